"""Speed of a shared CPU: among processes of one job, with other programs, and compared with when it was measured.

Processes of one job share the memory, and each takes longer. With other programs, a thread that waits for a core holds
up all others, so that the loss is more than their share of the cores; how much more depends on when they compute, and
forecasts get a wider interval. The speed now is estimated from anchors that were timed both then and now.
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
    """Times of operations on a CPU without other processes."""

    def traffic_seconds(self, operation: Operation) -> float:
        """Time to read and write the operation's bytes at the memory's best rate [s]."""
        ...


@dataclass(frozen=True)
class ContendedTimes:
    """`OperationTimes` of one of several processes with the same work.

    `slowdown` is the ratio of times by what bounds them, `arithmetic` or `memory`: an operation's time at the memory's
    best rate counts as memory, the rest as arithmetic.
    """

    alone: UncontendedTimes
    slowdown: Mapping[str, float]

    def seconds(self, operation: Operation) -> float:
        """Time of `operation` [s]."""
        seconds = self.alone.seconds(operation)
        traffic = min(seconds, self.alone.traffic_seconds(operation))
        return traffic * self.slowdown.get("memory", 1.0) + (seconds - traffic) * self.slowdown.get("arithmetic", 1.0)

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds` [fraction]."""
        return self.alone.relative_error(operation)


_MOST = 0.9
"""Largest share of the CPU that other processes are assumed to use."""


def widen_for_load(forecast: Forecast, share: float) -> Forecast:
    """The forecast with intervals of time widened for other processes that use `share` of the CPU [0 to 1].

    From the time without them, to the time if they come to use as large a share of the rest.
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
    """One line on the effect of other processes on the forecast.

    >>> describe_load(0.8)
    'others use 80% of the CPU: times may be several times as long, and are shorter once others are gone'
    """
    often = "several times" if share >= 0.5 else "up to twice"
    return f"others use {share:.0%} of the CPU: times may be {often} as long, and are shorter once others are gone"


_HOURS = 0.2
"""Drift of a shared CPU in hours, one standard deviation [logarithm]: three micro-benchmarks in a night differed
by 0.13 and 0.15 with one thread, by 0.29 and 0.32 with two."""
_TO_SPEAK_OF = 0.1
"""Least change of speed that is reported [logarithm]."""


def speed_changes(then_s: Mapping[str, float], now_s: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Change of each anchor's time [logarithm], for anchors that were timed both times.

    Args:
        then_s: times of anchors when the device was measured [s], by name.
        now_s: times now, by turn; the median discards a disturbed turn.
    """
    names = [name for name in then_s if now_s and all(name in turn for turn in now_s)]
    return {name: statistics.median(math.log(turn[name] / then_s[name]) for turn in now_s) for name in names}


def pace_of(then_s: Mapping[str, float], now_s: Sequence[Mapping[str, float]]) -> Pace | None:
    """The speed now, from the arguments of `speed_changes`; None if no anchor was timed both times.

    The measured change is shrunk towards 0 by its noise (differences between anchors, and between turns) against the
    known drift of machines.
    """
    changes = speed_changes(then_s, now_s)
    if not changes:
        return None
    turns = [statistics.median(math.log(turn[name] / then_s[name]) for name in changes) for turn in now_s]
    noise = statistics.pvariance(changes.values()) + statistics.pvariance(turns)
    weight = _HOURS**2 / (_HOURS**2 + noise)
    return Pace(factor=math.exp(weight * statistics.median(changes.values())), deviation=math.sqrt(weight * noise))


def describe_pace(pace: Pace) -> tuple[str, ...]:
    """One line if the speed differs from the measured one by more than noise; else none.

    >>> describe_pace(Pace(factor=1.25, deviation=0.03))
    ('this CPU takes 1.25 times as long now as when it was measured; forecasts count that',)
    """
    if abs(math.log(pace.factor)) < _TO_SPEAK_OF:
        return ()
    return (f"this CPU takes {pace.factor:.2f} times as long now as when it was measured; forecasts count that",)
