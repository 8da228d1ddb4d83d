from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.loading import order as order_module
from stoker.loading.order import EpochOrder, KeyedPermutation, RandomStream, key_of

SIZES = st.integers(1, 3000)
KEYS = st.integers(0, 2**64 - 1)


class CountingPermutation(KeyedPermutation):
    """Counts the positions it is asked for."""

    asked = 0

    def __call__(self, positions):
        CountingPermutation.asked += len(positions)
        return super().__call__(positions)


@given(SIZES, KEYS)
def test_a_keyed_permutation_is_one(size: int, key: int) -> None:
    """Every index comes exactly once, at any size and key."""
    assert sorted(KeyedPermutation(size, key)(np.arange(size)).tolist()) == list(range(size))


@given(SIZES, KEYS, st.data())
def test_a_position_can_be_asked_for_alone(size: int, key: int, data: st.DataObject) -> None:
    """What is at a position does not depend on which others were asked for, or in which order."""
    permutation = KeyedPermutation(size, key)
    some = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    assert permutation(np.array(some)).tolist() == permutation(np.arange(size))[some].tolist()


def test_other_keys_give_other_orders() -> None:
    """A hundred epochs, a hundred orders, none of them the original one."""
    orders = {tuple(KeyedPermutation(50, key_of(RandomStream.ORDER, 0, epoch))(np.arange(50))) for epoch in range(100)}
    assert len(orders) == 100
    assert tuple(range(50)) not in orders


@pytest.mark.parametrize("size", [2, 7, 33])
def test_every_index_comes_equally_often_at_every_position(size: int) -> None:
    """Over many keys: chi-squared of the size x size table of counts is within five deviations of its mean."""
    num_keys = 1000
    table = np.zeros((size, size))
    for epoch in range(num_keys):
        table[np.arange(size), KeyedPermutation(size, key_of(RandomStream.ORDER, 1, epoch))(np.arange(size))] += 1
    expected = num_keys / size
    chi_squared = ((table - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom) + 5


def test_neighbours_are_not_kept_together() -> None:
    """Samples next to each other in the data come next to each other in the order as rarely as by chance."""
    size = 20_000
    shuffled = KeyedPermutation(size, key_of(RandomStream.ORDER, 0, 0))(np.arange(size))
    adjacent = (np.abs(np.diff(shuffled)) == 1).sum()
    assert adjacent < 2 + 5 * np.sqrt(2)
    assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < 5 / np.sqrt(size)


@settings(max_examples=50)
@given(st.integers(1, 200), st.integers(1, 64), st.data())
def test_any_stretch_of_an_epoch_is_that_of_the_whole(size: int, block: int, data: st.DataObject) -> None:
    """Blocks, in which the order is computed, cannot be seen from outside, whatever was asked before."""
    whole = KeyedPermutation(size, key_of(RandomStream.ORDER, 3, 5))(np.arange(size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "_BLOCK", block)
        order = EpochOrder(size, seed=3)
        for _ in range(3):
            start = data.draw(st.integers(0, size))
            stop = data.draw(st.integers(start, size))
            assert order.indices(5, start, stop).tolist() == whole[start:stop].tolist()
            order.indices(data.draw(st.integers(0, 6)), 0, 1)


def test_a_position_far_into_a_large_epoch_costs_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """O(1): resuming in the middle of a billion samples evaluates 65,536 positions, and asking again none."""
    monkeypatch.setattr(order_module, "KeyedPermutation", CountingPermutation)
    CountingPermutation.asked = 0
    order = EpochOrder(10**9, seed=0)
    found = order.indices(7, 500_000_000, 500_000_512)
    assert CountingPermutation.asked == 2**16
    order.indices(7, 500_000_512, 500_001_024)
    assert CountingPermutation.asked == 2**16
    assert len(set(found.tolist())) == 512


@pytest.mark.parametrize(("start", "stop"), [(0, 11), (-1, 3), (5, 4), (11, 11)])
def test_what_is_not_in_an_epoch_cannot_be_asked_for(start: int, stop: int) -> None:
    """Our own bug, said at once."""
    with pytest.raises(IndexError, match="an epoch has positions 0 to 10"):
        EpochOrder(10, seed=0).indices(0, start, stop)


def test_the_order_is_the_one_it_always_was() -> None:
    """A run begun under one version of Stoker is continued by the next: these numbers never change."""
    assert KeyedPermutation(10, 0)(np.arange(10)).tolist() == [5, 4, 0, 9, 3, 8, 1, 2, 6, 7]
    assert EpochOrder(1000, seed=42).indices(3, 500, 506).tolist() == [729, 89, 785, 783, 987, 503]
