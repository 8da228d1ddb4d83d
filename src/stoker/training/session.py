"""From a run's directory to a loop ready to go, wherever the run was left."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from stoker import records
from stoker.errors import BadRun
from stoker.jobs import Job, Optimizer
from stoker.jobs.early_stopping import bare_name
from stoker.jobs.job import measure_of
from stoker.jobs.metrics import direction_of, gives_one_number, metric_name, says_lower_is_better
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import data_indices
from stoker.loading.randomness import RandomStream, key_of, seed_generators
from stoker.planning.resolved_job import ResolvedJob
from stoker.profiling.environment import environment
from stoker.records import CheckpointManifest, Coupling, Decision, Device, Environment, JobSpec, Position
from stoker.records.codec import JSON
from stoker.records.run import ExampleSet
from stoker.stepping.step import Step
from stoker.stepping.weight_averaging import EqualAverage
from stoker.stepping.world import ALONE, World
from stoker.store import CheckpointStore, RunDirectory, find_run, runs_root
from stoker.training.checkpoints import (
    Checkpointer,
    keep_weights,
    kept_at,
    kept_path,
    model_weights,
    newest_together,
    restore,
)
from stoker.training.elastic.state_broadcast import SurvivorState, state_from_furthest_rank
from stoker.training.loop import Best, Loop, evaluation_is_due
from stoker.training.rank_messages import require_visible_to_all_ranks
from stoker.training.recovery import Recovery, Replanned
from stoker.training.run_control import RunControl
from stoker.training.signals import StopRequest
from stoker.training.snapshots import load_weights
from stoker.training.telemetry import Sink, Telemetry
from stoker.training.watchdog import Watchdog, patience_s, slowest_phase_s

_GUARANTEES = {
    "indexed": "order computed from (seed, epoch, position): resumes at any sample, at once",
    "seekable": "one reader in each process; its own state is kept with each checkpoint: resumes there, at once",
    "stream": "one reader in each process; it has no state: a resume reads again what was read before",
}

_LOOKS = 64
"""Points of a run at which its schedule is looked at."""
_OF_POSITIONS = ("batch", "seed", "freeze", "sampling", "lengths")
"""Settings of a job without which the number of an update does not say what came before it, beside its data."""


@dataclass(frozen=True)
class _Start:
    """Where a run goes on: a checkpoint, the position it stands for in this run, and whether this run wrote it.

    If another did, `keeps_plateau` says whether a plateau that lowered its learning rate is one of this run.
    """

    path: Path
    manifest: CheckpointManifest
    position: Position
    is_own: bool
    keeps_plateau: bool = True


@dataclass
class TrainingSession:
    """A run in this process: what is trained, where it is kept, and how far it is."""

    prepared: ResolvedJob
    directory: RunDirectory
    decision: Decision
    store: CheckpointStore
    loop: Loop
    position: Position
    is_profiled: bool = False
    metrics: dict[str, float] | None = None
    """Of the weights worth keeping, at the end."""
    weights: dict[str, torch.Tensor] | None = None
    """Those weights, whole, at the end."""
    examples: tuple[ExampleSet, ...] = ()
    """What they made of samples of held-out sets."""

    @property
    def step(self) -> Step:
        """The model and its optimiser."""
        return self.loop.step

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train."""
        return self.loop.is_complete(self.position)


