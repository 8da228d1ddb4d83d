"""A training session: the loop, ready to run, with the state of the run's newest checkpoint.

`build_session` restores a new run, a resumed one, a fork (from its parent's checkpoint), or the state that survivors of
a generation carry over.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import torch

from stoker import activity, records
from stoker.devices import planned_devices
from stoker.errors import BadRun
from stoker.jobs import Job, Optimizer
from stoker.jobs.early_stopping import bare_name
from stoker.jobs.job import measure_of
from stoker.jobs.metrics import direction_of, gives_one_number, metric_name, says_lower_is_better
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import data_indices
from stoker.loading.order import RandomStream, key_of, seed_generators
from stoker.planning.resolved_job import ResolvedJob
from stoker.records import CheckpointManifest, Decision, Device, JobSpec, Position
from stoker.records.codec import JSON
from stoker.records.run import DATA_GUARANTEES, ExampleSet
from stoker.stepping.python_state import unsaved_tensors
from stoker.stepping.step import Step
from stoker.stepping.weight_averaging import EqualAverage
from stoker.stepping.world import ALONE, World
from stoker.store import CheckpointStore, RunDirectory, find_run, runs_root
from stoker.store.checkpoint_store import order_of_name
from stoker.store.run_files import ENVIRONMENT, RUN
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
from stoker.training.plan_in_force import PlanInForce, Replanned
from stoker.training.plan_trials import PlanTrials
from stoker.training.rank_messages import require_visible_to_all_ranks
from stoker.training.recovery import Recovery
from stoker.training.run_control import RunControl
from stoker.training.run_setup import environment
from stoker.training.signals import StopRequest
from stoker.training.slices import Slice
from stoker.training.snapshots import matching_weights
from stoker.training.telemetry import Sink, Telemetry
from stoker.training.watchdog import Watchdog, patience_s, slowest_phase_s

_ORDER_SETTINGS = ("batch", "seed", "freeze", "sampling")
"""Settings of a job that, with its data, decide which samples came before an update."""


@dataclass(frozen=True)
class _Start:
    """The checkpoint that a run goes on from, and its position in this run.

    `is_own`: this run wrote it. Of a parent's checkpoint, `keeps_plateau`: both runs have the same schedule, so that
    a learning rate lowered by a plateau stays lowered.
    """

    path: Path
    manifest: CheckpointManifest
    position: Position
    is_own: bool
    keeps_plateau: bool = True


@dataclass
class TrainingSession:
    """A run in this process: its loop, its directory and its position."""

    prepared: ResolvedJob
    directory: RunDirectory
    plans: PlanInForce
    store: CheckpointStore
    loop: Loop
    position: Position
    is_profiled: bool = False
    trained_under: Decision | None = None
    """The decision with the plan of the last update, once training has ended: evaluations may need a smaller one."""
    metrics: dict[str, float] | None = None
    """Final metrics, of the weights worth keeping."""
    weights: dict[str, torch.Tensor] | None = None
    """The final weights, gathered from all processes; None in a process alone."""
    python: dict[str, JSON] = field(default_factory=dict)
    """The plain Python values that belong to the final weights, once they are evaluated."""
    examples: tuple[ExampleSet, ...] = ()
    """Samples of held-out sets with the final model's outputs."""

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
    plans: PlanInForce,
    sink: Sink,
    stop: StopRequest,
    replanned: Callable[[Replanned], None],
    world: World = ALONE,
    carried: SurvivorState | None = None,
    age_s: float = 0.0,
    slice_: Slice | None = None,
) -> TrainingSession:
    """The run in `directory` with its state restored; its lock must be held.

    Every process calls this. State carried over goes first: the furthest rank gives its state to the others; where no
    rank carries any, all start from the last checkpoint. `age_s` is how long this command has trained the run, lost
    processes included [s]: losses that come faster than checkpoints are due must not postpone them for ever.
    `slice_` is the time that this process may take.

    Raises:
        BadRun: its checkpoints are damaged, or of another model; or the run it was forked from went further.
    """
    identity = directory.read_run().spec_digest
    store = CheckpointStore(directory.checkpoints, spec_digest=identity)
    if world.layout.world_size > 1:
        require_visible_to_all_ranks(world, directory.path)
    start, total_updates = None, plans.decision.chosen.forecast.total_updates
    if world.layout.world_size == 1:  # a process alone replays its schedule from where it begins
        start = None if carried is not None else _start_from(directory, prepared, store, total_updates, world)
        begun = carried.position.updates if carried else start.position.updates if start else 0
        plans.at(max(0, begun - 1))  # the state is laid out for it; the loop switches as it did
    # The plan of several processes names the GPU of the first one.
    decision, plan = plans.decision, dataclasses.replace(plans.plan, device=device.torch_name)
    step = Step(prepared.job, plan, plans.coupling, world=world)
    seed_generators(key_of(RandomStream.MICRO_BATCH, prepared.job.seed))
    given = state_from_furthest_rank(step, carried)
    if given is not None:
        position, progress = given.position, given.progress
    else:
        if world.layout.world_size > 1:
            start = _start_from(directory, prepared, store, total_updates, world)
        position = Position() if start is None else start.position
        progress = {} if start is None else _restore(step, start)
        if start is not None and world.is_first:
            _repeat_if_missed(prepared, directory, store, start, progress)
    wall_s = float(progress.get("wall_s", 0.0))
    telemetry = _telemetry(prepared, decision, position, sink, device=device.torch_name, wall_s=wall_s)
    step.on_composed = telemetry.replanned
    source = BatchSource(
        prepared.data.train,
        step.pipeline(prepared.data.train, augmented=True),
        prepared.extent,
        prepared.job.seed,
        plan,
        split=step.split(),
    )
    source.reader.state = progress.get("reader")
    checkpointer = Checkpointer(store, spec_digest=identity, version=version("stoker"), kept_in=directory.kept_weights)
    loop = Loop(
        step=step,
        source=source,
        extent=prepared.extent,
        total_updates=decision.chosen.forecast.total_updates,
        held_out=prepared.data.held_out,
        evaluate_every=prepared.job.evaluation.every,
        keep_every=prepared.job.evaluation.keep_every,
        best=_best_so_far(prepared.job, progress),
        checkpointer=checkpointer,
        telemetry=telemetry,
        stop=stop,
        recovery=Recovery(
            step,
            tell=telemetry.emit,
            replanned=replanned,
            dumps=directory.dumps,
            in_data=functools.partial(data_indices, prepared.data.train),
        ),
        watchdog=Watchdog(
            telemetry,
            source.watch,
            stop,
            tell=lambda words: telemetry.emit("warned", message=words),
            dumps=directory.dumps,
            slowest_s=slowest_s(prepared.job, decision),
            is_busy=lambda: checkpointer.is_writing or activity.is_long(),
            least_s=patience_s(processes=world.layout.world_size),
        ),
        plans=plans if world.layout.world_size == 1 else None,
        unevaluated=None if given is None else given.unevaluated,
        unsaved_s=_unsaved_s(store, age_s),
        course=RunControl.of(prepared.job),
        saves_first=start is not None and not start.is_own,
        slice=slice_
        and slice_.expecting(
            save_s=progress.get("save_s", decision.chosen.forecast.checkpoint_s.high),
            evaluate_s=progress.get("evaluate_s", decision.chosen.forecast.evaluate_s.value),
        ),
    )
    if loop.plans is not None and any(switch.kind == "trial" for switch in plans.schedule.switches):
        _try_plans(loop, prepared, device, plans)
    loop.course.load(progress.get("course", {}))
    if isinstance(step.average, EqualAverage):
        step.average.count = int(progress.get("averaged", 0))
    step.loss_scale.load(progress.get("loss_scale"))
    step.loss_scale.on_overflow = loop.tell_overflow
    if plan.device_mtbf_h is not None:
        loop.save_every_s = float(progress.get("save_every_s", plan.checkpoint_every_s))
    session = TrainingSession(prepared, directory, plans, store, loop, position)
    for problem in store.problems:
        telemetry.emit("warned", message=problem)
    if start is not None:
        _note_that_it_goes_on(directory, world)
        telemetry.emit("resumed", samples=position.samples, updates=position.updates, checkpoint=str(start.path))
    if given is None:
        _announce_start(session, device)
    return session


