"""Serving limit: the settings that hold the highest rate within an objective, over real sockets, in bounded time.

For given settings a bracket on the rate is closed by a few measurements (`highest_rate`). Settings are searched one
coordinate after the other, each candidate against the best so far (`search`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from stoker.errors import StokerError
from stoker.loadtesting.measurement import LoadTarget, at_rate, greet, least_requests, with_callers
from stoker.records import ServiceSettings
from stoker.records.service import LoadMeasurement, Objective, ServingLimit, SettingsTrial
from stoker.units import format_seconds

LEVELS = (0.5, 0.8, 1.0)
"""Shares of the highest rate at which the chosen settings are measured again."""

_SEARCH_SHARE = 0.75
_DEFAULT_SHARE = 0.35
_CAPACITY_S = 1.5
_CAPACITY_CALLERS = 32
_FIRST_SHARE = 0.7
_BACK_OFF = 0.93


Start = Callable[[ServiceSettings], AbstractContextManager[LoadTarget]]
"""Serves a model with given settings until the context ends; gives the target to measure.

Raises StokerError if the service does not start.
"""


@dataclass
class SettingsSearch:
    """A search of a model's best settings; `run` once.

    Args:
        start: serves with settings.
        objective: the latency to hold.
        default: the settings that are tried first.
        cores: number of cores to divide among instances.
        seconds: time limit [s]; a capacity and one rate are measured in any case.
        on_trial: called with each trial when it ends.
    """

    start: Start
    objective: Objective
    default: ServiceSettings
    cores: int
    seconds: float
    on_trial: Callable[[SettingsTrial], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    trials: list[SettingsTrial] = field(default_factory=list)

    def run(self, *, model: str, machine: str) -> ServingLimit:
        """Try settings, choose the best, and measure it again; Ctrl-C ends the search with the best so far.

        Raises:
            StokerError: the service does not start or answer even with the default settings.
        """
        self._began, is_complete = self.clock(), False
        levels: tuple[LoadMeasurement, ...] = ()
        with self.start(self.default) as target:
            greet(target)
            # The first rate is a share of what callers that wait for their answers reach.
            capacity = with_callers(target, _CAPACITY_CALLERS, min(_CAPACITY_S, self.seconds / 8))
            highest = self._highest(target, first=_FIRST_SHARE * max(capacity.throughput, 1.0))
        tried = (capacity, *highest.tried)
        default = self._noted(SettingsTrial(settings=self.default, rate=highest.rate, why=highest.why, tried=tried))
        try:
            _, is_complete = search(
                default,
                (instances_and_threads(self.cores), batch_rows, delays(self.objective)),
                self._attempt,
                has_time=lambda: self._left(_SEARCH_SHARE) > self._seconds_at(default.rate or self._lowest_rate),
            )
            chosen, levels = self._confirmed(max(self.trials, key=lambda trial: trial.rate))
        except KeyboardInterrupt:
            chosen = max(self.trials, key=lambda trial: trial.rate)
        return ServingLimit(
            model=model,
            objective=self.objective,
            machine=machine,
            default=default,
            chosen=chosen,
            trials=tuple(self.trials),
            levels=levels,
            took_s=self.clock() - self._began,
            is_complete=is_complete,
        )

    def _attempt(self, settings: ServiceSettings, must_hold: float) -> SettingsTrial:
        try:
            with self.start(settings) as target:
                greet(target)
                highest = self._highest(target, first=must_hold or self._lowest_rate, must_hold=must_hold)
        except StokerError as error:
            highest = HighestRate(0.0, (), error.message)
        return self._noted(SettingsTrial(settings=settings, rate=highest.rate, why=highest.why, tried=highest.tried))

    def _confirmed(self, best: SettingsTrial) -> tuple[SettingsTrial, tuple[LoadMeasurement, ...]]:
        """New measurements of the best trial, since the maximum of noisy results is biased upwards.

        The rate steps down until it is held again, or the time is over; then the last miss is reported. A share of the
        rate that misses is measured twice if the full rate was held.
        """
        if best.rate == 0.0 or best.settings is None:
            return best, ()
        with self.start(best.settings) as target:
            greet(target)
            rate, full = best.rate, None
            while full is None or (full.held != "held" and self._left(0.9) > self._seconds_at(rate)):
                rate = rate if full is None else rate * _BACK_OFF
                full = at_rate(target, rate, 1.5 * self._seconds_at(rate), cuts=True, seed=2)
            rest = []
            for share in LEVELS[:-1]:
                level = at_rate(target, share * rate, self._in_time(share * rate), seed=3)
                if level.held == "missed" and full.held == "held":
                    level = at_rate(target, share * rate, self._in_time(share * rate), seed=4)
                rest.append(level)
        missed = [f"{level.rate:.4g}" for level in rest if level.held == "missed"]
        if full.held == "held" and missed:
            why = f"held again in a fresh measurement, though {', '.join(missed)} requests/s missed twice (noise)"
            return replace(best, rate=rate, why=why), (*rest, full)
        if full.held != "held":
            return replace(best, why=f"seen to hold it once, but not again at {rate:.4g} requests/s"), (*rest, full)
        return replace(best, rate=rate, why="held again in a fresh measurement"), (*rest, full)

    @property
    def _lowest_rate(self) -> float:
        """The lowest rate that was measured [requests/s]: the first rate if none was held."""
        rates = [measured.rate for trial in self.trials for measured in trial.tried if measured.rate]
        return min(rates, default=1.0)

    def _highest(self, target: LoadTarget, *, first: float, must_hold: float = 0.0) -> HighestRate:
        """The highest rate by measurements that end early if they miss.

        The default settings, tried first, get less time once they held a rate.
        """
        seeds = itertools.count(1000)
        held: list[bool] = []

        def probe(rate: float, seconds: float) -> LoadMeasurement:
            measured = at_rate(target, rate, seconds, cuts=True, seed=next(seeds))
            held.append(measured.held == "held")
            return measured

        def has_time(needed_s: float) -> bool:
            share = _DEFAULT_SHARE if any(held) and not self.trials else _SEARCH_SHARE
            return self._left(share) > needed_s

        return highest_rate(probe, first=first, must_hold=must_hold, seconds_at=self._seconds_at, has_time=has_time)

    def _seconds_at(self, rate: float) -> float:
        """Seconds to measure at a rate: a twentieth of the time, or more if that is too few requests."""
        shortest_s = min(2.0, self.seconds / 8)
        longest_s = max(shortest_s, self.seconds / 20)
        return probe_seconds(rate, self.objective.q, shortest_s=shortest_s, longest_s=longest_s)

    def _in_time(self, rate: float) -> float:
        """Like `_seconds_at`, at most half of the time left, at least a second; for levels, which decide nothing."""
        return max(1.0, min(self._seconds_at(rate), self._left(1.0) / 2))

    def _left(self, share: float) -> float:
        return share * self.seconds - (self.clock() - self._began)

    def _noted(self, trial: SettingsTrial) -> SettingsTrial:
        self.trials.append(trial)
        self.on_trial(trial)
        return trial


Probe = Callable[[float, float], LoadMeasurement]
"""Measures at a rate [requests/s] for a time [s]."""

CLOSE_ENOUGH = 1.05
"""Ratio of the bracket's ends at which it is closed."""

