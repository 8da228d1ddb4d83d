"""A command's request, checked against the model and the files before anything is computed; and the job it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

import pyarrow as pa

from stoker.artifacts import Artifact
from stoker.devices import attached_cpu
from stoker.engines import Engine, engine_record
from stoker.errors import BadJob
from stoker.predicting.batch_size import about_rows, choose_sizes, head_of
from stoker.predicting.batched_inference import PredictionModel
from stoker.predicting.column_mapping import Input, inputs_of, is_binary, most_rows, parse_mapping, resolve
from stoker.predicting.file_sources import NumpySource, find_sources
from stoker.predicting.image_inputs import TableOfImages, parse_pixels
from stoker.predicting.input_conversion import fill
from stoker.predicting.job_identity import RequestedSettings, cut, stamp_of
from stoker.predicting.prediction_output import schema_of
from stoker.predicting.row_source import RowSource, SourceColumn
from stoker.records import EngineName, Manifest
from stoker.records.prediction import PixelSettings, PredictionJob

Resize = Literal["", "stretch", "crop", "pad"]


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """Options of `stoker predict`; a None is chosen by the job, which keeps the choice when it continues.

    `columns` have the form `x=pixels`; `pixels` and `resize` are for images (`stoker predict --help`); `max_bad` is a
    share (`1%`) or a number of rows, and may change when the job is continued.
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


@dataclass(frozen=True)
class PredictionRequest:
    """A model, the sources of its rows with their stamps, and the mapping between them."""

    artifact: Artifact
    sources: tuple[RowSource, ...]
    stamps: tuple[str, ...]
    inputs: tuple[Input, ...]
    asked: RequestedSettings
    schema: pa.Schema
    most_bad: MostBad

    def model(self, batch_rows: int) -> PredictionModel:
        """The model, with batches of so many rows."""
        return PredictionModel(self.artifact.manifest, self.inputs, batch_rows)


def resolve_request(artifact: Artifact, names: Sequence[str], options: PredictOptions) -> PredictionRequest:
    """The request of a command.

    Raises:
        BadJob: a file is missing or unreadable, a column does not fit, or an option is invalid.
    """
    manifest = artifact.manifest
    sources = find_sources(names)
    if not manifest.is_batched:
        sources = tuple(_of_whole_requests(source, manifest, options) for source in sources)
    stamps = tuple(map(stamp_of, sources))
    fields = {str(source.path): source.fields() for source in sources}
    first = {field.name: field for field in next(iter(fields.values()))}
    inputs = inputs_of(manifest)
    limit = most_rows(manifest)
    if options.batch_rows is not None and limit is not None and options.batch_rows > limit:
        raise BadJob(f"--batch {options.batch_rows}: {manifest.name} takes at most {limit} rows at once")
    asked = RequestedSettings(
        model=manifest.name,
        version=artifact.version,
        model_digest=artifact.digest,
        columns=resolve(inputs, fields, parse_mapping(options.columns), options.keep),
        keep=options.keep,
        pixels=PixelSettings(values=options.pixels, resize=options.resize),
        allow_nan=options.allow_nan,
        batch_rows=options.batch_rows,
        part_rows=options.part_rows,
        threads=options.threads,
    )
    images = [spec for spec in inputs if spec.image is not None and _may_be_image(spec, first, asked)]
    for spec in images:
        if asked.pixels.values or first[asked.columns[spec.name][0]].holds_images:
            parse_pixels(asked.pixels.values, spec)
    if not images and asked.pixels != PixelSettings():
        raise BadJob("--pixels and --resize are for images, and no input is read from images")
    if named := [name for spec in images if (name := _named_by(spec, first, asked))]:
        sources = tuple(source if source.format == "images" else TableOfImages(source, named) for source in sources)
        stamps = tuple(map(stamp_of, sources))
    schema = schema_of(manifest, [first[name] for name in options.keep])
    return PredictionRequest(artifact, sources, stamps, inputs, asked, schema, parse_most_bad(options.max_bad))


def _of_whole_requests(source: RowSource, manifest: Manifest, options: PredictOptions) -> RowSource:
    """A source whose arrays may be the whole inputs of one request, for a model without a batch."""
    if not isinstance(source, NumpySource):
        return source
    columns = parse_mapping(options.columns)
    ranks = {columns.get(spec.name, (spec.name,))[0]: len(spec.shape) for spec in manifest.inputs}
    if source.format == "npy" and len(manifest.inputs) == 1:
        ranks = {source.path.stem: len(manifest.inputs[0].shape)}
    return NumpySource(source.path, ranks=ranks)


