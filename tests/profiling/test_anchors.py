from __future__ import annotations

import itertools

import pytest
import torch

from stoker.profiling.ceilings import measure_anchors, usual


def test_every_anchor_is_timed_in_every_turn() -> None:
    """The same names each time, so that now can be compared with then; threads are as before."""
    threads = torch.get_num_threads()
    turns = measure_anchors(threads=1, turns=2)
    assert len(turns) == 2
    assert turns[0].keys() == turns[1].keys()
    assert {"product in fp32", "sum of two"} <= turns[0].keys()
    assert all(seconds > 0 for turn in turns for seconds in turn.values())
    assert torch.get_num_threads() == threads


def test_a_machine_of_half_the_speed_takes_twice_as_long() -> None:
    """The clock alone says how long an anchor took: a second between its readings, or two."""
    ticks = itertools.count()
    by_seconds = measure_anchors(threads=1, turns=1, clock=lambda: float(next(ticks)))
    by_twos = measure_anchors(threads=1, turns=1, clock=lambda: 2.0 * next(ticks))
    assert set(by_seconds[0].values()) == {1.0}
    assert set(by_twos[0].values()) == {2.0}


def test_one_disturbed_turn_is_outvoted() -> None:
    """Of three turns the middle one is the usual; of none there is none."""
    assert usual([{"a": 1.0}, {"a": 90.0}, {"a": 1.2}]) == {"a": 1.2}
    assert usual([]) == {}


def test_threads_are_as_before_when_timing_fails() -> None:
    """A clock that breaks leaves PyTorch as it was."""
    threads = torch.get_num_threads()

    def broken() -> float:
        raise OSError("no clock")

    with pytest.raises(OSError, match="no clock"):
        measure_anchors(threads=threads + 1, turns=1, clock=broken)
    assert torch.get_num_threads() == threads
