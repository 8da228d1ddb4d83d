"""How fast a CPU is now beside when it was measured, from anchors that were timed both then and now."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from stoker.records import Pace

_HOURS = 0.2
"""How far a shared CPU drifts in hours, one standard deviation [logarithm]: three micro-benchmarks in a night differed
by 0.13 and 0.15 with one thread, by 0.29 and 0.32 with two."""
_TO_SPEAK_OF = 0.1
"""Change of the pace that is told [logarithm]."""


def changes(then_s: Mapping[str, float], now_s: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By how much each anchor's time changed [logarithm]; those that were timed both times.

    Args:
        then_s: times of anchors when the device was measured [s], by name.
        now_s: the same now, turn by turn. A turn that was disturbed is outvoted by the others.
    """
    names = [name for name in then_s if now_s and all(name in turn for turn in now_s)]
    return {name: statistics.median(math.log(turn[name] / then_s[name]) for turn in now_s) for name in names}


def pace_of(then_s: Mapping[str, float], now_s: Sequence[Mapping[str, float]]) -> Pace | None:
    """The pace now, from what `changes` takes; None where no anchor was timed both times.

    What a moment says is weighed against how far machines are known to drift: where kinds of anchors, or turns, say
    different things, less of it is believed.
    """
    found = changes(then_s, now_s)
    if not found:
        return None
    turns = [statistics.median(math.log(turn[name] / then_s[name]) for name in found) for turn in now_s]
    noise = statistics.pvariance(found.values()) + statistics.pvariance(turns)
    believed = _HOURS**2 / (_HOURS**2 + noise)
    return Pace(factor=math.exp(believed * statistics.median(found.values())), deviation=math.sqrt(believed * noise))


def pace_in_words(pace: Pace) -> tuple[str, ...]:
    """One line where the pace is another than when the device was measured by more than noise; else none.

    >>> pace_in_words(Pace(factor=1.25, deviation=0.03))
    ('this CPU takes 1.25 times as long now as when it was measured; forecasts count that',)
    """
    if abs(math.log(pace.factor)) < _TO_SPEAK_OF:
        return ()
    return (f"this CPU takes {pace.factor:.2f} times as long now as when it was measured; forecasts count that",)
