"""Near duplicates: pictures that were stored again, scaled or brightened. Hashes propose, pixels decide.

What: pairs whose perceptual hashes are close; of these the pairs whose distance is at most 0.3 times either one's
    distance to its usual neighbours; of these the pairs whose decoded pixels correlate. The threshold is relative
    because in uniform sets (garments on black, X-rays) two different pictures may have r = 0.99.
Costs: hashing is one pass; the rest is a product with 4,096 references, and decoding the few remaining pairs.
Source: D. Lowe, "Distinctive Image Features from Scale-Invariant Keypoints", 2004, section 7.1 (the ratio of the
    nearest to the next nearest; ours is to the fourth among references: a picture stored three times is still found).

Close hashes are found by multi-index hashing, without comparing all pairs. A hash is four bands of 16 bits; two hashes
    within 7 bits differ in at most one bit of some band (pigeonhole), so that only the buckets of equal bands and of
    those one bit away are searched. Some pairs at larger distances are found as well.
Costs: for N evenly spread hashes about N² / 3900 comparisons; more for hashes that crowd into few buckets, up to a
    limit for each hash, beyond which they are not compared, but counted.
Source: M. Norouzi, A. Punjani, D. Fleet, "Fast Exact Search in Hamming Space with Multi-Index Hashing", 2014,
    section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.inspecting.findings import AGAINST, Tell, groups_of, rank
from stoker.inspecting.image_signatures import ImageSurvey
from stoker.records.data_check import Finding

_SIDE = 32
"""Side at which pairs are compared, if both are as large [pixels]: enough to distinguish pictures, few enough that
edges of a scaled or compressed copy fall into the same pixels."""

_LEAST_SPREAD = 8
"""Levels between the darkest and the brightest pixel, below which a picture is too uniform to compare."""

_MOST_RATIO = 0.3
"""Distance of a pair over the distance to the usual neighbours, above which a pair does not stand out [1]."""

_SURE = 0.999
"""Pearson's r of the small grey pictures, from which a pair always stands out: one of a burst of copies."""

_REFERENCES = 4096
_USUAL = 4
"""The reference, counted from the nearest, whose distance counts as usual."""

_DISTANCE_BLOCK = 1 << 15


@dataclass(frozen=True)
class NearPair:
    """Two rows, the earlier one first, and Pearson's r of their pixels."""

    first: int
    second: int
    correlation: float


@dataclass(frozen=True)
class NearPairs:
    """The pairs, the number of decoded pairs, and the number of pictures compared with only part of similar ones."""

    pairs: tuple[NearPair, ...]
    decoded: int
    crowded: int

    def note(self) -> str:
        """A line for the report."""
        note = (
            f"near duplicates: {self.decoded:,} pairs stand out of what is usual here, {len(self.pairs):,} have "
            "similar pixels; what was mirrored, turned or cropped is not found"
        )
        crowd = f"; {self.crowded:,} pictures look like thousands of others and were compared with part of them"
        return note + (crowd if self.crowded else "")


def near_pairs(survey: ImageSurvey, least_correlation: float, tell: Tell) -> NearPairs:
    """All pairs of pictures with other pixels that look the same."""
    signatures = survey.signatures
    first, _ = groups_of(signatures["content"])
    rows = first[signatures["spread"][first] >= _LEAST_SPREAD]
    usual = usual_distances(signatures, rows, tell)
    is_foreign = np.isin(survey.splits, [code for code, name in enumerate(survey.split_names) if name == AGAINST])

    def keep(left: NDArray[np.int64], right: NDArray[np.int64]) -> NDArray[np.bool_]:
        a, b = rows[left], rows[right]
        kept: NDArray[np.bool_] = standing_out(signatures, usual, a, b) & ~(is_foreign[a] & is_foreign[b])
        return kept

    close = close_pairs(np.asarray(signatures["look"][rows]), keep)
    pairs: list[NearPair] = []
    picture = functools.lru_cache(maxsize=256)(survey.picture)
    for done, (one, other) in enumerate(zip(rows[close.first].tolist(), rows[close.second].tolist(), strict=True)):
        if done % 256 == 0:
            tell("comparing pairs", done, len(close.first))
        r = correlation(picture(one), picture(other))
        if r >= least_correlation:
            pairs.append(NearPair(one, other, r))
    return NearPairs(tuple(pairs), len(close.first), close.crowded)


