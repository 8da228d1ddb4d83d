"""What a service holds on this machine: settings tried against each other, over real sockets, in bounded time.

The highest rate a service holds within an objective, by a bracket on the rate that a few measurements close.

Which settings of a service hold the most: one coordinate after the other, each candidate against the best so far.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from stoker.errors import StokerError
from stoker.loadtesting.measurement import LoadTarget, at_rate, greet, least_requests, with_callers
from stoker.records import ServiceSettings
from stoker.records.service import LoadMeasurement, Objective, ServingLimit, SettingsTrial
from stoker.units import format_seconds

LEVELS = (0.5, 0.8, 1.0)
"""Shares of the rate found at which the chosen settings are measured anew."""

_SEARCH_SHARE = 0.75
_DEFAULT_SHARE = 0.35
_CAPACITY_S = 1.5
_CAPACITY_CALLERS = 32
_FIRST_SHARE = 0.7
_BACK_OFF = 0.93


class Start(Protocol):
    """Serves a model with given settings until the context ends, and gives what to ask."""

    def __call__(self, settings: ServiceSettings) -> AbstractContextManager[LoadTarget]:
        """Raises StokerError where the service does not come up."""
        ...


@dataclass
class SettingsSearch:
    """A search of a model's best settings; `run` once.

    Args:
        start: serves with settings.
        objective: what has to be held.
        default: settings that a service has without being told.
        cores: those that may be shared out among instances.
        seconds: the time it may take; at least a capacity and one rate are measured, however short.
        told: called with each trial, when it has ended.
    """

    start: Start
    objective: Objective
    default: ServiceSettings
    cores: int
    seconds: float
    told: Callable[[SettingsTrial], None] = lambda _: None
    clock: Callable[[], float] = time.monotonic
    trials: list[SettingsTrial] = field(default_factory=list)

    def run(self, *, model: str, machine: str) -> ServingLimit:
        """Try, choose, and measure what was chosen once more; what is known by then where the user interrupts.

        Raises:
            StokerError: the service does not come up, or does not answer, even with the default settings.
        """
        began, is_complete = self.clock(), False
        levels: tuple[LoadMeasurement, ...] = ()
        self._began = began
        default = self._first_trial()
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
            model=model, objective=self.objective, machine=machine, default=default, chosen=chosen,
            trials=tuple(self.trials), levels=levels, took_s=self.clock() - began, is_complete=is_complete,
        )  # fmt: skip

    def _first_trial(self) -> SettingsTrial:
        """The default settings, from a guess at the rate: a share of what callers that wait get out of it."""
        with self.start(self.default) as target:
            greet(target)
            capacity = with_callers(target, _CAPACITY_CALLERS, min(_CAPACITY_S, self.seconds / 8))
            found = self._highest(target, first=_FIRST_SHARE * max(capacity.throughput, 1.0))
        return self._noted(SettingsTrial(settings=self.default, rate=found.rate, why=found.why,
                                         tried=(capacity, *found.tried)))  # fmt: skip

    def _attempt(self, settings: ServiceSettings, must_hold: float) -> SettingsTrial:
        try:
            with self.start(settings) as target:
                greet(target)
                found = self._highest(target, first=must_hold or self._lowest_rate, must_hold=must_hold)
        except StokerError as error:
            found = HighestRate(0.0, (), error.message)
        return self._noted(SettingsTrial(settings=settings, rate=found.rate, why=found.why, tried=found.tried))

    def _confirmed(self, best: SettingsTrial) -> tuple[SettingsTrial, tuple[LoadMeasurement, ...]]:
        """Fresh measurements of the best, since the luckiest of many is less good than it looked.

        The rate steps down until it is held anew, or time is over; then the last one that failed is told as it is.
        """
        if best.rate == 0.0 or best.settings is None:
            return best, ()
        with self.start(best.settings) as target:
            greet(target)
            rate, full = best.rate, None
            while full is None or (full.held != "held" and self._left(0.9) > self._seconds_at(rate)):
                rate = rate if full is None else rate * _BACK_OFF
                full = at_rate(target, rate, 1.5 * self._seconds_at(rate), cuts=True, seed=2)
            rest = [self._level(target, share * rate, is_below_held=full.held == "held") for share in LEVELS[:-1]]
        missed = [f"{one.rate:.4g}" for one in rest if one.held == "missed"]
        if full.held == "held" and missed:
            why = f"held again in a fresh measurement, though {', '.join(missed)} requests/s missed twice (noise)"
            return replace(best, rate=rate, why=why), (*rest, full)
        if full.held != "held":
            return replace(best, why=f"seen to hold it once, but not again at {rate:.4g} requests/s"), (*rest, full)
        return replace(best, rate=rate, why="held again in a fresh measurement"), (*rest, full)

    def _level(self, target: LoadTarget, rate: float, *, is_below_held: bool) -> LoadMeasurement:
        """A measurement at a share of the rate found; once more where it missed what a higher rate holds."""
        measured = at_rate(target, rate, self._in_time(rate), seed=3)
        if measured.held == "missed" and is_below_held:
            measured = at_rate(target, rate, self._in_time(rate), seed=4)
        return measured

    @property
    def _lowest_rate(self) -> float:
        """The lowest rate that any settings were measured at [requests/s]: where to begin if none was held."""
        return min((one.rate for trial in self.trials for one in trial.tried if one.rate), default=1.0)

    def _highest(self, target: LoadTarget, *, first: float, must_hold: float = 0.0) -> HighestRate:
        """The bracket on the rate, of measurements that end as soon as they are lost.

        The default settings, tried first, have less time once they held something.
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
        """How long to measure at a rate: a twentieth of the time, unless that tells nothing."""
        shortest_s = min(2.0, self.seconds / 8)
        longest_s = max(shortest_s, self.seconds / 20)
        return probe_seconds(rate, self.objective.q, shortest_s=shortest_s, longest_s=longest_s)

    def _in_time(self, rate: float) -> float:
        """The same, cut to half of the time that is left, but at least a second: it decides nothing."""
        return max(1.0, min(self._seconds_at(rate), self._left(1.0) / 2))

    def _left(self, share: float) -> float:
        return share * self.seconds - (self.clock() - self._began)

    def _noted(self, trial: SettingsTrial) -> SettingsTrial:
        self.trials.append(trial)
        self.told(trial)
        return trial


