"""Tables as batches of rows with their faults: CSV, JSONL, Parquet, and folders of text files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stoker.data.reading.table_readers import (
    CsvFile,
    Lines,
    RowFault,
    batches_of,
    object_in,
    opened,
    parquet_file,
    rows_in,
)

ROWS_OF_A_BATCH = 4096


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows; a missing value is None.

    `problems` are the faults of unreadable rows, whose values mean nothing. `ids` are names of the rows, if they have
    their own.
    """

    first_row: int
    columns: dict[str, list[Any]]
    num_rows: int
    problems: dict[int, RowFault] = field(default_factory=dict)
    ids: Sequence[str] | None = None


class TableSource(Protocol):
    """A file of rows, or a folder of files that are a row each."""

    @property
    def name(self) -> str:
        """Its path below the source."""
        ...

    @property
    def split(self) -> str:
        """Its split; empty if there are none."""
        ...

    @property
    def is_typed(self) -> bool:
        """True if values have types; else all are text, which may look like a number."""
        ...

    @property
    def num_bytes(self) -> int:
        """Its size [bytes]."""
        ...

    def batches(self) -> Iterator[RowBatch]:
        """Its rows, in order.

        Raises:
            BadTable: it cannot be read, or not to its end.
        """
        ...


def row_id(table: TableSource, batch: RowBatch, row: int) -> str:
    """The name of a row: its own, or `FILE:ROW`."""
    return batch.ids[row] if batch.ids is not None else f"{table.name}:{batch.first_row + row}"


RowT = TypeVar("RowT")

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-nan", "#n/a", "<na>"})
"""Missing values in a CSV, in lower case: those of pandas, and `?` of the UCI repository."""


_HEAD_BYTES = 2**20


@dataclass(frozen=True)
class FileTable(ABC):
    """A file of rows; see `TableSource` for `name` and `split`."""

    path: Path
    name: str
    split: str
    is_typed: bool = True

    @property
    def num_bytes(self) -> int:
        """Its size [bytes]; 0 for an unreadable file, which is reported when it is read."""
        return _size_of(self.path)

    @abstractmethod
    def batches(self) -> Iterator[RowBatch]:
        """Its rows, in order; raises BadTable."""


@dataclass(frozen=True)
class CsvTable(FileTable):
    """A CSV file with a header; the delimiter is the most frequent of tab, semicolon and comma in the header."""

    is_typed: bool = False

    def batches(self) -> Iterator[RowBatch]:
        """Rows in order, without blank lines. Bytes that are not UTF-8 become surrogates."""
        with opened(self.path) as file:
            head = file.readline(_HEAD_BYTES).decode("utf-8", "replace")
            table = CsvFile(self.path, max(",;\t", key=head.count))
            rows = ((record.fields, record.fault) for record in table.records(file))
            yield from _in_batches(rows, lambda fields: _columns(table.header, fields))


@dataclass(frozen=True)
class JsonlTable(FileTable):
    """A file with a JSON object on each line."""

    def batches(self) -> Iterator[RowBatch]:
        """Objects in order; keys that an object lacks are missing values."""
        with opened(self.path) as file:
            yield from _in_batches((object_in(line.content) for line in rows_in(Lines(file, self.path))), _of_objects)


@dataclass(frozen=True)
class ParquetTable(FileTable):
    """A Parquet file."""

    def batches(self) -> Iterator[RowBatch]:
        """Rows in order; every page is decoded and its checksum verified, if it has one."""
        with parquet_file(self.path) as file:
            for first, batch in batches_of(file, self.path, ROWS_OF_A_BATCH):
                columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
                yield RowBatch(first, columns, batch.num_rows)


@dataclass(frozen=True)
class TextTable:
    """Text files of one split, a row each, with the columns `text` and `label`; a row's name is its path."""

    root: Path
    split: str
    names: tuple[str, ...]
    labels: tuple[str | None, ...]
    name: str = ""
    is_typed: bool = True

    @property
    def num_bytes(self) -> int:
        """Total size of the readable files [bytes]."""
        return sum(_size_of(self.root / name) for name in self.names)

    def batches(self) -> Iterator[RowBatch]:
        """One row for each file."""
        for start in range(0, len(self.names), ROWS_OF_A_BATCH):
            names = self.names[start : start + ROWS_OF_A_BATCH]
            texts: list[str | None] = []
            problems: dict[int, RowFault] = {}
            for row, name in enumerate(names):
                try:
                    texts.append((self.root / name).read_bytes().decode("utf-8", "surrogateescape"))
                except OSError as error:
                    texts.append(None)
                    problems[row] = RowFault("corrupt", f"cannot be read: {error.strerror}")
            columns: dict[str, list[Any]] = {"text": texts}
            if any(label is not None for label in self.labels):
                columns["label"] = list(self.labels[start : start + ROWS_OF_A_BATCH])
            yield RowBatch(start, columns, len(names), problems, ids=names)


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _in_batches(
    rows: Iterator[tuple[RowT, RowFault | None]], columns_of: Callable[[Sequence[RowT]], dict[str, list[Any]]]
) -> Iterator[RowBatch]:
    """Rows with their faults, a batch at a time."""
    first = 0
    while taken := list(islice(rows, ROWS_OF_A_BATCH)):
        problems = {row: fault for row, (_, fault) in enumerate(taken) if fault is not None}
        yield RowBatch(first, columns_of([values for values, _ in taken]), len(taken), problems)
        first += len(taken)


def _columns(header: Sequence[str], rows: Sequence[list[str]]) -> dict[str, list[Any]]:
    """Fields by column, None for missing ones; rows of another width have only missing ones."""
    width, nothing = len(header), [""] * len(header)
    columns = zip(*(fields if len(fields) == width else nothing for fields in rows), strict=True)
    return {
        name: [(None if field.strip().lower() in MISSING else field) for field in column]
        for name, column in zip(header, columns, strict=True)
    }


def _of_objects(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
