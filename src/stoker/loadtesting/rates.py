"""The highest rate a service holds within an objective, by a bracket on the rate that a few measurements close."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from stoker.loadtesting.quantiles import least_requests
from stoker.records.loadtest import LoadMeasurement
from stoker.units import format_seconds

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
class Found:
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
) -> Found:
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
                return Found(bracket.held, tuple(tried), why)
            measured = probe(rate, needed_s)
            tried.append(measured)
            if measured.held != "unclear":
                break
        bracket = bracket.after(rate, is_held=measured.held == "held")
        if bracket.held < must_hold:
            return Found(0.0, tuple(tried), f"it missed the objective at {must_hold:.4g} requests/s, which others hold")
        rate = bracket.next_rate(first)
    why = "the highest rate held is known to 5 %" if bracket.held else "it held no rate that was tried"
    return Found(bracket.held, tuple(tried), why)
