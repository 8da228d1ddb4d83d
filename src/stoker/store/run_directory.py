"""A run's directory: which file holds what, typed reading and writing.

```
DIR/run.json           Run: status, metrics, how far; written last, so that a directory without one is no run
    spec.json          JobSpec: what is learned
    plan.json          Decision: how it is executed, and why
    environment.json   Environment: the determinism class
    device.json        Device
    coupling.json      Coupling
    started.json       Started: the folder and the job file of the first start
    events.jsonl       one Event a line
    checkpoints/       see CheckpointStore
    weights/           weights kept for good, each named by its position [samples]: 000000027000.safetensors
    plans.jsonl        one PlanSwitch a line: which update began under which plan, after the first
    dumps/             what was found out when something went wrong: numbers that are not finite, stacks of a hang
    bottleneck.json    Bottleneck: what bounded the run, once it is finished
    ranks/             where the time of updates went: a RankTimes of each process, for each time that they met
    profile/           what `--profile` saw: kernels.json (KernelTable) and the files it names
    report.html
    launch.json        Launch: of a run executed elsewhere, here; not at the place
    launch/            of a run executed elsewhere: what was ordered, states, output; see launching/at_place.py
    lock               see RunLock
```
Training and trackers add `job/` (a copy of the job file), `model.safetensors`, `examples.json`,
`pruning.json`, `tracking/`; tuning adds `trial.json` (StudyTrial) to a trial that has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from stoker.errors import BadRun, RunFailed, StokerError
from stoker.records import (
    Bottleneck,
    Coupling,
    Decision,
    Device,
    Environment,
    Event,
    JobSpec,
    KernelTable,
    Launch,
    PlanSwitch,
    RankTimes,
    Report,
    Run,
    dumps,
    loads,
)
from stoker.records.codec import Record
from stoker.records.plan_schedule import PlanSchedule
from stoker.records.progress import read_event
from stoker.store.checkpoint_store import CheckpointStore
from stoker.store.disk_errors import disk_errors, read_errors
from stoker.store.files import (
    append_line,
    aside_path,
    disk,
    is_aside,
    read_lines,
    read_record,
    remove_leftovers,
    remove_tree,
    write_atomic,
)
from stoker.store.locks import HELD_FILE, LOCK_FILE, TAKING_FILE, RunLock, is_held_here

TRIAL_FILE = "trial.json"

R = TypeVar("R", bound=Record)

_RUN, _SPEC, _PLAN, _ENVIRONMENT = "run.json", "spec.json", "plan.json", "environment.json"
_DEVICE, _COUPLING, _EVENTS, _REPORT, _CHECKPOINTS = (
    "device.json",
    "coupling.json",
    "events.jsonl",
    "report.html",
    "checkpoints",
)
_SWITCHES, _DUMPS = "plans.jsonl", "dumps"
_BOTTLENECK, _PROFILE, _KERNELS = "bottleneck.json", "profile", "profile/kernels.json"
_RANKS, _KEPT = "ranks", "weights"
_LAUNCH, _LAUNCHING = "launch.json", "launch"
_STAYING = frozenset({LOCK_FILE, HELD_FILE, TAKING_FILE, _LAUNCH, _LAUNCHING})
_BEFORE_A_RUN_IS = frozenset({_SPEC, _PLAN, _ENVIRONMENT, _DEVICE, _COUPLING, *_STAYING})


@dataclass(frozen=True)
class RunDirectory:
    """The files of one run. Making this object touches nothing; `create` makes a run, `is_run` says whether one is."""

    path: Path

    @property
    def name(self) -> str:
        """The directory's name, by which the run is found."""
        return self.path.resolve().name

    @property
    def events_path(self) -> Path:
        """The log of events."""
        return self.path / _EVENTS

    @property
    def checkpoints(self) -> Path:
        """The directory for a `CheckpointStore`; made by it when the first is written."""
        return self.path / _CHECKPOINTS

    @property
    def kept_weights(self) -> Path:
        """The directory of the weights that are kept for good; there if some were."""
        return self.path / _KEPT

    @property
    def report_path(self) -> Path:
        """The HTML report, if it was written."""
        return self.path / _REPORT

    @property
    def is_run(self) -> bool:
        """Whether a run was made here, readable or not."""
        try:
            return (self.path / _RUN).exists()
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
        records: dict[str, object | None] = {
            _SPEC: spec,
            _PLAN: decision,
            _ENVIRONMENT: environment,
            _DEVICE: device,
            _COUPLING: coupling,
            _RUN: run,
        }
        with nullcontext() if is_held_here(path) else RunLock(path):
            if not directory.is_vacant:
                raise BadRun(f"{path} is not empty: {directory.in_the_way()}.", remedy="Choose another directory.")
            try:
                directory._remove_all_but_the_lock()
                for name, record in records.items():
                    if record is not None:
                        directory._write(name, record, error=BadRun)
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

    def read_run(self) -> Run:
        """The run's record.

        Raises:
            BadRun: it is missing, damaged (the field is named) or of another version.
        """
        return self._read(_RUN, Run)

    def read_headway(self) -> Run:
        """The run's record, with the position of its newest checkpoint where that is ahead; raises as `read_run`.

        A run that was killed, also after it had failed and went on, has not written how far it came: its checkpoints
        are named by samples.
        """
        run = self.read_run()
        if run.status == "finished":
            return run
        names = CheckpointStore(self.checkpoints).names()
        saved = int(names[-1].partition(".")[0]) if names else 0
        return replace(run, samples=max(run.samples, saved))

    def write_run(self, run: Run) -> None:
        """Replace the run's record.

        Raises:
            RunFailed: it cannot be written; the old one is intact.
        """
        self._write(_RUN, run)

    def read_spec(self) -> JobSpec:
        """The job's spec; raises as `read_run`."""
        return self._read(_SPEC, JobSpec)

    def read_decision(self) -> Decision | None:
        """The plan and why, None if there is none; raises as `read_run`."""
        return self._read_if_there(_PLAN, Decision)

    def write_decision(self, decision: Decision) -> None:
        """Replace the plan and why, once plans that were tried in the run are settled; raises as `write_run`."""
        self._write(_PLAN, decision)

    def write_coupling(self, coupling: Coupling) -> None:
        """Replace what couples samples, once they were compared; raises as `write_run`."""
        self._write(_COUPLING, coupling)

    def read_environment(self) -> Environment | None:
        """The determinism class, None if there is none; raises as `read_run`."""
        return self._read_if_there(_ENVIRONMENT, Environment)

    def read_device(self) -> Device | None:
        """The device, None if there is none; raises as `read_run`."""
        return self._read_if_there(_DEVICE, Device)

    def read_coupling(self) -> Coupling | None:
        """The coupling of samples, None if there is none; raises as `read_run`."""
        return self._read_if_there(_COUPLING, Coupling)

    @property
    def dumps(self) -> Path:
        """The directory for what was found out when something went wrong; made when the first is written."""
        return self.path / _DUMPS

    def read_schedule(self) -> PlanSchedule | None:
        """Which update runs under which plan, None if the run has lost its plan.

        Raises:
            BadRun: a file cannot be read, or is damaged.
        """
        decision = self.read_decision()
        if decision is None:
            return None
        path = self.path / _SWITCHES
        with read_errors(path):
            lines = read_lines(path)
        try:
            return PlanSchedule.of(decision.chosen.plan, (loads(line, PlanSwitch) for line in lines))
        except ValueError as problem:
            raise BadRun(f"{path} cannot be used: {problem}.", remedy="Start another run with --new.") from problem

    def append_switch(self, switch: PlanSwitch) -> None:
        """Add a switch to the schedule; it is on the disk when this returns.

        Raises:
            RunFailed: it cannot be written; the schedule is as it was.
        """
        path = self.path / _SWITCHES
        append_line(path, dumps(switch, indent=None), what="a change of plan", is_durable=True)

    @property
    def profile_path(self) -> Path:
        """The directory of what `--profile` saw, if it was asked for."""
        return self.path / _PROFILE

    def read_bottleneck(self) -> Bottleneck | None:
        """The run's bottleneck, None if it was not determined; raises as `read_run`."""
        return self._read_if_there(_BOTTLENECK, Bottleneck)

    def write_bottleneck(self, bottleneck: Bottleneck) -> None:
        """Replace what bounded the run; raises as `write_run`."""
        self._write(_BOTTLENECK, bottleneck)

    def read_kernels(self) -> KernelTable | None:
        """The operations that `--profile` saw, None if it was not asked for; raises as `read_run`."""
        return self._read_if_there(_KERNELS, KernelTable)

    def write_kernels(self, kernels: KernelTable) -> None:
        """Replace the profiled operations; `profile_path` must be there; raises as `write_run`."""
        self._write(_KERNELS, kernels)

    @property
    def launching(self) -> Path:
        """The directory of what was ordered of a place elsewhere, and what it says; see launching/at_place.py."""
        return self.path / _LAUNCHING

    def read_launch(self) -> Launch | None:
        """Where the run is executed, None if here; raises as `read_run`."""
        return self._read_if_there(_LAUNCH, Launch)

    def write_launch(self, launch: Launch) -> None:
        """Replace where the run is executed; the directory must be there; raises as `write_run`."""
        self._write(_LAUNCH, launch)

    def read_rank_times(self) -> tuple[RankTimes, ...]:
        """Each process's times, in the order of rendezvous and of ranks; raises as `read_run`."""
        folder = self.path / _RANKS
        with read_errors(folder):
            names = sorted(file.name for file in folder.glob("*.json")) if folder.exists() else []
        times = (self._read(f"{_RANKS}/{name}", RankTimes) for name in names)
        return tuple(sorted(times, key=lambda rank: (rank.began_at, rank.rank)))

    def write_rank_times(self, times: RankTimes) -> None:
        """Replace what one process noted, which is the only one to write this file; raises as `write_run`."""
        folder = self.path / _RANKS
        with disk_errors(folder, "the times of a process"), suppress(FileExistsError):
            disk().make_directory(folder)
        write_atomic(folder / times.file_name, dumps(times, indent=None) + "\n", what="the times of a process")

    def read_report(self) -> Report:
        """Everything a report of the run shows.

        Raises:
            BadRun: a record is damaged.
        """
        return Report(
            run=self.read_run(),
            spec=self.read_spec(),
            decision=self.read_decision(),
            device=self.read_device(),
            environment=self.read_environment(),
            coupling=self.read_coupling(),
            events=self.read_events(),
            bottleneck=self.read_bottleneck(),
            kernels=self.read_kernels(),
            ranks=self.read_rank_times(),
            schedule=self.read_schedule(),
            launch=self.read_launch(),
        )

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
                message = f"{_EVENTS}, line {number} cannot be read: {problem}"
                newest = events[-1].at if events else 0.0
                events.append(Event(kind="warned", at=newest, fields={"message": message}))
        if lines and num_damaged == len(lines):
            raise BadRun(f"{self.events_path} cannot be read: {events[0].fields['message']}.")
        return tuple(events)

    def _read(self, name: str, record: type[R]) -> R:
        return read_record(self.path / name, record, remedy=_NOT_LOST)

    def _read_if_there(self, name: str, record: type[R]) -> R | None:
        with read_errors(self.path / name):
            is_there = (self.path / name).exists()
        return self._read(name, record) if is_there else None

    def _write(self, name: str, record: object, error: type[StokerError] = RunFailed) -> None:
        write_atomic(self.path / name, dumps(record) + "\n", what=f"the run's {name}", error=error)

    def _remove_all_but_the_lock(self) -> None:
        """Empty the directory, in an order that leaves a run or a vacant directory wherever it stops.

        Of a folder first its name: a tracker's thread may still write into it.
        """
        with disk_errors(self.path, "the run's directory", error=BadRun):
            names = {entry.name for entry in self.path.iterdir()} - _STAYING
            for name in sorted(names, key=lambda n: (n == _RUN or n in _BEFORE_A_RUN_IS, n in _BEFORE_A_RUN_IS)):
                path = self.path / name
                if path.is_dir() and not path.is_symlink() and not is_aside(path):
                    disk().rename(path, aside := aside_path(path))
                    path = aside
                remove_tree(path)


_NOT_LOST = "Restore it from a copy, or start another run with --new; checkpoints in it are untouched."
