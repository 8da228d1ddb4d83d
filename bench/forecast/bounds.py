"""How much slower one thing is than another, from processes in which both were timed: a ratio and its upper bound.

Noise on a shared machine has heavy tails, and one slow process of the other side must not loosen the bound: it is
distribution-free. Of n ratios, the k-th smallest is above the true median with the probability that fewer than k of n
fair coins show heads; of five, the largest is with 31/32.

Source: W. J. Conover, Practical Nonparametric Statistics, 3rd edition, section 3.2 (confidence interval of a quantile).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95

FEWEST = 5
"""With fewer processes no bound has that confidence."""


def slowdown(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """(ratio, upper bound): the median of ours over theirs, and what it is below with a confidence of 95 %.

    Element i of both was measured in the i-th process.

    >>> slowdown([2.0, 2.0, 2.2, 2.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0])
    (2.0, 2.2)
    """
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    place = _place_of_bound(len(ratios))
    return statistics.median(ratios), math.inf if place is None else ratios[place]


def regret(times: dict[int, list[float]], chosen: int) -> tuple[int, float, float]:
    """(best, ratio, upper bound) of the chosen among things timed in the same processes [s].

    The best is the one of the least median. The bound is the largest of those against every other, since the best by
    chance need not be the best in truth; both are at least 1.
    """
    best = min(times, key=lambda at: statistics.median(times[at]))
    ratio, _ = slowdown(times[chosen], times[best])
    bounds = [slowdown(times[chosen], theirs)[1] for at, theirs in times.items() if at != chosen]
    return best, max(1.0, ratio), max([1.0, *bounds])


def _place_of_bound(count: int) -> int | None:
    """Which of so many sorted ratios (from 0) bounds their median; None where none does."""
    below = 0
    for place in range(count):
        below += math.comb(count, place)
        if below / 2**count >= CONFIDENCE:
            return place
    return None
