"""The determinism class: what it holds, and what makes it another."""

from __future__ import annotations

import dataclasses
import platform

import pytest
import torch

from stoker.records import Plan
from stoker.testing import fake_device
from stoker.training.run_setup import environment

PLAN = Plan(device="cpu", micro_batch=8, threads=2)


def test_it_names_what_bits_depend_on() -> None:
    """Device, threads, versions, and the flags that choose kernels."""
    found = environment(fake_device(), PLAN)
    assert (found.device_model, found.device_kind, found.threads) == ("Fake CPU", "cpu", 2)
    assert (found.torch_version, found.python_version) == (torch.__version__, platform.python_version())
    assert found.flags["deterministic_algorithms"] == "False"
    assert {"numpy", "cuda", "driver"} <= found.libraries.keys()


def test_it_is_another_with_other_threads_flags_or_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them changes the digest; nothing else does."""
    before = environment(fake_device(), PLAN).digest()
    assert environment(fake_device(), dataclasses.replace(PLAN, micro_batch=4)).digest() == before
    assert environment(fake_device(), dataclasses.replace(PLAN, threads=1)).digest() != before
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert environment(fake_device(), PLAN).digest() != before
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    torch.use_deterministic_algorithms(True)
    try:
        assert environment(fake_device(), PLAN).digest() != before
    finally:
        torch.use_deterministic_algorithms(False)
