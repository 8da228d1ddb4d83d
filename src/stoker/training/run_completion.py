"""The end of a run: finished (metrics, weights, record, report, calibration), left unfinished, or failed."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

import safetensors.torch

from stoker import records
from stoker.activity import doing
from stoker.data.files.source import stated_classes
from stoker.errors import BadRun, StokerError
from stoker.loading.datasets import sample_name
from stoker.loading.samples import Samples
from stoker.planning.run_bottleneck import bottleneck_of
from stoker.records import Estimate, Event
from stoker.records.codec import JSON
from stoker.stepping.step_failures import evaluating
from stoker.store import CheckpointStore, RunDirectory, cache_root, calibration_log, write_atomic
from stoker.store.run_files import BOTTLENECK, ENVIRONMENT, KERNELS, RUN, WEIGHTS
from stoker.training.checkpoints import kept_weights, weights_metadata
from stoker.training.evaluation import evaluate
from stoker.training.evaluation_examples import ExampleWatcher, collect_examples, write_examples
from stoker.training.run_handle import Run, write_report
from stoker.training.session import TrainingSession
from stoker.training.slices import SLICE_OVER
from stoker.training.snapshots import matching_weights
from stoker.training.telemetry import Sink, Telemetry, emit_event

_DIVERGED = 3.0
"""A loss that rose by more than this factor of its first value diverged; a smaller rise is overfitting or noise.

Of a first value of 0 or less, as of a log-likelihood, no factor says anything.
"""


def final_metrics(session: TrainingSession) -> dict[str, float]:
    """Metrics of the weights worth keeping, which stay in the step's model; the only use of the test set."""
    job, data, step = session.prepared.job, session.prepared.data, session.step
    session.trained_under = session.plans.decision
    best = session.store.best() if job.evaluation.select != "last" and data.valid is not None else None
    if best is not None:
        weights = kept_weights(*best)
        step.put_own_python(best[1].skeleton.get("python", {}))
    else:
        weights = {name: tensor.clone() for name, tensor in step.kept_weights().items()}
    step.keep_model_weights()
    step.load_model_state(matching_weights(step.model_state(), weights, session.directory.path, world=step.world))
    session.python = step.python_changes()
    whole: dict[str, float] = {}
    watchers: list[ExampleWatcher] = []
    for split, samples in (*data.held_out.items(), ("test", data.test)):
        if samples is None:
            continue
        started = time.perf_counter()
        metrics, watcher = _evaluate(session, samples, split)
        watchers.append(watcher)
        whole |= {f"{split}/{name}": value for name, value in metrics.items()}
        if split == "test":
            took_s = time.perf_counter() - started
            trained = session.position.samples if best is None else best[1].position.samples
            session.loop.telemetry.emit(
                "evaluated", split=split, samples=trained, metrics=dict(metrics), took_s=took_s, best=False
            )
    session.examples = collect_examples(watchers, step.world)
    return whole


def _evaluate(session: TrainingSession, samples: Samples, split: str) -> tuple[dict[str, float], ExampleWatcher]:
    """The final weights' metrics on one set, and the examples seen; in smaller batches where memory is short."""
    step, emit = session.step, session.loop.telemetry.emit
    classes = stated_classes(session.prepared.job.data)

    def work() -> tuple[dict[str, float], ExampleWatcher]:
        name_of, ignored = functools.partial(sample_name, samples), step.objective.ignored
        watcher = ExampleWatcher(split, step.objective.fields, classes, ignored, name_of)
        size, whole = map(session.loop.extent.evaluated_at_once, (step.plan.micro_batch, step.job.batch_size))
        return evaluate(step, samples, size, watcher=watcher, padded_together=whole), watcher

    with evaluating(split):
        metrics, watcher = session.loop.recovery.without_weights(work, session.position)
    if watcher.problem is not None:
        emit("warned", message=f"samples of {split} cannot be shown in the report: {watcher.problem}")
    return metrics, watcher


@doing("writing the weights and the report")
def finish_run(session: TrainingSession, metrics: dict[str, float], peak_bytes: int) -> Run:
    """Write weights, report and at last the record: a run is finished once all of it is written."""
    directory, telemetry = session.directory, session.loop.telemetry
    first, last = session.loop.losses
    if first is not None and last is not None and last - first > _DIVERGED * first > 0:
        message = f"the loss rose from {first:.4g} to {last:.4g}: the run diverged. Lower the learning rate first"
        telemetry.emit("warned", message=message)
    state = session.step.model_state() if session.weights is None else session.weights
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    metadata = weights_metadata({}, session.python)
    write_atomic(directory.path / WEIGHTS, safetensors.torch.save(weights, metadata), what="the trained weights")
    done = dataclasses.replace(
        directory.read_run(),
        status="finished",
        metrics=metrics,
        samples=session.position.samples,
        updates=session.position.updates,
        wall_s=telemetry.wall_s,
        failure=None,
        ended_early=session.loop.course.verdict,
    )
    kernels = directory.read(KERNELS) if session.is_profiled else None
    profile = {"folder": str(directory.profile_path), "files": dict(kernels.files)} if kernels is not None else None
    fields: dict[str, JSON] = {
        "run": directory.name,
        "metrics": dict(metrics),
        "loss": last,
        "samples": done.samples,
        "updates": done.updates,
        "wall_s": done.wall_s,
        "ended_early": done.ended_early,
        "report": str(directory.report_path),
        "peak_bytes": peak_bytes,
        "bottleneck": records.to_json(_bottleneck(session, done)),
        "profile": profile,
    }
    with _warn_on_error(telemetry, "the samples that the report shows"):
        write_examples(directory, session.examples)
    with _warn_on_error(telemetry, f"the report (`stoker report {directory.path}` writes it later)"):
        finished = Event(kind="finished", at=time.time(), fields=fields)  # in the report before it is in the log
        report = directory.read_report()
        write_report(directory, dataclasses.replace(report, run=done, events=(*report.events, finished)))
    with _warn_on_error(telemetry, "how the forecast compares, for the next plan,"):
        _calibrate(session, done, peak_bytes)
    directory.write(RUN, done)
    telemetry.emit("finished", **fields)
    return Run(directory, session.prepared.job)


