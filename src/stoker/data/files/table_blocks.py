"""The rows of CSV, Parquet and JSONL files in blocks, and a block's columns as numbers, texts and codes.

pyarrow reads CSV several times as fast as the reader of single records, and so goes first; from the block with a broken
row on the other takes over, which leaves the row out or names it. pyarrow accepts quotes that are never closed, and
text after a closed one: a file with these is read by the other reader. Imports pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from stoker.data.files.table_store import TableSpec
from stoker.data.reading.table_readers import (
    NOT_A_NUMBER,
    CsvFile,
    Lines,
    RowFault,
    are_quotes_sound,
    batches_of,
    is_utf8,
    kind_of,
    no_such_column,
    object_in,
    opened,
    parquet_file,
    rows_in,
    words_of,
)
from stoker.errors import BadJob, first_line, nearest

_BLOCK_BYTES = 8 * 2**20
_BLOCK_ROWS = 2**15
_SHOWN = 60
"""Characters of a broken row shown in an error."""


@dataclass(frozen=True)
class RowBlock:
    """Some rows of a file: their numbers `rows` [B], and their values by column, for CSV as text."""

    path: Path
    rows: np.typing.NDArray[np.int64]
    columns: dict[str, pa.Array]
    is_text: bool = False
    """True if every value is text, from which numbers have to be read."""

    def only(self, keep: np.typing.NDArray[np.bool_]) -> RowBlock:
        """The rows where `keep` [B] is true."""
        if keep.all():
            return self
        columns = {name: column.filter(pa.array(keep)) for name, column in self.columns.items()}
        return RowBlock(self.path, self.rows[keep], columns, self.is_text)


def header_of(path: Path, spec: TableSpec, dropped: frozenset[int]) -> tuple[str, ...]:
    """The columns of a file; for JSONL, the keys of its first object that is not `dropped`.

    Raises:
        BadJob: it cannot be read, has no columns, or has one twice.
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


def blocks_of(path: Path, spec: TableSpec, columns: Sequence[str], dropped: frozenset[int]) -> Iterator[RowBlock]:
    """All rows of a file that are not `dropped`.

    Raises:
        BadJob: a column is missing, or unexpected if all are features; a row is ragged or broken, or the file is
            damaged.
    """
    if spec.format != "jsonl":
        header = header_of(path, spec, dropped)
        _require_columns(path, header, columns)
        _require_no_more(path, header, spec, columns)
    try:
        if spec.format == "csv":
            yield from _csv_blocks(CsvFile(path, spec.delimiter), columns, dropped)
        elif spec.format == "parquet":
            with parquet_file(path) as file:
                for first, batch in batches_of(file, path, _BLOCK_ROWS, list(columns)):
                    rows = np.arange(first, first + batch.num_rows, dtype=np.int64)
                    yield _kept(RowBlock(path, rows, {name: batch.column(name) for name in columns}), dropped)
        else:
            yield from _jsonl_blocks(path, spec, columns, dropped)
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
    """Raise BadJob for an unexpected column, if every column is a feature."""
    others = [name for name in header if name not in columns] if spec.features is None else []
    if others:
        raise BadJob(
            f"{path} has {others[0]!r}, which the first row or file of the table lacks",
            remedy="Name the columns that are features: features=[…].",
        )


def _kept(block: RowBlock, dropped: frozenset[int]) -> RowBlock:
    if not dropped:
        return block
    return block.only(np.array([row not in dropped for row in block.rows.tolist()], bool))


def _csv_blocks(file: CsvFile, columns: Sequence[str], dropped: frozenset[int]) -> Iterator[RowBlock]:
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
                include_columns=list(columns),
                column_types=dict.fromkeys(columns, pa.string()),
                strings_can_be_null=True,
                null_values=[""],
                quoted_strings_can_be_null=True,
            ),
        ) as reader:
            for batch in reader:
                rows = np.arange(first, first + batch.num_rows, dtype=np.int64)
                first += batch.num_rows
                values = dict(zip(columns, batch.columns, strict=True))
                yield _kept(RowBlock(file.path, rows, values, is_text=True), dropped)
    except pa.ArrowInvalid:
        yield from _blocks_of_records(file, columns, dropped, first)


