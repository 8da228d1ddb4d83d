"""The rows of CSV, Parquet and JSONL files, block by block. Imports pyarrow: it is imported when a table is read.

pyarrow reads CSV several times as fast as a reader of single records does, and so goes first; from the block on in
which it meets a broken row that one takes over, to leave the row out, or to tell which it is. Quotes that are never
closed, and what follows a closed one, are no fault to pyarrow: they are looked for before, and such a file is left to
the other reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from stoker.data.files.table_spec import TableSpec
from stoker.data.reading.csv_file import CsvFile
from stoker.data.reading.faults import RowFault
from stoker.data.reading.headers import no_such_column
from stoker.data.reading.json_lines import kind_of, object_in, rows_in
from stoker.data.reading.lines import Lines, is_utf8, opened
from stoker.data.reading.parquet import batches_of, parquet_file
from stoker.data.reading.quotes import are_quotes_sound
from stoker.errors import BadJob, first_line

_BLOCK_BYTES = 8 * 2**20
_BLOCK_ROWS = 2**15
_SHOWN = 60
"""Characters of a broken row that are shown."""


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


def header_of(path: Path, spec: TableSpec, dropped: frozenset[int]) -> tuple[str, ...]:
    """The columns of a file; of JSONL, the keys of its first object that is not `dropped`.

    Raises:
        BadJob: it cannot be read, has none, or has one twice.
    """
    if spec.format == "csv":
        return CsvFile(path, spec.delimiter).header
    if spec.format == "parquet":
        with parquet_file(path) as file:
            header = tuple(file.schema_arrow.names)
    else:
        header = next((tuple(found) for _, found in _objects(path, dropped)), ())
    twice = sorted({name for name in header if header.count(name) > 1})
    if not header or twice:
        what = f"has two columns {twice[0]!r}" if twice else "has no columns"
        raise BadJob(f"{path} {what}", remedy="Give a file whose columns have names, each once.")
    return header


def blocks_of(path: Path, spec: TableSpec, columns: Sequence[str], dropped: frozenset[int]) -> Iterator[Block]:
    """All rows of a file that are not `dropped`.

    Raises:
        BadJob: a column is missing, or one too much where all are read; a row is ragged or broken, or the file is
            damaged.
    """
    if spec.format != "jsonl":
        header = header_of(path, spec, dropped)
        _require_columns(path, header, columns)
        _require_no_more(path, header, spec, columns)
    with _told(path, spec):
        if spec.format == "csv":
            yield from _csv_blocks(CsvFile(path, spec.delimiter), columns, dropped)
        elif spec.format == "parquet":
            yield from (_kept(block, dropped) for block in _parquet_blocks(path, columns))
        else:
            yield from _jsonl_blocks(path, spec, columns, dropped)


@contextmanager
def _told(path: Path, spec: TableSpec) -> Iterator[None]:
    """Errors of the disk and of pyarrow, with the file."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise BadJob(
            f"{path} cannot be read as {spec.format.upper()}: {first_line(error)}",
            remedy="Copy the file again if it is damaged. `stoker data check` looks through all of it.",
        ) from error


