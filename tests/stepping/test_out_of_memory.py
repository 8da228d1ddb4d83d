"""Memory that could not be had: recognised, and how much there is."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import pytest
import torch

from stoker.devices.cpu import attached_cpu
from stoker.stepping import step_failures
from stoker.stepping.step_failures import free_bytes, ran_out_of_memory, reachable_bytes

CPU = torch.device("cpu")


def test_pytorchs_own_failure_is_recognised() -> None:
    """More than any machine has, asked of the CPU's allocator; and no other error of its kind."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert ran_out_of_memory(caught.value)
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA"))
    assert ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be …"))
    assert ran_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert not ran_out_of_memory(RuntimeError("shapes cannot be multiplied"))


@pytest.mark.skipif(sys.platform != "linux", reason="the figures are the kernel's")
def test_what_is_free_keeps_to_the_limits_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the machine's memory; a limit on the address space that is used up leaves nothing."""
    free, reachable = free_bytes(CPU), reachable_bytes(CPU)
    assert free is not None
    assert reachable is not None
    assert 0 < free < reachable
    assert free < attached_cpu().memory_bytes
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (1, 1))
    assert free_bytes(CPU) == 0


def test_nothing_is_said_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unknown is None, not a guess."""
    monkeypatch.setattr(step_failures, "_MEMINFO", tmp_path / "absent")
    assert free_bytes(CPU) is None
    assert reachable_bytes(CPU) is None