def _blocks_of_records(
    file: CsvFile, columns: Sequence[str], dropped: frozenset[int], first: int
) -> Iterator[RowBlock]:
    """The rows from `first` on, one by one, so that broken ones can be left out or named."""
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


def _block_of_texts(path: Path, rows: list[int], values: list[list[str]], columns: Sequence[str]) -> RowBlock:
    texts = {name: pa.array([row[i] or None for row in values], pa.string()) for i, name in enumerate(columns)}
    return RowBlock(path, np.array(rows, np.int64), texts, is_text=True)


def _jsonl_blocks(path: Path, spec: TableSpec, columns: Sequence[str], dropped: frozenset[int]) -> Iterator[RowBlock]:
    seen: dict[str, None] = {}
    rows: list[int] = []
    objects: list[dict[str, Any]] = []
    for row, value in _objects(path, dropped):
        seen.update(dict.fromkeys(value))
        rows.append(row)
        objects.append(value)
        if len(rows) == _BLOCK_ROWS:
            yield _block_of_objects(path, rows, objects, columns)
            rows, objects = [], []
    _require_columns(path, tuple(seen), columns)
    _require_no_more(path, tuple(seen), spec, columns)
    yield _block_of_objects(path, rows, objects, columns)


def _block_of_objects(path: Path, rows: list[int], objects: list[dict[str, Any]], columns: Sequence[str]) -> RowBlock:
    arrays = {name: _column(path, name, rows, [value.get(name) for value in objects]) for name in columns}
    return RowBlock(path, np.array(rows, np.int64), arrays)


def _column(path: Path, name: str, rows: list[int], values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, UnicodeError) as error:
        kinds = [kind_of(value) for value in values]
        usual = next(kind for kind in kinds if kind != "null")
        odd = next((index for index, kind in enumerate(kinds) if kind not in ("null", usual)), None)
        if odd is None:
            what = f"{path}: {name!r} cannot be read: {first_line(error)}"
            raise BadJob(what, remedy="Whole numbers have 64 bits, and text is whole characters.") from error
        raise BadJob(
            f"{path}, row {rows[odd]}: {name!r} is {values[odd]!r}, a {kinds[odd]}, where others are a {usual}",
            remedy="Let all rows have one type in a column.",
        ) from error


