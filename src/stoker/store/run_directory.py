"""A run's directory on a disk: making, reading and writing it; `run_files` says which file holds what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from stoker.errors import BadRun, RunFailed, StokerError
from stoker.records import (
    Coupling,
    Decision,
    Device,
    Environment,
    Event,
    InputColumns,
    JobSpec,
    PlanSwitch,
    RankTimes,
    Report,
    Run,
    dumps,
)
from stoker.records.codec import Record
from stoker.records.progress import read_event
from stoker.store.checkpoint_store import CheckpointStore
from stoker.store.disk_errors import disk_errors, read_errors
from stoker.store.files import (
    append_line,
    aside_path,
    disk,
    is_aside,
    read_lines,
    remove_leftovers,
    remove_tree,
    write_atomic,
)
from stoker.store.locks import HELD_FILE, LOCK_FILE, TAKING_FILE, RunLock, is_held_here
from stoker.store.run_files import (
    CHECKPOINTS,
    COLUMNS,
    COUPLING,
    DEVICE,
    DUMPS,
    ENVIRONMENT,
    EVENTS,
    KEPT,
    LAUNCH,
    LAUNCHING,
    PLAN,
    PROFILE,
    RANKS,
    REPORT,
    RUN,
    SPEC,
    SWITCHES,
    RunFile,
    RunFiles,
)

R = TypeVar("R", bound=Record)

_STAYING = frozenset({LOCK_FILE, HELD_FILE, TAKING_FILE, LAUNCH.name, LAUNCHING})
_BEFORE_A_RUN_IS = frozenset(
    {SPEC.name, PLAN.name, ENVIRONMENT.name, DEVICE.name, COUPLING.name, COLUMNS.name, *_STAYING}
)


@dataclass(frozen=True)
class RunDirectory(RunFiles):
    """The files of one run. Making this object touches nothing; `create` makes a run, `is_run` says whether one is."""

    path: Path

    @property
    def name(self) -> str:
        """The directory's name, by which the run is found."""
        return self.path.resolve().name

    @property
    def events_path(self) -> Path:
        """The log of events."""
        return self.path / EVENTS

    @property
    def checkpoints(self) -> Path:
        """The directory for a `CheckpointStore`; made by it when the first is written."""
        return self.path / CHECKPOINTS

    @property
    def kept_weights(self) -> Path:
        """The directory of the weights that are kept for good; there if some were."""
        return self.path / KEPT

    @property
    def report_path(self) -> Path:
        """The HTML report, if it was written."""
        return self.path / REPORT

    @property
    def is_run(self) -> bool:
        """Whether a run was made here, readable or not."""
        try:
            return (self.path / RUN.name).exists()
        except OSError:  # a directory this user may not look into is none of this user's runs
            return False

    @property
    def is_vacant(self) -> bool:
        """Whether a run may be made here: nothing is there, or only what a run that never came to be left behind."""
        return not self.path.exists() or (self.path.is_dir() and not self.foreign_entries())

    def foreign_entries(self) -> tuple[str, ...]:
        """Names in this directory that stand in the way of a new run."""
        return tuple(sorted(e.name for e in self.path.iterdir() if e.name not in _BEFORE_A_RUN_IS and not is_aside(e)))

    @classmethod
    def create(
        cls,
        path: Path,
        run: Run,
        spec: JobSpec,
        *,
        decision: Decision | None = None,
        environment: Environment | None = None,
        device: Device | None = None,
        coupling: Coupling | None = None,
        columns: InputColumns | None = None,
    ) -> RunDirectory:
        """Make a run in a vacant directory, which need not exist.

        It is there as a whole or not at all: an error removes what was written, and what a power cut leaves is vacant.
        The run's lock is held until then; a lock this process holds already is used.

        Raises:
            BadRun: the directory holds something, is in use, or cannot be written (full or read-only disk).
        """
        if run.spec_digest != spec.digest():
            raise ValueError(f"the run is of job {run.spec_digest[:12]}, its spec is {spec.digest()[:12]}")
        directory = cls(path)
        records: list[tuple[RunFile[Any], Record | None]] = [
            (SPEC, spec),
            (PLAN, decision),
            (ENVIRONMENT, environment),
            (DEVICE, device),
            (COUPLING, coupling),
            (COLUMNS, columns),
            (RUN, run),
        ]
        with nullcontext() if is_held_here(path) else RunLock(path):
            if not directory.is_vacant:
                raise BadRun(f"{path} is not empty: {directory.in_the_way()}.", remedy="Choose another directory.")
            try:
                directory._remove_all_but_the_lock()
                for file, record in records:
                    if record is not None:
                        directory.write(file, record, error=BadRun)
            except BaseException:
                with suppress(StokerError):  # the first error is the one to report; what stays is vacant
                    directory._remove_all_but_the_lock()
                raise
        return directory

    @contextmanager
    def locked(self) -> Iterator[RunLock]:
        """Hold the run for this process, and clear away what a killed one left half-written.

        Raises:
            BadRun: another process holds it, or the lock cannot be written.
        """
        with RunLock(self.path) as lock:
            with disk_errors(self.path, "the run's directory", error=BadRun):
                remove_leftovers(self.path)
            yield lock

    def discard(self) -> None:
        """Remove a run that failed before it kept anything; the lock must be free, or held by this process.

        Raises:
            BadRun: it has a checkpoint, or another process holds it.
        """
        kept = [e.name for e in self.checkpoints.iterdir() if not is_aside(e)] if self.checkpoints.exists() else []
        if kept:
            raise BadRun(f"The run {self.path} has checkpoints ({', '.join(sorted(kept)[:3])}).", remedy="Delete it.")
        with nullcontext() if is_held_here(self.path) else RunLock(self.path):
            self._remove_all_but_the_lock()
            with disk_errors(self.path, "the run's directory", error=BadRun), suppress(OSError):
                disk().remove_file(self.path / LOCK_FILE)
                disk().remove_directory(self.path)  # stays if another program put something there

    def in_the_way(self) -> str:
        """The first few foreign entries, for people."""
        if not self.path.is_dir():
            return "it is a file"
        names = self.foreign_entries()
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return "it holds " + ", ".join(names[:3]) + more

    def content(self, name: str) -> bytes | None:
        """The content of a file; None if it is not there."""
        path = self.path / name
        with read_errors(path):
            return path.read_bytes() if path.exists() else None

    def listed(self, folder: str) -> Sequence[str]:
        """Names of the files in a folder, in order; none if it is not there."""
        path = self.path / folder
        with read_errors(path):
            return sorted(file.name for file in path.iterdir()) if path.exists() else []

    def write(self, file: RunFile[R], record: R, *, error: type[StokerError] = RunFailed) -> None:
        """Replace the record of a file, in a directory that is there.

        Raises:
            StokerError: `error`, if it cannot be written; the old one is intact.
        """
        write_atomic(self.path / file.name, dumps(record) + "\n", what=f"the run's {file.name}", error=error)

    def read_headway(self) -> Run:
        """The run's record, with the position of its newest checkpoint where that is ahead; raises as `read`.

        A run that was killed, also after it had failed and went on, has not written how far it came: its checkpoints
        are named by samples.
        """
        run = self.read_run()
        if run.status == "finished":
            return run
        names = CheckpointStore(self.checkpoints).names()
        saved = int(names[-1].partition(".")[0]) if names else 0
        return replace(run, samples=max(run.samples, saved))

    @property
    def dumps(self) -> Path:
        """The directory for what was found out when something went wrong; made when the first is written."""
        return self.path / DUMPS

    def append_switch(self, switch: PlanSwitch) -> None:
        """Add a switch to the schedule; it is on the disk when this returns.

        Raises:
            RunFailed: it cannot be written; the schedule is as it was.
        """
        path = self.path / SWITCHES
        append_line(path, dumps(switch, indent=None), what="a change of plan", is_durable=True)

    @property
    def profile_path(self) -> Path:
        """The directory of what `--profile` saw, if it was asked for."""
        return self.path / PROFILE

    @property
    def launching(self) -> Path:
        """The directory of what was ordered of a place elsewhere, and what it says; see launching/at_place.py."""
        return self.path / LAUNCHING

    def write_rank_times(self, times: RankTimes) -> None:
        """Replace what one process noted, which is the only one to write this file; raises as `write`."""
        folder = self.path / RANKS
        with disk_errors(folder, "the times of a process"), suppress(FileExistsError):
            disk().make_directory(folder)
        write_atomic(folder / times.file_name, dumps(times, indent=None) + "\n", what="the times of a process")

    def read_report(self) -> Report:
        """Everything a report of the run shows.

        Raises:
            BadRun: a record is damaged, or the log of events cannot be read.
        """
        return self.report_with(self.read_events())

    def append_event(self, event: Event) -> None:
        """Add an event to the log; it survives the death of the process.

        Raises:
            RunFailed: it cannot be written; the log is as it was.
        """
        append_line(self.events_path, dumps(event, indent=None), what="an event")

    def read_events(self) -> tuple[Event, ...]:
        """All events, oldest first; one being written, or cut off at the end, is left out.

        A line that cannot be read becomes a `warned` event which names it.

        Raises:
            BadRun: the log cannot be read, or not one of its lines can (then it is of another version).
        """
        with read_errors(self.events_path):
            lines = read_lines(self.events_path)
        events: list[Event] = []
        num_damaged = 0
        for number, line in enumerate(lines, start=1):
            try:
                events.append(read_event(line))
            except ValueError as problem:
                num_damaged += 1
                message = f"{EVENTS}, line {number} cannot be read: {problem}"
                newest = events[-1].at if events else 0.0
                events.append(Event(kind="warned", at=newest, fields={"message": message}))
        if lines and num_damaged == len(lines):
            raise BadRun(f"{self.events_path} cannot be read: {events[0].fields['message']}.")
        return tuple(events)

    def _remove_all_but_the_lock(self) -> None:
        """Empty the directory, in an order that leaves a run or a vacant directory wherever it stops.

        Of a folder first its name: a tracker's thread may still write into it.
        """
        with disk_errors(self.path, "the run's directory", error=BadRun):
            names = {entry.name for entry in self.path.iterdir()} - _STAYING
            for name in sorted(names, key=lambda n: (n == RUN.name or n in _BEFORE_A_RUN_IS, n in _BEFORE_A_RUN_IS)):
                path = self.path / name
                if path.is_dir() and not path.is_symlink() and not is_aside(path):
                    disk().rename(path, aside := aside_path(path))
                    path = aside
                remove_tree(path)
