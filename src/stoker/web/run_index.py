"""The runs, studies, plans and data checks in some folders, each run as one row, kept up to date by stamps of files.

A row costs a few small reads however long its run is: the records, the end of the log, and a few lines from all over it
for the curve. While a run trains, only what its log gained is read.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from stoker.errors import BadRun, StokerError, first_line
from stoker.launching.meter import spent_of
from stoker.records import Event, Launch, Run
from stoker.records.codec import JSON, printable
from stoker.records.progress import MOST
from stoker.reporting.history import Rewinds, as_number, forecast_of, numbers, price_of
from stoker.reporting.wording import headline_metric, short
from stoker.store.foreign_files import open_below, read_below
from stoker.store.locations import is_on_network
from stoker.store.locks import HELD_FILE, LOCK_FILE, is_alive
from stoker.store.run_files import EVENTS, LAUNCH, PLAN, RUN, SPEC, TRIAL, RunFiles
from stoker.store.run_query import Value, values_of

ANNOTATIONS = "annotations.json"
"""Tags, note and whether a run is archived, in its directory."""

MOST_RECORD_BYTES, _MOST_SHOWN_BYTES = 8 * 2**20, 64 * 2**20
_MOST_RUNS = 20_000
_TAIL_BYTES = 16 * 1024
_NUM_SAMPLED = 32
_MOST_POINTS = 96
"""Points of a row's curve; beyond twice as many every second one is dropped."""
_QUIET_S = 120.0
"""A run that holds its lock and has said nothing for so long, or for 20 of its usual pauses, is stalled [s]."""
_ROW_S = 3.5
"""After progress a run's row is rebuilt this often [s], at every fourth look; after any other event at once."""

_MOST_OPEN_LOGS = 64

_TO_BE_NOTED = -1
"""A time that no folder has, so that there is a scan."""

State = str
"""queued, planning, running, stalled, stopped, finished, failed, unreadable; of a trial that its study ended pruned or
handed on; of a run elsewhere its launch's phase."""


class Tail(NamedTuple):
    """What was read last of a log: whole lines, the byte at which they start, and of which file ("": of none)."""

    log: str = ""
    start: int = 0
    lines: bytes = b""

    @property
    def end(self) -> int:
        """The byte after them: what comes next is read from there."""
        return self.start + len(self.lines)


class _OpenLog:
    """A log that is read from again and again: open for as long as this is kept."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class ForeignRun(RunFiles):
    """The files of a run that others may have written: see `store.foreign_files`.

    Args:
        root: the folder of the run.
        name: its path there.
        most_bytes: size of the largest file that is read [bytes].
    """

    def __init__(self, root: Path, name: str, most_bytes: int) -> None:
        self.path = root / name
        self._root, self._name, self._most_bytes = root, name, most_bytes

    def content(self, name: str) -> bytes | None:
        """The content of a plain file; None if it is not there."""
        return read_below(self._root, f"{self._name}/{name}", self._most_bytes)

    def listed(self, folder: str) -> Sequence[str]:
        """Names of the first 4,096 files in a folder, in order; none in a link, or a folder that cannot be read."""
        path = self.path / folder
        try:
            return [] if path.is_symlink() else sorted(one.name for one in path.iterdir())[:4096]
        except OSError:
            return []


@dataclass
class Row:
    """One run.

    Attributes:
        id: names the run to the page: its path below its folder, with the folder's number before it where there are
            several.
        tail: of its log; of one that is seen for the first time the lines are not kept.
        document: what the page is sent.
        values: what it can be selected by; see `store.run_query`.
    """

    id: str
    root: Path
    name: str
    document: dict[str, JSON] = field(default_factory=dict)
    values: dict[str, Value] = field(default_factory=dict)
    stamp: tuple[int, ...] = ()
    looked_at: float = 0.0
    """When it was last looked at as a whole while it trained, by the monotonic clock [s]."""
    tail: Tail = field(default_factory=Tail)
    untaken: bytes = b""
    """Lines that its log gained, which are parsed when the row is rebuilt."""
    open_log: _OpenLog | None = None
    """While it trains: opening a log, name by name, costs more than reading from it."""
    curve: list[tuple[float, float, float]] = field(default_factory=list)
    """(samples, wall_s, loss to 4 digits) of progress events from all over the run."""
    rewinds: Rewinds = field(default_factory=Rewinds)
    split_s: dict[str, float] = field(default_factory=dict)
    last: dict[str, JSON] = field(default_factory=dict)
    """Fields of the last progress."""
    last_kind: str = ""
    last_at: float | None = None
    """When the last event was, of any kind but `logged` [s since 1970]."""
    latest: dict[str, JSON] = field(default_factory=dict)
    heard_at: float = 0.0
    """When the log was last seen to grow, by the monotonic clock: clocks of machines jump [s]."""
    version: int = 0
    records: _Records | None = None

    @functools.cached_property
    def path(self) -> Path:
        """The run's directory."""
        return self.root / self.name

    @functools.cached_property
    def files(self) -> ForeignRun:
        """Its records, as its own page shows them."""
        return ForeignRun(self.root, self.name, _MOST_SHOWN_BYTES)

    @property
    def is_live(self) -> bool:
        """Whether more may come of it soon."""
        return self.document.get("state") in ("running", "planning", "stalled")


