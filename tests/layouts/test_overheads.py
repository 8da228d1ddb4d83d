"""What layouts cost besides arithmetic and messages."""

from __future__ import annotations

from stoker.layouts import axes_of
from stoker.layouts.shards import sharding_groups
from stoker.records import Layout, Operation
from tests.planning.spreading import PARTS, messages


def overhead_s(layout: Layout, passes: int) -> float:
    """Of an update of PARTS [s]."""
    return sum(axis.overhead_s(PARTS, layout, passes) for axis in axes_of(layout))


def test_layouts_cost_by_what_they_do() -> None:
    """One process nothing; shards by their groups in each pass; a divided sequence more than a whole one."""
    assert overhead_s(Layout(), 3) == 0
    assert 0 < overhead_s(Layout(replicas=2), 1) < overhead_s(Layout(shards=2), 1)
    once, thrice = (overhead_s(Layout(shards=2), passes) for passes in (1, 3))
    assert thrice > 2 * once
    assert overhead_s(Layout(shards=2, reshard=False), 3) < thrice
    assert overhead_s(Layout(tensor=2), 1) < overhead_s(Layout(tensor=2, sequence=True), 1)
    assert overhead_s(Layout(stages=2), 1) > 0


class ByBytes:
    """A byte read or written takes a second."""

    def seconds(self, operation: Operation) -> float:
        """Of one execution [s]."""
        return operation.bytes_read + operation.bytes_written


def test_shards_are_copied_in_and_out() -> None:
    """Of a gather a half and the whole, of a scatter the whole, each read and written; replicas copy none of it."""
    layout, replicas = Layout(shards=2, reshard=False), Layout(replicas=2)
    whole = sum(sharding_groups(PARTS, layout))

    def copies_s(layout: Layout) -> float:
        traffic = messages(layout, 3)
        return sum(axis.copies_s(traffic, layout, ByBytes().seconds) for axis in axes_of(layout))

    assert copies_s(layout) == 2 * whole * (3 * 1.5 + 1)
    assert copies_s(replicas) == 0
