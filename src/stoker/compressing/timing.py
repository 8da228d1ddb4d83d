"""Which of several models is faster here, and by how much at least.

What: interleaved rounds. In each round every contestant runs once, in an order that turns from round to round, so that
whatever else the machine does meets all of them alike. Within a round the times of two are divided; the median of these
ratios is the speed-up, and the bootstrap of rounds gives its bounds.
Use when: the difference is what matters. A latency told alone is a median on the machine as it was.
Costs: rounds × the sum of all latencies.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stoker.records.compression import Interval

RESAMPLES = 2000
FEWEST_ROUNDS, MOST_ROUNDS = 6, 101
LEAST_RUN_S = 0.002
"""A timed run takes at least so long: shorter calls are repeated within it, against the clock's own noise."""

_SLOW_S = 0.1

Times = dict[str, tuple[float, ...]]
"""Seconds a call in each round, by contestant; equally many of each."""


@dataclass(frozen=True)
class Race:
    """Rounds of several contestants."""

    seconds: Times

    def latency(self, name: str) -> float:
        """The median time of a call [s]."""
        return statistics.median(self.seconds[name])

    def ratios(self, name: str, against: str) -> tuple[float, ...]:
        """How much faster than `against` each round was; above 1 is faster."""
        pairs = zip(self.seconds[against], self.seconds[name], strict=True)
        return tuple(other / own for other, own in pairs)

    def ratio(self, name: str, against: str) -> float:
        """How much faster than `against` in the median round: what `speed_up` is made of."""
        return float(np.exp(np.median(np.log(self.ratios(name, against)))))


def race(
    contestants: Mapping[str, Callable[[], object]],
    clock: Callable[[], float],
    *,
    seconds: float,
) -> Race:
    """Let every contestant run in each round, for about `seconds` in all, within the fewest and most rounds.

    Each has run once before, untimed.
    """
    repeats = {name: _repeats(call, clock) for name, call in contestants.items()}
    found: dict[str, list[float]] = {name: [] for name in contestants}
    order, started = list(contestants), clock()
    for number in range(MOST_ROUNDS):
        if number >= FEWEST_ROUNDS and clock() - started > seconds:
            break
        for name in order:
            found[name].append(_timed(contestants[name], repeats[name], clock))
        order.append(order.pop(0))
    return Race({name: tuple(times) for name, times in found.items()})


def speed_up(races: Sequence[Race], name: str, against: str, *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """How much faster `name` is than `against`: the geometric mean over races of the median ratio, with bounds.

    Races are of batch sizes, say; each bound holds with `confidence` on its own.
    """
    logs = [np.log(race.ratios(name, against)) for race in races]
    generator = np.random.default_rng(seed)
    resampled = np.zeros(RESAMPLES)
    for one in logs:
        draws = generator.integers(0, len(one), size=(RESAMPLES, len(one)))
        resampled += np.median(one[draws], axis=1)
    value = float(np.exp(np.mean(np.log([one.ratio(name, against) for one in races]))))
    low, high = np.exp(np.quantile(resampled / len(logs), [1 - confidence, confidence]))
    return Interval(value=value, low=min(value, float(low)), high=max(value, float(high)))


def _repeats(call: Callable[[], object], clock: Callable[[], float]) -> int:
    """Calls of one timed run. The first call may still set things up: a quick one is timed once more."""
    once = _timed(call, 1, clock)
    if once < _SLOW_S:
        once = _timed(call, 1, clock)
    return max(1, min(100, round(LEAST_RUN_S / once)))


def _timed(call: Callable[[], object], repeats: int, clock: Callable[[], float]) -> float:
    started = clock()
    for _ in range(repeats):
        call()
    return max(clock() - started, 1e-9) / repeats
