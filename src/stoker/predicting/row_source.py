"""The seam between files and rows.

Rows as they were read: columns, and which rows could not even be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from stoker.records.prediction import PredictionPart, SourceFormat


@dataclass(frozen=True)
class SourceExtent:
    """How many rows a source has, and where each part begins in it [bytes]; formats that are not text give zeros."""

    num_rows: int
    offsets: tuple[int, ...]


class RowReader(Protocol):
    """A source that is open. Parts read in their order are read once through; another order costs more, no more."""

    def read(self, part: PredictionPart) -> SourceRows:
        """The rows of a part.

        Raises:
            RunFailed: the file is damaged, or is no longer what it was.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class RowSource(Protocol):
    """A file, or a folder of images, whose rows can be read in parts, never the whole of it at once."""

    path: Path
    format: SourceFormat

    def files(self) -> Sequence[Path]:
        """What it consists of, in order."""
        ...

    def fields(self) -> tuple[SourceColumn, ...]:
        """Its columns, in order.

        Raises:
            BadJob: it cannot be read, or is not what its name says.
        """
        ...

    def extent(self, part_rows: int) -> SourceExtent:
        """How long it is, if cut into parts of so many rows; text is read once through for that.

        Raises:
            BadJob: it cannot be read, or is not what its name says.
        """
        ...

    def open(self, columns: Sequence[str]) -> RowReader:
        """Begin reading these columns."""
        ...


def cut_evenly(num_rows: int, part_rows: int) -> SourceExtent:
    """The extent of a source that is not text."""
    return SourceExtent(num_rows, (0,) * -(-num_rows // part_rows))


Column: TypeAlias = pa.Array | list[Any]
"""Values of one column: an Arrow array, or Python objects with None for nothing."""


@dataclass(frozen=True)
class SourceColumn:
    """A column that a source has.

    `type` is None where every row may hold another (JSON). `is_text` says that strings stand for values (CSV), and
    `is_image` that they are paths of image files.
    """

    name: str
    type: pa.DataType | None
    is_text: bool = False
    is_image: bool = False

    @property
    def holds_images(self) -> bool:
        """Whether its type is one that images, or their paths, have: nothing else could be made of it for a tensor."""
        if self.type is None or self.is_text:
            return False
        kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
        return self.is_image or pa.types.is_struct(self.type) or any(holds(self.type) for holds in kinds)


@dataclass(frozen=True)
class SourceRows:
    """Some rows of one source in its order, and only the columns asked for.

    `broken` has the rows (from 0) that hold no values at all, and why; their values are None. `names` are for sources
    in which each row is a file of its own.
    """

    source: str
    first_row: int
    num_rows: int
    columns: Mapping[str, Column]
    broken: Mapping[int, str] = field(default_factory=dict)
    names: Sequence[str] | None = None

    def origin(self, index: int) -> tuple[str, int]:
        """The file that row `index` of these comes from, and its number there."""
        return (self.source, self.first_row + index) if self.names is None else (self.names[index], 0)
