from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.inspecting import near_duplicates
from stoker.inspecting.near_duplicates import MOST_BITS, SURE_BITS, close_pairs


def _by_brute_force(hashes: np.ndarray, most: int) -> set[tuple[int, int]]:
    bits = np.bitwise_count(hashes[:, None] ^ hashes[None, :])
    first, second = np.nonzero(np.triu(bits <= most, k=1))
    return set(zip(first.tolist(), second.tolist(), strict=True))


words = st.integers(0, 2**64 - 1)
crowds = st.builds(
    lambda centres, flips: np.array(
        [centres[n % len(centres)] ^ sum(1 << bit for bit in set(bits)) for n, bits in enumerate(flips)], np.uint64
    ),
    st.lists(words, min_size=1, max_size=3),
    st.lists(st.lists(st.integers(0, 63), max_size=6), min_size=2, max_size=40),
)


@pytest.mark.slow
@given(crowds)
def test_every_pair_that_is_close_is_found_once(hashes: np.ndarray) -> None:
    """Pairs within the sure distance are all found; none is found twice, or beyond the allowed distance."""
    pairs = close_pairs(hashes)
    found = list(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))
    assert len(found) == len(set(found))
    assert _by_brute_force(hashes, SURE_BITS) <= set(found) <= _by_brute_force(hashes, MOST_BITS)


def test_most_pairs_a_little_further_apart_are_found() -> None:
    """Of pairs with 8 to 10 bits as many are found as the module says."""
    draw = np.random.default_rng(0)
    for bits, share in ((8, 0.953), (9, 0.86), (10, 0.738)):
        flips = [sum(1 << int(bit) for bit in draw.choice(64, bits, replace=False)) for _ in range(1000)]
        words = draw.integers(0, 2**64, 1000, np.uint64)
        pairs = close_pairs(np.concatenate([words, words ^ np.array(flips, np.uint64)]))
        found = int((pairs.second == pairs.first + 1000).sum())
        assert abs(found / 1000 - share) < 0.03


def test_a_crowd_is_bounded_and_counted(monkeypatch) -> None:
    """Where too many hashes share a bucket, each is compared with part of them, and that is reported."""
    monkeypatch.setattr(near_duplicates, "_MOST_PARTNERS", 5)
    pairs = close_pairs(np.zeros(50, np.uint64))
    assert pairs.crowded == 44
    assert len(pairs.first) <= 50 * 5


def test_small_blocks_find_the_same(monkeypatch) -> None:
    """How many comparisons are made at once changes nothing."""
    hashes = np.random.default_rng(1).integers(0, 2**20, 300, np.uint64) << np.uint64(12)
    whole = close_pairs(hashes)
    monkeypatch.setattr(near_duplicates, "_PAIR_BLOCK", 64)
    parts = close_pairs(hashes)
    assert np.array_equal(whole.first, parts.first)
    assert np.array_equal(whole.second, parts.second)
    assert len(whole.first) > 0
