"""Pairs of 64-bit hashes that differ in few bits, without comparing all with all.

What: multi-index hashing. A hash is four bands of 16 bits; two hashes within 7 bits of each other differ in at most one
    bit of some band (pigeonhole), so that it is enough to look into the buckets of equal bands and of those one bit
    away. Pairs a little further apart are found as well if some band of theirs is that close.
Costs: for N hashes spread evenly, about N² / 3900 comparisons; for hashes that crowd into few buckets more, up to a
    limit for each hash, past which they are not compared, and counted.
Source: M. Norouzi, A. Punjani, D. Fleet, "Fast Exact Search in Hamming Space with Multi-Index Hashing", 2014,
    section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_BITS = 10
"""Bits that two hashes of a pair may differ in."""

SURE_BITS = 7
"""Bits up to which every pair is found; of those with 8, 9 and 10 bits 95, 86 and 74 % are, where bits are even."""

_BANDS = 4
_BAND_BITS = 16
_BUCKETS = 1 << _BAND_BITS
_MOST_PARTNERS = 4096
"""Hashes of one bucket that a hash is compared with."""

_BLOCK = 1 << 22
"""Comparisons at once: 100 MB."""

Rows = NDArray[np.int64]
Keep = Callable[[Rows, Rows], NDArray[np.bool_]]


@dataclass(frozen=True)
class ClosePairs:
    """Pairs of rows (`first` < `second`), each once; `crowded` is how many hashes met more partners than the limit."""

    first: Rows
    second: Rows
    crowded: int = 0


def close_pairs(hashes: NDArray[np.uint64], keep: Keep = lambda first, _: np.ones(len(first), np.bool_)) -> ClosePairs:
    """The pairs of hashes within `MOST_BITS` bits of each other; within `SURE_BITS` all of them.

    Args:
        hashes: one a row.
        keep: which of some pairs are wanted; asked block by block, so that only these are held.
    """
    found: list[NDArray[np.uint64]] = []
    crowded = np.zeros(len(hashes), np.bool_)
    for band in range(_BANDS):
        keys = (hashes >> np.uint64(band * _BAND_BITS)).astype(np.uint16).astype(np.int64)
        order = np.argsort(keys, kind="stable")
        ends = np.cumsum(np.bincount(keys, minlength=_BUCKETS))
        for flipped in (0, *(1 << bit for bit in range(_BAND_BITS))):
            begins, counts = _partners(keys[order], ends, flipped)
            crowded[order[counts > _MOST_PARTNERS]] = True
            found += [
                _encoded(order[left], order[right], hashes, keep)
                for left, right in _expanded(begins, np.minimum(counts, _MOST_PARTNERS))
            ]
    codes = np.unique(np.concatenate(found)) if found else np.empty(0, np.uint64)
    first, second = codes >> np.uint64(32), codes & np.uint64(0xFFFFFFFF)
    return ClosePairs(first.astype(np.int64), second.astype(np.int64), int(crowded.sum()))


def _partners(keys: Rows, ends: Rows, flipped: int) -> tuple[Rows, Rows]:
    """For each place in the order of keys, where its partners begin there and how many they are; each pair once."""
    others = keys ^ flipped
    begins = np.where(others > 0, ends[others - 1], 0)
    if flipped == 0:
        begins = np.arange(1, len(keys) + 1)
    counts = ends[others] - begins
    return begins, np.where((others >= keys) & (counts > 0), counts, 0)


def _expanded(begins: Rows, counts: Rows) -> Iterator[tuple[Rows, Rows]]:
    """Places on the left and right of each pair, a block of pairs at a time."""
    total = np.cumsum(counts)
    start = 0
    while start < len(counts):
        before = total[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(total, before + _BLOCK, side="right")))
        block = counts[start:stop]
        if block.any():
            left = np.repeat(np.arange(start, stop), block)
            within = np.arange(len(left)) - np.repeat(np.cumsum(block) - block, block)
            yield left, np.repeat(begins[start:stop], block) + within
        start = stop


def _encoded(left: Rows, right: Rows, hashes: NDArray[np.uint64], keep: Keep) -> NDArray[np.uint64]:
    """The pairs that are close and wanted, each as one number: the smaller row above the larger."""
    near = np.bitwise_count(hashes[left] ^ hashes[right]) <= MOST_BITS
    left, right = left[near], right[near]
    wanted = keep(left, right)
    left, right = left[wanted], right[wanted]
    low, high = np.minimum(left, right).astype(np.uint64), np.maximum(left, right).astype(np.uint64)
    return np.unique((low << np.uint64(32)) | high)
