"""The peak of memory within a block, by the kernel's own mark and by sampling."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from stoker.profiling import plan_trial
from stoker.profiling.plan_trial import PeakMemory
from stoker.units import MIB

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' /proc")


def touched(num_bytes: int) -> mmap.mmap:
    """Resident memory mapped from the system: malloc may retain what an earlier test of this process has freed."""
    memory = mmap.mmap(-1, num_bytes)
    for page in range(0, num_bytes, mmap.PAGESIZE):
        memory[page] = 1
    return memory


@linux
def test_a_peak_is_seen_though_it_is_over_before_the_block_is() -> None:
    """200 MiB that were freed again count; what the process had before is counted too."""
    with PeakMemory("cpu") as quiet:
        touched(MIB)
    with PeakMemory("cpu") as peak:
        del_me = touched(200 * MIB)
        del del_me
    assert 190 * MIB < peak.num_bytes - quiet.num_bytes < 300 * MIB


@linux
def test_the_peak_so_far_can_be_read_within_the_block() -> None:
    """A run is finished, and its peak logged, before the block is left."""
    with PeakMemory("cpu") as peak:
        before = peak.num_bytes
        del_me = touched(200 * MIB)
        del del_me
        assert peak.num_bytes - before > 150 * MIB
        assert before > 10 * MIB


@linux
def test_an_earlier_peak_is_not_counted_again() -> None:
    """The mark is reset: a block without allocations does not show the one before."""
    with PeakMemory("cpu") as high:
        del_me = touched(200 * MIB)
        del del_me
    with PeakMemory("cpu") as low:
        touched(MIB)
    assert low.num_bytes < high.num_bytes - 150 * MIB


@linux
def test_blocks_may_be_nested() -> None:
    """The outer block's peak came before the inner one, whose own is small."""
    with PeakMemory("cpu") as outer:
        del_me = touched(200 * MIB)
        del del_me
        with PeakMemory("cpu") as inner:
            touched(MIB)
    assert inner.num_bytes < outer.num_bytes - 150 * MIB


@linux
def test_where_the_mark_cannot_be_reset_the_size_is_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in containers that forbid it: what is there at the end of the block is seen at the latest then."""
    monkeypatch.setattr(plan_trial, "_RESET", tmp_path / "there" / "is" / "none")
    with PeakMemory("cpu") as quiet:
        pass
    with PeakMemory("cpu") as peak:
        held = touched(200 * MIB)
    assert 190 * MIB < peak.num_bytes - quiet.num_bytes < 300 * MIB
    assert held[0] == 1


@linux
def test_what_is_counted_though_nothing_touched_it_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in gVisor, whose sizes have all of mapped files; once, also where a block is nested."""
    monkeypatch.setattr(plan_trial, "_RESET", tmp_path / "there" / "is" / "none")
    with PeakMemory("cpu") as usual:
        pass
    monkeypatch.setattr(plan_trial, "untouched_bytes", lambda: 8 * MIB)
    with PeakMemory("cpu") as less, PeakMemory("cpu"):
        pass
    assert 7 * MIB < usual.num_bytes - less.num_bytes < 9 * MIB


def test_elsewhere_it_is_the_peak_of_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without /proc, what the system says of the process since it began."""
    monkeypatch.setattr(plan_trial, "_STATUS", tmp_path / "none")
    with PeakMemory("cpu") as peak:
        pass
    assert peak.num_bytes > 10 * MIB


def test_the_peak_is_read_even_if_the_block_fails() -> None:
    """The error passes, and no thread is left behind."""
    with pytest.raises(ValueError, match="mine"), PeakMemory("cpu") as peak:
        raise ValueError("mine")
    assert peak.num_bytes > 0 or sys.platform == "win32"


@pytest.mark.gpu
def test_on_a_gpu_it_is_what_was_allocated() -> None:
    """200 MiB on the device, freed again; libraries and earlier tests hold some besides."""
    torch.cuda.init()
    before = torch.cuda.memory_allocated("cuda:0")
    with PeakMemory("cuda:0") as peak:
        held = torch.ones(200 * MIB, dtype=torch.uint8, device="cuda:0")
        del held
    assert 200 * MIB <= peak.num_bytes - before < 220 * MIB
