"""Free blocks by size and by neighbourhood."""

from __future__ import annotations

from stoker.planning.model.caching_allocator import FreeBlocks


def test_the_best_fit_is_the_smallest_that_suffices_then_the_lowest() -> None:
    """Of sizes 30, 10, 20 and 20, a request for 15 gets the lower of the two 20s."""
    free = FreeBlocks()
    for address, size in ((0, 30), (100, 10), (300, 20), (200, 20)):
        free.add(address, size)
    assert free.best_fit(15) == 200
    assert free.best_fit(30) == 0
    assert free.best_fit(31) is None
    assert free.fitting(20) == [(20, 200), (20, 300), (30, 0)]


def test_a_block_joins_both_neighbours() -> None:
    """What is between two free blocks makes them one; a block one byte away stays separate."""
    free = FreeBlocks()
    free.add(0, 10)
    free.add(20, 10)
    free.add(31, 10)
    assert free.absorb(10, 10) == 0
    assert free.sizes == {0: 30, 31: 10}
    assert free.ending_at(30) == 0
    assert free.remove(0) == 30
    assert free.best_fit(11) is None
