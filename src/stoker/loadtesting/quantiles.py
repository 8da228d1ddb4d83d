"""Quantiles of latencies with intervals, for samples that are not independent of each other.

The interval about a quantile q holds every latency x of which it cannot be told, with 95 % confidence, that more or
fewer than 1 - q of all requests take longer: the binomial test of how many did, without any assumption about the shape
of the tail. Latencies of a queue are alike for a while, so that n of them say less than n independent ones: n is
divided by how much more the share of slow requests varies between 20 stretches of the measurement than by chance.

Source: H. A. David and H. N. Nagaraja, Order Statistics (3rd ed., 2003), section 7.1; P. Heidelberger and
P. A. W. Lewis, "Quantile Estimation in Dependent Sequences", Operations Research 32(1), 1984. Ours uses batch means of
the indicator, which is simpler than their spectral estimate.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from stoker.records.loadtest import Quantile

CONFIDENCE = 0.95
_STRETCHES = 20
_LEAST_OF_A_STRETCH = 10
_BY_CHANCE = 2.0
"""Independent samples give a larger factor less than once in a hundred times (chi-squared of 19 degrees, over 19)."""
_MOST_EXACT = 20_000


def quantile_of(latencies_s: NDArray[np.float64], q: float) -> Quantile:
    """The quantile `q` of latencies [s] in the order of their requests, infinite for those never answered.

    It is the smallest latency that at least a share `q` of the requests did not exceed. NaN without any.
    """
    n = len(latencies_s)
    if n == 0:
        return Quantile(q=q, seconds=math.nan, low=0.0, high=math.inf)
    ordered = np.sort(latencies_s)
    return Quantile(
        q=q,
        seconds=float(ordered[max(0, math.ceil(q * n - 1e-9) - 1)]),
        low=float(ordered[_first(n - 1, lambda k: not fails(latencies_s, q, float(ordered[k])))]),
        high=_or_inf(ordered, _first(n, lambda k: holds(latencies_s, q, float(ordered[k])))),
    )


def holds(latencies_s: NDArray[np.float64], q: float, within_s: float) -> bool:
    """Whether it is sure that at least a share `q` of all requests takes no longer than `within_s`."""
    num_late, n = _effective(latencies_s, within_s)
    return num_late <= n - ranks(n, q)[1]


def fails(latencies_s: NDArray[np.float64], q: float, within_s: float) -> bool:
    """Whether it is sure that less than a share `q` of all requests takes no longer than `within_s`."""
    num_late, n = _effective(latencies_s, within_s)
    return num_late > n - ranks(n, q)[0]


def most_late(n: int, q: float) -> int:
    """How many of `n` requests may exceed a latency so that the interval about the quantile `q` still lies within it.

    -1 if `n` are too few to bound the quantile at all; of independent requests, the most favourable case.

    >>> most_late(1000, 0.99), most_late(300, 0.99)
    (3, -1)
    """
    return n - ranks(n, q)[1]


def least_requests(q: float) -> int:
    """How many requests it takes to bound the quantile `q` from above at all, if none of them is late.

    >>> least_requests(0.99), least_requests(0.5)
    (368, 6)
    """
    return math.ceil(math.log((1 - CONFIDENCE) / 2) / math.log(q))


@lru_cache(maxsize=4096)
def ranks(n: int, q: float) -> tuple[int, int]:
    """The order statistics (from 1) of `n` samples between which the quantile `q` lies with 95 % confidence.

    The lower is 0, or the upper `n` + 1, where there are too few samples for a bound.
    """
    tail = (1 - CONFIDENCE) / 2
    if n > _MOST_EXACT:  # the normal approximation, continuity corrected; exact to a rank at this size
        middle, spread = n * q, 1.959964 * math.sqrt(n * q * (1 - q))
        return max(0, math.floor(middle - spread)), min(n + 1, math.ceil(middle + spread) + 1)
    k = np.arange(n + 1)
    log_choose = np.concatenate(([0.0], np.cumsum(np.log((n - k[:-1]) / (k[:-1] + 1)))))
    below = np.cumsum(np.exp(log_choose + k * math.log(q) + (n - k) * math.log1p(-q)))  # P(at most k lie below)
    low = int(np.searchsorted(below, tail, side="right"))
    high = int(np.searchsorted(below, 1 - tail, side="left")) + 1
    return low, high


def _effective(latencies_s: NDArray[np.float64], within_s: float) -> tuple[float, int]:
    """How many independent requests say as much as these, and how many of them are late."""
    is_late = latencies_s > within_s
    factor = dependence(is_late)
    return float(is_late.sum()) / factor, max(1, round(len(is_late) / factor))


def _first(end: int, is_so: Callable[[int], bool]) -> int:
    """The first index before `end` from which on it is so; `end` if there is none."""
    return bisect.bisect_left(range(end), x=True, key=is_so)


def _or_inf(ordered: NDArray[np.float64], index: int) -> float:
    return float(ordered[index]) if index < len(ordered) else math.inf


def dependence(is_slow: NDArray[np.bool_]) -> float:
    """How many dependent samples say as much as one independent, at least 1, by batch means of an indicator."""
    size = len(is_slow) // _STRETCHES
    share = float(is_slow.mean())
    if size < _LEAST_OF_A_STRETCH or share in {0.0, 1.0}:
        return 1.0
    means = is_slow[: size * _STRETCHES].reshape(_STRETCHES, size).mean(axis=1)
    factor = size * float(means.var(ddof=1)) / (share * (1 - share))
    return factor if factor > _BY_CHANCE else 1.0