Probe = Callable[[float, float], LoadMeasurement]
"""Measures at a rate [requests/s] for so long [s]."""

CLOSE_ENOUGH = 1.05
"""The bracket's ends when it is done: its upper over its lower."""

LEAST_RATE = 0.5
"""Rates below are not tried [requests/s]: a measurement would take minutes."""

_AMPLE = 1.05
_WELL = 3.9
_STEP_UP = 1.5
_STEP_DOWN = 0.5


@dataclass(frozen=True)
class Bracket:
    """A rate that is held (0: none is known), and one that is not (infinite: none is known) [requests/s]."""

    held: float = 0.0
    missed: float = math.inf

    def next_rate(self, first: float) -> float | None:
        """The rate to try next, `first` if nothing is known; None once the ends are close, or none can be held."""
        if self.held == 0.0 and math.isinf(self.missed):
            return first
        if self.held == 0.0:
            return self.missed * _STEP_DOWN if self.missed * _STEP_DOWN >= LEAST_RATE else None
        if math.isinf(self.missed):
            return self.held * _STEP_UP
        return math.sqrt(self.held * self.missed) if self.missed / self.held > CLOSE_ENOUGH else None

    def after(self, rate: float, *, is_held: bool) -> Bracket:
        """With what a measurement at `rate` showed."""
        return replace(self, held=max(self.held, rate)) if is_held else replace(self, missed=min(self.missed, rate))


@dataclass(frozen=True)
class HighestRate:
    """The highest rate that was held [requests/s], what was measured for it, and what ended the search."""

    rate: float
    tried: tuple[LoadMeasurement, ...]
    why: str


def probe_seconds(rate: float, q: float, *, shortest_s: float = 2.0, longest_s: float = 12.0) -> float:
    """How long to measure at `rate` [s]: for requests enough to tell a quantile well, or at least at all.

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
    """Bracket the highest rate that `probe` finds held.

    A measurement that leaves it unclear is made once more, twice as long; what is still unclear is not held. `has_time`
    tells whether there is time for a measurement of so many seconds; without, the highest rate held so far is found.
    The first measurement is always made.

    Args:
        probe: what measures.
        first: the rate to begin with [requests/s].
        has_time: asked before each measurement but the first.
        must_hold: a rate to beat; it is tried first, and nothing else once it is missed.
        seconds_at: how long to measure at a rate.
    """
    bracket = Bracket()
    tried: list[LoadMeasurement] = []
    rate: float | None = must_hold or first
    while rate is not None:
        for stretch in (1, 2):
            needed_s = stretch * seconds_at(rate)
            if tried and not has_time(needed_s):
                lowest = min(one.rate for one in tried if one.rate is not None)
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
"""Serves with these settings, and finds the highest rate held, if it is at least so high [requests/s]."""

Axis = Callable[[ServiceSettings], Iterator[ServiceSettings]]
"""Settings that differ from given ones in one coordinate, the likeliest to be better first."""

LEAST_GAIN = 1.05
"""A candidate has to hold so many times the best rate so far; less could be chance."""

_LARGEST_BATCH = 256


def instances_and_threads(cores: int) -> Axis:
    """Ways to share the cores out: as many instances as divide them evenly, and one instance with one thread."""

    def others(settings: ServiceSettings) -> Iterator[ServiceSettings]:
        shares = [(count, cores // count) for count in range(1, cores + 1) if cores % count == 0]
        for instances, threads in dict.fromkeys((*shares, (1, 1))):
            yield replace(settings, instances=instances, threads=threads)

    return others


def batch_rows(settings: ServiceSettings) -> Iterator[ServiceSettings]:
    """Twice, half, four times and a quarter of the rows."""
    for rows in (settings.max_batch_rows * 2, settings.max_batch_rows // 2, settings.max_batch_rows * 4,
                 settings.max_batch_rows // 4):  # fmt: skip
        if 1 <= rows <= _LARGEST_BATCH:
            yield replace(settings, max_batch_rows=rows)


def delays(objective: Objective) -> Axis:
    """Waiting for company: not at all, or small shares of the time that an answer may take."""

    def others(settings: ServiceSettings) -> Iterator[ServiceSettings]:
        for share in (0.0, 0.05, 0.2):
            yield replace(settings, max_delay_s=share * objective.within_s)

    return others


def search(
    default: SettingsTrial, axes: tuple[Axis, ...], attempt: Try, *, has_time: Callable[[], bool]
) -> tuple[tuple[SettingsTrial, ...], bool]:
    """Try settings along the axes, in rounds, until a round improves nothing or time is over.

    Returns:
        All trials after the default's, the best being whichever held the highest rate; and whether it ended by itself.
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
