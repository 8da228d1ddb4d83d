"""From a trained step to a finished run: final metrics, weights, record, report, calibration."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime

import safetensors.torch

from stoker import records, reporting, training
from stoker.flow.runs import WEIGHTS, Run
from stoker.flow.starting import Session
from stoker.store import CalibrationStore, cache_root, write_atomic


def final_metrics(session: Session) -> dict[str, float]:
    """Metrics of the weights worth keeping, which are left in the step's model; the test set is used here, once."""
    job, data, step = session.prepared.job, session.prepared.data, session.step
    best = session.store.best() if job.select == "best" and data.valid is not None else None
    if best is not None:
        weights = training.kept_weights(*best)
    else:
        weights = {name: tensor.clone() for name, tensor in step.kept_weights().items()}
    step.average = None
    training.load_weights(step.model, weights, session.directory.path)
    found: dict[str, float] = {}
    for split, samples in (("valid", data.valid), ("test", data.test)):
        if samples is None:
            continue
        started = time.perf_counter()
        metrics = training.evaluate(step, samples, training.evaluation_batch(step))
        found |= {f"{split}/{name}": value for name, value in metrics.items()}
        if split == "test":
            took_s = time.perf_counter() - started
            at = session.position.samples if best is None else best[1].position.samples
            session.loop.telemetry.emit(
                "evaluated", split=split, samples=at, metrics=dict(metrics), took_s=took_s, best=False
            )
    return found


def finish(session: Session, metrics: dict[str, float], peak_bytes: int) -> Run:
    """Write weights, record and report."""
    directory, telemetry = session.directory, session.loop.telemetry
    state = session.step.model.state_dict()
    weights = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}
    write_atomic(directory.path / WEIGHTS, safetensors.torch.save(weights), what="the trained weights")
    done = dataclasses.replace(
        directory.read_run(),
        status="finished",
        metrics=metrics,
        samples=session.position.samples,
        updates=session.position.updates,
        wall_s=telemetry.wall_s,
        failure=None,
    )
    directory.write_run(done)
    telemetry.emit(
        "finished",
        run=directory.name,
        metrics=dict(metrics),
        samples=done.samples,
        updates=done.updates,
        wall_s=done.wall_s,
        report=str(directory.report_path),
        peak_bytes=peak_bytes,
    )
    write_atomic(directory.report_path, reporting.render_html(directory.read_report()), what="the report")
    _calibrate(session, done, peak_bytes)
    return Run(directory, session.prepared.job)


def _calibrate(session: Session, run: records.Run, peak_bytes: int) -> None:
    """Store forecast beside measured, for the next plan; a run in several pieces was not what was forecast."""
    events, environment = session.directory.read_events(), session.directory.read_environment()
    if environment is None or any(event.kind == "resumed" for event in events):
        return
    forecast = session.decision.chosen.forecast
    store = CalibrationStore(cache_root() / "calibration")
    at = datetime.now(UTC).isoformat(timespec="seconds")

    def append(quantity: records.Quantity, expected: float, measured: float) -> None:
        store.append(
            records.Calibration(
                device_model=environment.device_model,
                torch_version=environment.torch_version,
                run=run.name,
                quantity=quantity,
                forecast=expected,
                measured=measured,
                at=at,
            )
        )

    append("total_s", forecast.total_s.value, run.wall_s)
    append("peak_bytes", forecast.peak_bytes.value, float(peak_bytes))