def _try_plans(loop: Loop, prepared: ResolvedJob, device: Device, plans: PlanInForce) -> None:
    """Let the loop try plans on the run's own updates, until that is settled; and compare samples where it must."""
    threads = max(plans.schedule.began.threads, plans.schedule.at(0).threads)  # as --threads allowed
    place = planned_devices(device.torch_name, (device,))[0].limited_to(plans.decision.memory_limit_bytes, threads)
    loop.trials = PlanTrials(prepared, place, loop.step, plans, loop.telemetry, loop.total_updates)
    loop.recovery.compare = loop.trials.compare_samples
    if loop.watchdog is not None:
        loop.watchdog.hangs = loop.hangs


def _repeat_if_missed(
    prepared: ResolvedJob, directory: RunDirectory, store: CheckpointStore, start: _Start, progress: dict[str, JSON]
) -> None:
    """Repeat what follows the writing of a checkpoint, where a kill came in between: mark the best, keep weights.

    The mark may also be of a later checkpoint, which was damaged and passed over: its evaluation is made again.
    """
    every, position, folder = prepared.job.evaluation.keep_every, start.position, directory.kept_weights
    at_best = progress["best"]["samples"] if "best" in progress else 0
    written = [name for name in store.names() if (order_of_name(name) or (None,))[0] == at_best]
    if at_best and written:
        store.mark_best(start.path.name if at_best == position.samples else written[-1])
    if not start.is_own:
        return
    if prepared.job.evaluation.select != "last" and (damage := store.damage_of_best()) is not None:
        store.problems.append(
            f"{damage} Unless a later evaluation is better, the run needs it at its end: restore it from a copy."
        )
    if every is None or position.updates == 0 or kept_path(folder, position).exists():
        return
    if evaluation_is_due(every, prepared.extent, prepared.extent.position(position.updates - 1), position):
        keep_weights(folder, start.path, start.manifest, kept_at(prepared.extent, position))


