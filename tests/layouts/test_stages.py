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