def near_findings(survey: ImageSurvey, pairs: tuple[NearPair, ...]) -> Iterator[Finding]:
    """Leaks first: of a pair in two splits, the sample of lower rank. Then, within a split, all but one of a cluster.

    A sample is a near duplicate if it looks like an earlier one of its split that is not: one of each chain stays.
    """
    flagged: set[int] = set()
    within: list[NearPair] = []
    for pair in pairs:
        if survey.splits[pair.first] == survey.splits[pair.second]:
            within.append(pair)
            continue
        kept, given = sorted((pair.first, pair.second), key=lambda row: -rank(survey.split_name(row)))
        if given not in flagged:
            flagged.add(given)
            yield _finding(survey, given, kept, pair.correlation)
    for pair in sorted(within, key=lambda pair: (pair.second, pair.first)):
        if pair.first not in flagged and pair.second not in flagged:
            flagged.add(pair.second)
            yield _finding(survey, pair.second, pair.first, pair.correlation)


def correlation(one: Image.Image, other: Image.Image) -> float:
    """Pearson's r [-1 to 1] of all values of two RGB pictures, at one size; 0 if either has no contrast.

    Brightness and contrast do not count, shape and colours do.
    """
    size = min(one.width, other.width, _SIDE), min(one.height, other.height, _SIDE)
    a, b = _sized(one, size).reshape(-1), _sized(other, size).reshape(-1)
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / scale if scale > 0 else 0.0


def _finding(survey: ImageSurvey, row: int, other: int, r: float) -> Finding:
    is_leak = survey.splits[row] != survey.splits[other]
    where = f" in {survey.split_name(other)}" if is_leak else ""
    labels = survey.label(row), survey.label(other)
    differ = f"; labelled {labels[0]} and {labels[1]}" if labels[0] != labels[1] else ""
    return Finding(
        fault="near-leak" if is_leak else "near-duplicate",
        gravity="suspect",
        id=survey.ids[row],
        where=survey.split_name(row),
        related=(survey.ids[other],),
        measure=round(r, 4),
        detail=f"looks like {survey.ids[other]}{where} (r = {r:.4f}){differ}",
    )


