"""What stages hold, pass on and wait for, as forecasts have it."""

from __future__ import annotations

import dataclasses

import pytest

from stoker.layouts.base import DividedUpdate
from stoker.layouts.local_state import held_parts
from stoker.layouts.stages import AXIS, boundary_bytes
from stoker.records import Layout
from tests.planning.spreading import PARTS, trace


def update(layout: Layout, passes: int, passed: tuple[float, ...] = ()) -> DividedUpdate:
    """An update of two blocks, whose stages pass on so much."""
    parts = dataclasses.replace(PARTS, passed=passed)
    return DividedUpdate(layout=layout, parts=parts, held=held_parts(parts, layout, 0), passes=passes, trace=trace)


def test_a_stage_sends_and_keeps_all_that_it_passes_on() -> None:
    """In messages as many times as large, and in the memory of the stage that receives it, with its gradient."""
    layout, one = Layout(stages=2), boundary_bytes(trace(), PARTS)
    plain, more = (AXIS.traffic(update(layout, 4, passed))[0] for passed in ((), (2.5,)))
    assert plain.sizes == (one,)
    assert more.sizes == (round(2.5 * one),)
    of_last = AXIS.trace_of(trace(), PARTS, layout, 1)
    waiting = [AXIS.waiting_bytes(of_last, update(layout, 4, passed), 1) for passed in ((), (2.5,))]
    assert waiting == [2 * one, 2 * round(2.5 * one)]
    of_first = AXIS.trace_of(trace(), PARTS, layout, 0)
    assert AXIS.waiting_bytes(of_first, update(layout, 4, (2.5,)), 0) == pytest.approx(
        sum(one.num_bytes for one in of_first.storages if one.category == "activation")
    )


FOUR = dataclasses.replace(
    PARTS,
    blocks=("a", "b", "c", "d"),
    parameters=(
        dataclasses.replace(PARTS.parameters[0], name="table", block=None),
        *(dataclasses.replace(PARTS.parameters[1], name=f"{name}.up", block=n) for n, name in enumerate("abcd")),
        dataclasses.replace(PARTS.parameters[0], name="head", block=None),
    ),
)


def test_each_process_holds_every_other_piece() -> None:
    """Of four blocks in two processes of two chunks each, with what comes before them, and what comes after."""
    layout = Layout(stages=2, chunks=2)
    first, last = (AXIS.held(FOUR, layout, rank) for rank in (0, 1))
    assert [one.name for one in first.parameters] == ["table", "a.up", "c.up"]
    assert [one.block for one in first.parameters] == [None, 0, 1]
    assert [one.name for one in last.parameters] == ["b.up", "d.up", "head"]
    assert (first.blocks, last.blocks) == (("a", "c"), ("b", "d"))


def test_chunks_divide_the_bubble_and_multiply_messages() -> None:
    """As long as micro-batches are a multiple of the processes; a last group of fewer waits."""
    plain, chunked = Layout(stages=4), Layout(stages=4, chunks=2)
    assert AXIS.num_idle_turns(plain, 8) == 3
    assert AXIS.num_idle_turns(chunked, 8) == 1.5
    assert AXIS.num_idle_turns(chunked, 6) == 2.5
    assert AXIS.num_idle_turns(plain, 6) == 3
    two, of_chunks = Layout(stages=2), Layout(stages=2, chunks=2)
    assert AXIS.traffic(update(two, 4))[0].times == 2 * (4 + 1)
    assert AXIS.traffic(update(of_chunks, 4))[0].times == 2 * (2 * 4 + 1)


def test_more_micro_batches_wait_in_interleaved_stages() -> None:
    """The first of two processes keeps those of five chunks in place of those of two whole stages."""
    kept = AXIS.trace_of(trace(), PARTS, Layout(stages=2), 0)
    of_one = sum(one.num_bytes for one in kept.storages if one.category == "activation")
    received = boundary_bytes(trace(), PARTS)
    assert AXIS.waiting_bytes(kept, update(Layout(stages=2), 8), 0) == of_one
    chunked = AXIS.waiting_bytes(kept, update(Layout(stages=2, chunks=2), 8), 0)
    assert chunked == 4 * of_one // 2 + 6 * received


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"chunks": 2}, "2 chunks need several stages"),
        ({"stages": 2, "chunks": 2, "schedule": "gpipe"}, "in the schedule 1f1b, got 2 in gpipe"),
        ({"stages": 2, "chunks": 0}, "chunks must be from 1"),
    ],
)
def test_chunks_that_cannot_be_are_refused(settings: dict[str, object], said: str) -> None:
    """With the numbers."""
    with pytest.raises(ValueError, match=said):
        Layout(**settings)  # type: ignore[arg-type]
