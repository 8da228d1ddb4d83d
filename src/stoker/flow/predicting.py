"""`stoker predict`: rows from files through an exported model into Parquet, continued where it was cut off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from stoker.artifacts import Artifact, excess, read
from stoker.devices import attached_cpu
from stoker.engines import Engine, load
from stoker.errors import BadArtifact, BadRun
from stoker.predicting.beginning import elsewhere, new_job
from stoker.predicting.directory import OutputDirectory, next_free
from stoker.predicting.identity import differences
from stoker.predicting.request import PredictOptions, Request, request
from stoker.predicting.running import Running
from stoker.records.prediction import PredictionEvent, PredictionJob, PredictionSummary
from stoker.store import RunLock

Sink = Callable[[PredictionEvent], None]


def predict(
    model: str | Path,
    inputs: Sequence[str | Path],
    out: str | Path,
    options: PredictOptions | None = None,
    *,
    new: bool = False,
    sink: Sink = lambda _: None,
) -> PredictionSummary:
    """Answer every row of some files, and write the answers as Parquet into `out`; the same call continues.

    Args:
        model: directory of an exported model, or of one of its versions.
        inputs: files, folders and patterns.
        out: directory of the job; with `new`, the first of `out`, `out-2`, … that is free.
        options: how.
        new: start over even if the job could be continued.
        sink: is told what happens.

    Raises:
        BadArtifact: the model cannot be used, or does not give here what it gave when it was exported.
        BadJob: the files, or what was asked for, do not fit the model.
        BadRun: `out` holds another job, or is in use.
        RunFailed: it could not go on; what is done is kept.
    """
    artifact = read(model)
    artifact.verify()
    asked = request(artifact, [str(name) for name in inputs], options or PredictOptions())
    place = next_free(Path(out)) if new else Path(out)
    with RunLock(place):
        directory = OutputDirectory(place)
        job = _begun_job(directory, asked)
        summary = None if job is None else directory.read_summary()
        if summary is not None:
            directory.finish(summary)
            sink(PredictionEvent(kind="finished", at=time.time(), fields=asdict(summary) | {"computed_rows": 0}))
            return summary
        return _compute(asked, job, directory, sink)


def _begun_job(directory: OutputDirectory, asked: Request) -> PredictionJob | None:
    """The job to continue, if one was begun; another than what is asked for is an error."""
    job = directory.read_job()
    if job is None:
        if not directory.is_fresh():
            raise BadRun(f"{directory.path} holds other things", remedy="Choose a new -o DIR, or add --new.")
        return None
    if changed := differences(job, asked.asked, asked.sources):
        raise BadRun(
            f"{directory.path} was begun with something else: {'; '.join(changed)}",
            remedy="Give what it was begun with to continue it, or start over beside it with --new.",
        )
    return job


def _compute(asked: Request, job: PredictionJob | None, directory: OutputDirectory, sink: Sink) -> PredictionSummary:
    """Begin the job if it was not, and compute what is not done, on as many engines as the cores hold."""
    threads = asked.asked.threads or (job.threads if job else 1)
    engines = load(asked.artifact, instances=max(1, attached_cpu().cores // threads), threads=threads)
    try:
        _check_golden(asked.artifact, engines[0])
        if job is None:
            job = new_job(asked, engines, threads, clock=time.perf_counter, now=datetime.now(UTC))
            directory.begin(job)
        elif changed := elsewhere(job, asked.artifact.manifest.engine):
            message = f"continued elsewhere ({changed}): the rest agrees within tolerance, not bit for bit"
            sink(PredictionEvent(kind="warned", at=time.time(), fields={"message": message}))
        running = Running(
            job=job, model=asked.model(job.batch_rows), sources=asked.sources, stamps=asked.stamps,
            schema=asked.schema, engines=engines, out=directory, most_bad=asked.most_bad, sink=sink,
        )  # fmt: skip
        return running.run()
    finally:
        for engine in engines:
            engine.close()


def _check_golden(artifact: Artifact, engine: Engine) -> None:
    """Ask for what was answered at the export, before hours are spent."""
    golden, manifest = artifact.golden(), artifact.manifest
    share = excess(engine.run(golden.inputs), golden.outputs, manifest.tolerance)
    if not share <= 1:
        raise BadArtifact(
            f"{artifact.path} does not answer here as it did on {manifest.proved_on}: "
            f"{share:.3g} times the difference its manifest allows",
            remedy="Export it again on this machine, with an engine and a precision that it computes correctly.",
        )
