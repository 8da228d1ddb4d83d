"""The rows of CSV, Parquet and JSONL files, block by block. Imports pyarrow: it is imported when a table is read.

CSV and its ragged rows are pyarrow's affair; JSON is parsed line by line, so that a broken line can be named.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from stoker.data.files.table_spec import TableSpec
from stoker.errors import BadJob, first_line, nearest

_BLOCK_BYTES = 8 * 2**20
_BLOCK_ROWS = 2**15


@dataclass(frozen=True)
class Block:
    """Some rows of a file: `rows` [B] are their numbers in it, `columns` their values, of CSV as text."""

    path: Path
    rows: np.typing.NDArray[np.int64]
    columns: dict[str, pa.Array]
    is_text: bool = False
    """Whether every value is written as text, so that numbers have to be read from it."""

    def only(self, keep: np.typing.NDArray[np.bool_]) -> Block:
        """Those rows that `keep` [B] says."""
        if keep.all():
            return self
        columns = {name: column.filter(pa.array(keep)) for name, column in self.columns.items()}
        return Block(self.path, self.rows[keep], columns, self.is_text)


def header_of(path: Path, spec: TableSpec) -> tuple[str, ...]:
    """The columns of a file.

    Raises:
        BadJob: it cannot be read, has none, or has one twice.
    """
    readers = {"csv": _csv_header, "parquet": _parquet_header, "jsonl": _jsonl_header}
    try:
        header = readers[spec.format](path, spec)
    except (OSError, UnicodeDecodeError, csv.Error, pa.ArrowException) as error:
        raise _unreadable(path, spec.format, error) from error
    twice = sorted({name for name in header if header.count(name) > 1})
    if not header or twice:
        what = f"has two columns {twice[0]!r}" if twice else "has no columns"
        raise BadJob(f"{path} {what}", remedy="The first line names the columns, each once.")
    return header


def blocks_of(path: Path, spec: TableSpec, columns: Sequence[str], dropped: frozenset[int]) -> Iterator[Block]:
    """All rows of a file that are not `dropped`.

    Raises:
        BadJob: a column is missing, a row is ragged or broken, or the file is damaged.
    """
    readers = {"csv": _csv_blocks, "parquet": _parquet_blocks, "jsonl": _jsonl_blocks}
    if spec.format != "jsonl":
        _require_columns(path, header_of(path, spec), columns)
    try:
        for block in readers[spec.format](path, spec, columns, dropped):
            yield _kept(block, dropped)
    except (OSError, UnicodeDecodeError, pa.ArrowException) as error:
        raise _unreadable(path, spec.format, error) from error


def _unreadable(path: Path, kind: str, error: Exception) -> BadJob:
    is_encoded = isinstance(error, UnicodeDecodeError)
    remedy = "Write it in UTF-8." if is_encoded else "Copy the file again if it is damaged."
    return BadJob(
        f"{path} cannot be read as {kind.upper()}: {first_line(error)}",
        remedy=f"{remedy} `stoker data check` looks through all of it.",
    )


def _require_columns(path: Path, header: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if column not in header:
            raise BadJob(
                f"{path} has no column {column!r}. {nearest(column, header)}",
                remedy="Mend the name where the source is made.",
            )


def _kept(block: Block, dropped: frozenset[int]) -> Block:
    if not dropped:
        return block
    return block.only(np.array([row not in dropped for row in block.rows.tolist()], bool))


def _csv_header(path: Path, spec: TableSpec) -> tuple[str, ...]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return tuple(next(csv.reader(file, delimiter=spec.delimiter), []))


@dataclass
class _Ragged:
    """Rows with another number of fields than the header: passed over where they are left out, else remembered."""

    dropped: frozenset[int]
    passed: list[int] = field(default_factory=list)
    first: str | None = None

    def __call__(self, row: Any) -> str:
        at = row.number - 2  # their count begins with 1 at the header
        if at in self.dropped:
            self.passed.append(at)
            return "skip"
        self.first = f"row {at} has {row.actual_columns} fields, the header has {row.expected_columns}: {row.text!r}"
        return "error"


def _csv_blocks(path: Path, spec: TableSpec, columns: Sequence[str], dropped: frozenset[int]) -> Iterator[Block]:
    ragged = _Ragged(dropped)
    try:
        with pyarrow.csv.open_csv(
            path,
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=spec.delimiter, newlines_in_values=True, invalid_row_handler=ragged
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=list(columns), column_types=dict.fromkeys(columns, pa.string()),
                strings_can_be_null=True, null_values=[""], quoted_strings_can_be_null=True,
            ),
        ) as reader:  # fmt: skip
            first = 0
            for batch in reader:
                rows = _numbered(first, batch.num_rows, ragged.passed)
                first = first if not len(rows) else int(rows[-1]) + 1
                yield Block(path, rows, dict(zip(columns, batch.columns, strict=True)), is_text=True)
    except pa.ArrowInvalid as error:
        if ragged.first is None:
            raise
        raise BadJob(
            f"{path}: {ragged.first}",
            remedy="Mend the row, quote fields that hold the delimiter, or leave it out with clean=….",
        ) from error


def _numbered(first: int, count: int, passed: Sequence[int]) -> np.typing.NDArray[np.int64]:
    """The numbers of `count` rows from `first` on, those that were passed over left out."""
    rows = np.arange(first, first + count + len(passed), dtype=np.int64)
    return rows[~np.isin(rows, np.array(passed, np.int64))][:count]


def _parquet_header(path: Path, _spec: TableSpec) -> tuple[str, ...]:
    return tuple(pq.read_schema(path).names)


def _parquet_blocks(path: Path, _spec: TableSpec, columns: Sequence[str], _dropped: frozenset[int]) -> Iterator[Block]:
    with pq.ParquetFile(path, memory_map=True, pre_buffer=False) as file:
        first = 0
        for batch in file.iter_batches(_BLOCK_ROWS, columns=list(columns), use_threads=False):
            rows = np.arange(first, first + batch.num_rows, dtype=np.int64)
            first += batch.num_rows
            yield Block(path, rows, {name: batch.column(name) for name in columns})


def _jsonl_header(path: Path, _spec: TableSpec) -> tuple[str, ...]:
    """The keys of the first object."""
    for _, found in _objects(path, frozenset()):
        return tuple(found)
    return ()


def _jsonl_blocks(path: Path, _spec: TableSpec, columns: Sequence[str], dropped: frozenset[int]) -> Iterator[Block]:
    seen: set[str] = set()
    rows: list[int] = []
    objects: list[dict[str, Any]] = []
    for row, found in _objects(path, dropped):
        seen.update(found)
        rows.append(row)
        objects.append(found)
        if len(rows) == _BLOCK_ROWS:
            yield _block_of_objects(path, rows, objects, columns)
            rows, objects = [], []
    _require_columns(path, tuple(seen), columns)
    yield _block_of_objects(path, rows, objects, columns)


def _block_of_objects(path: Path, rows: list[int], objects: list[dict[str, Any]], columns: Sequence[str]) -> Block:
    arrays = {name: _column(path, name, rows, [found.get(name) for found in objects]) for name in columns}
    return Block(path, np.array(rows, np.int64), arrays)


def _column(path: Path, name: str, rows: list[int], values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except pa.ArrowException as error:
        kinds = [_json_kind(value) for value in values]
        usual = next(kind for kind in kinds if kind != "null")
        odd = next((at for at, kind in enumerate(kinds) if kind not in ("null", usual)), 0)
        raise BadJob(
            f"{path}, row {rows[odd]}: {name!r} is {values[odd]!r}, a {kinds[odd]}, where others are a {usual}",
            remedy="Let all rows have one type in a column.",
        ) from error


def _json_kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}
    return kinds.get(type(value), "null")


def _objects(path: Path, dropped: frozenset[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every line's object with its number; blank lines are none, and what is dropped is not looked at."""
    with path.open("rb") as file:
        row = -1
        for line in file:
            if not line.strip():
                continue
            row += 1
            if row in dropped:
                continue
            try:
                found = json.loads(line)
            except ValueError as error:
                raise BadJob(
                    f"{path}, row {row}: no JSON ({error}): {line[:60].decode('utf-8', 'replace')!r}",
                    remedy="One object a line; mend the line, or leave it out with clean=….",
                ) from error
            if not isinstance(found, dict):
                raise BadJob(f"{path}, row {row}: a {_json_kind(found)}, wanted an object", remedy="One object a line.")
            yield row, found
