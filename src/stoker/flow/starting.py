"""From a run's directory to a loop ready to go, wherever the run was left."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from stoker import profiling, records, training
from stoker.errors import BadRun
from stoker.flow.preparation import Prepared
from stoker.jobs import Job
from stoker.loading import BatchSource
from stoker.records import CheckpointManifest, Coupling, Decision, Environment, Position
from stoker.stepping import Step, measure_name
from stoker.store import CheckpointStore, RunDirectory, find_run, runs_root
from stoker.training import Sink

_GUARANTEES = {
    "indexed": "order computed from (seed, epoch, position): resumes at any sample, at once",
}


@dataclass
class Session:
    """A run in this process: what is trained, where it is kept, and how far it is."""

    prepared: Prepared
    directory: RunDirectory
    decision: Decision
    store: CheckpointStore
    loop: training.Loop
    position: Position

    @property
    def step(self) -> Step:
        """The model and its optimiser."""
        return self.loop.step


def ready(
    prepared: Prepared,
    directory: RunDirectory,
    *,
    decision: Decision,
    coupling: Coupling,
    sink: Sink,
    stop: training.StopRequest,
) -> Session:
    """The run in `directory` with its state restored; its lock must be held.

    Raises:
        BadRun: its checkpoints are damaged, or of another model.
    """
    plan, store = decision.chosen.plan, CheckpointStore(directory.checkpoints)
    step = Step(prepared.job, plan, coupling)
    found = _start_from(directory, prepared, store)
    position, progress = Position(), {}
    if found is not None:
        path, manifest, position = found
        progress = training.restore(step, path, manifest) if position.updates else {}
        if not position.updates:  # a fork onto other data: only what was learned is taken over
            training.load_weights(step.model, training.model_weights(path, manifest), path)
    if found is not None and path.parent == store.directory and progress["best"]["samples"] == position.samples:
        store.mark_best(path.name)  # a kill may have come between its writing and its marking
    telemetry = _telemetry(prepared, decision, position, float(progress.get("wall_s", 0.0)), sink)
    loop = training.Loop(
        step=step,
        source=BatchSource(
            prepared.data.train, step.pipeline(prepared.data.train, augmented=True), prepared.extent,
            prepared.job.seed, plan,
        ),
        extent=prepared.extent,
        total_updates=decision.chosen.forecast.total_updates,
        valid=prepared.data.valid,
        evaluate_every=prepared.job.evaluate_every,
        best=training.Best(**progress["best"]) if progress else training.Best(_deciding_measure(prepared.job)),
        checkpointer=training.Checkpointer(store, spec_digest=prepared.spec.digest(), version=stoker_version()),
        telemetry=telemetry,
        stop=stop,
    )  # fmt: skip
    session = Session(prepared, directory, decision, store, loop, position)
    for problem in store.problems:
        telemetry.emit("warned", message=problem)
    if found is not None:
        telemetry.emit("resumed", samples=position.samples, updates=position.updates, checkpoint=str(found[0]))
    _tell_start(session)
    return session


def stoker_version() -> str:
    """The version of the installed package."""
    return version("stoker")


def _telemetry(
    prepared: Prepared, decision: Decision, position: Position, wall_s: float, sink: Sink
) -> training.Telemetry:
    extent, every = prepared.extent, prepared.job.evaluate_every
    forecast, has_valid = decision.chosen.forecast, prepared.data.valid is not None
    left = extent.evaluations(every, forecast.total_updates) - extent.intervals(every, position)
    return training.Telemetry(
        sink,
        total_samples=forecast.total_samples,
        total_updates=forecast.total_updates,
        evaluate_s=forecast.evaluate_s.value if has_valid else 0.0,
        evaluations_left=left if has_valid else 0,
        wall_s=wall_s,
    )


def _start_from(
    directory: RunDirectory, prepared: Prepared, store: CheckpointStore
) -> tuple[Path, CheckpointManifest, Position] | None:
    """The checkpoint to start from and the position it stands for: this run's newest, or its parent's."""
    found = store.newest()
    if found is not None:
        return *found, found[1].position
    run = directory.read_run()
    if run.forked_from is None:
        return None
    parent = find_run(runs_root(), run.forked_from)
    found = CheckpointStore(parent.checkpoints).newest()
    if found is None:
        raise BadRun(f"{parent.name} has no checkpoint to start from")
    theirs, mine = parent.read_spec(), prepared.spec
    same_order = all(theirs.settings.get(key) == mine.settings.get(key) for key in ("batch", "seed"))
    same_data = theirs.data_fingerprint == mine.data_fingerprint
    return *found, found[1].position if same_order and same_data else Position()


def _tell_start(session: Session) -> None:
    """Say what begins, under which guarantee."""
    prepared, telemetry, plan = session.prepared, session.loop.telemetry, session.decision.chosen.plan
    was, device = session.directory.read_environment(), session.directory.read_device()
    now = was if device is None else profiling.environment(device, plan)
    level = (
        "bit-equal on resume" if plan.device == "cpu" else "same law on resume: GPU kernels may not be deterministic"
    )
    if was is not None and now is not None and was != now:
        level = "same mathematics on resume: the environment has changed"
        changes = _changes(was, now)
        telemetry.emit("warned", message=f"the run began elsewhere; it goes on exactly up to rounding ({changes})")
    spec, data = prepared.spec, prepared.data
    sizes = {name: 0 if part is None else len(part) for name, part in
             (("train", data.train), ("valid", data.valid), ("test", data.test))}  # fmt: skip
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


def _changes(was: Environment, now: Environment) -> str:
    before, after = dataclasses.asdict(was), dataclasses.asdict(now)
    return ", ".join(
        f"{name}: {before[name]} then, {after[name]} now" for name in before if before[name] != after[name]
    )


def _deciding_measure(job: Job) -> str:
    """The measure that tells the best checkpoint: the first metric, or the loss."""
    return measure_name(job.metrics[0]) if job.metrics else "loss"
