"""Trials of a study as real runs: how a process trains one, and what is looked up before the first."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker import training
from stoker.devices import attached_devices, cheapest, planned_devices, resolve_place
from stoker.errors import BadJob, BadRun, DoesNotFit, StokerError, first_line
from stoker.jobs import Entry, Job, load_job
from stoker.jobs.code_digest import name_of, source_digest
from stoker.jobs.metrics import gives_one_number, metric_name, says_lower_is_better
from stoker.planning.decision import decide, given_plan
from stoker.planning.model.objectives import cost_usd
from stoker.planning.resolved_job import ResolvedJob, resolve_job
from stoker.records import Event, Plan, digest
from stoker.records.codec import JSON
from stoker.records.progress import by_measure, is_validation
from stoker.records.study import Parameter, PlannedTrial
from stoker.stepping.step_failures import NotFinite, ran_out_of_memory
from stoker.store import CheckpointStore, RunDirectory, RunLock
from stoker.store.locks import is_locked
from stoker.tuning.population import require_changeable
from stoker.tuning.processes import Judge, TrialReading, TrialRequest, TrialResult, TrialResultKind, TrialSlot
from stoker.tuning.space import as_text

_LOCK_S = 120.0
"""How long a run that this process is to continue may be held by one that is not known to live [s]."""


@dataclass(frozen=True, kw_only=True)
class JobSource:
    """Where the jobs of a study come from: a job file, or a function of the settings; `fixed` are settings of all."""

    path: Path | None = None
    function: Callable[..., Job] | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def make(self, parameters: Mapping[str, JSON]) -> tuple[Job, Entry | None]:
        """The job with these settings.

        Raises:
            BadJob: it cannot be made.
        """
        settings = {**self.fixed, **parameters}
        if self.path is not None:
            with _space_parameters_note(parameters):
                return load_job(self.path, {name: as_text(value) for name, value in settings.items()})
        assert self.function is not None
        try:
            job = self.function(**settings)
        except StokerError:
            raise
        except Exception as problem:
            raise BadJob(f"{self.name}(…) raised {type(problem).__name__}: {first_line(problem)}") from problem
        if not isinstance(job, Job):
            raise BadJob(f"{self.name}(…) returned a {type(job).__name__}, wanted a stoker.Job")
        return job, None

    @property
    def name(self) -> str:
        """The file's name, or the function's."""
        return self.path.stem if self.path is not None else getattr(self.function, "__name__", "job")

    def digest(self, entry: Entry | None) -> str:
        """SHA-256 (hex) of what makes the jobs: the file and its local imports, or the function's text."""
        if entry is not None:
            return entry.digest
        return digest([name_of(self.function), source_digest(self.function)])


@contextmanager
def _space_parameters_note(parameters: Mapping[str, JSON]) -> Iterator[None]:
    """A value that a job file refuses came from the space, and is reported so, where it was not given by `--set`."""
    try:
        yield
    except BadJob as error:
        text = error.message
        for name in parameters:
            text = text.replace(f"--set {name}=", f"--space {name}: the value ")
        if text == error.message:
            raise
        raise BadJob(text, remedy=error.remedy) from error


@dataclass(frozen=True, kw_only=True)
class TrainTrial:
    """Trains a trial in this process; see `stoker.tuning.processes.RunTrial`. It is pickled on its way there."""

    source: JobSource
    plan: Plan | Path | None = None

    def __call__(self, request: TrialRequest, slot: TrialSlot, judge: Judge) -> TrialResult:
        """The trial's end. The test set is not used: a study that looked at it would have chosen by it."""
        directory = RunDirectory(request.directory)
        _wait_until_free(directory)
        missed, saved = _missed(directory, request.reported_samples)
        verdicts = [judge(reading) for reading in missed]
        if directory.is_run and directory.read_run().status == "finished":
            return _kept_ending(directory)  # it was, and the study's process was killed before it noted that
        if any(verdicts) and saved > missed[-1].samples:  # it has stopped, as runs do, after the update that followed
            return TrialResult(kind="stopped", samples=saved, wall_s=directory.read_run().wall_s)
        listener = _Listener(judge, is_stopping=any(verdicts))
        try:
            job, entry = self.source.make(request.parameters)
            run = training.train.train(
                dataclasses.replace(job, test=None),
                on=request.on or slot.on,
                run_dir=request.directory,
                plan=self.plan,
                memory=slot.memory_bytes,
                entry=entry,
                sink=listener,
                fork=None if request.parent is None else str(request.parent),
            )
        except StokerError as error:
            return listener.ending(_kind_of(error), error.message)
        if run.status != "finished":
            return listener.ending("stopped")
        return _kept_ending(directory)


