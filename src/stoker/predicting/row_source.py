"""The interface of sources of rows: files that are read in parts, as columns with their broken rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from stoker.records.prediction import PredictionPart, SourceFormat


@dataclass(frozen=True)
class SourceExtent:
    """Number of rows of a source, and offset of each part [bytes]; 0 for formats that are not text."""

    num_rows: int
    offsets: tuple[int, ...]


class RowReader(Protocol):
    """An open source. Parts may be read in any order; in ascending order the file is read once."""

    def read(self, part: PredictionPart) -> SourceRows:
        """The rows of a part.

        Raises:
            RunFailed: the file is damaged or has changed.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class RowSource(Protocol):
    """A file, or a folder of images, whose rows are read in parts."""

    path: Path
    format: SourceFormat

    def files(self) -> Sequence[Path]:
        """Its files, in order."""
        ...

    def fields(self) -> tuple[SourceColumn, ...]:
        """Its columns, in order.

        Raises:
            BadJob: it cannot be read, or is of another format than its name.
        """
        ...

    def extent(self, part_rows: int) -> SourceExtent:
        """Its extent in parts of so many rows; reads a text file once.

        Raises:
            BadJob: it cannot be read, or is of another format than its name.
        """
        ...

    def open(self, columns: Sequence[str]) -> RowReader:
        """Begin reading these columns."""
        ...


def cut_evenly(num_rows: int, part_rows: int) -> SourceExtent:
    """The extent of a source that is not text."""
    return SourceExtent(num_rows, (0,) * -(-num_rows // part_rows))


Column: TypeAlias = pa.Array | list[Any]
"""Values of one column: an Arrow array, or Python objects with None for missing ones."""


@dataclass(frozen=True)
class SourceColumn:
    """A column of a source.

    `type` is None if rows may have different types (JSON). With `is_text` strings stand for values (CSV); with
    `is_image` they are paths of image files.
    """

    name: str
    type: pa.DataType | None
    is_text: bool = False
    is_image: bool = False

    @property
    def holds_images(self) -> bool:
        """True if its type is only possible for images or their paths, if it fills a tensor."""
        if self.type is None or self.is_text:
            return False
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        return self.is_image or pa.types.is_struct(self.type) or any(holds(self.type) for holds in kinds)


@dataclass(frozen=True)
class SourceRows:
    """Consecutive rows of one source, with the requested columns.

    `broken` has the rows (from 0) without any values, and why; their values are None. `names` are the files of a source
    with one file per row.
    """

    source: str
    first_row: int
    num_rows: int
    columns: Mapping[str, Column]
    broken: Mapping[int, str] = field(default_factory=dict)
    names: Sequence[str] | None = None

    def origin(self, index: int) -> tuple[str, int]:
        """The file of row `index`, and the row's number there."""
        return (self.source, self.first_row + index) if self.names is None else (self.names[index], 0)
