"""The seam between files and rows: batches of columns, and which rows could not be read.

Rows from CSV, JSONL, Parquet, and from folders of text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stoker.data.reading.text_tables import CsvFile, Lines, RowFault, object_in, opened, rows_in

ROWS_OF_A_BATCH = 4096


@dataclass(frozen=True)
class RowBatch:
    """Consecutive rows; a value is None where it is missing.

    `problems` says of rows that could not be read what they are: their values mean nothing. `ids` are the names of the
    rows where they have some of their own.
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

    def batches(self) -> Iterator[RowBatch]:
        """Its rows, once through.

        Raises:
            BadTable: it cannot be read, or not to its end.
        """
        ...


def row_id(table: TableSource, batch: RowBatch, row: int) -> str:
    """The name of a row: `FILE:ROW`, or its own."""
    return batch.ids[row] if batch.ids is not None else f"{table.name}:{batch.first_row + row}"


RowT = TypeVar("RowT")

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-nan", "#n/a", "<na>"})
"""What stands for a missing value in a CSV, in lower case: what pandas takes for one, and `?` of the UCI repository."""


_HEAD_BYTES = 2**20


@dataclass(frozen=True)
class FileTable(ABC):
    """A file of rows; `name` and `split` as `Table` has them."""

    path: Path
    name: str
    split: str
    is_typed: bool = True

    @property
    def num_bytes(self) -> int:
        """Its size [bytes]; 0 where it cannot be looked at, which is told when it is read."""
        return _size_of(self.path)

    @abstractmethod
    def batches(self) -> Iterator[RowBatch]:
        """Its rows, once through; raises BadTable."""


@dataclass(frozen=True)
class CsvTable(FileTable):
    """A CSV file with a header; the delimiter is the one of tab, semicolon and comma that the header has most of."""

    is_typed: bool = False

    def batches(self) -> Iterator[RowBatch]:
        """Rows in order; blank lines are none. Bytes that are no UTF-8 are kept as surrogates."""
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
        """Rows in order, every page decoded and its checksum looked at where it has one."""
        from stoker.data.reading.parquet import batches_of, parquet_file  # noqa: PLC0415 - an optional extra

        with parquet_file(self.path) as file:
            for first, batch in batches_of(file, self.path, ROWS_OF_A_BATCH):
                columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
                yield RowBatch(first, columns, batch.num_rows)


@dataclass(frozen=True)
class TextTable:
    """Files of text of one split: a row each, with the columns `text` and `label`; its name is its path."""

    root: Path
    split: str
    names: tuple[str, ...]
    labels: tuple[str | None, ...]
    name: str = ""
    is_typed: bool = True

    @property
    def num_bytes(self) -> int:
        """Their size [bytes], of those that can be looked at."""
        return sum(_size_of(self.root / name) for name in self.names)

    def batches(self) -> Iterator[RowBatch]:
        """A file a row."""
        for start in range(0, len(self.names), ROWS_OF_A_BATCH):
            names = self.names[start : start + ROWS_OF_A_BATCH]
            texts, problems = _texts_of(self.root, names)
            columns: dict[str, list[Any]] = {"text": texts}
            if any(label is not None for label in self.labels):
                columns["label"] = list(self.labels[start : start + ROWS_OF_A_BATCH])
            yield RowBatch(start, columns, len(names), problems, ids=names)


def _texts_of(root: Path, names: Sequence[str]) -> tuple[list[Any], dict[int, RowFault]]:
    """What is in each file; None, and why, where one cannot be read."""
    texts: list[Any] = []
    problems: dict[int, RowFault] = {}
    for at, name in enumerate(names):
        try:
            texts.append((root / name).read_bytes().decode("utf-8", "surrogateescape"))
        except OSError as error:
            texts.append(None)
            problems[at] = RowFault("corrupt", f"cannot be read: {error.strerror}")
    return texts, problems


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _in_batches(
    rows: Iterator[tuple[RowT, RowFault | None]], columns_of: Callable[[Sequence[RowT]], dict[str, list[Any]]]
) -> Iterator[RowBatch]:
    """Rows with what is wrong with them, a batch at a time."""
    first = 0
    while taken := list(islice(rows, ROWS_OF_A_BATCH)):
        problems = {at: fault for at, (_, fault) in enumerate(taken) if fault is not None}
        yield RowBatch(first, columns_of([values for values, _ in taken]), len(taken), problems)
        first += len(taken)


def _columns(header: Sequence[str], rows: Sequence[list[str]]) -> dict[str, list[Any]]:
    """Fields by column, None where they stand for nothing; rows of another width have nothing."""
    width, nothing = len(header), [""] * len(header)
    columns = zip(*(fields if len(fields) == width else nothing for fields in rows), strict=True)
    return {name: [_value(field) for field in column] for name, column in zip(header, columns, strict=True)}


def _value(field: str) -> str | None:
    return None if field.strip().lower() in MISSING else field


def _of_objects(rows: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}