def build_session(  # noqa: PLR0913 - what a session is made of
    prepared: ResolvedJob,
    directory: RunDirectory,
    device: Device,
    *,
    decision: Decision,
    coupling: Coupling,
    sink: Sink,
    stop: StopRequest,
    replanned: Callable[[Replanned], None],
    world: World = ALONE,
    carried: SurvivorState | None = None,
    age_s: float = 0.0,
) -> TrainingSession:
    """The run in `directory` with its state restored; its lock must be held.

    Among several processes each of them calls this. What they carried over from before they met goes first: the
    furthest gives its state to the others; if nobody carries anything, all start from the last checkpoint. `age_s` is
    how long the run has been trained by this command, also by processes that are gone [s]: losses that come faster than
    checkpoints are due must not put them off for ever.

    Raises:
        BadRun: its checkpoints are damaged, or of another model; or the run it was forked from went further.
    """
    plan, identity = decision.chosen.plan, directory.read_run().spec_digest
    store = CheckpointStore(directory.checkpoints, spec_digest=identity)
    if world.layout.world_size > 1:
        require_visible_to_all_ranks(world, directory.path)
    step = Step(prepared.job, plan, coupling, world=world)
    seed_generators(key_of(RandomStream.MICRO_BATCH, prepared.job.seed))
    start, given = None, state_from_furthest_rank(step, carried)
    if given is not None:
        position, progress = given.position, given.progress
    else:
        start = _start_from(directory, prepared, store, decision.chosen.forecast.total_updates, world)
        position = Position() if start is None else start.position
        progress = {} if start is None else _restored(step, start)
        if (
            start is not None
            and "best" in progress
            and progress["best"]["samples"] == position.samples
            and world.is_first
        ):
            store.mark_best(start.path.name)  # a kill may have come between its writing and its marking
        if start is not None and start.is_own and world.is_first:
            _keep_if_missed(prepared, directory, start)
    telemetry = _telemetry(prepared, decision, position, float(progress.get("wall_s", 0.0)), sink)
    source = BatchSource(
        prepared.data.train, step.pipeline(prepared.data.train, augmented=True), prepared.extent, prepared.job.seed,
        plan, split=step.split(),
    )  # fmt: skip
    source.reader.state = progress.get("reader")
    checkpointer = Checkpointer(store, spec_digest=identity, version=stoker_version(), kept_in=directory.kept_weights)
    loop = Loop(
        step=step,
        source=source,
        extent=prepared.extent,
        total_updates=decision.chosen.forecast.total_updates,
        held_out=prepared.data.held_out,
        evaluate_every=prepared.job.evaluate_every,
        keep_every=prepared.job.keep_every,
        best=_best_so_far(prepared.job, progress),
        checkpointer=checkpointer,
        telemetry=telemetry,
        stop=stop,
        recovery=Recovery(
            step, tell=telemetry.emit, replanned=replanned, dumps=directory.dumps,
            in_data=functools.partial(data_indices, prepared.data.train),
        ),
        watchdog=Watchdog(
            telemetry, source.watch, stop, tell=lambda words: telemetry.emit("warned", message=words),
            dumps=directory.dumps, slowest_s=slowest_s(prepared.job, decision),
            is_writing=lambda: checkpointer.is_writing, least_s=patience_s(processes=world.layout.world_size),
        ),
        unevaluated=None if given is None else given.unevaluated,
        unsaved_s=_unsaved_s(store, age_s),
        course=_course(prepared.job, step, progress),
    )  # fmt: skip
    if plan.device_mtbf_h is not None:
        loop.save_every_s = float(progress.get("save_every_s", plan.checkpoint_every_s))
    session = TrainingSession(prepared, directory, decision, store, loop, position)
    for problem in store.problems:
        telemetry.emit("warned", message=problem)
    if start is not None:
        telemetry.emit("resumed", samples=position.samples, updates=position.updates, checkpoint=str(start.path))
    if given is None:
        _tell_start(session, device)
    return session


def _keep_if_missed(prepared: ResolvedJob, directory: RunDirectory, start: _Start) -> None:
    """Write weights that are to be kept, where a kill came after their checkpoint was written and before they were."""
    every, position, folder = prepared.job.keep_every, start.position, directory.kept_weights
    if every is None or position.updates == 0 or kept_path(folder, position).exists():
        return
    if evaluation_is_due(every, prepared.extent, prepared.extent.position(position.updates - 1), position):
        keep_weights(folder, start.path, start.manifest, kept_at(prepared.extent, position))


def slowest_s(job: Job, decision: Decision) -> float:
    """What the slowest phase of the run takes by forecast [s]; see `slowest_phase_s`."""
    updates_apart = 1 if job.sync is None else job.sync.interval(job.batch)
    return slowest_phase_s(decision.chosen.forecast, updates_apart)