def standing_out(
    signatures: NDArray[np.void], usual: NDArray[np.float32], left: NDArray[np.int64], right: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """The pairs that are much closer, by small grey pictures, than pictures of this set usually are.

    Args:
        signatures: of the whole set.
        usual: see `usual_distances`.
        left: one row of each pair.
        right: the other.
    """
    out = np.zeros(len(left), np.bool_)
    for start in range(0, len(left), _DISTANCE_BLOCK):
        block = slice(start, start + _DISTANCE_BLOCK)
        r = (_units(signatures, left[block]) * _units(signatures, right[block])).sum(axis=1)
        near = _distances(r) <= _MOST_RATIO * np.minimum(usual[left[block]], usual[right[block]])
        out[block] = near | (r >= _SURE)
    return out


def usual_distances(signatures: NDArray[np.void], rows: NDArray[np.int64], tell: Tell) -> NDArray[np.float32]:
    """For each of `rows`, the distance to its fourth nearest reference; 0 for others. References are rows by digest."""
    usual = np.zeros(len(signatures), np.float32)
    if not len(rows):
        return usual
    order = np.argsort(np.ascontiguousarray(signatures["content"][rows, :8]).view(np.uint64).reshape(-1))
    references = _units(signatures, rows[order[:_REFERENCES]])
    place = len(references) - min(_USUAL, len(references))
    for start in range(0, len(rows), _DISTANCE_BLOCK // 8):
        some = rows[start : start + _DISTANCE_BLOCK // 8]
        usual[some] = _distances(np.partition(_units(signatures, some) @ references.T, place, axis=1)[:, place])
        tell("learning what is usual", min(start + len(some), len(rows)), len(rows))
    return usual


def _units(signatures: NDArray[np.void], rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Small grey pictures [rows, 256] without mean, of length 1."""
    flat = signatures["grey"][rows].reshape(len(rows), -1).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    units: NDArray[np.float32] = flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-6)
    return units


def _distances(r: NDArray[np.float32]) -> NDArray[np.float32]:
    """Distances of vectors of length 1 by their correlation."""
    distances: NDArray[np.float32] = np.sqrt(np.maximum(2 - 2 * r, 0))
    return distances


def _sized(image: Image.Image, size: tuple[int, int]) -> NDArray[np.float32]:
    fitted = image if image.size == size else image.resize(size, Image.Resampling.BOX)
    return np.asarray(fitted, np.float32)


MOST_BITS = 10
"""Most bits in which two hashes of a pair differ."""

SURE_BITS = 7
"""Bits up to which every pair is found; of pairs with 8, 9 and 10 bits 95, 86 and 74 % are, if bits are even."""

_BANDS = 4
_BAND_BITS = 16
_BUCKETS = 1 << _BAND_BITS
_MOST_PARTNERS = 4096
"""Most hashes of one bucket that a hash is compared with."""

_PAIR_BLOCK = 1 << 22
"""Number of comparisons at once: 100 MB."""

Rows = NDArray[np.int64]
Keep = Callable[[Rows, Rows], NDArray[np.bool_]]


@dataclass(frozen=True)
class ClosePairs:
    """Pairs of rows (`first` < `second`), each once; `crowded` counts hashes with more partners than the limit."""

    first: Rows
    second: Rows
    crowded: int = 0


def close_pairs(hashes: NDArray[np.uint64], keep: Keep = lambda first, _: np.ones(len(first), np.bool_)) -> ClosePairs:
    """The pairs of hashes within `MOST_BITS` bits of each other; within `SURE_BITS` all of them.

    Args:
        hashes: one a row.
        keep: the pairs to keep; called block by block, so that only these are held.
    """
    pairs: list[NDArray[np.uint64]] = []
    crowded = np.zeros(len(hashes), np.bool_)
    for band in range(_BANDS):
        keys = (hashes >> np.uint64(band * _BAND_BITS)).astype(np.uint16).astype(np.int64)
        order = np.argsort(keys, kind="stable")
        ends = np.cumsum(np.bincount(keys, minlength=_BUCKETS))
        for flipped in (0, *(1 << bit for bit in range(_BAND_BITS))):
            begins, counts = _partners(keys[order], ends, flipped)
            crowded[order[counts > _MOST_PARTNERS]] = True
            pairs += [
                _encoded(order[left], order[right], hashes, keep)
                for left, right in _expanded(begins, np.minimum(counts, _MOST_PARTNERS))
            ]
    codes = np.unique(np.concatenate(pairs)) if pairs else np.empty(0, np.uint64)
    first, second = codes >> np.uint64(32), codes & np.uint64(0xFFFFFFFF)
    return ClosePairs(first.astype(np.int64), second.astype(np.int64), int(crowded.sum()))


def _partners(keys: Rows, ends: Rows, flipped: int) -> tuple[Rows, Rows]:
    """For each place in the order of keys, the first of its partners and their number; each pair once."""
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
        stop = max(start + 1, int(np.searchsorted(total, before + _PAIR_BLOCK, side="right")))
        block = counts[start:stop]
        if block.any():
            left = np.repeat(np.arange(start, stop), block)
            within = np.arange(len(left)) - np.repeat(np.cumsum(block) - block, block)
            yield left, np.repeat(begins[start:stop], block) + within
        start = stop


def _encoded(left: Rows, right: Rows, hashes: NDArray[np.uint64], keep: Keep) -> NDArray[np.uint64]:
    """The close pairs to keep, each as one number: the smaller row above the larger."""
    near = np.bitwise_count(hashes[left] ^ hashes[right]) <= MOST_BITS
    left, right = left[near], right[near]
    kept = keep(left, right)
    left, right = left[kept], right[kept]
    low, high = np.minimum(left, right).astype(np.uint64), np.maximum(left, right).astype(np.uint64)
    return np.unique((low << np.uint64(32)) | high)
