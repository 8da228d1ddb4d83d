"""Findings of `stoker data check` about a data set, and the samples to leave out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Fault = Literal[
    "corrupt",
    "empty",
    "foreign",
    "extension",
    "mode",
    "shape",
    "blank",
    "not-finite",
    "duplicate",
    "near-duplicate",
    "leak",
    "near-leak",
    "contradiction",
    "suspect-label",
    "unlabelled",
    "empty-class",
    "imbalance",
    "unknown-class",
    "ragged",
    "missing",
    "missing-column",
    "constant",
    "mixed-types",
    "outlier",
    "out-of-vocabulary",
    "target-leak",
    "empty-text",
    "encoding",
]
"""The kinds of faults; docs/data-check.md says of each what it means."""

Gravity = Literal["corrupt", "fault", "suspect", "note"]
"""`corrupt`: cannot be read as what it should be. `fault`: it can, and is wrong, or counts twice. `suspect`: a person
should look. `note`: a fact about the whole set, good or bad."""

DataKind = Literal["images", "shards", "arrays", "table", "text"]
"""Files of images; shards of WebDataset; arrays of images (IDX, NumPy); rows of tables; files of text."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that was found.

    `id` names the sample (see `CleanList`), and is empty for what concerns a whole split, class or column, which
    `where` names then. `related` are the samples it was compared with: copies, neighbours, or examples. `measure`
    is how far out it is, in the unit that `detail` names; within a kind of fault, larger is worse.
    """

    fault: Fault
    gravity: Gravity
    id: str = ""
    where: str = ""
    related: tuple[str, ...] = ()
    detail: str = ""
    measure: float | None = None


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    """A split: how many of its samples could be read, and how many of each class; classes in the order of names."""

    name: str
    num_samples: int
    classes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ColumnFacts:
    """A column of a table, in the split that trains; where none is said to, in the first.

    `distinct` counts different values, and stops at the most that are counted (`is_distinct_capped`); `median` is of
    numbers alone.
    """

    name: str
    kind: str
    num_rows: int
    missing: int
    distinct: int
    is_distinct_capped: bool = False
    median: float | None = None
    examples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataCheck:
    """A data set as it was found: its splits and columns, what is wrong, and in `notes` what was not looked at, or how.

    `settings` are the options it was checked with, `took_s` how long that took [s].
    """

    schema: ClassVar[int] = 2
    source: str
    kind: DataKind
    made_at: str
    took_s: float
    against: tuple[str, ...] = ()
    splits: tuple[SplitFacts, ...]
    columns: tuple[ColumnFacts, ...] = ()
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def num_samples(self) -> int:
        """Number of samples that could be read."""
        return sum(split.num_samples for split in self.splits)

    def counts(self) -> dict[tuple[Gravity, Fault], int]:
        """Number of findings of each kind, the gravest first, then the most."""
        order = ("corrupt", "fault", "suspect", "note")
        counted = Counter((finding.gravity, finding.fault) for finding in self.findings)
        return dict(sorted(counted.items(), key=lambda item: (order.index(item[0][0]), -item[1], item[0][1])))


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A sample to leave out: what it is named by, why, and what was seen."""

    id: str
    why: Fault
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class CleanList:
    """The samples of `source` to leave out; everything else is kept, `kept` samples.

    A sample is named by its path below the source in a folder of files; by `FILE:ROW` in a table or an array, where
    the row counts from 0 without the header, and FILE is the path below the source (the file's name where the source
    is that file); and by `SHARD:KEY` in a shard. Paths are written with `/`.
    """

    schema: ClassVar[int] = 1
    source: str
    made_at: str
    kept: int
    dropped: tuple[Dropped, ...] = ()

    def __post_init__(self) -> None:
        if self.kept < 0:
            raise ValueError(f"kept must be 0 samples or more, got {self.kept}")

    def dropped_ids(self) -> frozenset[str]:
        """The names of the samples to leave out."""
        return frozenset(sample.id for sample in self.dropped)