def stoker_version() -> str:
    """The version of the installed package."""
    return version("stoker")


def _unsaved_s(store: CheckpointStore, age_s: float) -> float:
    """How long ago this command saved a checkpoint, or began where it has not [s]."""
    names = store.names()
    if not names:
        return age_s
    return min(age_s, max(0.0, time.time() - (store.directory / names[-1]).stat().st_mtime))


def _telemetry(prepared: ResolvedJob, decision: Decision, position: Position, wall_s: float, sink: Sink) -> Telemetry:
    extent, every = prepared.extent, prepared.job.evaluate_every
    forecast, has_valid = decision.chosen.forecast, prepared.data.valid is not None
    left = extent.evaluations(every, forecast.total_updates) - extent.intervals(every, position) + 1
    return Telemetry(
        sink,
        total_samples=forecast.total_samples,
        total_updates=forecast.total_updates,
        evaluate_s=forecast.evaluate_s.value if has_valid else 0.0,
        evaluations_left=left if has_valid else 0,
        wall_s=wall_s,
    )


def _restored(step: Step, start: _Start) -> dict[str, JSON]:
    """Put what `start` holds into `step`; the progress kept with it, of another run's what this one goes on with."""
    if start.position.updates:
        progress = restore(step, start.path, start.manifest)
        return progress if start.is_own else _taken_over(progress, with_plateau=start.keeps_plateau)
    weights = model_weights(start.path, start.manifest)
    load_weights(step.model, weights, start.path, world=step.world)
    step.begin_at_weights()
    return {}


def _start_from(
    directory: RunDirectory, prepared: ResolvedJob, store: CheckpointStore, total_updates: int, world: World
) -> _Start | None:
    """The checkpoint to start from: this run's newest, or its parent's."""
    found = newest_together(world, store)
    if found is not None:
        return _Start(*found, found[1].position, is_own=True)
    run = directory.read_run()
    if run.forked_from is None:
        return None
    parent = find_run(runs_root(), run.forked_from)
    theirs_store = CheckpointStore(parent.checkpoints, spec_digest=parent.read_run().spec_digest)
    found = newest_together(world, theirs_store)
    if found is None:
        raise BadRun(f"{parent.name} has no checkpoint to start from")
    theirs = parent.read_spec()
    position = found[1].position if _goes_on(theirs, prepared.spec_like(theirs)) else Position()
    if position.updates >= total_updates:
        raise BadRun(
            f"{parent.name} made {position.updates} updates; this job makes {total_updates}, so nothing is left to do",
            remedy="Fork it under a longer job (until=…).",
        )
    schedules = [_without_run(spec.settings.get("schedule")) for spec in (theirs, prepared.spec_like(theirs))]
    return _Start(*found, position, is_own=False, keeps_plateau=schedules[0] == schedules[1])


def _taken_over(progress: dict[str, JSON], *, with_plateau: bool) -> dict[str, JSON]:
    """What a fork goes on with: how far data were read, how many weights an average is of, a lowered learning rate.

    Its time and its best are its own, and it waits anew for what ends it before time, which may have ended its parent.
    """
    taken = {key: value for key, value in progress.items() if key not in ("wall_s", "best", "course", "save_every_s")}
    if with_plateau and "course" in progress:
        taken["course"] = {**progress["course"], "verdict": None, "stops": None}
    return taken


def _without_run(schedule: JSON) -> JSON:
    """A schedule's settings but for the length of its run, which a fork may change."""
    return {key: value for key, value in schedule.items() if key != "run"} if isinstance(schedule, dict) else schedule


def _goes_on(theirs: JobSpec, mine: JobSpec) -> bool:
    """Whether a fork continues where its parent is; else it takes over the weights and counts from 0."""
    same_order = all(theirs.settings.get(key) == mine.settings.get(key) for key in _OF_POSITIONS)
    optimizers = [_kind(spec.settings.get("optimizer")) for spec in (theirs, mine)]
    return same_order and theirs.data_fingerprint == mine.data_fingerprint and optimizers[0] == optimizers[1]