LEAST_RATE = 0.5
"""The lowest rate to try [requests/s]: a measurement below would take minutes."""

_AMPLE = 1.05
_WELL = 3.9
_STEP_UP = 1.5
_STEP_DOWN = 0.5


@dataclass(frozen=True)
class Bracket:
    """The highest rate known to be held (0: none) and the lowest known to be missed (infinite: none) [requests/s]."""

    held: float = 0.0
    missed: float = math.inf

    def next_rate(self, first: float) -> float | None:
        """The next rate to try [requests/s], initially `first`; None once the ends are close or no rate can be held."""
        if self.held == 0.0 and math.isinf(self.missed):
            return first
        if self.held == 0.0:
            return self.missed * _STEP_DOWN if self.missed * _STEP_DOWN >= LEAST_RATE else None
        if math.isinf(self.missed):
            return self.held * _STEP_UP
        return math.sqrt(self.held * self.missed) if self.missed / self.held > CLOSE_ENOUGH else None

    def after(self, rate: float, *, is_held: bool) -> Bracket:
        """The bracket after a measurement at `rate`."""
        return replace(self, held=max(self.held, rate)) if is_held else replace(self, missed=min(self.missed, rate))


@dataclass(frozen=True)
class HighestRate:
    """The highest rate that was held [requests/s], its measurements, and why the search ended."""

    rate: float
    tried: tuple[LoadMeasurement, ...]
    why: str


def probe_seconds(rate: float, q: float, *, shortest_s: float = 2.0, longest_s: float = 12.0) -> float:
    """Time to measure at `rate` [s]: enough requests to estimate the quantile well, or at least to bound it.

    >>> [round(probe_seconds(rate, 0.99), 1) for rate in (20, 50, 500, 5000)]
    [19.3, 12.0, 3.0, 2.0]
    """
    least = _AMPLE * least_requests(q) / rate
    return max(least, min(longest_s, max(shortest_s, _WELL * least)))