def read_json(root: Path, name: str, most_bytes: int = MOST_RECORD_BYTES) -> dict[str, Any]:
    """A JSON object of a plain file; empty where there is none, or none that can be read."""
    try:
        content = read_below(root, name, most_bytes)
        value = orjson.loads(content) if content else {}
    except (StokerError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


@dataclass
class _Found:
    """What a look at the folders found besides runs: see `RunIndex`."""

    problems: list[str] = field(default_factory=list)
    studies: dict[str, tuple[Path, str]] = field(default_factory=dict)
    plans: dict[str, tuple[Path, str]] = field(default_factory=dict)
    checks: dict[str, tuple[Path, str]] = field(default_factory=dict)


class RunIndex:
    """All runs in `roots`.

    Attributes:
        rows: by id.
        version: rises with every change; each row has the version of its last change.
        problems: folders that cannot be listed, in words; `problems_version` is that of their last change, or of
            `is_whole`'s.
        is_whole: whether all folders were looked at once.
    """

    def __init__(self, roots: Sequence[Path], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.roots = tuple(roots)
        self.rows: dict[str, Row] = {}
        self.removed: dict[str, int] = {}
        self.version = 0
        self.problems: list[str] = []
        self.problems_version = 0
        self.is_whole = False
        self.studies: dict[str, tuple[Path, str]] = {}
        self.plans: dict[str, tuple[Path, str]] = {}
        self.checks: dict[str, tuple[Path, str]] = {}
        self._clock = clock
        self._live: set[str] = set()
        self._on_network: set[Path] = set()
        """Folders whose logs are opened for each look: NFS shows late that one which stays open grew or is another."""
        self._by_version: dict[str, Row] = {}
        """The rows, the one that changed last at the end."""
        self._folders: dict[str, int] = {}
        """Where a run may begin or go on, and when that folder or lock was changed [ns since 1970]."""

    def scan(self) -> bool:
        """Look at all folders; whether anything changed."""
        before = self.version
        for _ in self.scanning():
            pass
        return self.version != before

    def scanning(self) -> Iterator[None]:
        """Look at all folders, one run a step, those first whose directories were changed last.

        Between two steps runs that train may be looked at; what is not a run stays as it was until the last step.
        """
        seen, found = set[str](), _Found()
        self._folders = {}
        for number, root in enumerate(self.roots):
            prefix = f"{number}~" if len(self.roots) > 1 else ""
            is_run = any((root / file).is_file() for file in _MAKE_A_RUN)
            folder = root.absolute().parent if is_run else root
            (self._on_network.add if is_on_network(folder) else self._on_network.discard)(folder)
            names = self._found_in(folder, root.absolute().name, prefix, found)
            for name, stamp in names if is_run else self._found(root, prefix, found):
                run = printable(prefix + name)  # of names that are not UTF-8 too
                seen.add(run)
                row = self._look(run, folder, name, stamp)
                if row.is_live or row.document["status"] == "finished":
                    del self._folders[os.fspath(row.path)], self._folders[f"{row.path}/{LOCK_FILE}"]
                yield
        is_other = found.problems != self.problems or not self.is_whole
        self.is_whole = True
        self.problems, self.studies, self.plans, self.checks = found.problems, found.studies, found.plans, found.checks
        if is_other:
            self.problems_version = self.version + 1
            self.version += 1
        for gone in self.rows.keys() - seen:
            self.rows.pop(gone).open_log = None  # which a page may still hold
            self._live.discard(gone)
            self._by_version.pop(gone, None)
            self.removed[gone] = self.version + 1  # first: pages that follow look at any time
            self.version += 1

    def look_at_live(self, followed: Iterable[str] = ()) -> set[str]:
        """Look at the runs that train and at those whose ids are given; the ids of those whose logs have grown.

        Between two progress events nothing of a run changes but its log: of every other look that is all.
        """
        grown = set[str]()
        for row in [self.rows[run] for run in self._live.union(followed) if run in self.rows]:
            before = row.tail.log, row.tail.end
            is_due = row.last_kind != "progress" or self._clock() - row.looked_at >= _ROW_S
            with suppress(OSError):
                if not is_due:
                    _read_log(row)
                    self._close_log(row)
                    is_due = row.untaken.count(_PROGRESS) < row.untaken.count(b"\n")
                if is_due:
                    row.looked_at, was_live = self._clock(), row.is_live
                    self._look(row.id, row.root, row.name, _stamp(row.path))
                    if was_live and not row.is_live and row.document["status"] != "finished":
                        self._folders[os.fspath(row.path)] = _TO_BE_NOTED  # as it may go on
            if before != (row.tail.log, row.tail.end):
                grown.add(row.id)
        return grown

    def has_new_folders(self) -> bool:
        """Whether `scan` would find a run that began, goes on or went, as far as the times of folders tell."""
        return any(_changed_ns(path) != time_ns for path, time_ns in self._folders.items())

    def changed_since(self, version: int) -> tuple[list[Row], list[str]]:
        """Rows that changed after `version`, and ids of those that went."""
        newest_first = reversed(list(self._by_version.values()))  # a thread may be adding some
        return (
            list(itertools.takewhile(lambda row: row.version > version, newest_first)),
            [name for name, at in list(self.removed.items()) if at > version and name not in self.rows],
        )

    def _note(self, path: Path) -> None:
        """Let `has_new_folders` look at a folder, or at a lock, which a resumed run writes again in its place.

        Before it is looked at otherwise, so that what comes later is noticed.
        """
        self._folders[os.fspath(path)] = _changed_ns(path)

    def _found(self, root: Path, prefix: str, found: _Found) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and stamps of the runs in a folder and in its studies; studies, plans and checks are noted."""
        self._note(root)
        try:
            entries = sorted(os.scandir(root), key=lambda entry: (-_changed_ns(entry.path), entry.name))
        except OSError as problem:
            found.problems.append(f"{short(root)} cannot be listed: {problem.strerror}.")
            return
        for entry in entries[:_MOST_RUNS]:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from self._found_in(root, entry.name, prefix, found)
                elif entry.name.endswith(".json") and entry.is_file(follow_symlinks=False):
                    found.plans[printable(prefix + entry.name)] = (root, entry.name)

    def _found_in(self, root: Path, name: str, prefix: str, found: _Found) -> Iterator[tuple[str, tuple[int, ...]]]:
        self._note(root / name)
        self._note(root / name / LOCK_FILE)
        try:
            yield name, _stamp(root / name)
            return
        except OSError:
            pass
        if _is_file(root / name / "check.json"):
            found.checks[printable(prefix + name)] = (root, name)
        if _is_file(root / name / "study.json"):
            found.studies[printable(prefix + name)] = (root, name)
            self._note(root / name / "trials")
            with suppress(OSError):
                for entry in sorted(os.scandir(root / name / "trials"), key=lambda one: one.name)[:_MOST_RUNS]:
                    with suppress(OSError):
                        if entry.is_dir(follow_symlinks=False):
                            inner = f"{name}/trials/{entry.name}"
                            self._note(root / inner)
                            self._note(root / inner / LOCK_FILE)
                            yield inner, _stamp(root / inner)

    def _look(self, run: str, root: Path, name: str, stamp: tuple[int, ...]) -> Row:
        row = self.rows.get(run)
        is_new = row is None
        if row is None:
            row = Row(run, root, name, heard_at=self._clock())
        if row.stamp == stamp and not row.is_live:
            return row
        before = row.document
        try:
            self._take_in(row, stamp, is_new=is_new)
        except Exception as problem:  # noqa: BLE001 - records may hold anything, disks fail, and the others go on
            row.stamp = stamp
            why = f"{type(problem).__name__}: {first_line(problem)}"
            row.document = {
                **_named(row),
                "tags": [],
                "note": "",
                "status": "unreadable",
                "state": "unreadable",
                "problem": short(why, 400),
                "values": {},
            }
            row.values = {"name": row.name}
        self.rows[run] = row  # a new one not before it is described: pages may ask for the rows at any time
        if row.document != before:
            self._by_version.pop(run, None)
            row.version = self.version + 1
            self._by_version[run] = row
            self.version += 1
        (self._live.add if row.is_live else self._live.discard)(run)
        self._close_log(row)
        return row

    def _close_log(self, row: Row) -> None:
        """Close its log, unless the next look finds it sooner if it stays open."""
        if not row.is_live or len(self._live) > _MOST_OPEN_LOGS or row.root in self._on_network:
            row.open_log = None

    def _take_in(self, row: Row, stamp: tuple[int, ...], *, is_new: bool) -> None:
        """Read what changed of a run, and rebuild its description."""
        before = row.document
        if not row.tail.log.endswith(f".{stamp[_LOG_STAMP]}"):  # another file is there now, or none
            row.open_log = None
        _read_log(row)
        is_heard = bool(row.untaken) and not is_new
        for line in row.untaken.splitlines():
            _take(row, line)
        row.untaken = b""
        if is_heard:
            row.heard_at = self._clock()
        if stamp != row.stamp or is_heard or "state" not in before:
            row.document, row.values = describe(row, stamp[:_LOG_STAMP] + stamp[_LOG_STAMP + 3 :])
        status, launch = row.document.get("status"), row.document.get("launch")
        state = _state(row, status, launch, self._clock(), is_heard=is_heard)
        if state == "stopped" and (trial := row.document.get("trial")):
            state, row.document = trial["state"], {**row.document, "eta_s": None}
        if row.document is before and state == before["state"]:
            return
        row.document = {**row.document, "state": state}
        row.stamp = stamp


def _named(row: Row) -> dict[str, JSON]:
    """What identifies a row: the study that the run is a trial of, and names."""
    where = row.name.rsplit("/trials/", 1)
    study = printable(where[0]) if len(where) > 1 else None
    return {"id": row.id, "name": short(row.name.rsplit("/", 1)[-1]), "study": study}


def _is_file(path: Path) -> bool:
    try:
        return path.is_file() and not path.is_symlink()
    except OSError:
        return False


_STAMPED = (RUN.name, EVENTS, ANNOTATIONS, LAUNCH.name, PLAN.name, TRIAL.name)
_LOG_STAMP = 3 * _STAMPED.index(EVENTS)
_RECORDS = tuple(file for file in _STAMPED if file != EVENTS)
_MAKE_A_RUN = (RUN.name, LAUNCH.name)
"""A run elsewhere has no run.json here before it is fetched."""


def _stamp(path: Path) -> tuple[int, ...]:
    """Sizes and times of the files a row is made of.

    Raises:
        OSError: there is no run.
    """
    stamp: list[int] = []
    folder = os.fspath(path)
    for name in _STAMPED:
        try:
            status = os.lstat(f"{folder}/{name}")
            stamp += (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            stamp += (0, 0, 0)
    if not any(stamp[3 * _STAMPED.index(name)] for name in _MAKE_A_RUN):
        raise FileNotFoundError(path)
    return tuple(stamp)


def _changed_ns(path: str | Path) -> int:
    """When a file was last written, or something added to a folder or removed [ns since 1970]; 0 if it is not there."""
    try:
        return os.lstat(path).st_mtime_ns
    except OSError:
        return 0


# ------------------------------------------------------------------------------------------------------------- the log


_PROGRESS = b'"kind": "progress"'
"""In each line of progress, as `records.codec` writes it; of any other line the row is rebuilt at once."""


def _read_log(row: Row) -> None:
    """Read what the log gained. Of a log seen for the first time, its end and some lines."""
    try:
        row.open_log = row.open_log or _OpenLog(open_below(row.root, f"{row.name}/{EVENTS}"))
    except OSError:
        return
    descriptor = row.open_log.descriptor
    status = os.fstat(descriptor)
    size, log, start = status.st_size, f"{status.st_dev}.{status.st_ino}", row.tail.end
    if log == row.tail.log and size == start:
        return
    is_anew = row.tail.log != log or size < start or size - start > 4 * _TAIL_BYTES
    if is_anew:
        row.curve, row.rewinds, row.split_s, row.last, row.latest, row.untaken = [], Rewinds(), {}, {}, {}, b""
        row.last_kind, row.last_at = "", None
        start, taken = max(0, size - _TAIL_BYTES), 0
        start += os.pread(descriptor, _TAIL_BYTES, start).find(b"\n") + 1 if start else 0
        for offset in _sampled_offsets(size):
            piece = os.pread(descriptor, 2048, offset)
            begin = piece.find(b"\n") + 1
            line, end, _ = piece[begin:].partition(b"\n")
            if begin and end and taken < offset + begin < start:  # each line once
                taken = offset + begin
                _take(row, line)
    content = os.pread(descriptor, size - start, start)
    lines = content[: content.rfind(b"\n") + 1]
    row.untaken += _sampled_lines(lines, size) if is_anew else lines
    # At once: streams read it while a thread scans.
    row.tail = Tail(log, start + len(lines), b"") if is_anew else Tail(log, start, lines)


def _sampled_offsets(size: int) -> list[int]:
    """Where lines are looked at in a log: evenly, before its end."""
    rest = size - _TAIL_BYTES
    return [rest * number // _NUM_SAMPLED for number in range(_NUM_SAMPLED)] if rest > 0 else []


def _sampled_lines(end: bytes, size: int) -> bytes:
    """The end of a log of `size` bytes with as much of its progress, the last included, as is taken of what is before.

    Its other events stay, and so does all of a log that is not longer.
    """
    rest = size - _TAIL_BYTES
    if rest <= 0:
        return end
    most = max(8, _NUM_SAMPLED * _TAIL_BYTES // rest)
    lines = end.splitlines(keepends=True)
    left = sum(_PROGRESS in line for line in lines)
    step = max(1, -(-left // most))
    kept = []
    for line in lines:
        is_progress = _PROGRESS in line
        left -= is_progress
        if not is_progress or left % step == 0:
            kept.append(line)
    return b"".join(kept)


def _take(row: Row, line: bytes) -> None:
    """An event of the log, as far as a row shows it; lines that cannot be read are passed over."""
    try:
        event = orjson.loads(line)
        kind, fields = event["kind"], event["fields"]
        samples = as_number(fields.get("samples"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
    if samples is not None and not math.isfinite(samples):
        samples = None
    position = row.rewinds.position_of(kind, samples)
    if position is not None:
        row.curve = [point for point in row.curve if point[0] <= position]
    if kind == "progress" and samples is not None:
        wall_s, loss = as_number(fields.get("wall_s")), as_number(fields.get("loss"))
        row.curve.append((samples, wall_s or 0.0, math.nan if loss is None else float(f"{loss:.4g}")))
        if len(row.curve) > 2 * _MOST_POINTS:
            row.curve = row.curve[1::2]
        split = fields.get("split_s")
        for phase, seconds in split.items() if isinstance(split, dict) and len(split) < 32 else ():
            if type(seconds) in (float, int):
                part = "data" if phase == "data" else "other"
                row.split_s[part] = row.split_s.get(part, 0.0) + seconds
        row.last = {**fields, "at": event.get("at")}
    elif kind == "evaluated" and isinstance(fields.get("metrics"), dict):
        split = short(fields.get("split", "valid"), 40)
        for name, value in list(numbers(fields["metrics"]).items())[:50]:
            row.latest[f"{split}/{short(name, 60).removeprefix(split + '/')}"] = value
    if isinstance(kind, str) and kind != "logged":
        row.last_kind, row.last_at = kind[:20], as_number(event.get("at"))


# ------------------------------------------------------------------------------------------------------------- the row


@dataclass(frozen=True)
class _Records:
    """What a row takes from a run's records, all but its log: read again only where their stamps change."""

    stamp: tuple[int, ...]
    document: dict[str, JSON]
    run: Run | None = None
    expected: dict[str, JSON] = field(default_factory=dict)
    price: float | None = None
    launch: Launch | None = None
    values: dict[str, Value] = field(default_factory=dict)


def _records(row: Row, stamp: tuple[int, ...]) -> _Records:
    root, name = row.root, row.name
    document = _named(row)
    missing = {file for file, inode in zip(_RECORDS, stamp[::3], strict=True) if not inode} if stamp else set()

    def known(file: str, most_bytes: int = MOST_RECORD_BYTES) -> dict[str, Any]:
        return {} if file in missing else read_json(root, f"{name}/{file}", most_bytes)

    notes = known(ANNOTATIONS, 256 * 1024)
    tags = notes.get("tags")
    document |= {
        "tags": [short(tag, 40) for tag in tags[:20]] if isinstance(tags, list) else [],
        "note": short(notes.get("note") or "", 2000),
        "is_archived": notes.get("is_archived") is True,
    }
    files, launch, unread = ForeignRun(root, name, MOST_RECORD_BYTES), None, BadRun("there is no run.json")
    try:
        launch = None if LAUNCH.name in missing else files.read_launch()
    except BadRun as problem:  # a run that was fetched is shown without it
        unread = problem
    document["launch"] = None if launch is None else _launch_document(launch)
    try:
        run = files.read(RUN) or (None if launch is None else _not_fetched(name, launch))
        if run is None:
            raise unread
        spec = files.read(SPEC)
    except StokerError as problem:
        document |= {"status": "unreadable", "problem": short(problem, 400), "values": {}}
        return _Records(stamp, document, values={"name": name})
    decision = known(PLAN.name)
    price = (launch.price_per_h if launch else None) or price_of(decision)
    values: dict[str, Value] = {"name": run.name, "status": run.status}
    values = values_of(run, spec) if spec else values
    expected = forecast_of(decision)
    trial = known(TRIAL.name)
    is_ended = trial.get("state") in ("pruned", "handed on")
    document |= {
        "status": run.status,
        "trial": {"state": trial["state"], "reason": short(trial.get("reason", ""), 200)} if is_ended else None,
        "job": short(spec.name if spec else "", 80),
        "created_at": short(run.created_at, 40),
        "price_per_h": price,
        "device": short(expected.get("device") or "", 80),
        "failure": short(run.failure or "", 600),
        "forked_from": short(run.forked_from or "", 80) or None,
    }
    return _Records(stamp, document, run, expected, price, launch, values)


def _not_fetched(name: str, launch: Launch) -> Run:
    """The record of a run elsewhere, as far as it is known here before its directory is fetched."""
    return Run(
        name=short(name),
        status="finished" if launch.state.phase == "finished" else "unfinished",
        created_at=launch.submitted_at,
        spec_digest="",
        total_samples=0,
    )


def describe(row: Row, stamp: tuple[int, ...] = ()) -> tuple[dict[str, JSON], dict[str, Value]]:
    """The row's document and what it can be selected by, from the run's records and what was read of its log.

    `stamp` is that of the records, without the log.
    """
    if row.records is None or row.records.stamp != stamp or not stamp:
        row.records = _records(row, stamp)
    known = row.records
    run, expected, document = known.run, known.expected, dict(known.document)
    if run is None:
        return document, known.values
    last = row.last
    samples = max(run.samples, _count(last.get("samples"))) if run.status != "finished" else run.samples
    wall_s = max(run.wall_s, as_number(last.get("wall_s")) or 0.0)
    total = run.total_samples or _count(last.get("total_samples"))
    metrics = run.metrics or {str(name): value for name, value in row.latest.items()}
    headline = headline_metric({k: v for k, v in metrics.items() if math.isfinite(v)} or metrics)
    eta = remaining_s(row.curve, samples, total, as_number(last.get("eta_s")), expected.get("total_s"), wall_s)
    whole_s = sum(row.split_s.values())
    document |= {
        "samples": min(samples, MOST),
        "total_samples": min(total, MOST),
        "updates": min(run.updates, MOST),
        "wall_s": wall_s,
        "metric": [short(headline[0], 60), _finite(headline[1])] if headline else None,
        "loss": _finite(as_number(last.get("loss"))),
        "has_nan": bool(row.curve) and not math.isfinite(row.curve[-1][2]),
        "samples_per_s": _finite(as_number(last.get("samples_per_s"))),
        "resident_bytes": _finite(as_number(last.get("resident_bytes"))),
        "allocated_bytes": _finite(as_number(last.get("allocated_bytes"))),
        "curve": [
            [point[0], point[2] if math.isfinite(point[2]) else None]
            for point in row.curve[:: max(1, len(row.curve) // 40)]
        ],
        "eta_s": eta if run.status == "unfinished" else None,
        "at": _finite(as_number(last.get("at"))),
        "cost_usd": _cost(row, known, wall_s),
        "waiting": row.split_s.get("data", 0.0) / whole_s if whole_s else None,
        "metrics": {short(k, 60): _finite(v) for k, v in list(metrics.items())[:40]},
    }
    return document, known.values


def _cost(row: Row, known: _Records, wall_s: float) -> float | None:
    """What a run has cost [USD]: of training here; elsewhere as `--max-cost` counts, with starts and lost work."""
    trained, launch = (wall_s / 3600 * known.price if known.price else None), known.launch
    if launch is None or not launch.price_per_h:
        return trained
    last: list[Event] = []
    if row.last_at is not None and not launch.continued_here_at:
        last.append(Event(kind="stopped" if row.last_kind in ("stopped", "finished") else "progress", at=row.last_at))
    spent = spent_of(launch, last)
    is_known = launch.spent is not None and not launch.is_going_on
    return _finite(spent if is_known else max(spent or 0.0, trained or 0.0))


def _count(value: JSON) -> int:
    """A count that a log states; 0 where it is none, or beyond any that can be."""
    number = as_number(value)
    return int(number) if number is not None and 0 <= number <= MOST else 0


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _launch_document(launch: Launch) -> dict[str, JSON]:
    """Place, kind, phase with its reason, price [USD/h] and limit of a run elsewhere."""
    state = launch.state
    return {
        "place": short(launch.place, 80),
        "kind": short(launch.kind, 20),
        "phase": state.phase,
        "why": short(state.why, 300),
        "evidence": short(state.evidence, 300),
        "at": short(state.at, 40),
        "starts_in_s": state.starts_in_s,
        "restarts": state.restarts,
        "submitted_at": short(launch.submitted_at, 40),
        "price_per_h": launch.price_per_h,
        "max_cost": launch.max_cost,
        "currency": short(launch.currency, 8),
        "states": [
            {"phase": one.phase, "why": short(one.why, 200), "at": short(one.at, 40)} for one in launch.states[-40:]
        ],
    }


def remaining_s(
    curve: Sequence[tuple[float, float, float]],
    samples: float,
    total: float,
    eta_s: float | None,
    forecast: JSON,
    wall_s: float,
) -> list[float | str] | None:
    """The time to go [s]: value, low, high in 8 cases of 10, and what that rests on; None where nothing is known.

    With enough of the run made, the interval is that of the run's own rates, evaluations and checkpoints included, over
    stretches of its later half; before, that of the forecast.
    """
    left = max(0.0, total - samples)
    half = bisect.bisect_left(curve, samples / 2, key=lambda point: point[0])
    marks = curve[half :: max(1, (len(curve) - half) // 16)]
    rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(marks) if b[0] > a[0] and b[1] > a[1]]
    if len(rates) >= 5:
        tenths = statistics.quantiles(rates, n=10)
        value = statistics.fmean(rates) * left if eta_s is None else eta_s
        return [value, min(value, tenths[0] * left), max(value, tenths[-1] * left), "this run's rates"]
    if isinstance(forecast, list) and len(forecast) == 3:
        value, low, high = (max(0.0, float(end) - wall_s) for end in forecast)
        value = value if eta_s is None else eta_s
        return [value, min(value, low), max(value, high), "forecast"]
    return None if eta_s is None else [eta_s, eta_s, eta_s, "the last rate"]


def _state(row: Row, status: object, launch: JSON, now_s: float, *, is_heard: bool) -> State:
    """What a run is doing; `is_heard`: its log has just grown, so that its process need not be looked for."""
    if status != "unfinished":
        return str(status)
    phase = launch.get("phase") if isinstance(launch, dict) else None
    if phase not in (None, "unknown", "finished"):
        return str(phase)
    if not is_heard and not is_held(row.root, row.name):
        return "stopped" if row.last_kind or not launch else "queued"
    if row.last_kind in ("", "planned", "noted", "warned") and not row.curve:
        return "planning"
    if is_heard:
        return "running"
    pauses = [b[1] - a[1] for a, b in zip(row.curve[-9:], row.curve[-8:], strict=False)]
    usual_s = statistics.median(pauses) if pauses else 0.0
    return "stalled" if now_s - row.heard_at > max(_QUIET_S, 20 * usual_s) else "running"


def holder_of(root: Path, name: str) -> tuple[int, str] | None:
    """Process number and host of the holder of a run's lock; None without a holder."""
    for file in (LOCK_FILE, HELD_FILE):
        held = read_json(root, f"{name}/{file}", 4096)
        pid, host = held.get("pid"), held.get("host")
        if isinstance(pid, int) and isinstance(host, str) and 1 < pid < 2**31:
            return pid, host
    return None


def is_held(root: Path, name: str) -> bool:
    """Whether a living process of this host holds the run; one of another host counts as alive."""
    holder = holder_of(root, name)
    return holder is not None and (holder[1] != platform.node() or is_alive(holder[0]))


_TAG = re.compile(r"[^\s,#][^\s,]{0,39}")


def checked_tags(tags: Sequence[str]) -> tuple[str, ...]:
    """Tags as they are kept: at most 20 words without spaces or commas, each once.

    Raises:
        BadRun: one is none.
    """
    for tag in tags:
        if not _TAG.fullmatch(tag):
            raise BadRun(f"{short(tag, 60)!r} is no tag", remedy="A tag is a word of up to 40 characters.")
    return tuple(dict.fromkeys(tags))[:20]