class _Listener:
    """A sink that asks after each evaluation whether to go on, and stops the run by a signal if not.

    A run stops after the update that follows; so does one that is cut off before that and stopped when it begins.
    """

    def __init__(self, judge: Judge, *, is_stopping: bool = False) -> None:
        self._judge, self._is_stopping = judge, is_stopping
        self._total_samples = self._samples = 0
        self._wall_s = 0.0
        self._evaluated: dict[str, dict[str, float]] = {}

    def __call__(self, event: Event) -> None:
        fields = event.fields
        self._samples = max(self._samples, int(fields.get("samples") or 0))
        self._wall_s = float(fields.get("wall_s") or self._wall_s)
        if event.kind == "started":
            self._total_samples = int(fields["total_samples"])
            if self._is_stopping:
                _stop_run()
        if event.kind == "evaluated" and is_validation(event):
            self._evaluated[fields["split"]] = _metrics_of(event)
            if fields.get("more"):  # validation sets
                return
            metrics, self._evaluated = by_measure(self._evaluated), {}
            reading = TrialReading(samples=fields["samples"], total_samples=self._total_samples, metrics=metrics)
            if self._judge(reading) and reading.samples < self._total_samples:
                _stop_run()

    def ending(self, kind: TrialResultKind, words: str = "") -> TrialResult:
        """How the run ended, with what was spent on it."""
        return TrialResult(kind=kind, samples=self._samples, wall_s=self._wall_s, words=words)


def _stop_run() -> None:
    signal.raise_signal(signal.SIGTERM)  # asks the run of this process to save and stop


def _missed(directory: RunDirectory, reported_samples: int) -> tuple[list[TrialReading], int]:
    """The readings that a study may have missed of a run that was cut off, and where the run is saved [samples].

    Its last evaluation is reported again too: whether the answer was acted on is unknown. What comes after the newest
    checkpoint is left out, for it will be trained and evaluated again.
    """
    if not directory.is_run:
        return [], 0
    run = directory.read_run()
    newest = CheckpointStore(directory.checkpoints, spec_digest=run.spec_digest).newest()
    if newest is None:
        return [], 0
    saved, total = newest[1].position.samples, run.total_samples
    last: dict[int, dict[str, dict[str, float]]] = {}
    for event in directory.read_events():
        if event.kind == "evaluated" and is_validation(event) and reported_samples <= event.fields["samples"] <= saved:
            last.setdefault(event.fields["samples"], {})[event.fields["split"]] = _metrics_of(event)
    return [
        TrialReading(samples=samples, total_samples=total, metrics=by_measure(evaluated))
        for samples, evaluated in sorted(last.items())
    ], saved


def _metrics_of(event: Event) -> dict[str, float]:
    return {name: float(value) for name, value in event.fields["metrics"].items()}


def _kept_ending(directory: RunDirectory) -> TrialResult:
    """The ending of a finished run, from its records."""
    run = directory.read_run()
    finished = next((event.fields for event in reversed(directory.read_events()) if event.kind == "finished"), {})
    metrics = {name.removeprefix("valid/"): value for name, value in run.metrics.items() if name.startswith("valid/")}
    return TrialResult(
        kind="finished",
        metrics=metrics,
        samples=run.samples,
        wall_s=run.wall_s,
        peak_bytes=int(finished.get("peak_bytes", 0)),
    )


def _kind_of(error: StokerError) -> TrialResultKind:
    """The kind of a run's error for a study: out of memory, diverged, or failed."""
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(error, DoesNotFit) or ran_out_of_memory(error) for error in chain):
        return "out of memory"
    return "diverged" if any(isinstance(error, NotFinite) for error in chain) else "failed"


def _wait_until_free(directory: RunDirectory) -> None:
    """Wait until the process that had the run, which is asked to stop when its study ends, has saved it.

    That takes as long as the update and the evaluation under way.

    Raises:
        BadRun: another one has it, on another host or unknown.
    """
    deadline = time.monotonic() + _LOCK_S
    while directory.path.exists():
        try:
            with RunLock(directory.path):
                return
        except BadRun:
            if time.monotonic() > deadline and not is_locked(directory.path):
                raise
            time.sleep(0.2)


@dataclass(frozen=True, kw_only=True)
class JobSurvey:
    """A survey of a study's jobs before any is trained.

    `objectives` maps every name of an objective to whether higher is better; `default` is what chooses a run's best
    checkpoint. `first_samples` and `total_samples` are where a trial is evaluated first, and where it ends. `digest` is
    of what makes the jobs, `data_fingerprint` of the data of the first one that could be made.
    """

    digest: str
    data_fingerprint: str
    objectives: dict[str, bool]
    unclear: tuple[str, ...]
    default: str
    first_samples: int
    total_samples: int
    planned: tuple[PlannedTrial, ...]


