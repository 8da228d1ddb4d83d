"""Rows from CSV, JSONL, Parquet, and from folders of text."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import first_line
from stoker.inspecting.tables.rows import ROWS_OF_A_BATCH, BadTable, Batch
from stoker.records.cleaning import Fault

MISSING = frozenset({"", "na", "n/a", "nan", "null", "none", "?", "-nan", "#n/a", "<na>"})
"""What stands for a missing value in a CSV, in lower case: what pandas takes for one, and `?` of the UCI repository."""

_LONGEST_FIELD = 1 << 27


@dataclass(frozen=True)
class CsvTable:
    """A CSV file with a header; the delimiter is the one of tab, semicolon and comma that the header has most of."""

    path: Path
    name: str
    split: str
    is_typed: bool = False

    @property
    def num_bytes(self) -> int:
        """Its size [bytes]."""
        return self.path.stat().st_size

    def batches(self) -> Iterator[Batch]:
        """Rows in order; blank lines are none. Bytes that are no UTF-8 are kept as surrogates."""
        csv.field_size_limit(_LONGEST_FIELD)  # of the whole process; the default is 128 KiB
        with _opened(self.path).open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            head = file.readline()
            file.seek(0)
            delimiter = max(",;\t", key=head.count)
            reader = csv.reader(file, delimiter=delimiter)
            header = next(reader, [])
            if not header:
                raise BadTable("is empty: the first line names the columns")
            if twice := sorted({name for name in header if header.count(name) > 1}):
                raise BadTable(f"has two columns {twice[0]!r}")
            yield from _csv_batches(reader, header)


@dataclass(frozen=True)
class JsonlTable:
    """A file with a JSON object on each line."""

    path: Path
    name: str
    split: str
    is_typed: bool = True

    @property
    def num_bytes(self) -> int:
        """Its size [bytes]."""
        return self.path.stat().st_size

    def batches(self) -> Iterator[Batch]:
        """Objects in order; keys that an object lacks are missing values."""
        first, rows, problems = 0, list[dict[str, Any]](), dict[int, tuple[Fault, str]]()
        with _opened(self.path).open("rb") as file:
            for line in file:
                if not line.strip():
                    continue
                value, problem = _object(line)
                if problem:
                    problems[len(rows)] = problem
                rows.append(value)
                if len(rows) == ROWS_OF_A_BATCH:
                    yield _of_objects(first, rows, problems)
                    first, rows, problems = first + len(rows), [], {}
        if rows:
            yield _of_objects(first, rows, problems)


@dataclass(frozen=True)
class ParquetTable:
    """A Parquet file."""

    path: Path
    name: str
    split: str
    is_typed: bool = True

    @property
    def num_bytes(self) -> int:
        """Its size [bytes]."""
        return self.path.stat().st_size

    def batches(self) -> Iterator[Batch]:
        """Rows in order, every page decoded and its checksum looked at where it has one."""
        import pyarrow as pa  # noqa: PLC0415 - an optional extra
        import pyarrow.parquet as pq  # noqa: PLC0415

        first = 0
        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                for batch in file.iter_batches(batch_size=ROWS_OF_A_BATCH):
                    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
                    yield Batch(first, columns, batch.num_rows)
                    first += batch.num_rows
        except (pa.ArrowException, OSError, ValueError) as error:
            raise BadTable(f"cannot be read after row {first:,}: {first_line(error)}") from error


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
        """Their size [bytes]."""
        return sum((self.root / name).stat().st_size for name in self.names)

    def batches(self) -> Iterator[Batch]:
        """A file a row."""
        for start in range(0, len(self.names), ROWS_OF_A_BATCH):
            names = self.names[start : start + ROWS_OF_A_BATCH]
            text = [(self.root / name).read_bytes().decode("utf-8", "surrogateescape") for name in names]
            columns: dict[str, list[Any]] = {"text": list(text)}
            if any(label is not None for label in self.labels):
                columns["label"] = list(self.labels[start : start + ROWS_OF_A_BATCH])
            yield Batch(start, columns, len(names), ids=names)


def _csv_batches(reader: Iterator[list[str]], header: Sequence[str]) -> Iterator[Batch]:
    first, rows, problems = 0, list[list[str | None]](), dict[int, tuple[Fault, str]]()
    nothing: list[str | None] = [None] * len(header)
    while True:
        try:
            fields = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            problems[len(rows)] = ("corrupt", f"is no CSV: {error}")
            rows.append(nothing)
            continue
        if not fields:
            continue
        if len(fields) != len(header):
            problems[len(rows)] = ("ragged", f"has {len(fields)} fields, the header has {len(header)}")
            fields = []
        rows.append([_value(field) for field in fields] if fields else nothing)
        if len(rows) == ROWS_OF_A_BATCH:
            yield Batch(first, _columns(header, rows), len(rows), problems)
            first, rows, problems = first + len(rows), [], {}
    if rows:
        yield Batch(first, _columns(header, rows), len(rows), problems)


def _value(field: str) -> str | None:
    return None if field.strip().lower() in MISSING else field


def _columns(header: Sequence[str], rows: list[list[str | None]]) -> dict[str, list[Any]]:
    return {name: [row[place] for row in rows] for place, name in enumerate(header)}


def _object(line: bytes) -> tuple[dict[str, Any], tuple[Fault, str] | None]:
    """What a line holds, and what is wrong with it."""
    try:
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return {}, ("encoding", f"is not UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return {}, ("corrupt", f"is no JSON: {first_line(error)}")
    if not isinstance(value, dict):
        return {}, ("corrupt", f"is no JSON object: {type(value).__name__}")
    return value, None


def _of_objects(first: int, rows: list[dict[str, Any]], problems: dict[int, tuple[Fault, str]]) -> Batch:
    names = list(dict.fromkeys(name for row in rows for name in row))
    return Batch(first, {name: [row.get(name) for row in rows] for name in names}, len(rows), problems)


def _opened(path: Path) -> Path:
    if not path.is_file():
        raise BadTable("is no file")
    return path
