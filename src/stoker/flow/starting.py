"""From a run's directory to a loop ready to go, wherever the run was left."""

from __future__ import annotations

import dataclasses
from importlib.metadata import version
from pathlib import Path

from stoker import profiling, records, training
from stoker.errors import BadRun
from stoker.flow.preparation import Prepared
from stoker.jobs import Job
from stoker.loading import BatchSource
from stoker.records import Decision, Plan, Position
from stoker.stepping import Step, measure_name
from stoker.store import CheckpointStore, RunDirectory, find_run, runs_root
from stoker.training import Sink

_GUARANTEES = {
    "indexed": "order computed from (seed, epoch, position): resumes at any sample, at once",
}


def ready(
    prepared: Prepared,
    directory: RunDirectory,
    decision: Decision,
    step: Step,
    store: CheckpointStore,
    sink: Sink,
    stop: training.StopRequest,
) -> tuple[training.Loop, Position]:
    """The loop, with its state restored, and where it begins."""
    job, data, extent, chosen = prepared.job, prepared.data, prepared.extent, decision.chosen
    total = chosen.forecast.total_updates
    found = _start_from(directory, prepared, store)
    position, progress = Position(), {}
    if found is not None:
        path, manifest, position = found
        progress = training.restore(step, path, manifest)
    best = training.Best(**progress["best"]) if progress.get("best") and position.updates else _no_best(job)
    done = extent.intervals(job.evaluate_every, position)
    telemetry = training.Telemetry(
        sink,
        total_samples=extent.position(total).samples,
        total_updates=total,
        evaluate_s=chosen.forecast.evaluate_s.value if data.valid is not None else 0.0,
        evaluations_left=0 if data.valid is None else extent.evaluations(job.evaluate_every, total) - done,
        wall_s=float(progress.get("wall_s", 0.0)) if position.updates else 0.0,
    )
    for problem in store.problems:
        telemetry.emit("warned", message=problem)
    if found is not None:
        telemetry.emit("resumed", samples=position.samples, updates=position.updates, checkpoint=str(found[0]))
    _tell_start(prepared, directory, chosen.plan, telemetry, position)
    pipeline = step.pipeline(data.train, augmented=True)
    loop = training.Loop(
        step=step,
        source=BatchSource(data.train, pipeline, extent, job.seed, chosen.plan),
        extent=extent,
        total_updates=total,
        valid=data.valid,
        evaluate_every=job.evaluate_every,
        best=best,
        checkpointer=training.Checkpointer(store, spec_digest=prepared.spec.digest(), version=stoker_version()),
        telemetry=telemetry,
        stop=stop,
    )
    return loop, position


def _start_from(
    directory: RunDirectory, prepared: Prepared, store: CheckpointStore
) -> tuple[Path, records.CheckpointManifest, Position] | None:
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
    theirs = parent.read_spec()
    mine = prepared.spec
    same_order = all(theirs.settings.get(key) == mine.settings.get(key) for key in ("batch", "seed"))
    same_data = theirs.data_fingerprint == mine.data_fingerprint
    return *found, found[1].position if same_order and same_data else Position()


def _tell_start(
    prepared: Prepared, directory: RunDirectory, plan: Plan, telemetry: training.Telemetry, position: Position
) -> None:
    was = directory.read_environment()
    device = directory.read_device()
    now = was if device is None else profiling.environment(device, plan)
    level = "bit-equal on resume" if plan.device == "cpu" else "same law on resume (GPU kernels may not be deterministic)"
    if was is not None and now is not None and was != now:
        level = "same mathematics"
        telemetry.emit("warned", message="this is another environment than the run began in: "
                       f"resuming is exact up to rounding ({_changes(was, now)})")  # fmt: skip
    spec, data = prepared.spec, prepared.data
    telemetry.emit(
        "started", samples=position.samples, total_samples=telemetry.total_samples,
        total_updates=telemetry.total_updates, environment=records.to_json(now), level=level, run=directory.name,
        data={"class": spec.data_class, "guarantee": _GUARANTEES[spec.data_class], "name": data.train.name,
              "train": len(data.train), "valid": 0 if data.valid is None else len(data.valid),
              "test": 0 if data.test is None else len(data.test)},
    )  # fmt: skip


def _changes(was: records.Environment, now: records.Environment) -> str:
    before, after = dataclasses.asdict(was), dataclasses.asdict(now)
    return ", ".join(f"{name}: {before[name]} then, {after[name]} now" for name in before if before[name] != after[name])


def _no_best(job: Job) -> training.Best:
    return training.Best(measure_name(job.metrics[0]) if job.metrics else "loss")


def stoker_version() -> str:
    return version("stoker")
