"""Sending runs to trackers: while they train, in threads so that training never waits, or afterwards.

An upload sends a run's log of events to one tracker, from the place where the last upload ended. What was sent is
recorded in the run's folder `tracking` after it was sent: a kill in between repeats some points, and loses none. The
tracker's own name of the run is kept there too, so that a continued run stays one run.
"""

from __future__ import annotations

import copy
import hashlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from stoker.errors import BadRun, RunFailed, StokerError
from stoker.records import Event, JobSpec, Plan, to_json
from stoker.records.codec import JSON
from stoker.records.progress import read_event
from stoker.reporting.history import Rewinds, as_number, finite
from stoker.store import RunDirectory, find_run, runs_root, write_atomic
from stoker.store.files import make_directories, read_lines
from stoker.tracking.base import MetricPoint, RunDescription, Tracker, TrackerTarget, parse_tracker, without_secrets


@dataclass(frozen=True)
class Sent:
    """The result of sending a run: the number of events sent, and where users find the run."""

    run: str
    tracker: str
    events: int
    where: str


@contextmanager
def tracked(
    directory: RunDirectory, targets: Sequence[TrackerTarget], tell: Callable[[str], None]
) -> Iterator[tuple[Callable[[Event], None], ...]]:
    """Sinks of events through which trackers follow a run; at the end of the block they have all of it."""
    if not targets:
        yield ()
        return
    following = BackgroundUploads([RunUpload(directory, target.word, target.open) for target in targets], tell)
    try:
        yield (following,)
    finally:
        following.close()


def track(run: str, to: str) -> Sent:
    """Send the part of a run that a tracker does not have yet; the run may be finished.

    Args:
        run: its name, the start of one, `latest`, or a path.
        to: a tracker: `tensorboard`, `mlflow=http://host:5000`, `wandb=project`, `trackio`, `prometheus`, `csv`.

    Raises:
        BadJob: there is no such tracker, or its package is missing.
        BadRun: there is no such run, or it cannot be read.
        RunFailed: the tracker failed; the same call sends the rest.
    """
    target, directory = parse_tracker(to), find_run(runs_root(), run)
    upload = RunUpload(directory, target.word, target.open)
    try:
        events = upload.send()
        upload.close()
    except StokerError:
        raise
    except Exception as problem:
        raise RunFailed(
            f"{target.name} did not take the run: {type(problem).__name__}: {problem}",
            remedy="Nothing is lost; the same command sends what is left.",
        ) from problem
    return Sent(directory.name, target.name, events, upload.where or "")


PATIENCE_S = 15.0
"""How long the end of a run waits for a tracker [s]."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Pause between two attempts at a failing tracker, doubled each time [s]."""


