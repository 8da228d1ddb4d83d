"""From a trained step to a finished run: final metrics, weights, record, report, calibration."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime

import safetensors.torch

from stoker import records, reporting, training
from stoker.flow.preparation import Prepared
from stoker.flow.runs import WEIGHTS, Run, read_report
from stoker.records import Event, Position
from stoker.stepping import Step
from stoker.store import CalibrationStore, CheckpointStore, RunDirectory, cache_root, write_atomic
from stoker.training import Sink


def final_metrics(
    prepared: Prepared, step: Step, store: CheckpointStore, loop: training.Loop, sink: Sink
) -> dict[str, float]:
    """Metrics of the weights worth keeping, which are left in the step's model; the test set is used here, once."""
    if prepared.job.select == "best" and prepared.data.valid is not None and (best := store.best()) is not None:
        weights = training.kept_weights(*best)
    else:
        weights = {name: tensor.clone() for name, tensor in step.kept_weights().items()}
    step.average = None
    training.load_weights(step.model, weights, store.directory)
    found: dict[str, float] = {}
    for split, samples in (("valid", prepared.data.valid), ("test", prepared.data.test)):
        if samples is not None:
            started = time.perf_counter()
            metrics = training.evaluate(step, samples, training.evaluation_batch(step))
            found |= {f"{split}/{name}": value for name, value in metrics.items()}
            if split == "test":
                loop.telemetry.emit("evaluated", split=split, samples=loop.best.samples or loop.telemetry.total_samples,
                                    metrics=dict(metrics), took_s=time.perf_counter() - started, best=False)  # fmt: skip
    return found


def finish(
    prepared: Prepared,
    directory: RunDirectory,
    step: Step,
    loop: training.Loop,
    position: Position,
    metrics: dict[str, float],
    peak_bytes: int,
    sink: Sink,
) -> Run:
    """Write weights, record and report."""
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in step.model.state_dict().items()}
    write_atomic(directory.path / WEIGHTS, safetensors.torch.save(weights), what="the trained weights")
    wall_s = loop.telemetry.wall_s
    done = dataclasses.replace(
        directory.read_run(), status="finished", metrics=metrics, samples=position.samples, updates=position.updates,
        wall_s=wall_s, failure=None,
    )  # fmt: skip
    directory.write_run(done)
    sink(Event(kind="finished", at=time.time(), fields={
        "run": directory.name, "metrics": metrics, "samples": position.samples, "updates": position.updates,
        "wall_s": wall_s, "report": str(directory.report_path), "peak_bytes": peak_bytes}))  # fmt: skip
    write_atomic(directory.report_path, reporting.render_html(read_report(directory)), what="the report")
    _calibrate(directory, done, peak_bytes)
    return Run(directory, prepared.job)


def _calibrate(directory: RunDirectory, run: records.Run, peak_bytes: int) -> None:
    """Store forecast beside measured, for the next plan."""
    decision, environment = directory.read_decision(), directory.read_environment()
    if decision is None or environment is None or any(e.kind == "resumed" for e in directory.read_events()):
        return
    forecast = decision.chosen.forecast
    pairs = {"total_s": (forecast.total_s.value, run.wall_s), "peak_bytes": (forecast.peak_bytes.value, peak_bytes)}
    store = CalibrationStore(cache_root() / "calibration")
    for quantity, (expected, measured) in pairs.items():
        store.append(
            records.Calibration(
                device_model=environment.device_model, torch_version=environment.torch_version, run=run.name,
                quantity=quantity, forecast=expected, measured=float(measured),  # type: ignore[arg-type]  # its names
                at=datetime.now(UTC).isoformat(timespec="seconds"),
            )  # fmt: skip
        )