def slowest_s(job: Job, decision: Decision) -> float:
    """Forecast time of the slowest phase of the run [s]; see `slowest_phase_s`."""
    sync_interval = 1 if job.sync is None else job.sync.interval(job.batch_size)
    return slowest_phase_s(decision.chosen.forecast, sync_interval)


def _unsaved_s(store: CheckpointStore, age_s: float) -> float:
    """Time since this command saved a checkpoint, or since it began [s]."""
    names = store.names()
    if not names:
        return age_s
    return min(age_s, max(0.0, time.time() - (store.directory / names[-1]).stat().st_mtime))


def _telemetry(
    prepared: ResolvedJob, decision: Decision, position: Position, sink: Sink, *, device: str, wall_s: float
) -> Telemetry:
    extent, every = prepared.extent, prepared.job.evaluation.every
    forecast, has_valid = decision.chosen.forecast, prepared.data.valid is not None
    left = extent.evaluations(every, forecast.total_updates) - extent.intervals(every, position) + 1
    return Telemetry(
        sink,
        total_samples=forecast.total_samples,
        total_updates=forecast.total_updates,
        evaluate_s=forecast.evaluate_s.value if has_valid and decision.is_settled else 0.0,
        evaluations_left=left if has_valid else 0,
        device=device,
        wall_s=wall_s,
    )


def _restore(step: Step, start: _Start) -> dict[str, JSON]:
    """Put the checkpoint's state into `step`; returns the progress to go on with.

    A fork keeps how far data were read, the number of weights in an average and a lowered learning rate. Its time, its
    best and its early stopping begin at zero: the latter may have ended its parent.
    """
    if not start.position.updates:
        weights = model_weights(start.path, start.manifest)
        step.load_model_state(matching_weights(step.model_state(), weights, start.path, world=step.world))
        step.begin_at_weights()
        return {}
    progress = restore(step, start.path, start.manifest)
    if start.is_own:
        return progress
    kept = {key: value for key, value in progress.items() if key not in ("wall_s", "best", "course", "save_every_s")}
    if start.keeps_plateau and "course" in progress:
        kept["course"] = {**progress["course"], "verdict": None, "stops": None}
    return kept


