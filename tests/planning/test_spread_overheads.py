"""What layouts cost besides arithmetic and messages."""

from __future__ import annotations

from stoker.planning.model.communication import replicated_traffic, sharded_traffic, sharding_groups
from stoker.planning.model.layout_forecast import overhead_s, shard_copies_s
from stoker.records import Layout, Operation
from tests.planning.spreading import PARTS


def test_layouts_cost_by_what_they_do() -> None:
    """One process nothing; shards by their groups in each pass; a divided sequence more than a whole one."""
    assert overhead_s(PARTS, Layout(), 3) == 0
    assert 0 < overhead_s(PARTS, Layout(replicas=2), 1) < overhead_s(PARTS, Layout(shards=2), 1)
    once, thrice = (overhead_s(PARTS, Layout(shards=2), passes) for passes in (1, 3))
    assert thrice > 2 * once
    assert overhead_s(PARTS, Layout(shards=2, reshard=False), 3) < thrice
    assert overhead_s(PARTS, Layout(tensor=2), 1) < overhead_s(PARTS, Layout(tensor=2, sequence=True), 1)
    assert overhead_s(PARTS, Layout(stages=2), 1) > 0


class ByBytes:
    """A byte read or written takes a second."""

    def seconds(self, operation: Operation) -> float:
        """Of one execution [s]."""
        return operation.bytes_read + operation.bytes_written

    def relative_error(self, _operation: Operation) -> float:
        """None."""
        return 0.0


def test_shards_are_copied_in_and_out() -> None:
    """Of a gather a half and the whole, of a scatter the whole, each read and written; replicas copy none of it."""
    layout = Layout(shards=2, reshard=False)
    whole = sum(sharding_groups(PARTS, 2))
    assert shard_copies_s(sharded_traffic(PARTS, layout, 3), 2, ByBytes()) == 2 * whole * (3 * 1.5 + 1)
    assert shard_copies_s(replicated_traffic(PARTS.parameters), 1, ByBytes()) == 0