class BackgroundUploads:
    """A sink of events that wakes one thread for each tracker.

    A failing tracker is reported once, and tried again with growing pauses. What is not sent in the end stays in the
    run, and `stoker runs track` sends it.

    Args:
        uploads: the run, for each tracker.
        tell: receives messages about failing trackers in the training thread, at the next event or at the end.
        pause_s: least time between two uploads [s].
    """

    def __init__(self, uploads: Sequence[RunUpload], tell: Callable[[str], None], *, pause_s: float = 1.0) -> None:
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._uploaders = [_Uploader(upload, self._messages.put, pause_s) for upload in uploads]
        self._tell = tell

    def __call__(self, event: Event) -> None:
        """Wake the threads, since the log has a new event, and pass their messages on."""
        for uploader in self._uploaders:
            uploader.news.set()
        self._pass_on()

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Send the rest, as far as time allows [s for each tracker]."""
        for uploader in self._uploaders:
            uploader.end()
        for uploader in self._uploaders:
            uploader.thread.join(timeout=patience_s)
        if not all(uploader.upload.directory.is_run for uploader in self._uploaders):
            return  # the run failed before it kept anything: there is nothing to send later, and no log for a message
        self._pass_on()
        for uploader in self._uploaders:
            if uploader.thread.is_alive() or uploader.problem is not None:
                why, name = uploader.problem or f"it did not answer for {patience_s:g} s", uploader.name
                self._tell(
                    f"{name} was not sent everything ({why}); nothing is lost: "
                    f"`stoker runs track {uploader.upload.directory.name} --to {name}` sends the rest"
                )

    def _pass_on(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._tell(self._messages.get_nowait())


class _Uploader:
    """One tracker and its thread; `problem` is why the last attempt failed."""

    def __init__(self, upload: RunUpload, tell: Callable[[str], None], pause_s: float) -> None:
        self.upload, self._tell, self._pause_s = upload, tell, pause_s
        self.name = without_secrets(upload.name)
        self.news, self._over = threading.Event(), threading.Event()
        self.problem: str | None = None
        self._is_reported = False
        # A daemon: a library that hangs must not keep a finished run from ending.
        self.thread = threading.Thread(target=self._run, name=f"tracker {self.name}", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Send once more, and stop."""
        self._over.set()
        self.news.set()

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._over.is_set():
            self.news.wait()
            self.news.clear()
            if self._attempt(self.upload.send):
                pause_s = _FIRST_PAUSE_S
                self._over.wait(self._pause_s)
            else:
                self._over.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                self.news.set()
        if self._attempt(self.upload.send):
            self._attempt(self.upload.close)

    def _attempt(self, what: Callable[[], object]) -> bool:
        try:
            what()
        except Exception as error:  # noqa: BLE001 - other people's libraries raise anything, and a run goes on
            text = str(error).strip()
            self.problem = f"{type(error).__name__}: {without_secrets(text.splitlines()[0]) if text else ''}"
            if not self._is_reported:
                self._is_reported = True
                self._tell(f"{self.name} cannot be reached, the run goes on ({self.problem})")
            return False
        self.problem = None
        return True


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
    _rewinds: Rewinds = field(default_factory=Rewinds, init=False)

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
        points: list[MetricPoint] = []
        rewinds = copy.copy(self._rewinds)  # an attempt that fails is made again, with the same events
        for event in events:
            position = rewinds.position_of(event.kind, finite(event, "samples"))
            if position is not None:
                points = [point for point in points if point.samples <= position]
                tracker.go_back(int(position))
            points += points_of(event)
        for first in range(0, len(points), MOST_POINTS):
            tracker.log(points[first : first + MOST_POINTS])
        if any(event.kind in ("finished", "stopped") for event in events):
            self._end(tracker)
        self._keep(tracker, offset)
        self._rewinds = rewinds
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
                f"{self.state_path} cannot be read: {problem}", remedy="Delete it: all events are then sent again."
            ) from problem
        return state if isinstance(state, dict) else {}

    def _keep(self, tracker: Tracker, sent_bytes: int) -> None:
        name, where = without_secrets(self.name), without_secrets(tracker.where)
        state = {"tracker": name, "id": tracker.id, "where": where, "sent_bytes": sent_bytes}
        write_atomic(self.state_path, json.dumps(state, indent=1) + "\n", what="what a tracker was sent")


def new_events(log: Path, offset: int) -> tuple[list[Event], int]:
    """The complete events of a log from byte `offset` on, and the byte after them; unreadable lines are left out."""
    try:
        lines = read_lines(log, offset)
    except OSError as problem:
        raise BadRun(f"{log} cannot be read: {problem.strerror}") from problem
    events: list[Event] = []
    for line in lines:
        with suppress(ValueError):  # the report shows such lines
            events.append(read_event(line))
    return events, offset + sum(len(line) + 1 for line in lines)


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
    "allocated_bytes": "train/allocated_bytes",
    "epoch": "train/epoch",
    "eta_s": "train/eta_s",
}
"""Fields of a progress event, and their names at trackers."""


_AXES = ("samples", "seconds")
"""Names of the axis at W&B and of the first columns of a table: a value of such a name becomes `logged/NAME`."""


def points_of(event: Event) -> list[MetricPoint]:
    """All points of an event: of a `logged` one a point for each position, under the names that `stoker.log` was given.

    >>> points_of(Event(kind="logged", at=1.0, fields={"samples": 9, "scalars": {"gate": [[8, 0.5], [9, 0.25]]}}))
    [MetricPoint(samples=8, at=1.0, values={'gate': 0.5}), MetricPoint(samples=9, at=1.0, values={'gate': 0.25})]
    """
    scalars = event.fields.get("scalars")
    if event.kind != "logged" or not isinstance(scalars, Mapping):
        point = point_of(event)
        return [] if point is None else [point]
    by_position: dict[int, dict[str, float]] = {}
    for given, pairs in scalars.items():
        name = f"logged/{given}" if given in _AXES else str(given)
        for pair in pairs if isinstance(pairs, list) else ():
            if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int):
                number = as_number(pair[1])
                if number is not None:
                    by_position.setdefault(pair[0], {})[name] = number
    return [MetricPoint(samples=samples, at=event.at, values=values) for samples, values in sorted(by_position.items())]


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
    numbers = {name: number for name, value in values.items() if (number := as_number(value)) is not None}
    samples = fields.get("samples")
    return MetricPoint(samples=samples, at=event.at, values=numbers) if numbers and isinstance(samples, int) else None