def _start_from(
    directory: RunDirectory, prepared: ResolvedJob, store: CheckpointStore, total_updates: int, world: World
) -> _Start | None:
    """The checkpoint to start from: this run's newest, or its parent's."""
    newest = newest_together(world, store)
    if newest is not None:
        return _Start(*newest, newest[1].position, is_own=True)
    run = directory.read_run()
    if run.forked_from is None:
        return None
    parent = find_run(runs_root(), run.forked_from)
    theirs_store = CheckpointStore(parent.checkpoints, spec_digest=parent.read_run().spec_digest)
    newest = newest_together(world, theirs_store)
    if newest is None:
        raise BadRun(
            f"{parent.name} has no checkpoint to start from",
            remedy=f"If it is kept at a URL, give --fork {parent.name} --keep URL: its checkpoints are fetched.",
        )
    theirs, mine = parent.read_spec(), prepared.spec
    position = newest[1].position if _continues(theirs, mine) else Position()
    if position.updates >= total_updates:
        raise BadRun(
            f"{parent.name} made {position.updates} updates; this job makes {total_updates}, so nothing is left to do",
            remedy="Fork it under a longer job (until=…).",
        )
    schedules = [spec.settings.get("schedule") for spec in (theirs, mine)]
    for number, schedule in enumerate(schedules):
        if isinstance(schedule, dict):  # a fork may change the length of the run
            schedules[number] = {key: value for key, value in schedule.items() if key != "run"}
    return _Start(*newest, position, is_own=False, keeps_plateau=schedules[0] == schedules[1])


def _continues(theirs: JobSpec, mine: JobSpec) -> bool:
    """Whether a fork continues at its parent's position; else it takes over the weights and counts from 0."""
    same_order = all(theirs.settings.get(key) == mine.settings.get(key) for key in _ORDER_SETTINGS)
    optimizers = [spec.settings.get("optimizer") for spec in (theirs, mine)]
    for number, optimizer in enumerate(optimizers):
        if isinstance(optimizer, dict) and "type" in optimizer:  # Stoker's own: settings may differ, state may not
            optimizers[number] = optimizer["type"]
    return same_order and theirs.data_fingerprint == mine.data_fingerprint and optimizers[0] == optimizers[1]


def _note_that_it_goes_on(directory: RunDirectory, world: World) -> None:
    """A run that had failed is unfinished from here on, also if it is killed."""
    record = directory.read_run()
    if world.rank == 0 and record.status == "failed":
        directory.write(RUN, dataclasses.replace(record, status="unfinished", failure=None))


def _announce_start(session: TrainingSession, device: Device) -> None:
    """Send the event that training begins, with the exactness it guarantees, and warnings about the job."""
    prepared, telemetry, plan = session.prepared, session.loop.telemetry, session.plans.plan
    was, now = session.directory.read(ENVIRONMENT), environment(device, plan)
    level = (
        "bit-equal on resume" if plan.device == "cpu" else "same law on resume: GPU kernels may not be deterministic"
    )
    if session.loop.plans is not None and session.plans.schedule.switches:
        level += ", each update under the plan that it had" if plan.device == "cpu" else ""
        now = dataclasses.replace(now, threads=now.threads if was is None else was.threads)  # the schedule's
    if was is not None and was != now:
        level = "same mathematics on resume: the environment has changed"
        before, after = dataclasses.asdict(was), dataclasses.asdict(now)
        changes = ", ".join(
            f"{name}: {before[name]} then, {after[name]} now" for name in before if before[name] != after[name]
        )
        telemetry.emit("warned", message=f"the run began elsewhere; it goes on exactly up to rounding ({changes})")
    if unsaved := session.loop.step.coupling.unsaved:
        level = f"none on resume: checkpoints do not hold {' and '.join(unsaved)}, from which the next pass goes on"
        telemetry.emit(
            "warned", message=f"{level}, nor do the weights of `run.model()`; keep it in a persistent buffer"
        )
    for doubt in _doubts(session) if not session.position.updates else ():
        telemetry.emit("warned", message=doubt)
    spec, data = prepared.spec, prepared.data
    sizes = {
        "train": len(data.train),
        "valid": sum(map(len, data.held_out.values())),
        "test": 0 if data.test is None else len(data.test),
    }
    telemetry.emit(
        "started",
        samples=session.position.samples,
        total_samples=telemetry.total_samples,
        total_updates=telemetry.total_updates,
        environment=records.to_json(now),
        level=level,
        run=session.directory.name,
        data={
            "class": spec.data_class,
            "guarantee": DATA_GUARANTEES[spec.data_class],
            "name": data.train.name,
            **sizes,
        },
    )


