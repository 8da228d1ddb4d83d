"""A run as it stands now: its events folded, one by one, into what a live display shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stoker.records import Event, Forecast, Plan, from_json
from stoker.records.progress import is_validation
from stoker.reporting.bottlenecks import closing_lines
from stoker.reporting.history import (
    as_number,
    evaluation_metrics,
    finite,
    number,
    numbers,
    planned_forecast,
    planned_plan,
    text,
)

_MAY_BECOME_UNKNOWN = frozenset({"eta_s", "samples_per_s", "loss"})
"""Fields that an event may reset to unknown; others keep their last value."""

Curve = tuple[tuple[float, float], ...]
"""(position [samples], value) pairs in order."""

_MOST_POINTS = 512
"""Losses and rates kept; every second one is dropped when there are more, so that they span the whole run."""


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """What is known of a run after some events; times in seconds, `at` and `saved_at` since 1970, memory in bytes.

    `num_train` is the number of samples in an epoch; `best` and `best_samples` are the metrics and the position of the
    best evaluation so far; `split_s` sums what this process spent; before training `at` is when the current stage began
    (0 if unknown); `verdict` is what held the run back, in lines; `processes` train together.
    """

    phase: str = "planning"
    run: str = ""
    plan: str = ""
    forecast: Forecast | None = None
    explanation: tuple[str, ...] = ()
    device: str = ""
    at: float = 0.0
    samples: float = 0.0
    total_samples: float = 0.0
    num_train: float = 0.0
    loss: float | None = None
    learning_rate: float | None = None
    samples_per_s: float | None = None
    eta_s: float | None = None
    wall_s: float = 0.0
    split_s: Mapping[str, float] = field(default_factory=dict)
    resident_bytes: float | None = None
    losses: Curve = ()
    rates: Curve = ()
    valid: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    best_samples: float = 0.0
    saved_at: float | None = None
    saved_samples: float = 0.0
    saved_bytes: float | None = None
    reason: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    report: str = ""
    verdict: tuple[str, ...] = ()
    processes: int = 1

    @property
    def fraction(self) -> float:
        """Share of the training that is done [0 to 1]; 0 while the total is unknown."""
        return min(1.0, self.samples / self.total_samples) if self.total_samples else 0.0

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen in this process."""
        return self.phase in ("finished", "stopped")

    def after(self, event: Event) -> RunSnapshot:
        """The run as it stands once `event` has happened."""
        changes = _CHANGES[event.kind](self, event)
        known = {name: value for name, value in changes.items() if value is not None or name in _MAY_BECOME_UNKNOWN}
        return dataclasses.replace(self, **known)


def _planned(_: RunSnapshot, event: Event) -> dict[str, Any]:
    plan, forecast = planned_plan(event), planned_forecast(event)
    lines = event.fields.get("explanation")
    return {
        "at": event.at,
        "run": text(event, "run") or None,
        "plan": plan.in_words() if plan else text(event, "plan"),
        "device": text(event, "device") or (plan.device if plan else None),
        "forecast": forecast,
        "explanation": tuple(str(line) for line in lines) if isinstance(lines, list | tuple) else None,
        "processes": plan.layout.world_size if plan else None,
    }


def _replanned(_: RunSnapshot, event: Event) -> dict[str, Any]:
    new = event.fields.get("new")
    plan = from_json(new, Plan) if isinstance(new, Mapping) else None
    return {"plan": plan.in_words(), "processes": plan.layout.world_size} if plan else {}


def _started(before: RunSnapshot, event: Event) -> dict[str, Any]:
    environment, data = event.fields.get("environment"), event.fields.get("data")
    model = environment.get("device_model") if isinstance(environment, Mapping) else None
    return {
        "phase": "training",
        "at": event.at,
        "samples": number(event, "samples"),
        "total_samples": number(event, "total_samples"),
        "num_train": as_number(data.get("train")) if isinstance(data, Mapping) else None,
        "device": str(model) if model else before.device,
        "run": text(event, "run") or None,
    }


def _resumed(before: RunSnapshot, event: Event) -> dict[str, Any]:
    """A run that goes back drops what is known of samples that it will do again."""
    samples = number(event, "samples") or 0.0
    forgotten = {"best": {}, "best_samples": 0.0} if before.best_samples > samples else {}
    return {
        "phase": "training",
        "at": event.at,
        "samples": samples,
        "losses": _up_to(before.losses, samples),
        "rates": _up_to(before.rates, samples),
        **forgotten,
    }


def _progress(before: RunSnapshot, event: Event) -> dict[str, Any]:
    loss, rate = finite(event, "loss"), finite(event, "samples_per_s")
    spent = numbers(event.fields.get("split_s"))
    phases = dict.fromkeys([*before.split_s, *spent])
    return {
        "phase": "training",
        "at": event.at,
        "samples": number(event, "samples"),
        "total_samples": number(event, "total_samples"),
        "loss": number(event, "loss"),
        "learning_rate": finite(event, "lr"),
        "samples_per_s": rate,
        "eta_s": finite(event, "eta_s"),
        "wall_s": finite(event, "wall_s"),
        "split_s": {phase: before.split_s.get(phase, 0.0) + spent.get(phase, 0.0) for phase in phases},
        "resident_bytes": finite(event, "resident_bytes"),
        "losses": _with_one_more(before.losses, event, loss),
        "rates": _with_one_more(before.rates, event, rate),
    }


def _evaluated(before: RunSnapshot, event: Event) -> dict[str, Any]:
    metrics, name = evaluation_metrics(event), text(event, "split", "valid").partition("/")[2]
    if name:  # one of several validation sets
        metrics = {f"{name}/{measure}": value for measure, value in metrics.items()}
    changes: dict[str, Any] = {}
    if is_validation(event):
        changes["valid"] = {**before.valid, **metrics} if name else metrics
    if event.fields.get("best") is True:
        changes |= {"best": metrics, "best_samples": number(event, "samples")}
    return changes


def _checkpointed(_: RunSnapshot, event: Event) -> dict[str, Any]:
    samples = number(event, "samples")
    return {"saved_at": event.at, "saved_samples": samples, "saved_bytes": finite(event, "bytes")}


def _unchanged(_: RunSnapshot, __: Event) -> dict[str, Any]:
    return {}


def _stopped(_: RunSnapshot, event: Event) -> dict[str, Any]:
    return {"phase": "stopped", "samples": number(event, "samples") or None, "reason": text(event, "reason")}


def _finished(_: RunSnapshot, event: Event) -> dict[str, Any]:
    return {
        "phase": "finished",
        "samples": number(event, "samples"),
        "metrics": numbers(event.fields.get("metrics")),
        "wall_s": finite(event, "wall_s"),
        "report": text(event, "report"),
        "verdict": tuple(closing_lines(event)),
        "run": text(event, "run") or None,
    }


def _up_to(curve: Curve, samples: float) -> Curve:
    return tuple(point for point in curve if point[0] <= samples)


def _with_one_more(curve: Curve, event: Event, value: float | None) -> Curve:
    """The curve and its new point; every second point of it once there are too many."""
    longer = curve if value is None else (*curve, (number(event, "samples") or 0.0, value))
    return longer if len(longer) <= _MOST_POINTS else longer[::2]


_CHANGES = {
    "planned": _planned,
    "started": _started,
    "resumed": _resumed,
    "progress": _progress,
    "evaluated": _evaluated,
    "checkpointed": _checkpointed,
    "noted": _unchanged,
    "warned": _unchanged,
    "replanned": _replanned,
    "recovered": _unchanged,
    "skipped": _unchanged,
    "stopped": _stopped,
    "finished": _finished,
}
