"""What one command asks for, held against the model and the files before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from stoker.artifacts import Artifact
from stoker.errors import BadJob
from stoker.predicting.answering import Model
from stoker.predicting.identity import Asked, stamp_of
from stoker.predicting.inputs import Input, inputs_of, most_rows
from stoker.predicting.limits import MostBad, parse_most_bad
from stoker.predicting.mapping import parse_mapping, resolve
from stoker.predicting.pixels import parse_pixels
from stoker.predicting.rows import Field
from stoker.predicting.sources import Source, find_sources
from stoker.predicting.sources.arrays import ArraySource
from stoker.predicting.tables import schema_of
from stoker.records import Manifest
from stoker.records.prediction import PixelSettings

Resize = Literal["", "stretch", "crop", "pad"]


@dataclass(frozen=True, kw_only=True)
class PredictOptions:
    """How to predict; what is None is chosen, and then kept to when the job is continued.

    `columns` are words such as `x=pixels`; `pixels` and `resize` are for images (`stoker predict --help`);
    `max_bad` is a share (`1%`) or a number of rows, and may change when the job is continued.
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
class Request:
    """A model, the sources of its rows and their stamps when they were asked for, and how they go together."""

    artifact: Artifact
    sources: tuple[Source, ...]
    stamps: tuple[str, ...]
    inputs: tuple[Input, ...]
    asked: Asked
    schema: pa.Schema
    most_bad: MostBad

    def model(self, batch_rows: int) -> Model:
        """The model, with batches of so many rows."""
        return Model(self.artifact.manifest, self.inputs, batch_rows)


def request(artifact: Artifact, names: Sequence[str], options: PredictOptions) -> Request:
    """What is asked for, or why it cannot be.

    Raises:
        BadJob: files that are not there or cannot be read, columns that do not fit, options that make no sense.
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
    asked = Asked(
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
    _check_pixels(inputs, first, asked)
    schema = schema_of(manifest, [first[name] for name in options.keep])
    return Request(artifact, sources, stamps, inputs, asked, schema, parse_most_bad(options.max_bad))


def _of_whole_requests(source: Source, manifest: Manifest, options: PredictOptions) -> Source:
    """A source whose arrays may be the whole inputs of one request, as of a model without a batch."""
    if not isinstance(source, ArraySource):
        return source
    columns = parse_mapping(options.columns)
    ranks = {columns.get(spec.name, (spec.name,))[0]: len(spec.shape) for spec in manifest.inputs}
    if source.format == "npy" and len(manifest.inputs) == 1:
        ranks = {source.path.stem: len(manifest.inputs[0].shape)}
    return ArraySource(source.path, ranks=ranks)


def _check_pixels(inputs: Sequence[Input], fields: Mapping[str, Field], asked: Asked) -> None:
    """Images whose numbers are not told are refused, and so is telling of them where there are no images."""
    settings = asked.pixels
    images = [one for one in inputs if one.image is not None and _may_be_image(one, fields, asked)]
    for one in images:
        if settings.values or fields[asked.columns[one.name][0]].holds_images:
            parse_pixels(settings.values, one)
    if not images and settings != PixelSettings():
        raise BadJob("--pixels and --resize are for images, and no input is read from images")


def _may_be_image(one: Input, fields: Mapping[str, Field], asked: Asked) -> bool:
    """Whether an input is read from one column that has images or their paths, as far as can be told."""
    names = asked.columns[one.name]
    field = fields[names[0]]
    is_open = field.type is None or field.is_text
    return one.datatype != "BYTES" and len(names) == 1 and (is_open or field.holds_images)
