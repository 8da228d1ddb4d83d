"""The cost of a run elsewhere: its price times the time in which it held devices, and the stop before `--max-cost`.

What: time counts from the first sign that devices are held (`starting`, or the first event) until they are given back;
time in a queue, before the start or after a preemption, does not. Moments are the place's, from events and states, so
that a clock here or there that is off does not count as money.
Limits: storage, egress and taxes are left out, as in `stoker prices`; a client that is detached watches nothing, so a
launch with `--max-cost` also bounds the job's time at the place (`most_seconds`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from stoker.errors import BadJob
from stoker.launching.launcher import Launcher, LaunchTarget, Request
from stoker.records import ENDED, Event, Launch, LaunchState, from_json
from stoker.records.launch import LaunchPhase
from stoker.records.plan import Forecast
from stoker.records.progress import read_event
from stoker.units import format_money, format_seconds

HOLDS_DEVICES: frozenset[LaunchPhase] = frozenset({"starting", "running", "saving"})
_GIVEN_BACK: frozenset[LaunchPhase] = ENDED.union(("queued", "preempted", "requeued"))

_MARK_INTERVAL_S = 60.0

_ANOTHER_DAY_S = 600.0
"""A process that starts so long after the last event of the one before was started by another launch [s]."""

LEAST_RESERVE_S = 30.0
"""Time to ask, save and leave for which money is kept back at least [s]."""


def most_seconds(max_cost: float, price_per_h: float | None) -> float | None:
    """The longest that devices may be held for a sum [s]; None where nothing is charged, or no price is known.

    >>> most_seconds(5.0, 2.5)
    7200.0
    """
    return 3600 * max_cost / price_per_h if price_per_h else None


def price_there(target: LaunchTarget, request: Request, launcher: Launcher) -> tuple[float | None, str, str]:
    """Price an hour of the whole job at a place, its currency, and who says so; None: unknown.

    `--place-option price=2.50` says it where the place cannot.

    Raises:
        BadJob: that option is no amount.
        PlaceFailed: the place refuses, or does not answer.
    """
    if (given := request.options.get("price")) is not None:
        try:
            price = float(given)
        except ValueError:
            price = math.nan
        if not 0 <= price < math.inf:
            raise BadJob(f"--place-option price={given}: wanted US dollars an hour, such as 2.50")
        return price, "USD", "--place-option price"
    offers = launcher.offers(request)
    offer = next((one for one in offers if one.text == target.text), offers[0] if len(offers) == 1 else None)
    return (None, "USD", "") if offer is None else (offer.price_per_h, offer.currency, offer.price_source)


def save_time_s(kind: str, fields: Mapping[str, object]) -> float:
    """How long a save takes, by the forecast or the measurement in an event [s]; 0 if it has neither."""
    if isinstance(forecast := fields.get("forecast"), dict):
        return from_json(forecast, Forecast).checkpoint_s.high
    took = [fields.get("blocked_s"), fields.get("write_s")] if kind == "checkpointed" else []
    return sum(float(part) for part in took if isinstance(part, int | float))


@dataclass
class Meter:
    """Counts the time in which a run holds devices, from its states and events in any order of arrival.

    Attributes:
        price_per_h: of all devices together; None: unknown.
        max_cost: None: no limit.
        save_s: time to save and leave, by forecast or as measured [s].
    """

    price_per_h: float | None = None
    max_cost: float | None = None
    save_s: float = 0.0
    _held: dict[float, bool] = field(default_factory=dict)
    _since_newest_s: float = 0.0
    _newest_s: float = -math.inf
    _newest_event_s: float = math.inf
    _last_two_s: tuple[float, float] = (-math.inf, -math.inf)

    @classmethod
    def of(cls, launch: Launch) -> Meter:
        """The meter of a launch, with the states that are kept of it."""
        meter = cls(price_per_h=launch.price_per_h, max_cost=launch.max_cost)
        for state in launch.states:
            meter.on_state(state)
        return meter

    def on_state(self, state: LaunchState) -> None:
        """Take in a state."""
        if state.at_s is not None and state.phase in HOLDS_DEVICES | _GIVEN_BACK:
            self._mark(state.at_s, is_held=state.phase in HOLDS_DEVICES)

    def on_event(self, event: Event) -> None:
        """Take in an event of the run, which holds its devices then, until it has stopped or is finished."""
        if event.kind == "started" and event.at - self._newest_event_s > _ANOTHER_DAY_S:
            self._mark(self._newest_event_s, is_held=False)
        self._newest_event_s = event.at
        self._mark(event.at, is_held=event.kind not in ("stopped", "finished"))
        self.save_s = max(self.save_s, save_time_s(event.kind, event.fields))

    def on_wait(self, duration_s: float) -> None:
        """Let time pass here since the last sign of life."""
        self._since_newest_s += duration_s

    @property
    def held_s(self) -> float:
        """Time in which devices were held [s]."""
        total, began, newest = 0.0, None, 0.0
        for at, is_held in sorted(self._held.items()):
            newest = at
            if is_held and began is None:
                began = at
            elif not is_held and began is not None:
                total, began = total + at - began, None
        return total if began is None else total + newest - began + self._since_newest_s

    @property
    def spent(self) -> float | None:
        """The cost of that time; None where no price is known."""
        return None if self.price_per_h is None else self.price_per_h * self.held_s / 3600

    @property
    def reserve_s(self) -> float:
        """Time that is kept back for saving and leaving [s]."""
        return max(LEAST_RESERVE_S, 2 * self.save_s)

    def over_limit(self) -> str | None:
        """Why the run has to save and leave now; None while it is within `max_cost`."""
        if self.max_cost is None or not self.price_per_h or self.spent is None:
            return None
        if self.spent + self.price_per_h * self.reserve_s / 3600 < self.max_cost:
            return None
        return (
            f"{format_money(self.spent)} of {format_money(self.max_cost)} are spent, and saving may take "
            f"{format_seconds(self.reserve_s)}: the run is asked to save and leave"
        )

    def _mark(self, at: float, *, is_held: bool) -> None:
        if at >= self._newest_s:
            self._newest_s, self._since_newest_s = at, 0.0
        # Of a state and an event of one moment, the state knows better whether devices were given back.
        self._held[at] = is_held and self._held.get(at, True)
        before, last = self._last_two_s
        if at > last:  # of a stretch in which devices are held a mark a minute is enough: logs have millions of events
            is_one_stretch = all(self._held.get(mark) for mark in (before, last, at))
            if is_one_stretch and at - before < _MARK_INTERVAL_S:
                del self._held[last]
                self._last_two_s = (before, at)
            else:
                self._last_two_s = (last, at)


def spent_of(launch: Launch, events: Iterable[Event] = ()) -> float | None:
    """The cost of a run elsewhere as far as it is known here; None where no price is known.

    While it goes on, what was recorded when it was last followed is the least.
    """
    if launch.spent is not None and not launch.is_going_on:
        return launch.spent
    meter = Meter.of(launch)
    for event in events:
        meter.on_event(event)
    return max((cost for cost in (launch.spent, meter.spent) if cost is not None), default=None)


def held_in_log(events: Path, since: str, until_s: float) -> float:
    """Time in which a run held devices by its log [s], from one moment (ISO 8601) to another [s since 1970]."""
    meter = Meter()
    with suppress(OSError, ValueError):  # no log, or no such moment
        since_s = datetime.fromisoformat(since).timestamp()
        with events.open("rb") as log:
            for line in log:
                with suppress(ValueError):  # torn
                    event = read_event(line)
                    if since_s <= event.at < until_s:
                        meter.on_event(event)
    return meter.held_s
