"""At which share of channels a network is as fast as was asked for: a search that measures little.

What: each measurement makes a graph of the cut network and races it with the whole, so there shall be few. Speed grows
with the share that goes, about as the exponential of it: the next share is read off the line between the nearest
measurements on either side, kept away from their ends. Measurements made for one speed serve the next.
Source: the Illinois variant of regula falsi is the same idea without noise; what was measured is never believed here to
more than a twentieth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LARGEST = 0.9
"""The largest share that is tried."""

CLOSE = 1.05
"""A network that is up to so many times faster than was asked for is taken."""

_NARROW = 0.02
_MARGIN = 0.2
"""A share is tried no nearer to what was measured than this, of the distance between the two."""


@dataclass(frozen=True)
class Probe:
    """A share of channels that were to go, and how much faster than the whole network the rest was."""

    ratio: float
    speed_up: float


def next_ratio(probes: Sequence[Probe], target: float) -> float | None:
    """The share to measure next on the way to a speed; None where what was measured will do, or nothing can.

    >>> next_ratio([], 1.5)
    0.5
    >>> next_ratio([Probe(0.5, 1.52)], 1.5) is None
    True
    """
    if not probes:
        return 0.5
    best = fast_enough(probes, target)
    if best is None:
        furthest = max(probe.ratio for probe in probes)
        return None if furthest >= LARGEST else min(LARGEST, (furthest + LARGEST) / 2 + 0.05)
    slower = [probe for probe in probes if probe.ratio < best.ratio]
    below = max(slower, key=lambda probe: probe.ratio, default=Probe(0.0, 1.0))
    if best.speed_up <= CLOSE * target or best.ratio - below.ratio < _NARROW:
        return None
    low, high = math.log(min(below.speed_up, target)), math.log(best.speed_up)
    share = (math.log(target) - low) / (high - low)
    return below.ratio + (best.ratio - below.ratio) * min(max(share + 0.05, _MARGIN), 1 - _MARGIN)


def fast_enough(probes: Sequence[Probe], target: float) -> Probe | None:
    """The measurement that takes the fewest channels to be as fast as was asked for."""
    return min((probe for probe in probes if probe.speed_up >= target), key=lambda probe: probe.ratio, default=None)