def _objects(path: Path, dropped: frozenset[int]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of all rows that are not dropped, with their numbers."""
    with opened(path) as file:
        for row, line in enumerate(rows_in(Lines(file, path))):
            if row in dropped:
                continue
            value, fault = object_in(line.content)
            if fault:
                raise _broken(path, row, fault, line.content[:_SHOWN].decode("utf-8", "replace"))
            yield row, value


def _broken(path: Path, row: int, fault: RowFault, text: str) -> BadJob:
    text = text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")[:_SHOWN]
    return BadJob(
        f"{path}: row {row} {fault.words}" + (f": {text!r}" if text else ""),
        remedy="Mend the row, or leave it out with clean=…; `stoker data check` finds all such rows.",
    )


MOST_VALUES = 2**16
"""A column of categories or classes with more different values than this is an error."""


def numbers_of(block: RowBlock, column: str) -> npt.NDArray[np.float64]:
    """A column as float64 [B], NaN for missing values.

    Raises:
        BadJob: a value is not a number, or the column is of a type without numbers.
    """
    values = _plain(block.columns[column])
    if pa.types.is_null(values.type):
        return np.full(len(values), np.nan)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        texts = numerals_of(values)
        try:
            values = pc.cast(texts, pa.float64())
        except pa.ArrowException as error:
            index, value = next((i, text) for i, text in enumerate(texts.to_pylist()) if not _is_number(text))
            raise BadJob(
                f"{block.path}, row {int(block.rows[index])}: {column!r} is {value!r}, which is no number",
                remedy=f"A column of words is named in categories=[{column!r}] or text=[{column!r}].",
            ) from error
    elif not (
        pa.types.is_integer(values.type)
        or pa.types.is_floating(values.type)
        or pa.types.is_boolean(values.type)
        or pa.types.is_decimal(values.type)
    ):
        raise BadJob(
            f"{block.path}: the column {column!r} is of type {values.type}, which has no numbers",
            remedy="Make numbers of it, or leave it out of features=[…].",
        )
    numbers: npt.NDArray[np.float64] = pc.cast(values, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return numbers


def as_float32(numbers: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """The numbers as float32, and which of them are finite but too large for it."""
    with np.errstate(over="ignore"):
        stored = numbers.astype(np.float32)
    return stored, np.isinf(stored) & np.isfinite(numbers)


def too_large(block: RowBlock, row: int, column: str, value: float) -> BadJob:
    """The error for a number of a block that is too large for float32."""
    return BadJob(
        f"{block.path}, row {int(block.rows[row])}: {column!r} is {value:g}, and float32 ends at 3.4e38",
        remedy="Give it in another unit, or leave the row out with clean=….",
    )


def texts_of(block: RowBlock, column: str) -> pa.Array:
    """A column as large_string [B], null for missing values and NaN; numbers and booleans as text.

    Raises:
        BadJob: the column is of a type without text.
    """
    values = block.columns[column]
    try:
        return words_of(values)
    except pa.ArrowException as error:
        raise BadJob(
            f"{block.path}: the column {column!r} is of type {values.type}, which has no text", remedy="Leave it out."
        ) from error


def are_numbers(block: RowBlock, column: str) -> bool:
    """True if every value of a column is a number, missing, or a word for that; False for booleans."""
    values = _plain(block.columns[column])
    if pa.types.is_boolean(values.type):
        return False
    try:
        numbers_of(block, column)
    except BadJob:
        return False
    return True


class Vocabulary:
    """The different values of a column, numbered in order of appearance, or as given."""

    def __init__(self, column: str, given: tuple[str, ...] | None) -> None:
        self.column = column
        self.given = given
        self.numbers: dict[str, int] = {value: number for number, value in enumerate(given or ())}

    def codes_of(self, block: RowBlock, texts: pa.Array) -> npt.NDArray[np.int64]:
        """The numbers [B] of values [B], -1 for missing ones.

        Raises:
            BadJob: a value is not among the given ones, or there are too many.
        """
        encoded = pc.dictionary_encode(texts)
        known = np.array([self._number(block, texts, value) for value in encoded.dictionary.to_pylist()], np.int64)
        places = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        return np.where(places < 0, -1, np.append(known, -1)[places])

    def sorted(self) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """The values in their final order (as given, else sorted), and the final number of each code."""
        if self.given is not None:
            return self.given, np.arange(len(self.given), dtype=np.int64)
        values = tuple(sorted(self.numbers))
        final = np.empty(len(values), np.int64)
        final[[self.numbers[value] for value in values]] = np.arange(len(values))
        return values, final

    def _number(self, block: RowBlock, texts: pa.Array, value: str) -> int:
        if value not in self.numbers:
            if self.given is not None:
                row = int(block.rows[texts.to_pylist().index(value)])
                raise BadJob(
                    f"{block.path}, row {row}: {self.column!r} is {value!r}, which is not among its "
                    f"{len(self.given):,} values. {nearest(value, self.given)}",
                    remedy="Add it where the values are named, or leave the row out with clean=….",
                )
            if len(self.numbers) == MOST_VALUES:
                raise BadJob(
                    f"{block.path}: the column {self.column!r} has more than {MOST_VALUES:,} different values",
                    remedy="As categories they would be as many rows of a table; take it as text=[…], or leave it out.",
                )
            self.numbers[value] = len(self.numbers)
        return self.numbers[value]


def _plain(values: pa.Array) -> pa.Array:
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def numerals_of(texts: pa.Array) -> pa.Array:
    """Text [B] without surrounding space, null if it is a word for a missing number."""
    texts = pc.utf8_trim_whitespace(texts)
    spellings = pa.array(["", *NOT_A_NUMBER], texts.type)
    is_word = pc.fill_null(pc.is_in(texts, value_set=spellings), fill_value=False)
    return pc.if_else(is_word, pa.scalar(None, texts.type), texts)


def _is_number(value: str | None) -> bool:
    if value is None:
        return True
    try:
        pc.cast(pa.scalar(value), pa.float64())
    except pa.ArrowException:
        return False
    return True
