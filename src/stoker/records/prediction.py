"""An offline prediction job over files: its sources, its parts, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from stoker.records.codec import JSON

SourceFormat = Literal["parquet", "csv", "tsv", "jsonl", "npy", "npz", "images"]
"""The format of a source of rows; `images` is an image file, or a folder of them."""

PredictionEventKind = Literal["started", "progress", "warned", "finished"]


@dataclass(frozen=True, kw_only=True)
class PredictionSource:
    """A file, or a folder of images, that rows come from, in the order they are counted.

    `stamp` is the digest of its files' names, sizes and times of change: while it is the same, the content is not read
    again to compare its SHA-256 (hex).
    """

    path: str
    format: SourceFormat
    num_rows: int
    num_bytes: int
    sha256: str
    stamp: str


@dataclass(frozen=True, kw_only=True)
class PredictionPart:
    """Rows of one source that are answered together: `num_rows` from `first_row` (from 0).

    Of a text file they begin at `offset` [bytes].
    """

    source: int
    first_row: int
    num_rows: int
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class PixelSettings:
    """How images become numbers: `values` as the user wrote them, and what happens to images of another size."""

    values: str = ""
    resize: Literal["", "stretch", "crop", "pad"] = ""


@dataclass(frozen=True, kw_only=True)
class PredictionJob:
    """All that decides what is written, and how it is cut up; written before the first row is computed.

    `columns` maps each input of the model to the columns it is made of. Batches have `batch_rows` rows of one part, so
    that who computes a part, and when, changes no bit of it. `threads` are those of one engine. `made_on` and
    `libraries` tell where the same bits can be expected.
    """

    schema: ClassVar[int] = 1
    model: str
    version: int
    model_digest: str
    columns: dict[str, tuple[str, ...]]
    keep: tuple[str, ...] = ()
    pixels: PixelSettings = PixelSettings()
    allow_nan: bool = False
    batch_rows: int
    part_rows: int
    threads: int
    basis: str = ""
    """How `batch_rows` and `part_rows` were chosen."""
    sources: tuple[PredictionSource, ...]
    parts: tuple[PredictionPart, ...]
    made_on: str
    made_at: str
    libraries: dict[str, str] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of all sources."""
        return sum(source.num_rows for source in self.sources)


@dataclass(frozen=True, kw_only=True)
class BadRow:
    """A row that was not answered: where it is (rows count from 0), the column, and why."""

    source: str
    row: int
    column: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class PredictionSummary:
    """The result of a job: rows answered and bad rows in all, and what the last command did of it.

    `computed_rows` took `wall_s` in all and `compute_seconds` of the engines, added up. `padding_waste_ratio` is the
    share of what they computed that was padding.
    """

    schema: ClassVar[int] = 1
    rows: int
    bad_rows: int
    parts: int
    computed_rows: int
    wall_s: float
    rows_per_s: float
    compute_seconds: float
    padding_waste_ratio: float
    out: str


@dataclass(frozen=True, kw_only=True)
class PredictionEvent:
    """Something that happened; `at` is seconds since 1970 (UTC).

    Fields by kind:

    - started: out, rows, parts, done_parts, batch_rows, part_rows, threads, instances
    - progress: rows, bad_rows, total_rows, parts, total_parts, rows_per_s, eta_s
    - warned: message
    - finished: the fields of PredictionSummary
    """

    kind: PredictionEventKind
    at: float
    fields: dict[str, JSON] = field(default_factory=dict)
