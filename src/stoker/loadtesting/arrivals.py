"""When requests are due: fixed before the first is sent, so that a slow service cannot slow down who asks it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from stoker.errors import BadJob

MOST_REQUESTS = 1_000_000
"""Of one measurement; every latency is kept."""


def poisson(rate: float, seconds: float, *, seed: int = 0) -> NDArray[np.float64]:
    """Times [s] of independent callers: gaps are exponential, `rate` arrivals a second on average.

    Given how many arrive, arrivals of a Poisson process are uniform; so exactly `rate × seconds` of them come, and two
    measurements of one length ask for the same.

    Raises:
        BadJob: there would be none, or more than a million.

    Source: S. M. Ross, Introduction to Probability Models, section 5.3 (conditional distribution of arrival times).
    """
    return np.sort(np.random.default_rng(seed).uniform(0.0, seconds, _count(rate, seconds)))


def constant(rate: float, seconds: float) -> NDArray[np.float64]:
    """Times [s] that are 1/`rate` apart: a metronome, kinder to a queue than callers are.

    Raises:
        BadJob: there would be none, or more than a million.
    """
    return np.arange(_count(rate, seconds), dtype=np.float64) / rate


def _count(rate: float, seconds: float) -> int:
    wanted = rate * seconds
    if not (math.isfinite(wanted) and rate > 0 and seconds > 0 and 1 <= round(wanted) <= MOST_REQUESTS):
        raise BadJob(
            f"{rate:g} requests/s for {seconds:g} s are {wanted:,.0f} requests: wanted 1 to {MOST_REQUESTS:,}",
            remedy="Choose another rate, or another time.",
        )
    return round(wanted)
