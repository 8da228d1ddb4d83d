"""Reading a run's events: what is left of them after a resume, and their fields as numbers.

A killed run goes back to its last checkpoint and does some of its samples again. What it said of them the first time is
superseded; `live_history` leaves it out, so that a curve never runs twice over the same samples. Also the forecast and
the price of a stored plan, which curves are compared with.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from stoker.records import Event, Forecast, Plan, PlanSwitch, Report, from_json
from stoker.records.codec import JSON
from stoker.records.plan_schedule import PlanSchedule

_SUPERSEDED_KINDS = frozenset({"progress", "evaluated", "checkpointed", "logged"})
_OF_POSITIONS = ("progress", "checkpointed", "resumed")


class Rewinds:
    """Finds the events of a log at which its run went back: what it said beyond their position is superseded.

    A run goes back with a `resumed` event; one that could not write it shows by a progress that lies before the last,
    with which all at its own position is made again.
    """

    def __init__(self) -> None:
        self._latest = -math.inf

    def position_of(self, kind: str, samples: float | None) -> float | None:
        """The position [samples] to which the log's next event goes back; None if it goes on."""
        if samples is None or kind not in ("resumed", "progress"):
            return None
        goes_back = kind == "resumed" or samples < self._latest
        self._latest = samples
        if not goes_back:
            return None
        return samples if kind == "resumed" else samples - 1


def live_history(events: Sequence[Event]) -> tuple[Event, ...]:
    """The events that still describe the run, in order.

    Progress, evaluations, checkpoints and logged values beyond a position to which the run went back are left out; of
    two evaluations of one split at one position the later stays.
    """
    live, rewinds = list[Event](), Rewinds()
    for event in events:
        position = rewinds.position_of(event.kind, number(event, "samples"))
        if position is not None:
            live = [
                past
                for past in live
                if not (past.kind in _SUPERSEDED_KINDS and (number(past, "samples") or 0.0) > position)
            ]
        live.append(event)
    last_at = {_evaluation_place(event): index for index, event in enumerate(live) if event.kind == "evaluated"}
    return tuple(
        event
        for index, event in enumerate(live)
        if event.kind != "evaluated" or last_at[_evaluation_place(event)] == index
    )


def samples_done(report: Report) -> int:
    """How far training came [samples]: of a run that trains still, or was killed, its record does not say."""
    return _furthest(report, "samples", report.run.samples)


def updates_done(report: Report) -> int:
    """How many updates were made, likewise."""
    return _furthest(report, "updates", report.run.updates)


def _furthest(report: Report, field: str, recorded: int) -> int:
    """The furthest position of the events that still count; of a finished run that of its record."""
    if report.run.status == "finished":
        return recorded
    positions = [finite(event, field) for event in live_history(report.events) if event.kind in _OF_POSITIONS]
    return int(max((value for value in positions if value is not None), default=recorded))


def of_kind(events: Sequence[Event], kind: str) -> tuple[Event, ...]:
    """The events of one kind, in order."""
    return tuple(event for event in events if event.kind == kind)


def number(event: Event, name: str) -> float | None:
    """A field as a number; None if it is absent or no number. JSON's "nan" and "inf" are numbers."""
    return as_number(event.fields.get(name))


def finite(event: Event, name: str) -> float | None:
    """A field as a finite number; None if it is absent, no number, or not finite."""
    value = number(event, name)
    return value if value is not None and math.isfinite(value) else None


def text(event: Event, name: str, default: str = "") -> str:
    """A field as text; `default` if it is absent or None."""
    value = event.fields.get(name)
    return default if value is None else str(value)


def as_number(value: JSON) -> float | None:
    """A JSON value as a number; None if it is none, or one that no float can hold."""
    if type(value) is float:  # nearly always
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return None
    return float(value) if value in ("nan", "inf", "-inf") else None


def numbers(value: JSON) -> dict[str, float]:
    """The numeric members of a JSON object; empty if it is no object."""
    if not isinstance(value, Mapping):
        return {}
    result = {str(name): as_number(item) for name, item in value.items()}
    return {name: item for name, item in result.items() if item is not None}


