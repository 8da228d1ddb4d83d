"""Shapes to time: spread evenly over the orders of magnitude that models use, the same ones every time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The most that one call may compute, and the most elements that one of its tensors may have."""

    flops: float
    numel: int


def spread(num: int, *ranges: tuple[float, float], skip: int = 0) -> list[tuple[int, ...]]:
    """`num` points of whole numbers, spread evenly over the logarithms of `ranges`.

    Additive recurrence with the generalised golden ratio: any first few points are spread well already.
    Source: M. Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences" (2018).

    >>> spread(3, (1, 100), (16, 16))
    [(3, 16), (1, 16), (34, 16)]
    """
    ratio = 1.5
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / (len(ranges) + 1))
    points = []
    for index in range(1 + skip, num + 1 + skip):
        shares = [(0.5 + index * ratio ** -(axis + 1)) % 1 for axis in range(len(ranges))]
        points.append(tuple(_between(low, high, share) for (low, high), share in zip(ranges, shares, strict=True)))
    return points


def multiple(value: int, of: int) -> int:
    """The nearest positive multiple.

    >>> [multiple(20, 8), multiple(3, 8), multiple(100, 64)]
    [24, 8, 128]
    """
    return of * max(1, math.floor(value / of + 0.5))


def limited(sizes: Sequence[int], most: float) -> tuple[int, ...]:
    """`sizes` with the first made smaller where their product is above `most`.

    >>> limited((100, 10, 2), most=500)
    (25, 10, 2)
    """
    rest = math.prod(sizes[1:])
    return (max(1, min(sizes[0], int(most / rest))), *sizes[1:])


def _between(low: float, high: float, share: float) -> int:
    return round(low * math.pow(high / low, share))
