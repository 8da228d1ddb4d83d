"""The seam between files and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stoker.predicting.rows import Field, Rows
from stoker.records.prediction import PredictionPart, SourceFormat


@dataclass(frozen=True)
class Extent:
    """How many rows a source has, and where each part begins in it [bytes]; formats that are not text give zeros."""

    num_rows: int
    offsets: tuple[int, ...]


class Reader(Protocol):
    """A source that is open. Parts read in their order are read once through; another order costs more, no more."""

    def read(self, part: PredictionPart) -> Rows:
        """The rows of a part.

        Raises:
            RunFailed: the file is damaged, or is no longer what it was.
        """
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class Source(Protocol):
    """A file, or a folder of images, whose rows can be read in parts, never the whole of it at once."""

    path: Path
    format: SourceFormat

    def files(self) -> Sequence[Path]:
        """What it consists of, in order."""
        ...

    def fields(self) -> tuple[Field, ...]:
        """Its columns, in order.

        Raises:
            BadJob: it cannot be read, or is not what its name says.
        """
        ...

    def extent(self, part_rows: int) -> Extent:
        """How long it is, if cut into parts of so many rows; text is read once through for that.

        Raises:
            BadJob: it cannot be read, or is not what its name says.
        """
        ...

    def open(self, columns: Sequence[str]) -> Reader:
        """Begin reading these columns."""
        ...


def cut_evenly(num_rows: int, part_rows: int) -> Extent:
    """The extent of a source that is not text."""
    return Extent(num_rows, (0,) * -(-num_rows // part_rows))