def evaluation_metrics(event: Event) -> dict[str, float]:
    """The metrics of an `evaluated` event by their bare names: `accuracy`, whether or not written `valid/accuracy`."""
    prefix = f"{text(event, 'split', 'valid')}/"
    return {name.removeprefix(prefix): value for name, value in numbers(event.fields.get("metrics")).items()}


def best_evaluation(events: Sequence[Event]) -> Event | None:
    """The last evaluation on held-out data that was the best so far; None if none said so."""
    marked = [event for event in events if event.kind == "evaluated" and event.fields.get("best") is True]
    return marked[-1] if marked else None


def planned_plan(event: Event) -> Plan | None:
    """The plan a `planned` event carries; None if it carries words or nothing."""
    value = event.fields.get("plan")
    return from_json(value, Plan) if isinstance(value, Mapping) else None


def planned_forecast(event: Event) -> Forecast | None:
    """The forecast a `planned` event carries, if any."""
    value = event.fields.get("forecast")
    return from_json(value, Forecast) if isinstance(value, Mapping) else None


@dataclasses.dataclass(frozen=True)
class PlanStretch:
    """A plan, from which sample on it was in force, and the share of the trained samples that it held for [0 to 1].

    `is_trial`: it was one of several that were tried.
    """

    start: float
    plan: Plan
    share: float
    is_trial: bool = False


def plans_in_force(report: Report) -> tuple[PlanStretch, ...]:
    """The plans that the run trained under, in order; empty for a run without a recorded plan."""
    if report.decision is None:
        return ()
    schedule = report.schedule or PlanSchedule(report.decision.chosen.plan)
    starts = [(0.0, schedule.began, False)] if not schedule.switches or schedule.switches[0].update else []
    for switch in schedule.switches:
        plan, is_trial = switch.plan, switch.kind in ("trial", "left out")
        if not starts or (starts[-1][1].in_words(), starts[-1][2]) != (plan.in_words(), is_trial):
            starts.append((float(switch.samples), plan, is_trial))
    end = max(float(samples_done(report)), starts[-1][0])
    ends = [*(start for start, *_ in starts[1:]), end]
    return tuple(
        PlanStretch(start, plan, (stop - start) / end if end else 1.0, is_trial)
        for (start, plan, is_trial), stop in zip(starts, ends, strict=True)
    )


def settled_switch(report: Report) -> PlanSwitch | None:
    """The switch to the plan that trials in the run came to; None where there were none, or they go on."""
    return None if report.schedule is None else report.schedule.settled


def since_settled(report: Report) -> tuple[Event, ...]:
    """The events that still describe the run, of the updates under the plan that it settled on where it tried several.

    A `progress` counts if all of its updates do. All events, where none was sent since.
    """
    events, settled = live_history(report.events), settled_switch(report)
    if settled is None:
        return events
    since, before, found = settled.samples, 0.0, list[Event]()
    for event in events:
        position = number(event, "samples") or 0.0
        is_since = before >= since if event.kind == "progress" else position > since
        before = position if event.kind == "progress" else before
        if is_since or event.kind not in _SUPERSEDED_KINDS:
            found.append(event)
    return tuple(found) if of_kind(found, "progress") else events


def _evaluation_place(event: Event) -> tuple[str, float | None]:
    return text(event, "split", "valid"), number(event, "samples")


def _inner(document: JSON, *path: str | int) -> JSON:
    """A value inside of JSON from elsewhere; None where the path does not lead to one."""
    for key in path:
        try:
            document = document[key]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def forecast_of(decision: JSON) -> dict[str, JSON]:
    """The part of a stored Decision that rows and charts need: estimates as [value, low, high]."""
    forecast = _inner(decision, "candidates", 0, "forecast")
    document: dict[str, JSON] = {
        "device": _inner(decision, "device"),
        "is_settled": _inner(decision, "is_settled") is not False,
    }
    for name in ("total_s", "samples_per_s", "peak_bytes", "step_s", "cost_usd"):
        ends = [as_number(_inner(forecast, name, end)) for end in ("value", "low", "high")]
        if None not in ends:
            document[name] = ends
    return document


def price_of(decision: JSON) -> float | None:
    """The price of an hour of the chosen plan's devices [USD]; None where that is not known."""
    price = as_number(_inner(decision, "candidates", 0, "price", "usd_per_hour"))
    return price if price is not None and 0 < price < 1e9 else None