@dataclass(frozen=True, kw_only=True)
class SurveyJobs:
    """Makes the jobs of some configurations and plans them, in a process with as much of the machine as a trial has."""

    source: JobSource
    on: str
    plan: Plan | Path | None = None
    is_planned: bool = True
    population: tuple[Parameter, ...] = ()
    """The parameters that a population changes in the middle of runs; empty for other samplers."""
    seed: int = 0

    def __call__(self, configurations: Sequence[dict[str, JSON]]) -> JobSurvey:
        """A survey of the jobs: of all that are to be planned, else of the first one that can be made.

        Raises:
            BadJob: none of them can be made, there is nothing to choose by, or a population cannot train them.
        """
        planned: list[PlannedTrial] = []
        prepared: list[ResolvedJob] = []
        problem: StokerError | None = None
        for parameters in configurations:
            try:
                job, entry = self.source.make(parameters)
                planned.append(self._planned(parameters, job, entry, prepared))
            except StokerError as error:
                problem = problem or error
                planned.append(PlannedTrial(parameters=parameters, problem=error.message))
            if prepared and not self.is_planned:
                break
        if not prepared:
            assert problem is not None
            raise problem
        if self.population:
            require_changeable(lambda settings: resolve_job(*self.source.make(settings)), self.population, self.seed)
        return _surveyed(self.source, planned, prepared)

    def _planned(
        self, parameters: dict[str, JSON], job: Job, entry: Entry | None, jobs: list[ResolvedJob]
    ) -> PlannedTrial:
        """The forecast of a configuration; its resolved job goes into `jobs`, whether it fits or not."""
        prepared = resolve_job(dataclasses.replace(job, test=None), entry)
        jobs.append(prepared)
        if not self.is_planned:
            return PlannedTrial(parameters=parameters)
        device = resolve_place(self.on, attached_devices())
        forecast = decide(prepared, device, given_plan(self.plan))[0].chosen.forecast
        place = next(one for one in planned_devices(device.torch_name, attached_devices()) if one.device == device)
        price = cheapest(place.entry.name) if place.entry is not None else None
        return PlannedTrial(
            parameters=parameters,
            total_s=forecast.total_s,
            peak_bytes=forecast.peak_bytes,
            energy_kwh=forecast.energy_kwh,
            total_samples=forecast.total_samples,
            cost_usd=None if price is None else cost_usd(forecast.total_s, price),
        )


def _surveyed(source: JobSource, planned: Sequence[PlannedTrial], prepared: Sequence[ResolvedJob]) -> JobSurvey:
    first = prepared[0]
    if first.data.valid is None:
        raise BadJob(
            f"{source.name}: the job has no valid data, so trials cannot be compared",
            remedy="Give it: Job(valid=stoker.holdout(0.1), …).",
        )
    directions = _directions(first.job)
    objectives = {name: is_higher for name, is_higher in directions.items() if is_higher is not None}
    chooses = next(iter(first.data.held_out))
    chosen = f"{chooses}/{metric_name(first.job.metrics[0])}" if first.job.metrics else ""
    ends = [_ends(job) for job in prepared]
    totals = [trial.total_samples for trial in planned if trial.total_samples] or [end for _, end in ends if end]
    return JobSurvey(
        digest=source.digest(first.entry),
        data_fingerprint=first.spec.data_fingerprint,
        objectives=objectives,
        unclear=tuple(directions.keys() - objectives.keys()),
        default=chosen if chosen in objectives else f"{chooses}/loss",
        first_samples=min(begin for begin, _ in ends),
        total_samples=max(totals, default=0),
        planned=tuple(planned),
    )


def _directions(job: Job) -> dict[str, bool | None]:
    """Whether higher is better, for each measure that is one number; None where it is not stated."""
    directions: dict[str, bool | None] = {}
    for split in job.validation:
        if job.objective.loss is not None:
            directions[f"{split}/loss"] = False
        for metric in job.metrics:
            lower = says_lower_is_better(metric)
            if lower is None or gives_one_number(metric):
                directions[f"{split}/{metric_name(metric)}"] = None if lower is None else not lower
    return directions


def _ends(prepared: ResolvedJob) -> tuple[int, int]:
    """Where a run is first evaluated and where it ends [samples]; 0 where it is given in seconds."""
    extent, job = prepared.extent, prepared.job
    first = extent.position(extent.updates_in(job.evaluation.every)).samples
    total = 0 if job.until.unit == "seconds" else extent.position(extent.updates_in(job.until)).samples
    return (min(first, total) if total else first), total
