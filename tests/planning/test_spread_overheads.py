"""What layouts cost besides arithmetic and messages."""

from __future__ import annotations

from stoker.planning.spread_overheads import overhead_s
from stoker.records import Layout
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