def _may_be_image(spec: Input, fields: Mapping[str, SourceColumn], asked: RequestedSettings) -> bool:
    """True if an input is read from one column that may have images or their paths."""
    names = asked.columns[spec.name]
    field = fields[names[0]]
    is_open = field.type is None or field.is_text
    return spec.datatype != "BYTES" and len(names) == 1 and (is_open or field.holds_images)


def _named_by(spec: Input, fields: Mapping[str, SourceColumn], asked: RequestedSettings) -> str | None:
    """The column that may name files with an input's images; None if it holds them, or there can be none."""
    field = fields[asked.columns[spec.name][0]]
    takes_images = bool(asked.pixels.values) or spec.datatype == "UINT8"
    return None if not takes_images or (field.type is not None and is_binary(field.type)) else field.name


@dataclass(frozen=True)
class MostBad:
    """A number of rows, or a share of all."""

    rows: int | None = None
    share: float | None = None

    def rows_of(self, num_rows: int) -> int:
        """Largest number of bad rows among `num_rows` [rows]."""
        return self.rows if self.rows is not None else int((self.share or 0.0) * num_rows)

    def __str__(self) -> str:
        """As it is written on the command line."""
        return str(self.rows) if self.rows is not None else f"{100 * (self.share or 0.0):g}%"


def parse_most_bad(text: str) -> MostBad:
    """Parse `--max-bad`: `1%` of the rows, or `100` of them.

    Raises:
        BadJob: the text has another form.

    >>> parse_most_bad("1%").rows_of(12_345), parse_most_bad("7").rows_of(12_345)
    (123, 7)
    """
    problem = BadJob(f"--max-bad {text} is not understood", remedy="Give a share such as 1%, or a number of rows.")
    number = text.removesuffix("%")
    try:
        most = MostBad(rows=int(number)) if number == text else MostBad(share=float(number) / 100)
    except ValueError:
        raise problem from None
    if (most.rows or 0) < 0 or not 0 <= (most.share or 0.0) <= 1:
        raise problem
    return most


def new_job(
    request: PredictionRequest, engines: Sequence[Engine], threads: int, *, clock: Callable[[], float], now: datetime
) -> PredictionJob:
    """The job that a request begins; reads its sources once, and measures its first rows.

    Raises:
        BadJob: there are no rows, or the sources cannot be read.
    """
    asked, source = request.asked, request.sources[0]
    part = head_of(source)
    reader = source.open([name for names in asked.columns.values() for name in names])
    try:
        rows = reader.read(part)
    finally:
        reader.close()
    filled = fill(rows, request.inputs, asked.columns, asked.pixels, allow_nan=asked.allow_nan)
    chosen = choose_sizes(
        filled,
        part.num_rows,
        request.model(1),
        engines[0],
        clock,
        asked,
        total_rows=sum(map(about_rows, request.sources)),
        instances=len(engines),
    )
    sources, parts = cut(request.sources, chosen.part_rows)
    if not parts:
        raise BadJob("There are no rows", remedy="Look into the files: they have a header or a footer alone.")
    return PredictionJob(
        model=asked.model,
        version=asked.version,
        model_digest=asked.model_digest,
        columns=asked.columns,
        keep=asked.keep,
        pixels=asked.pixels,
        allow_nan=asked.allow_nan,
        batch_rows=chosen.batch_rows,
        part_rows=chosen.part_rows,
        threads=threads,
        basis=chosen.basis,
        sources=sources,
        parts=parts,
        made_on=attached_cpu().model,
        made_at=now.isoformat(timespec="seconds"),
        libraries=_libraries(request.artifact.manifest.engine),
    )


def elsewhere(job: PredictionJob, engine: EngineName) -> str:
    """Differences of this machine from the one the job began on; empty if the rest will have the same bits."""
    here = {"CPU": attached_cpu().model, **_libraries(engine)}
    before = {"CPU": job.made_on, **job.libraries}
    changed = [
        f"{what} {before.get(what, 'none')} then, {now} now" for what, now in here.items() if before.get(what) != now
    ]
    return "; ".join(changed)


def _libraries(engine: EngineName) -> dict[str, str]:
    """Versions of the packages that decide the bits of outputs and files."""
    versions = {}
    record = engine_record(engine)
    for name in ("stoker", "pyarrow", *((engine,) if record is None else record.packages)):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:  # ONNX Runtime has a package of another name for GPUs
            versions[name] = "unknown"
    return versions
