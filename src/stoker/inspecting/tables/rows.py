"""The seam between files and rows: batches of columns, and which rows could not be read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.data.reading.faults import RowFault

ROWS_OF_A_BATCH = 4096


@dataclass(frozen=True)
class Batch:
    """Consecutive rows; a value is None where it is missing.

    `problems` says of rows that could not be read what they are: their values mean nothing. `ids` are the names of the
    rows where they have some of their own.
    """

    first_row: int
    columns: dict[str, list[Any]]
    num_rows: int
    problems: dict[int, RowFault] = field(default_factory=dict)
    ids: Sequence[str] | None = None


class Table(Protocol):
    """A file of rows, or a folder of files that are a row each."""

    @property
    def name(self) -> str:
        """Its path below the source."""
        ...

    @property
    def split(self) -> str:
        """The split it is in; empty where there are none."""
        ...

    @property
    def is_typed(self) -> bool:
        """Whether values have types of their own; else all are text, and numbers are told from how they look."""
        ...

    @property
    def num_bytes(self) -> int:
        """Its size [bytes]."""
        ...

    def batches(self) -> Iterator[Batch]:
        """Its rows, once through.

        Raises:
            BadTable: it cannot be read, or not to its end.
        """
        ...


def row_id(table: Table, batch: Batch, row: int) -> str:
    """The name of a row: `FILE:ROW`, or its own."""
    return batch.ids[row] if batch.ids is not None else f"{table.name}:{batch.first_row + row}"