@contextmanager
def _warn_on_error(telemetry: Telemetry, what: str) -> Iterator[None]:
    """Turn an error of what follows training into a warning: the weights are kept."""
    try:
        yield
    except Exception as problem:  # noqa: BLE001 - a mistake in drawing a figure must not cost hours of training either
        telemetry.emit("warned", message=f"{what} could not be written: {problem}")


def _bottleneck(session: TrainingSession, done: records.Run) -> records.Bottleneck | None:
    """The run's bottleneck, written into its directory; figures that contradict each other give warnings."""
    directory, telemetry = session.directory, session.loop.telemetry
    with _warn_on_error(telemetry, "what held the run back"):
        report = dataclasses.replace(directory.read_report(), run=done, decision=session.trained_under)
        bottleneck = bottleneck_of(session.prepared, report)
        if bottleneck is None:
            return None
        directory.write(BOTTLENECK, bottleneck)
        for problem in bottleneck.problems:
            telemetry.emit("warned", message=problem)
        return bottleneck
    return None


def _calibrate(session: TrainingSession, run: records.Run, peak_bytes: int) -> None:
    """Store forecast and measurement for the next plan, unless the run was resumed, changed, unsettled or profiled.

    The peak of a run that tried plans is theirs too, and says nothing of the chosen one.
    """
    events, environment = session.directory.read_events(), session.directory.read(ENVIRONMENT)
    schedule, chosen = session.plans.schedule, session.plans.decision.chosen
    is_changed = any(switch.kind == "changed" for switch in schedule.switches)
    if session.is_profiled or not schedule.is_settled or is_changed or any(e.kind == "resumed" for e in events):
        return
    if environment is None:
        return
    log = calibration_log(cache_root())
    at = datetime.now(UTC).isoformat(timespec="seconds")

    def append(quantity: records.Quantity, expected: Estimate, measured: float) -> None:
        log.append(
            records.Calibration(
                device_model=environment.device_model,
                torch_version=environment.torch_version,
                run=run.name,
                quantity=quantity,
                forecast=expected.value,
                measured=measured,
                at=at,
                basis=expected.basis,
            )
        )

    for forecast in (chosen.forecast, chosen.untried):
        if forecast is not None:
            if run.ended_early is None:
                append("total_s", forecast.total_s, run.wall_s)
            if schedule.settled is None:
                append("peak_bytes", forecast.peak_bytes, float(peak_bytes))


def leave_unfinished(session: TrainingSession, reason: str) -> Run:
    """Leave the run to be continued."""
    directory, position, telemetry = session.directory, session.position, session.loop.telemetry
    more: dict[str, JSON] = {}
    if session.loop.slice is not None and reason == SLICE_OVER:
        left, advice = session.loop.slice.left_after(position.samples, telemetry.total_samples)
        more = {"slices_left": left}
        if advice:
            telemetry.emit("warned", message=advice)
    telemetry.emit("stopped", reason=reason, samples=position.samples, **more)
    run = directory.read_run()
    directory.write(
        RUN,
        dataclasses.replace(
            run,
            status="unfinished",
            failure=None,
            samples=position.samples,
            updates=position.updates,
            wall_s=telemetry.wall_s,
        ),
    )
    return Run(directory, session.prepared.job)


def record_failure(directory: RunDirectory, error: StokerError, sinks: Sequence[Sink], *, is_new: bool) -> None:
    """Record the failure as far as the disk allows; a run begun by this command that kept nothing leaves nothing."""
    samples, is_left = 0, not is_new
    with suppress(StokerError):  # the first error is the one to report
        is_left = not is_new or bool(CheckpointStore(directory.checkpoints).names()) or directory.dumps.exists()
        if not is_left:
            directory.discard()
            return
        if isinstance(error, BadRun):
            return  # the directory cannot be used, and is left as it is
        record = dataclasses.replace(directory.read_headway(), status="failed", failure=error.message)
        samples = record.samples
        directory.write(RUN, record)
    for sink in sinks if is_left else ():
        with suppress(StokerError):
            emit_event([sink], "stopped", reason=error.message, samples=samples)
