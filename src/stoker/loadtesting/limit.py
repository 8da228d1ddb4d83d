"""What a service holds on this machine: settings tried against each other, over real sockets, in bounded time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from stoker.errors import StokerError
from stoker.loadtesting.measuring import Target, at_rate, greet, with_callers
from stoker.loadtesting.rates import Found, highest_rate, probe_seconds
from stoker.loadtesting.settings import batch_rows, delays, instances_and_threads, search
from stoker.records import ServiceSettings
from stoker.records.loadtest import LoadMeasurement, Objective, ServingLimit, SettingsTrial

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

    def __call__(self, settings: ServiceSettings) -> AbstractContextManager[Target]:
        """Raises StokerError where the service does not come up."""
        ...


@dataclass
class Search:
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
            found = Found(0.0, (), error.message)
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

    def _level(self, target: Target, rate: float, *, is_below_held: bool) -> LoadMeasurement:
        """A measurement at a share of the rate found; once more where it missed what a higher rate holds."""
        measured = at_rate(target, rate, self._in_time(rate), seed=3)
        if measured.held == "missed" and is_below_held:
            measured = at_rate(target, rate, self._in_time(rate), seed=4)
        return measured

    @property
    def _lowest_rate(self) -> float:
        """The lowest rate that any settings were measured at [requests/s]: where to begin if none was held."""
        return min((one.rate for trial in self.trials for one in trial.tried if one.rate), default=1.0)

    def _highest(self, target: Target, *, first: float, must_hold: float = 0.0) -> Found:
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
