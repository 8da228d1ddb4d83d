"""Waits for other processes are counted while somebody watches."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from stoker.testing import FakeClock
from stoker.training.rank_times import CommTimer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock that PyTorch's two ways of waiting move on by 2 s and 3 s."""
    clock = FakeClock()

    def moving(seconds: float) -> Callable[..., str]:
        def wait(*_: object, **__: object) -> str:
            clock.advance(seconds)
            return "done"

        return wait

    monkeypatch.setattr(dist.Work, "wait", moving(2.0))
    monkeypatch.setattr(functional, "wait_tensor", moving(3.0))
    return clock


def test_both_ways_of_waiting_are_counted_between_start_and_stop(clock: FakeClock) -> None:
    """What they return is passed on; before and after nothing is counted, and PyTorch is as it was."""
    before = dist.Work.wait, functional.wait_tensor
    waits = CommTimer(clock)
    waits.start()
    assert waits.is_watching
    assert dist.Work.wait(None) == "done"
    assert functional.wait_tensor(None) == "done"
    waits.stop()
    dist.Work.wait(None)
    assert waits.total_s == 5.0
    assert (dist.Work.wait, functional.wait_tensor) == before


def test_waits_of_other_threads_do_not_hold_the_training_up(clock: FakeClock) -> None:
    """An exchange in the background is no time of the thread that trains."""
    waits = CommTimer(clock)
    waits.start()
    other = threading.Thread(target=dist.Work.wait, args=(None,))
    other.start()
    other.join()
    waits.stop()
    assert waits.total_s == 0.0


def test_a_wait_that_fails_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until another process was given up was spent."""
    clock = FakeClock(tick_s=1.0)

    def broken(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist.Work, "wait", broken)
    waits = CommTimer(clock)
    waits.start()
    with pytest.raises(RuntimeError, match="closed"):
        dist.Work.wait(None)
    waits.stop()
    assert waits.total_s == 1.0
