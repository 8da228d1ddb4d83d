"""Times of operations where several processes compute on one CPU: they share its memory, and each takes longer.

Forecasts on a machine that others use: what was measured among them says little of the time without, or with more.

A thread that waits for a core holds up all the others, so that the loss is more than the others' share of the cores;
how much more depends on when they compute. An interval that says so is all that can be had.

How fast a CPU is now beside when it was measured, from anchors that were timed both then and now.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stoker.planning.model.update_time import OperationTimes
from stoker.records import Estimate, Forecast, Operation, Pace


@runtime_checkable
class UncontendedTimes(OperationTimes, Protocol):
    """Times of operations on a CPU of which nobody else asks anything."""

    def traffic_seconds(self, operation: Operation) -> float:
        """Time that the operation's bytes take to come and go, at the memory's best rate [s]."""
        ...


@dataclass(frozen=True)
class ContendedTimes:
    """`OperationTimes` of a process among others that do the same.

    `slowdown` is how much longer operations take, by what bounds them, `arithmetic` or `memory`: of an operation's time
    as much counts as memory's as its bytes take to come and go.
    """

    alone: UncontendedTimes
    slowdown: Mapping[str, float]

    def seconds(self, operation: Operation) -> float:
        """Time of `operation` [s]."""
        seconds = self.alone.seconds(operation)
        traffic = min(seconds, self.alone.traffic_seconds(operation))
        return traffic * self.slowdown.get("memory", 1.0) + (seconds - traffic) * self.slowdown.get("arithmetic", 1.0)

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds`, as a fraction of it."""
        return self.alone.relative_error(operation)


_MOST = 0.9
"""Of the CPU, taken as the most that others use: nothing can be said beyond."""


def widen_for_load(forecast: Forecast, share: float) -> Forecast:
    """The forecast with intervals of time as wide as others make them who use `share` of the CPU [0 to 1].

    From what an update would take without them, to what it takes if they come to use as much again of what is left.
    """
    left = 1 - min(_MOST, max(0.0, share))

    def widened(time_s: Estimate) -> Estimate:
        return dataclasses.replace(time_s, low=time_s.low * left, high=time_s.high / left)

    rate = forecast.samples_per_s
    return dataclasses.replace(
        forecast,
        step_s=widened(forecast.step_s),
        samples_per_s=dataclasses.replace(rate, low=rate.low * left, high=rate.high / left),
        evaluate_s=widened(forecast.evaluate_s),
        total_s=widened(forecast.total_s),
    )


def describe_load(share: float) -> str:
    """One line on what others' use of the CPU does to the forecast.

    >>> words_on_others(0.8)
    'others use 80% of the CPU: times may be several times as long, and are shorter once others are gone'
    """
    often = "several times" if share >= 0.5 else "up to twice"
    return f"others use {share:.0%} of the CPU: times may be {often} as long, and are shorter once others are gone"


_HOURS = 0.2
"""How far a shared CPU drifts in hours, one standard deviation [logarithm]: three micro-benchmarks in a night differed
by 0.13 and 0.15 with one thread, by 0.29 and 0.32 with two."""
_TO_SPEAK_OF = 0.1
"""Change of the pace that is told [logarithm]."""


def speed_changes(then_s: Mapping[str, float], now_s: Sequence[Mapping[str, float]]) -> dict[str, float]:
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
    found = speed_changes(then_s, now_s)
    if not found:
        return None
    turns = [statistics.median(math.log(turn[name] / then_s[name]) for name in found) for turn in now_s]
    noise = statistics.pvariance(found.values()) + statistics.pvariance(turns)
    believed = _HOURS**2 / (_HOURS**2 + noise)
    return Pace(factor=math.exp(believed * statistics.median(found.values())), deviation=math.sqrt(believed * noise))


def describe_pace(pace: Pace) -> tuple[str, ...]:
    """One line where the pace is another than when the device was measured by more than noise; else none.

    >>> pace_in_words(Pace(factor=1.25, deviation=0.03))
    ('this CPU takes 1.25 times as long now as when it was measured; forecasts count that',)
    """
    if abs(math.log(pace.factor)) < _TO_SPEAK_OF:
        return ()
    return (f"this CPU takes {pace.factor:.2f} times as long now as when it was measured; forecasts count that",)
