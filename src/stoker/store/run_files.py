"""The files of a run: which one holds which record, and typed reading of them.

```
DIR/run.json           Run: status, metrics, how far; written last, so that a directory without one is no run
    spec.json          JobSpec: what is learned
    plan.json          Decision: how it is executed, and why
    environment.json   Environment: the determinism class
    device.json        Device
    coupling.json      Coupling
    columns.json       InputColumns: the columns of a table that samples were read from, and the words of categories
    started.json       Started: the folder and the job file of the first start
    job/               a copy of the job file and its local imports
    events.jsonl       one Event a line
    plans.jsonl        one PlanSwitch a line: which update began under which plan, after the first
    checkpoints/       see CheckpointStore
    weights/           weights kept for good, each named by its position [samples]: 000000027000.safetensors
    model.safetensors  the final weights
    examples.json      ExampleSets: samples of held-out sets with the final model's outputs
    pruning.json       Pruning: of a run that trains a pruned network
    bottleneck.json    Bottleneck: what bounded the run, once it is finished
    ranks/             where the time of updates went: a RankTimes of each process, for each time that they met
    profile/           what `--profile` saw: kernels.json (KernelTable) and the files it names
    dumps/             what was found out when something went wrong: numbers that are not finite, stacks of a hang
    report.html
    trial.json         StudyTrial: of a trial of a study, once it has ended
    tracking/          what trackers have sent
    launch.json        Launch: of a run executed elsewhere, here; not at the place
    launch/            of a run executed elsewhere: what was ordered, states, output; see launching/at_place.py
    lock               see RunLock
```
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from stoker.errors import BadRun
from stoker.records import (
    Bottleneck,
    Coupling,
    Decision,
    Device,
    Environment,
    Event,
    InputColumns,
    JobSpec,
    KernelTable,
    Launch,
    PlanSwitch,
    RankTimes,
    Report,
    Run,
    loads,
)
from stoker.records.codec import Record
from stoker.records.compression import Pruning
from stoker.records.plan_schedule import PlanSchedule
from stoker.records.run import ExampleSet, ExampleSets, Started
from stoker.records.study import StudyTrial

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class RunFile(Generic[R]):
    """A file of a run with one record: its path in the run's directory, and the record's class."""

    name: str
    record: type[R]


RUN = RunFile("run.json", Run)
SPEC = RunFile("spec.json", JobSpec)
PLAN = RunFile("plan.json", Decision)
ENVIRONMENT = RunFile("environment.json", Environment)
DEVICE = RunFile("device.json", Device)
COUPLING = RunFile("coupling.json", Coupling)
COLUMNS = RunFile("columns.json", InputColumns)
STARTED = RunFile("started.json", Started)
EXAMPLES = RunFile("examples.json", ExampleSets)
PRUNING = RunFile("pruning.json", Pruning)
BOTTLENECK = RunFile("bottleneck.json", Bottleneck)
KERNELS = RunFile("profile/kernels.json", KernelTable)
TRIAL = RunFile("trial.json", StudyTrial)
LAUNCH = RunFile("launch.json", Launch)

EVENTS, SWITCHES, WEIGHTS, REPORT = "events.jsonl", "plans.jsonl", "model.safetensors", "report.html"
CHECKPOINTS, KEPT, RANKS, PROFILE, DUMPS, LAUNCHING = "checkpoints", "weights", "ranks", "profile", "dumps", "launch"

_REMEDY = "Restore it from a copy, or start another run with --new; checkpoints in it are untouched."


class RunFiles(ABC):
    """Typed reading of one run's files; a subclass says how their content is read."""

    path: Path
    """The run's directory, by which messages name its files."""

    @abstractmethod
    def content(self, name: str) -> bytes | None:
        """The content of a file, by its path in the run's directory; None if it is not there.

        Raises:
            BadRun: it cannot be read.
        """

    @abstractmethod
    def listed(self, folder: str) -> Sequence[str]:
        """Names of the files in a folder of the run's directory, in order; none if it is not there.

        Raises:
            BadRun: it cannot be read.
        """

    def read(self, file: RunFile[R]) -> R | None:
        """The record of a file; None if it is not there.

        Raises:
            BadRun: it cannot be read, is damaged (the field is named) or of another version.
        """
        content = self.content(file.name)
        if content is None:
            return None
        try:
            return loads(content, file.record)
        except (ValueError, RecursionError) as problem:
            raise BadRun(f"{self.path / file.name} cannot be used: {problem}.", remedy=_REMEDY) from problem

    def require(self, file: RunFile[R]) -> R:
        """As `read`, of a file that every run has.

        Raises:
            BadRun: it is missing, or as `read`.
        """
        record = self.read(file)
        if record is None:
            raise BadRun(f"{self.path / file.name} cannot be read: No such file or directory.", remedy=_REMEDY)
        return record

    def read_run(self) -> Run:
        """The run's record; raises as `require`."""
        return self.require(RUN)

    def read_spec(self) -> JobSpec:
        """The job's spec; raises as `require`."""
        return self.require(SPEC)

    def read_decision(self) -> Decision | None:
        """The plan and why, None if there is none; raises as `read`."""
        return self.read(PLAN)

    def read_launch(self) -> Launch | None:
        """Where the run is executed, None if here; raises as `read`."""
        return self.read(LAUNCH)

    def read_schedule(self) -> PlanSchedule | None:
        """Which update runs under which plan, None if the run has lost its plan.

        Raises:
            BadRun: a file cannot be read, or is damaged.
        """
        decision = self.read_decision()
        if decision is None:
            return None
        lines = (self.content(SWITCHES) or b"").split(b"\n")[:-1]  # a last line may have been cut off
        try:
            return PlanSchedule.of(decision.chosen.plan, (loads(line, PlanSwitch) for line in lines))
        except ValueError as problem:
            path = self.path / SWITCHES
            raise BadRun(f"{path} cannot be used: {problem}.", remedy="Start another run with --new.") from problem

    def read_rank_times(self) -> tuple[RankTimes, ...]:
        """Each process's times, in the order of rendezvous and of ranks; raises as `read`."""
        files = [RunFile(f"{RANKS}/{name}", RankTimes) for name in self.listed(RANKS) if name.endswith(".json")]
        times = [times for times in map(self.read, files) if times is not None]
        return tuple(sorted(times, key=lambda rank: (rank.began_at, rank.rank)))

    def read_examples(self) -> tuple[ExampleSet, ...]:
        """Samples of held-out sets with the final model's outputs; empty if there are none, or they cannot be read."""
        with suppress(BadRun):
            examples = self.read(EXAMPLES)
            return () if examples is None else examples.sets
        return ()

    def report_with(self, events: Sequence[Event]) -> Report:
        """Everything a report of the run shows, with these events.

        Raises:
            BadRun: a record is damaged.
        """
        return Report(
            run=self.read_run(),
            spec=self.read_spec(),
            decision=self.read_decision(),
            device=self.read(DEVICE),
            environment=self.read(ENVIRONMENT),
            coupling=self.read(COUPLING),
            events=tuple(events),
            bottleneck=self.read(BOTTLENECK),
            kernels=self.read(KERNELS),
            ranks=self.read_rank_times(),
            schedule=self.read_schedule(),
            launch=self.read_launch(),
        )