def _require_columns(path: Path, header: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if column not in header:
            why, remedy = no_such_column(column, header)
            raise BadJob(f"{path} has no column {column!r}. {why}", remedy=remedy)


def _require_no_more(path: Path, header: Sequence[str], spec: TableSpec, columns: Sequence[str]) -> None:
    """Refuse a column that nobody reads, where every column is one of the features."""
    others = [name for name in header if name not in columns] if spec.features is None else []
    if others:
        raise BadJob(
            f"{path} has {others[0]!r}, which the first row or file of the table lacks",
            remedy="Name the columns that are features: features=[…].",
        )


def _kept(block: Block, dropped: frozenset[int]) -> Block:
    if not dropped:
        return block
    return block.only(np.array([row not in dropped for row in block.rows.tolist()], bool))


def _csv_blocks(file: CsvFile, columns: Sequence[str], dropped: frozenset[int]) -> Iterator[Block]:
    first = 0
    with opened(file.path) as content:
        if not are_quotes_sound(content, file.delimiter):
            content.close()
            yield from _blocks_of_records(file, columns, dropped, first)
            return
    try:
        with pyarrow.csv.open_csv(
            file.path,
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=pyarrow.csv.ParseOptions(delimiter=file.delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=list(columns), column_types=dict.fromkeys(columns, pa.string()),
                strings_can_be_null=True, null_values=[""], quoted_strings_can_be_null=True,
            ),
        ) as reader:  # fmt: skip
            for batch in reader:
                rows = np.arange(first, first + batch.num_rows, dtype=np.int64)
                first += batch.num_rows
                values = dict(zip(columns, batch.columns, strict=True))
                yield _kept(Block(file.path, rows, values, is_text=True), dropped)
    except pa.ArrowInvalid:
        yield from _blocks_of_records(file, columns, dropped, first)


def _blocks_of_records(file: CsvFile, columns: Sequence[str], dropped: frozenset[int], first: int) -> Iterator[Block]:
    """The rows from `first` on, one by one, so that broken ones can be left out, or told."""
    places = [file.header.index(name) for name in columns]
    rows: list[int] = []
    values: list[list[str]] = []
    with opened(file.path) as content:
        for row, record in enumerate(file.records(content)):
            if row < first or row in dropped:
                continue
            chosen = [] if record.fault else [record.fields[place] for place in places]
            fault = record.fault or (None if is_utf8("".join(chosen)) else RowFault("encoding", "is not UTF-8"))
            if fault:
                raise _broken(file.path, row, fault, file.delimiter.join(record.fields))
            rows.append(row)
            values.append(chosen)
            if len(rows) == _BLOCK_ROWS:
                yield _block_of_texts(file.path, rows, values, columns)
                rows, values = [], []
    yield _block_of_texts(file.path, rows, values, columns)


def _block_of_texts(path: Path, rows: list[int], values: list[list[str]], columns: Sequence[str]) -> Block:
    texts = {name: pa.array([row[at] or None for row in values], pa.string()) for at, name in enumerate(columns)}
    return Block(path, np.array(rows, np.int64), texts, is_text=True)


def _parquet_blocks(path: Path, columns: Sequence[str]) -> Iterator[Block]:
    with parquet_file(path) as file:
        for first, batch in batches_of(file, path, _BLOCK_ROWS, list(columns)):
            rows = np.arange(first, first + batch.num_rows, dtype=np.int64)
            yield Block(path, rows, {name: batch.column(name) for name in columns})


def _jsonl_blocks(path: Path, spec: TableSpec, columns: Sequence[str], dropped: frozenset[int]) -> Iterator[Block]:
    seen: dict[str, None] = {}
    rows: list[int] = []
    objects: list[dict[str, Any]] = []
    for row, found in _objects(path, dropped):
        seen.update(dict.fromkeys(found))
        rows.append(row)
        objects.append(found)
        if len(rows) == _BLOCK_ROWS:
            yield _block_of_objects(path, rows, objects, columns)
            rows, objects = [], []
    _require_columns(path, tuple(seen), columns)
    _require_no_more(path, tuple(seen), spec, columns)
    yield _block_of_objects(path, rows, objects, columns)


def _block_of_objects(path: Path, rows: list[int], objects: list[dict[str, Any]], columns: Sequence[str]) -> Block:
    arrays = {name: _column(path, name, rows, [found.get(name) for found in objects]) for name in columns}
    return Block(path, np.array(rows, np.int64), arrays)


def _column(path: Path, name: str, rows: list[int], values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        kinds = [kind_of(value) for value in values]
        usual = next(kind for kind in kinds if kind != "null")
        odd = next((at for at, kind in enumerate(kinds) if kind not in ("null", usual)), None)
        if odd is None:
            raise BadJob(f"{path}: {name!r} cannot be read: {first_line(error)}",
                         remedy="Whole numbers have 64 bits, and text is whole characters.") from error  # fmt: skip
        raise BadJob(
            f"{path}, row {rows[odd]}: {name!r} is {values[odd]!r}, a {kinds[odd]}, where others are a {usual}",
            remedy="Let all rows have one type in a column.",
        ) from error


def _objects(path: Path, dropped: frozenset[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every row's object with its number; what is dropped is not looked at."""
    with opened(path) as file:
        for row, line in enumerate(rows_in(Lines(file, path))):
            if row in dropped:
                continue
            found, fault = object_in(line.content)
            if fault:
                raise _broken(path, row, fault, line.content[:_SHOWN].decode("utf-8", "replace"))
            yield row, found


def _broken(path: Path, row: int, fault: RowFault, text: str) -> BadJob:
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:_SHOWN]
    return BadJob(
        f"{path}: row {row} {fault.words}" + (f": {text!r}" if text else ""),
        remedy="Mend the row, or leave it out with clean=…; `stoker data check` finds all such rows.",
    )