_COUNTERS = {"step", "steps", "global_step", "epoch", "iteration", "update", "batch"}


def _counter_of(schedule: object) -> str | None:
    """The name of a function's first argument if it is one for a count, as schedules of PyTorch take; else None."""
    first = next(iter(inspect.signature(schedule).parameters), None) if inspect.isfunction(schedule) else None
    return first if first in _COUNTERS else None


def _doubts(session: TrainingSession) -> Iterator[str]:
    """Probable mistakes in the job."""
    yield from session.step.coupling.notices
    optimizer, schedule = session.prepared.job.optimizer, session.prepared.job.schedule
    # A user's schedule is called by training alone: it may count its calls, or raise.
    if isinstance(optimizer, Optimizer) and type(schedule).__module__.startswith("stoker."):
        highest = max(abs(float(schedule(part / 64))) for part in range(64))
        if (doubt := optimizer.doubt(highest)) is not None:
            yield doubt
    if (counter := _counter_of(schedule)) is not None:
        yield (
            f"the schedule is given the share of the run that is done, from 0 to 1, and calls it {counter!r}: where a "
            "count is meant, as for LambdaLR, write it for shares, or take one of stoker.schedules"
        )
    if not isinstance(optimizer, Optimizer):
        if session.prepared.job.step is None:
            yield from _left_out(session.step)
        if unsaved := unsaved_tensors(session.step.optimizer):
            yield (
                f"the optimiser keeps tensors in {', '.join(map(repr, unsaved))}, which no checkpoint holds: a resumed "
                "run differs. Keep them in its self.state[parameter], or return them in state_dict() and put them "
                "back in load_state_dict()"
            )
    job = session.prepared.job
    is_chosen_by_loss = job.evaluation.select == "best" and _best_so_far(job, {}).name == "loss"
    if job.metrics and is_chosen_by_loss and session.loop.held_out:
        yield (
            "the best weights are those of the lowest loss on valid: it is not known whether more is better of "
            f'{metric_name(job.metrics[0])}. Give it an attribute lower_is_better, or say Evaluation(select="loss")'
        )


def _left_out(step: Step) -> Iterator[str]:
    """Parameters to train that the optimiser, which is the user's, was not given."""
    given = {id(parameter) for group in step.optimizer.param_groups for parameter in group["params"]}
    is_whole = step.world.layout.world_size == 1
    left = [name for name, p in step.model.named_parameters() if is_whole and p.requires_grad and id(p) not in given]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        yield (
            f"the optimiser does not have {left[0]}{more}, which therefore stay as they are; "
            "if that is meant, requires_grad_(False) or Job(freeze=…) saves their gradients"
        )


def _best_so_far(job: Job, progress: dict[str, JSON]) -> Best:
    """The measure that selects the best checkpoint, and its best value so far.

    It is the one that `select` names. Otherwise it is the first metric, if that is one number with a known direction
    (its name, an attribute `lower_is_better`, or torchmetrics' `higher_is_better`), and else the loss.
    """
    if job.evaluation.select in ("best", "last"):
        first = next(iter(job.metrics), "loss")
        lower_is_better = says_lower_is_better(first) if gives_one_number(first) else None
        name = "loss" if lower_is_better is None else metric_name(first)
    else:
        name = bare_name(job.evaluation.select)
        lower_is_better = direction_of(measure_of(job, job.evaluation.select), list(job.metrics), None)
    best: dict[str, JSON] = progress.get("best", {})
    if best.get("name") != name:  # values of another measure cannot be compared
        best = {"value": None, "samples": 0}
    return Best(name, best["value"], best["samples"], lower_is_better=bool(lower_is_better))
