"""Sending a run's log of events to one tracker, from the place where the last upload ended.

What was sent is recorded in the run's folder `tracking` after it was sent: a kill in between repeats some points, and
loses none. The tracker's own name of the run is kept there too, so that a continued run stays one run.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from stoker.errors import BadRun
from stoker.records import Event, JobSpec, Plan, to_json
from stoker.records.codec import JSON
from stoker.records.progress import read_event
from stoker.store import RunDirectory, write_atomic
from stoker.store.files import make_directories
from stoker.tracking.base import MetricPoint, RunDescription, Tracker

Opener = Callable[[RunDescription, str | None], Tracker]
"""Opens the run at a tracker: a new one, or the one with this id."""

MOST_POINTS = 500
"""Points in one call of `Tracker.log`."""

_LONGEST_VALUE = 250
"""Longest value of a parameter [characters]; older versions of MLflow refuse longer ones."""


@dataclass
class RunUpload:
    """A run, and a tracker that receives its events.

    Args:
        directory: the run.
        name: the tracker, `NAME` or `NAME=WHERE`.
        open_tracker: opens the run there; called at the first upload.
    """

    directory: RunDirectory
    name: str
    open_tracker: Opener
    _tracker: Tracker | None = field(default=None, init=False)
    _is_ended: bool = field(default=False, init=False)

    @property
    def state_path(self) -> Path:
        """The file with the state of the upload; two places of one tracker have two."""
        name, _, where = self.name.partition("=")
        place = f"-{hashlib.sha256(where.encode()).hexdigest()[:8]}" if where else ""
        return self.directory.path / "tracking" / f"{name}{place}.json"

    @property
    def where(self) -> str | None:
        """Where users find the run at the tracker, once something was sent."""
        where = self._state().get("where")
        return where if isinstance(where, str) else None

    def send(self) -> int:
        """Number of new events in the log, which are sent [events].

        Raises:
            BadRun: the log cannot be read.
            Exception: any error of the tracker's library; what was not sent stays to be sent.
        """
        events, offset = new_events(self.directory.events_path, self._sent_bytes())
        if not events and (self._tracker is not None or not self.directory.is_run):
            return 0
        if (tracker := self._tracker) is None:
            known = self._state().get("id")
            about = describe_run(self.directory, self.state_path.parent)
            make_directories(self.state_path.parent)
            tracker = self._tracker = self.open_tracker(about, known if isinstance(known, str) else None)
            self._keep(tracker, self._sent_bytes())
        self._is_ended = False
        points = [point for event in events if (point := point_of(event)) is not None]
        for first in range(0, len(points), MOST_POINTS):
            tracker.log(points[first : first + MOST_POINTS])
        if any(event.kind in ("finished", "stopped") for event in events):
            self._end(tracker)
        self._keep(tracker, offset)
        return len(events)

    def close(self) -> None:
        """Close the tracker, if it was opened."""
        if self._tracker is not None:
            if not self._is_ended:
                self._end(self._tracker)
            self._tracker.close()
            self._tracker = None

    def _end(self, tracker: Tracker) -> None:
        """Send the run's status; the directory of one that failed before it kept anything is gone."""
        report = self.directory.report_path
        status = self.directory.read_run().status if self.directory.is_run else "failed"
        tracker.end(status, [report] if report.is_file() else [])
        self._is_ended = True

    def _sent_bytes(self) -> int:
        """Size of the part of the log that was sent [bytes]."""
        sent = self._state().get("sent_bytes", 0)
        return sent if isinstance(sent, int) else 0

    def _state(self) -> dict[str, JSON]:
        try:
            state = json.loads(self.state_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as problem:
            raise BadRun(
                f"{self.state_path} cannot be read: {problem}", remedy="Delete it: all events are then sent anew."
            ) from problem
        return state if isinstance(state, dict) else {}

    def _keep(self, tracker: Tracker, sent_bytes: int) -> None:
        state = {"tracker": self.name, "id": tracker.id, "where": tracker.where, "sent_bytes": sent_bytes}
        write_atomic(self.state_path, json.dumps(state, indent=1) + "\n", what="what a tracker was sent")


def new_events(log: Path, offset: int) -> tuple[list[Event], int]:
    """The complete events of a log from byte `offset` on, and the byte after them; unreadable lines are left out."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            content = file.read()
    except FileNotFoundError:
        return [], offset
    except OSError as problem:
        raise BadRun(f"{log} cannot be read: {problem.strerror}") from problem
    whole = content[: content.rfind(b"\n") + 1]
    events: list[Event] = []
    for line in whole.splitlines():
        with suppress(ValueError):  # the report shows such lines
            events.append(read_event(line))
    return events, offset + len(whole)


def describe_run(directory: RunDirectory, folder: Path) -> RunDescription:
    """The description of a run for trackers.

    Raises:
        BadRun: its record or its spec cannot be read.
    """
    run, spec, decision = directory.read_run(), directory.read_spec(), directory.read_decision()
    return RunDescription(
        run=run.name,
        job=spec.name,
        folder=folder,
        created_at=datetime.fromisoformat(run.created_at).timestamp(),
        parameters=parameters_of(spec, None if decision is None else decision.chosen.plan),
    )


def parameters_of(spec: JobSpec, plan: Plan | None) -> dict[str, str]:
    """The settings of a job and the plan it began under, flat; arguments of the command line first."""
    flat: dict[str, str] = {}
    _flatten("", dict(spec.parameters), flat)
    _flatten("", dict(spec.settings), flat)
    if plan is not None:
        _flatten("plan", to_json(plan), flat)
    return flat


def _flatten(name: str, value: JSON, flat: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{name}.{key}" if name else key, item, flat)
    elif name and value not in (None, [], ""):
        flat.setdefault(name, str(value)[:_LONGEST_VALUE])


_PROGRESS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "samples_per_s": "train/samples_per_s",
    "resident_bytes": "train/resident_bytes",
    "epoch": "train/epoch",
}
"""Fields of a progress event, and their names at trackers."""


def point_of(event: Event) -> MetricPoint | None:
    """The numbers of an event for a tracker; None without numbers. NaN and infinities stay as they are.

    >>> point_of(Event(kind="evaluated", at=1.0, fields={"split": "valid", "samples": 64, "metrics": {"loss": 0.5}}))
    MetricPoint(samples=64, at=1.0, values={'valid/loss': 0.5})
    """
    fields, values = event.fields, dict[str, JSON]()
    if event.kind == "progress":
        values = {name: fields.get(field) for field, name in _PROGRESS.items()}
        rates = fields.get("lrs")
        if isinstance(rates, list) and len(rates) > 1:
            values |= {f"train/lr/group{number}": rate for number, rate in enumerate(rates)}
    elif event.kind in ("evaluated", "finished") and isinstance(metrics := fields.get("metrics"), Mapping):
        group = "final" if event.kind == "finished" else fields.get("split", "valid")
        values = {f"{group}/{name}": value for name, value in metrics.items()}
    numbers = {name: number for name, value in values.items() if (number := _number(value)) is not None}
    samples = fields.get("samples")
    return MetricPoint(samples=samples, at=event.at, values=numbers) if numbers and isinstance(samples, int) else None


def _number(value: JSON) -> float | None:
    """A value of an event as a number, or None; JSON has words for numbers that are not finite."""
    words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    if isinstance(value, str) and value in words:
        return words[value]
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
