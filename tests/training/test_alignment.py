"""Clocks of processes on different hosts, made comparable."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from stoker.training.rank_times import ClockAlignment, align_clocks


def _ahead(seconds: float) -> Callable[[], float]:
    return lambda: time.monotonic() + seconds


def _aligned(hosts: list[str], ahead: list[float]) -> list[ClockAlignment]:
    """What processes on those hosts find, with clocks so far ahead."""
    store = dist.HashStore()
    size = len(hosts)
    with ThreadPoolExecutor(size) as pool:
        found = [
            pool.submit(align_clocks, store, rank, size, host=hosts[rank], clock=_ahead(ahead[rank]))
            for rank in range(size)
        ]
        return [one.result(timeout=60) for one in found]


def test_a_clock_of_another_host_is_brought_to_the_first_ones() -> None:
    """The offset is right to within the uncertainty stated; all know when they met."""
    first, same, other = _aligned(["a", "a", "b"], [3.0, 3.0, 50.0])
    assert (first.offset_s, first.uncertainty_s) == (0.0, 0.0)
    assert (same.offset_s, same.uncertainty_s) == (0.0, 0.0)
    assert abs(other.offset_s - (3.0 - 50.0)) <= other.uncertainty_s + 1e-6
    assert 0.0 < other.uncertainty_s < 1.0
    assert first.began_at == same.began_at == other.began_at > 0


def test_nobody_waits_for_ever() -> None:
    """A process that does not answer is given up after the patience."""
    store = dist.HashStore()
    with pytest.raises(dist.DistError):
        align_clocks(store, 1, 2, patience_s=0.05)
    store.set_timeout(timedelta(seconds=1))
