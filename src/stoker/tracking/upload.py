"""Sending a run's log of events to one tracker, from where the last sending ended.

What was sent is kept in the run's folder `tracking`, after it was sent: a kill in between sends some points twice,
and none is lost. The tracker's own name of the run is kept there too, so that a continued run stays one run.

Which numbers of an event trackers are sent, and what they are called there. Decides; sends nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
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
"""Opens the run at a tracker: a new one, or the one of this id."""

MOST_POINTS = 500
"""Points that are sent at once."""

_LONGEST_VALUE = 250
"""Characters of a parameter's value; MLflow refuses more than that many in its older versions."""


@dataclass
class RunUpload:
    """A run, and a tracker that is sent its events.

    Args:
        directory: the run.
        name: what the tracker is called, `NAME` or `NAME=WHERE`.
        open_tracker: opens the run there; called at the first sending.
    """

    directory: RunDirectory
    name: str
    open_tracker: Opener
    _tracker: Tracker | None = field(default=None, init=False)
    _is_ended: bool = field(default=False, init=False)

    @property
    def state_path(self) -> Path:
        """Where it is kept how much was sent; two places of one tracker are two."""
        name, _, where = self.name.partition("=")
        place = f"-{hashlib.sha256(where.encode()).hexdigest()[:8]}" if where else ""
        return self.directory.path / "tracking" / f"{name}{place}.json"

    @property
    def where(self) -> str | None:
        """Where people find the run there, once something was sent."""
        found = self._state().get("where")
        return found if isinstance(found, str) else None

    def send(self) -> int:
        """Send what is new in the log; returns how many events that was.

        Raises:
            BadRun: the log cannot be read.
            Exception: whatever the tracker's library raises; what was not sent stays to be sent.
        """
        events, offset = new_events(self.directory.events_path, self._sent())
        if not events and (self._tracker is not None or not self.directory.is_run):
            return 0
        tracker = self._opened()
        points = [point for event in events if (point := point_of(event)) is not None]
        for first in range(0, len(points), MOST_POINTS):
            tracker.log(points[first : first + MOST_POINTS])
        if any(event.kind in ("finished", "stopped") for event in events):
            self._end(tracker)
        self._keep(tracker, offset)
        return len(events)

    def close(self) -> None:
        """Let the tracker go, if it was opened."""
        if self._tracker is not None:
            if not self._is_ended:
                self._end(self._tracker)
            self._tracker.close()
            self._tracker = None

    def _end(self, tracker: Tracker) -> None:
        """Note how the run stands: one that failed before it kept anything is gone."""
        report = self.directory.report_path
        status = self.directory.read_run().status if self.directory.is_run else "failed"
        tracker.end(status, [report] if report.is_file() else [])
        self._is_ended = True

    def _opened(self) -> Tracker:
        if self._tracker is None:
            known = self._state().get("id")
            about = describe_run(self.directory, self.state_path.parent)
            make_directories(self.state_path.parent)
            self._tracker = self.open_tracker(about, known if isinstance(known, str) else None)
            self._keep(self._tracker, self._sent())
        self._is_ended = False
        return self._tracker

    def _sent(self) -> int:
        """Bytes of the log that were sent."""
        found = self._state().get("sent_bytes", 0)
        return found if isinstance(found, int) else 0

    def _state(self) -> dict[str, JSON]:
        try:
            found = json.loads(self.state_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as problem:
            raise BadRun(
                f"{self.state_path} cannot be read: {problem}", remedy="Delete it: all events are then sent anew."
            ) from problem
        return found if isinstance(found, dict) else {}

    def _keep(self, tracker: Tracker, sent_bytes: int) -> None:
        state = {"tracker": self.name, "id": tracker.id, "where": tracker.where, "sent_bytes": sent_bytes}
        write_atomic(self.state_path, json.dumps(state, indent=1) + "\n", what="what a tracker was sent")


def new_events(log: Path, offset: int) -> tuple[list[Event], int]:
    """The whole events of a log from a byte on, and the byte after them; lines that cannot be read are left out."""
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
        with suppress(ValueError):  # the report names such lines
            events.append(read_event(line))
    return events, offset + len(whole)


def describe_run(directory: RunDirectory, folder: Path) -> RunDescription:
    """What trackers are told of a run.

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
    """The settings of a job and the plan it began under, flat; what was given on the command line first."""
    found: dict[str, str] = {}
    _flatten("", dict(spec.parameters), found)
    _flatten("", dict(spec.settings), found)
    if plan is not None:
        _flatten("plan", to_json(plan), found)
    return found


def _flatten(name: str, value: JSON, found: dict[str, str]) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _flatten(f"{name}.{key}" if name else key, item, found)
    elif name and value not in (None, [], ""):
        found.setdefault(name, str(value)[:_LONGEST_VALUE])


_PROGRESS = {
    "loss": "train/loss",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "samples_per_s": "train/samples_per_s",
    "resident_bytes": "train/resident_bytes",
    "epoch": "train/epoch",
}
"""Fields of a progress event, and what trackers call them."""


def point_of(event: Event) -> MetricPoint | None:
    """What a tracker is sent of an event; None where it has no numbers. Values that are no number (NaN) stay as such.

    >>> point_of(Event(kind="evaluated", at=1.0, fields={"split": "valid", "samples": 64, "metrics": {"loss": 0.5}}))
    Point(samples=64, at=1.0, values={'valid/loss': 0.5})
    """
    values = dict(_values(event))
    samples = event.fields.get("samples")
    if not values or not isinstance(samples, int):
        return None
    return MetricPoint(samples=samples, at=event.at, values=values)


def _values(event: Event) -> Iterator[tuple[str, float]]:
    fields = event.fields
    if event.kind == "progress":
        for field, name in _PROGRESS.items():
            yield from _number(name, fields.get(field))
        rates = fields.get("lrs")
        for place, rate in enumerate(rates if isinstance(rates, list) and len(rates) > 1 else ()):
            yield from _number(f"train/lr/group{place}", rate)
    elif event.kind == "evaluated":
        metrics = fields.get("metrics")
        for name, value in (metrics if isinstance(metrics, Mapping) else {}).items():
            yield from _number(f"{fields.get('split', 'valid')}/{name}", value)
    elif event.kind == "finished":
        metrics = fields.get("metrics")
        for name, value in (metrics if isinstance(metrics, Mapping) else {}).items():
            yield from _number(f"final/{name}", value)


def _number(name: str, value: JSON) -> Iterator[tuple[str, float]]:
    """The value under its name, if it is a number; JSON has words for those that are not finite."""
    words = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    if isinstance(value, str) and value in words:
        yield name, words[value]
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)