def highest_rate(
    probe: Probe,
    *,
    first: float,
    has_time: Callable[[float], bool],
    must_hold: float = 0.0,
    seconds_at: Callable[[float], float],
) -> HighestRate:
    """Bracket the highest rate that is held.

    An unclear measurement is repeated, twice as long; if it is still unclear, the rate counts as not held. The first
    measurement is always made.

    Args:
        probe: measures at a rate.
        first: the rate to begin with [requests/s].
        has_time: whether there is time for a measurement of that many seconds; else the search ends.
        must_hold: a rate to beat; it is tried first, and the search ends if it is missed.
        seconds_at: time to measure at a rate [s].
    """
    bracket = Bracket()
    tried: list[LoadMeasurement] = []
    rate: float | None = must_hold or first
    while rate is not None:
        for stretch in (1, 2):
            needed_s = stretch * seconds_at(rate)
            if tried and not has_time(needed_s):
                lowest = min(measured.rate for measured in tried if measured.rate is not None)
                missed = "" if bracket.held else f"missed at every rate tried, down to {lowest:.4g} requests/s; "
                why = f"{missed}no time was left for the {format_seconds(needed_s)} that {rate:.4g} requests/s take"
                return HighestRate(bracket.held, tuple(tried), why)
            measured = probe(rate, needed_s)
            tried.append(measured)
            if measured.held != "unclear":
                break
        bracket = bracket.after(rate, is_held=measured.held == "held")
        if bracket.held < must_hold:
            return HighestRate(
                0.0, tuple(tried), f"it missed the objective at {must_hold:.4g} requests/s, which others hold"
            )
        rate = bracket.next_rate(first)
    why = "the highest rate held is known to 5 %" if bracket.held else "it held no rate that was tried"
    return HighestRate(bracket.held, tuple(tried), why)


Try = Callable[[ServiceSettings, float], SettingsTrial]
"""Serves with these settings; finds the highest rate held, if it reaches the one given [requests/s]."""

Axis = Callable[[ServiceSettings], Iterator[ServiceSettings]]
"""Settings that differ from the given ones in one coordinate, the most promising first."""

LEAST_GAIN = 1.05
"""Least ratio of a candidate's rate to the best so far; less could be chance."""

_LARGEST_BATCH = 256


def instances_and_threads(cores: int) -> Axis:
    """Divisions of the cores: numbers of instances that divide them evenly, and one instance with one thread."""

    def others(settings: ServiceSettings) -> Iterator[ServiceSettings]:
        shares = [(count, cores // count) for count in range(1, cores + 1) if cores % count == 0]
        for instances, threads in dict.fromkeys((*shares, (1, 1))):
            yield replace(settings, instances=instances, threads=threads)

    return others


def batch_rows(settings: ServiceSettings) -> Iterator[ServiceSettings]:
    """Twice, half, four times and a quarter of the rows."""
    most = settings.max_batch_rows
    for rows in (most * 2, most // 2, most * 4, most // 4):
        if 1 <= rows <= _LARGEST_BATCH:
            yield replace(settings, max_batch_rows=rows)


def delays(objective: Objective) -> Axis:
    """Delays of a batch: none, or small shares of the objective's latency."""

    def others(settings: ServiceSettings) -> Iterator[ServiceSettings]:
        for share in (0.0, 0.05, 0.2):
            yield replace(settings, max_delay_s=share * objective.within_s)

    return others


def search(
    default: SettingsTrial, axes: tuple[Axis, ...], attempt: Try, *, has_time: Callable[[], bool]
) -> tuple[tuple[SettingsTrial, ...], bool]:
    """Try settings along the axes, in rounds, until a round improves nothing or the time is over.

    Returns:
        All trials after the default's, and whether the search ended before the time.
    """
    assert default.settings is not None
    best, best_settings, seen = default, default.settings, {default.settings}
    trials: list[SettingsTrial] = []
    is_improving = True
    while is_improving:
        is_improving = False
        for axis in axes:
            for candidate in axis(best_settings):
                if candidate in seen:
                    continue
                if not has_time():
                    return tuple(trials), False
                seen.add(candidate)
                trial = attempt(candidate, best.rate * LEAST_GAIN)
                trials.append(trial)
                if trial.rate > best.rate:
                    best, best_settings, is_improving = trial, candidate, True
    return tuple(trials), True