def _kind(optimizer: JSON) -> JSON:
    """What must be equal for one optimiser to take over another's state: of Stoker's own only the type."""
    return optimizer["type"] if isinstance(optimizer, dict) and "type" in optimizer else optimizer


def _tell_start(session: TrainingSession, device: Device) -> None:
    """Say what begins, under which guarantee."""
    prepared, telemetry, plan = session.prepared, session.loop.telemetry, session.decision.chosen.plan
    was, now = session.directory.read_environment(), environment(device, plan)
    level = (
        "bit-equal on resume" if plan.device == "cpu" else "same law on resume: GPU kernels may not be deterministic"
    )
    if was is not None and was != now:
        level = "same mathematics on resume: the environment has changed"
        changes = _changes(was, now)
        telemetry.emit("warned", message=f"the run began elsewhere; it goes on exactly up to rounding ({changes})")
    if unsaved := session.loop.step.coupling.unsaved:
        level = f"none on resume: checkpoints do not hold {' and '.join(unsaved)}, from which the next pass goes on"
        telemetry.emit("warned", message=f"{level}; keep it in a buffer (register_buffer)")
    for words in _doubts(session) if not session.position.updates else ():
        telemetry.emit("warned", message=words)
    spec, data = prepared.spec, prepared.data
    sizes = {"train": len(data.train), "valid": sum(map(len, data.held_out.values())),
             "test": 0 if data.test is None else len(data.test)}  # fmt: skip
    telemetry.emit(
        "started",
        samples=session.position.samples,
        total_samples=telemetry.total_samples,
        total_updates=telemetry.total_updates,
        environment=records.to_json(now),
        level=level,
        run=session.directory.name,
        data={"class": spec.data_class, "guarantee": _GUARANTEES[spec.data_class], "name": data.train.name, **sizes},
    )


def _doubts(session: TrainingSession) -> Iterator[str]:
    """What is probably a mistake in the job."""
    yield from session.step.coupling.notices
    optimizer, schedule = session.prepared.job.optimizer, session.prepared.job.schedule
    # A schedule of the user's is not called but where it is used: it may count its calls, or raise.
    if isinstance(optimizer, Optimizer) and type(schedule).__module__.startswith("stoker."):
        highest = max(abs(float(schedule(part / _LOOKS))) for part in range(_LOOKS))
        if (doubt := optimizer.doubt(highest)) is not None:
            yield doubt


def _changes(was: Environment, now: Environment) -> str:
    before, after = dataclasses.asdict(was), dataclasses.asdict(now)
    return ", ".join(
        f"{name}: {before[name]} then, {after[name]} now" for name in before if before[name] != after[name]
    )


def _course(job: Job, step: Step, progress: dict[str, JSON]) -> RunControl:
    """What evaluations have decided so far; how many weights the step's average is of is put back on the way."""
    if isinstance(step.average, EqualAverage):
        step.average.count = int(progress.get("averaged", 0))
    course = RunControl.of(job)
    course.load(progress.get("course", {}))
    return course


def _best_so_far(job: Job, progress: dict[str, JSON]) -> Best:
    """The measure that tells the best checkpoint, and its best value so far.

    It is the one that `select` names; else the first metric, if it is one number and known which way is better: by its
    name, by an attribute `lower_is_better`, or by torchmetrics' `higher_is_better`; else the loss.
    """
    if job.select in ("best", "last"):
        first = next(iter(job.metrics), "loss")
        lower_is_better = says_lower_is_better(first) if gives_one_number(first) else None
        name = "loss" if lower_is_better is None else metric_name(first)
    else:
        name = bare_name(job.select)
        lower_is_better = direction_of(measure_of(job, job.select), list(job.metrics), None)
    found: dict[str, JSON] = progress.get("best", {"value": None, "samples": 0})
    return Best(name, found["value"], found["samples"], lower_is_better=bool(lower_is_better))
