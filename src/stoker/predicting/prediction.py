"""The verb `stoker predict`: rows from files through an exported model into Parquet; an interrupted job continues."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from stoker.artifacts import MANIFEST, Artifact, read, read_settings, versions
from stoker.artifacts.directory import Listing
from stoker.artifacts.golden import nan_is_unproven, takes_nan
from stoker.devices import attached_cpu
from stoker.engines import Engine, load
from stoker.errors import BadArtifact, BadRun, RunFailed, ServiceError, StokerError
from stoker.predicting.file_sources import passed_over
from stoker.predicting.job_identity import differences
from stoker.predicting.prediction_output import OutputDirectory, next_free
from stoker.predicting.prediction_request import PredictOptions, elsewhere, new_job, resolve_request
from stoker.predicting.prediction_run import PredictionRun
from stoker.records import ServiceSettings
from stoker.records.prediction import PredictionEvent, PredictionSummary
from stoker.serving.repository.discovery import versions_to_try
from stoker.serving.repository.version_loader import check_answers
from stoker.store import RunLock

PredictionSink = Callable[[PredictionEvent], None]


def predict(
    model: str | Path,
    inputs: Sequence[str | Path],
    out: str | Path,
    options: PredictOptions | None = None,
    *,
    new: bool = False,
    sink: PredictionSink = lambda _: None,
) -> PredictionSummary:
    """Compute the outputs for every row of some files, and write them as Parquet into `out`; the same call continues.

    Args:
        model: directory of an exported model, or of one of its versions.
        inputs: files, folders and patterns.
        out: directory of the job; with `new`, the first of `out`, `out-2`, … that is free.
        options: see `PredictOptions`.
        new: start over even if the job could be continued.
        sink: called with events.

    Raises:
        BadArtifact: the model cannot be used, or its outputs here differ from those at export.
        BadJob: the files or the options do not fit the model.
        BadRun: `out` holds another job, or is in use.
        RunFailed: the run failed; finished parts are kept.
    """
    place = next_free(Path(out)) if new else Path(out)
    candidates, settings = _candidates(Path(model))
    for path in candidates[:-1]:
        try:
            return _predicted(path, settings, inputs, place, options or PredictOptions(), sink)
        except _Refused as error:
            message = f"version {path.name} is passed over, as a server would: {error.reason}"
            sink(PredictionEvent(kind="warned", at=time.time(), fields={"message": message}))
    try:
        return _predicted(candidates[-1], settings, inputs, place, options or PredictOptions(), sink)
    except _Refused as error:
        raise error.reason from None


class _Refused(Exception):
    """Why a server would not serve this version."""

    def __init__(self, reason: StokerError) -> None:
        super().__init__(reason.message)
        self.reason = reason


def _candidates(model: Path) -> tuple[tuple[Path, ...], ServiceSettings]:
    """The versions to try, in a server's order, and the model's settings; for the directory of a version, only it."""
    if (model / MANIFEST).is_file():
        return (model,), read_settings(model.absolute().parent)
    settings = read_settings(model)
    numbers = versions_to_try(versions(model), settings.versions)
    if not numbers:
        read(model)  # raises, and says what it is instead
    return tuple(model / str(number) for number in numbers), settings


def _predicted(
    path: Path,
    settings: ServiceSettings,
    inputs: Sequence[str | Path],
    place: Path,
    options: PredictOptions,
    sink: PredictionSink,
) -> PredictionSummary:
    """Predict with one version; raises _Refused if it fails a server's checks."""
    try:
        artifact = read(path)
        verified = artifact.verify()
    except BadArtifact as error:
        raise _Refused(error) from error
    names = [str(name) for name in inputs]
    asked = resolve_request(artifact, names, options)
    for message in passed_over(names, asked.sources, place):
        sink(PredictionEvent(kind="warned", at=time.time(), fields={"message": message}))
    with RunLock(place):
        directory = OutputDirectory(place)
        job = directory.read_job()
        threads = asked.asked.threads or (job.threads if job else 1)
        changes = () if job is None else differences(job, asked.asked, asked.sources)
        summary = None if job is None or changes else directory.read_summary(job)
        if job is not None and summary is not None:
            directory.finish(summary)
            if summary.bad_rows > (allowed := asked.most_bad.rows_of(job.num_rows)):
                raise RunFailed(
                    f"{summary.bad_rows} of {job.num_rows:,} rows are bad, --max-bad {asked.most_bad} allows {allowed}",
                    remedy=f"They are listed in {directory.bad_rows}. Give a larger --max-bad, "
                    "or mend the files and start over with --new.",
                )
            sink(PredictionEvent(kind="finished", at=time.time(), fields=asdict(summary) | {"computed_rows": 0}))
            return summary
        with _checked(artifact, verified, settings, threads) as engines:
            if changes:
                raise BadRun(
                    f"{directory.path} was begun with something else: {'; '.join(changes)}",
                    remedy="Give what it was begun with to continue it, or start over in another place with --new.",
                )
            if job is None and not directory.is_fresh():
                raise BadRun(f"{directory.path} holds other things", remedy="Choose a new -o DIR, or add --new.")
            begun = job is not None
            if asked.asked.allow_nan and not takes_nan(artifact.golden()):
                message = nan_is_unproven(artifact.manifest.name)
                sink(PredictionEvent(kind="warned", at=time.time(), fields={"message": message}))
            if job is None:
                job = new_job(asked, engines, threads, clock=time.perf_counter, now=datetime.now(UTC))
            check_answers(engines[0], artifact.manifest, artifact.golden(), most_rows=job.batch_rows)
            if not begun:
                directory.begin(job)
            elif changed := elsewhere(job, artifact.manifest.engine):
                message = f"continued elsewhere ({changed}): the rest agrees within tolerance, not bit for bit"
                sink(PredictionEvent(kind="warned", at=time.time(), fields={"message": message}))
            running = PredictionRun(
                job=job,
                model=asked.model(job.batch_rows),
                sources=asked.sources,
                stamps=asked.stamps,
                schema=asked.schema,
                engines=engines,
                out=directory,
                most_bad=asked.most_bad,
                sink=sink,
            )
            return running.run()


@contextmanager
def _checked(
    artifact: Artifact, verified: Listing, settings: ServiceSettings, threads: int
) -> Iterator[tuple[Engine, ...]]:
    """As many engines as fit on the cores; raises _Refused if the first does not give the golden answers."""
    engines: tuple[Engine, ...] = ()
    try:
        try:
            engines = load(artifact, instances=max(1, attached_cpu().cores // threads), threads=threads)
            artifact.require_unchanged(verified)
            check_answers(engines[0], artifact.manifest, artifact.golden(), most_rows=settings.max_batch_rows)
        except (BadArtifact, ServiceError) as error:
            raise _Refused(error) from error
        yield engines
    finally:
        for engine in engines:
            engine.close()
