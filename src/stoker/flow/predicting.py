"""`stoker predict`: rows from files through an exported model into Parquet, continued where it was cut off."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from stoker.artifacts import Artifact, read
from stoker.devices import attached_cpu
from stoker.engines import Engine, load
from stoker.errors import BadJob, BadRun
from stoker.predicting.answering import Model
from stoker.predicting.directory import OutputDirectory, next_free
from stoker.predicting.filling import fill
from stoker.predicting.identity import Asked, cut, differences
from stoker.predicting.inputs import inputs_of, most_rows
from stoker.predicting.limits import parse_most_bad
from stoker.predicting.mapping import parse_mapping, resolve
from stoker.predicting.measuring import choose_cut, head_of
from stoker.predicting.pixels import parse_pixels
from stoker.predicting.rows import Field
from stoker.predicting.running import Running
from stoker.predicting.sources import Source, find_sources
from stoker.predicting.tables import schema_of
from stoker.records.prediction import PixelSettings, PredictionEvent, PredictionJob, PredictionSummary
from stoker.store import RunLock

Sink = Callable[[PredictionEvent], None]
Resize = Literal["", "stretch", "crop"]


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How to predict; what is None is chosen, and then kept to when the job is continued.

    `columns` are words such as `x=pixels`; `pixels` and `resize` are for images, see `stoker.predicting.pixels`;
    `max_bad` is a share (`1%`) or a number of rows.
    """

    columns: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    pixels: str = ""
    resize: Resize = ""
    allow_nan: bool = False
    max_bad: str = "1%"
    batch_rows: int | None = None
    part_rows: int | None = None
    threads: int | None = None


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
        BadArtifact: the model cannot be used.
        BadJob: the files, or what was asked for, do not fit the model.
        BadRun: `out` holds another job, or is in use.
        RunFailed: it could not go on; what is done is kept.
    """
    artifact = read(model)
    artifact.verify()
    sources = find_sources([str(name) for name in inputs])
    preparing = _Preparing(artifact, sources, options or PredictOptions(), sink)
    place = next_free(Path(out)) if new else Path(out)
    directory = OutputDirectory(place)
    with RunLock(place):
        return preparing.run_in(directory)


class _Preparing:
    """A command, and what its job needs."""

    def __init__(self, artifact: Artifact, sources: Sequence[Source], options: PredictOptions, sink: Sink) -> None:
        self._artifact = artifact
        self._sources = sources
        self._options = options
        self._sink = sink
        self._inputs = inputs_of(artifact.manifest)
        self._most_bad = parse_most_bad(options.max_bad)
        fields = {str(source.path): source.fields() for source in sources}
        self._asked = self._resolved(fields)
        self._check_images(next(iter(fields.values())))
        kept = {field.name: field for field in next(iter(fields.values()))}
        self._schema = schema_of(artifact.manifest, [kept[name] for name in options.keep])

    def run_in(self, out: OutputDirectory) -> PredictionSummary:
        """Begin or continue the job of a directory that is locked for us."""
        job = out.read_job()
        if job is None and not out.is_fresh():
            raise BadRun(f"{out.path} holds other things", remedy="Choose a new -o DIR, or add --new.")
        if job is not None and (changed := differences(job, self._asked, self._sources)):
            raise BadRun(
                f"{out.path} was begun with something else: " + "; ".join(changed),
                remedy="Give what it was begun with to continue it, or start over beside it with --new.",
            )
        if job is not None and (summary := out.read_summary()) is not None:
            out.finish(summary)
            self._tell_finished(summary)
            return summary
        threads = self._asked.threads or (job.threads if job else 1)
        engines = load(self._artifact, instances=max(1, attached_cpu().cores // threads), threads=threads)
        try:
            if job is None:
                job = self._new_job(engines[0], threads)
                out.begin(job)
            self._warn_of_another_place(job)
            running = Running(
                job=job, model=self._model(job.batch_rows), sources=self._sources, schema=self._schema,
                engines=engines, out=out, most_bad=self._most_bad, sink=self._sink,
            )  # fmt: skip
            return running.run()
        finally:
            for engine in engines:
                engine.close()

    def _resolved(self, fields: dict[str, tuple[Field, ...]]) -> Asked:
        options, manifest = self._options, self._artifact.manifest
        limit = most_rows(manifest)
        if options.batch_rows is not None and limit is not None and options.batch_rows > limit:
            raise BadJob(f"--batch {options.batch_rows}: {manifest.name} takes at most {limit} rows at once")
        return Asked(
            model=manifest.name,
            version=self._artifact.version,
            model_digest=self._artifact.digest,
            columns=resolve(self._inputs, fields, parse_mapping(options.columns), options.keep),
            keep=options.keep,
            pixels=PixelSettings(values=options.pixels, resize=options.resize),
            allow_nan=options.allow_nan,
            batch_rows=options.batch_rows,
            part_rows=options.part_rows,
            threads=options.threads,
        )

    def _check_images(self, fields: Sequence[Field]) -> None:
        """Refuse images whose pixels are not told, and telling of pixels where there are no images."""
        by_name = {field.name: field for field in fields}
        images = [
            one
            for one in self._inputs
            if one.image is not None and one.datatype != "BYTES"
            and len(self._asked.columns[one.name]) == 1 and by_name[self._asked.columns[one.name][0]].may_hold_images
        ]  # fmt: skip
        for one in images:
            parse_pixels(self._options.pixels, one)
        if not images and (self._options.pixels or self._options.resize):
            raise BadJob("--pixels and --resize are for images, and no input is read from images")

    def _new_job(self, engine: Engine, threads: int) -> PredictionJob:
        """Look at the first rows, choose how to cut the job up, and cut it."""
        asked, source = self._asked, self._sources[0]
        part = head_of(source)
        reader = source.open([name for names in asked.columns.values() for name in names])
        try:
            rows = reader.read(part)
        finally:
            reader.close()
        filled = fill(rows, self._inputs, asked.columns, asked.pixels, allow_nan=asked.allow_nan)
        chosen = choose_cut(
            filled, part.num_rows, self._model(1), engine, time.perf_counter, batch_rows=asked.batch_rows,
            part_rows=asked.part_rows, most_rows=most_rows(self._artifact.manifest),
        )  # fmt: skip
        sources, parts = cut(self._sources, chosen.part_rows)
        if not parts:
            raise BadJob("There are no rows", remedy="Look into the files: they have a header or a footer alone.")
        return PredictionJob(
            model=asked.model, version=asked.version, model_digest=asked.model_digest, columns=asked.columns,
            keep=asked.keep, pixels=asked.pixels, allow_nan=asked.allow_nan, batch_rows=chosen.batch_rows,
            part_rows=chosen.part_rows, threads=threads, basis=chosen.basis, sources=sources, parts=parts,
            made_on=attached_cpu().model, made_at=datetime.now(UTC).isoformat(timespec="seconds"),
            libraries=_libraries(self._artifact.manifest.engine),
        )  # fmt: skip

    def _model(self, batch_rows: int) -> Model:
        return Model(self._artifact.manifest, self._inputs, batch_rows)

    def _warn_of_another_place(self, job: PredictionJob) -> None:
        """Elsewhere the rest of the rows agrees within the model's tolerance, and no longer bit for bit."""
        here = {"CPU": attached_cpu().model, **_libraries(self._artifact.manifest.engine)}
        before = {"CPU": job.made_on, **job.libraries}
        changed = [f"{what} {before.get(what, 'none')} then, {now} now" for what, now in here.items()
                   if before.get(what) != now]  # fmt: skip
        if changed:
            message = f"continued elsewhere ({'; '.join(changed)}): the rest agrees within tolerance, not bit for bit"
            self._sink(PredictionEvent(kind="warned", at=time.time(), fields={"message": message}))

    def _tell_finished(self, summary: PredictionSummary) -> None:
        self._sink(PredictionEvent(kind="finished", at=time.time(), fields=asdict(summary)))


def _libraries(engine: str) -> dict[str, str]:
    """Versions of what the bits of the answers, and of the files, depend on."""
    found = {}
    for name in ("stoker", "pyarrow", engine):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # ONNX Runtime has a package of another name for GPUs
            found[name] = "unknown"
    return found
