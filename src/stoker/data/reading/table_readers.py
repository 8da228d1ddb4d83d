"""Readers of CSV (RFC 4180), JSON Lines and Parquet files: rows with their place, and what is wrong with them.

`CsvFile` reads records, whose quoted fields may hold line breaks; `rows_in` and `object_in` read one JSON object a
line. Blank lines are not rows. Reading can start in the middle, at the offset of a row. A fault of one row is a
`RowFault`, which the caller may skip or report; a file that cannot be read on raises `BadTable`.

Parquet files are read a batch at a time, because row groups may be larger than memory, with pyarrow, which is imported
when the first of them is opened.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from stoker.errors import BadJob, first_line, nearest
from stoker.records.codec import read_json
from stoker.records.data_check import Fault
from stoker.units import format_bytes

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch
    from pyarrow.parquet import ParquetFile


NOT_A_NUMBER = ("NA", "N/A", "n/a", "NaN", "nan", "null", "NULL")
"""Missing numbers in text, in addition to empty text."""


class CsvRecord(NamedTuple):
    """A record: its offset [bytes], its fields (empty if they cannot be separated), and what is wrong with it."""

    start: int
    fields: list[str]
    fault: RowFault | None


@dataclass(frozen=True)
class CsvFile:
    """A file with a header; blank lines are no records."""

    path: Path
    delimiter: str = ","

    @cached_property
    def header(self) -> tuple[str, ...]:
        """The names of the columns.

        Raises:
            BadTable: the file cannot be read, or its first line is none, has a name twice, or is not UTF-8.
        """
        remedy = "The first line names the columns, each once, in UTF-8."
        with opened(self.path) as file:
            first = next(self._all(Lines(file, self.path, any_end=True), 0), None)
        if first is None:
            raise BadTable(self.path, "is empty: it has no columns", remedy=remedy)
        if not first.fields and first.fault:
            raise BadTable(self.path, f"has a first line that {first.fault.words}", remedy=remedy)
        names = first.fields
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadTable(self.path, f"has two columns {twice[0]!r}", remedy=remedy)
        if odd := next((name for name in names if not is_utf8(name)), None):
            raise BadTable(self.path, f"has a column {odd.encode(errors='surrogateescape')!r}", remedy=remedy)
        return tuple(names)

    def records(self, file: BinaryIO, offset: int = 0) -> Iterator[CsvRecord]:
        """The records of the open file from `offset` on [bytes]; from 0, those after the header.

        Bytes that are no UTF-8 become lone surrogates. A record with more or fewer fields than the header is faulty.

        Raises:
            BadTable: a quote is never closed, so that the rest of the file has no rows; or as `header`.
        """
        records = self._all(Lines(file, self.path, offset, any_end=True), len(self.header))
        if offset == 0:
            next(records)
        yield from records

    def _all(self, lines: Lines, width: int) -> Iterator[CsvRecord]:
        csv.field_size_limit(LONGEST_LINE_BYTES)  # of the whole process; the default is 128 KiB
        texts = (line.decode("utf-8", "surrogateescape") for line in lines)
        reader = csv.reader(texts, delimiter=self.delimiter, strict=True)
        while True:
            start, fault = lines.offset, None
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if str(error).startswith("unexpected end"):
                    with opened(self.path) as file:
                        before = Lines(file, self.path, any_end=True)
                        number = 1 + sum(before.offset <= start for _ in before)
                    raise BadTable(
                        self.path,
                        f"is no CSV from line {number:,} (byte {start:,}) on: a quote is opened there and never closed "
                        f"({error})",
                        remedy="A field with a quote or a line break is put in quotes, with the quotes in it doubled.",
                    ) from error
                fields, fault = [], RowFault("corrupt", f"is no CSV: {error}")
            if fields and len(fields) != width:
                fault = RowFault("ragged", f"has {len(fields)} fields, the header has {width}")
            if fields or fault:
                yield CsvRecord(start, fields, fault)


_KINDS = {bool: "boolean", int: "number", float: "number", str: "string", list: "list", dict: "object"}


class JsonLine(NamedTuple):
    """A line that is not blank, and where it begins [bytes]."""

    start: int
    content: bytes


def rows_in(lines: Lines) -> Iterator[JsonLine]:
    """The lines that are not blank."""
    start = lines.offset
    for content in lines:
        if content.strip():
            yield JsonLine(start, content)
        start = lines.offset


def object_in(content: bytes) -> tuple[dict[str, Any], RowFault | None]:
    """The object in a line; or an empty one, and why the line holds none."""
    try:
        value = read_json(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        return {}, RowFault("encoding", f"is not UTF-8 at byte {error.start} of the line")
    except (ValueError, RecursionError) as error:
        return {}, RowFault("corrupt", f"is no JSON: {first_line(error)}")
    if not isinstance(value, dict):
        return {}, RowFault("corrupt", f"is no JSON object but a {kind_of(value)}")
    return value, None


def kind_of(value: Any) -> str:
    """JSON's name for the type of a value."""
    return _KINDS.get(type(value), "null")


LONGEST_LINE_BYTES = 64 * 1024 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE = re.compile(rb"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")


def opened(path: Path) -> BinaryIO:
    """The open file.

    Raises:
        BadTable: it cannot be opened.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise BadTable(path, f"cannot be read: {error.strerror}", remedy="Give a file that is there.") from error


class Lines:
    """The lines of an open file from `offset` [bytes] on; with `any_end` a lone carriage return ends a line as well."""

    def __init__(self, file: BinaryIO, path: Path, offset: int = 0, *, any_end: bool = False) -> None:
        file.seek(offset)
        self._file = file
        self._path = path
        self._any_end = any_end
        self.offset = offset
        """Beginning of the next line [bytes]."""

    def __iter__(self) -> Iterator[bytes]:
        """The next lines, with their ends; a byte order mark is left out.

        Raises:
            BadTable: a line is so long that this is no file of lines.
        """
        while line := self._file.readline(LONGEST_LINE_BYTES):
            if len(line) == LONGEST_LINE_BYTES:
                raise BadTable(
                    self._path,
                    f"has a line of more than {format_bytes(LONGEST_LINE_BYTES)} at byte {self.offset:,}",
                    remedy="JSON Lines have one object a line; write an array of objects so, or as Parquet.",
                )
            first = line.find(b"\r") if self._any_end else -1
            pieces = (line,) if first < 0 or line[first:] in (b"\r", b"\r\n") else _LINE.findall(line)
            for piece in pieces:
                is_first = not self.offset
                self.offset += len(piece)
                yield piece.removeprefix(_BYTE_ORDER_MARK) if is_first else piece


def is_utf8(text: str) -> bool:
    """True if all of a text could be decoded; bytes that could not are lone surrogates (PEP 383)."""
    return text.isascii() or not any("\udc80" <= char <= "\udcff" for char in text)


_CHUNK_BYTES = 4 * 1024 * 1024


def are_quotes_sound(file: BinaryIO, delimiter: str, *, chunk_bytes: int = _CHUNK_BYTES) -> bool:
    r"""True if every field that begins with a quote ends with one, before a delimiter or the end of a line.

    Fast CSV readers ignore a quote that is never closed, and what follows a closed one: they read on to the next quote,
    and take the rows in between for one field. Fields of more than 64 MiB are refused.

    Args:
        file: an open file, read to its end or to the first unsound quote.
        delimiter: between fields, one byte; for others the answer is False.
        chunk_bytes: size of one read [bytes].

    >>> import io
    >>> [are_quotes_sound(io.BytesIO(text), ",") for text in (b'x,y\n1,"a ""b"", c"\n', b'x,y\n1,"a\n2,b\n')]
    [True, False]
    """
    if len(delimiter.encode()) != 1:
        return False
    inside, at_end = _patterns(delimiter)
    file.seek(0)
    buffer, place = file.read(len(_BYTE_ORDER_MARK)).removeprefix(_BYTE_ORDER_MARK), 0
    while chunk := file.read(chunk_bytes):
        buffer += chunk
        found = inside.match(buffer, place)
        end = found.end() if found else place
        buffer, place = buffer[max(0, end - 1) :], min(1, end)  # the byte before shows whether a field begins
        if len(buffer) > LONGEST_LINE_BYTES:
            return False
    return at_end.fullmatch(buffer, place) is not None


@lru_cache(maxsize=8)
def _patterns(delimiter: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    """The text before the first unsound quote, within a file and up to its end."""
    between = re.escape(delimiter.encode()) + rb"\r\n"
    field = rb'(?<![^%b])"(?:[^"]++|"")*+"' % between  # begins after a delimiter, at a line's or the file's beginning
    other = rb'[^"]++|(?<=[^%b])"' % between  # a quote within a field that begins with something else is a letter of it
    inside = rb"(?:%b|%b(?=[%b]))*+" % (other, field, between)
    at_end = rb"(?:%b|%b(?=[%b]|\Z))*+" % (other, field, between)
    return re.compile(inside), re.compile(at_end)


_OTHER_DELIMITERS = {";": "';'", "\t": "'\\t' (tabs)", "|": "'|'", ",": "','"}


def no_such_column(column: str, header: Sequence[str]) -> tuple[str, str]:
    r"""Why a header lacks a column (another delimiter, or spaces), and the remedy.

    >>> no_such_column("y", ["a;y"])
    ("Its header is one column, 'a;y'.", "If ';' is between fields, give delimiter=';'.")
    >>> no_such_column("y", ["a", " y"])
    ("Its header has spaces around names: ' y'.", 'Take them out of the file, or name the column with them.')
    >>> no_such_column("wide", ["a", "y"])
    ('Known: a, y.', 'Mend the name where the source is made.')
    """
    if len(header) == 1:
        for delimiter, shown in _OTHER_DELIMITERS.items():
            if column in [name.strip() for name in header[0].split(delimiter)]:
                remedy = f"If {shown} is between fields, give delimiter={shown.partition(' ')[0]}."
                return f"Its header is one column, {header[0]!r}.", remedy
    spaced = next((name for name in header if name.strip() == column.strip()), None)
    if spaced is not None:
        words = f"Its header has spaces around names: {spaced!r}."
        return words, "Take them out of the file, or name the column with them."
    return nearest(column, header), "Mend the name where the source is made."


def words_of(values: Array) -> Array:
    """Values [B] as large_string, null for missing ones and NaN; numbers and booleans as text.

    Raises:
        pyarrow.ArrowException: their type has no text.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if pa.types.is_floating(values.type):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    return pc.cast(values, pa.large_string())


@dataclass(frozen=True)
class RowFault:
    """Why a row has no values: its kind of fault, and a text that follows the row's name."""

    kind: Fault
    words: str


class BadTable(BadJob):
    """A file that cannot be read, or not any further; `what` follows the file's name."""

    def __init__(self, path: Path, what: str, *, remedy: str) -> None:
        super().__init__(f"{path} {what}", remedy=remedy)
        self.what = what


class BadImage(ValueError):
    """An image that cannot be decoded: its kind of fault, and why."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault: Fault = fault


_PARQUET_BUFFER_BYTES = 1024 * 1024


def parquet_file(path: Path) -> ParquetFile:
    """The open file; checksums of pages are verified when they are read.

    Raises:
        BadTable: it is no Parquet file, or is cut off.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(
            path, buffer_size=_PARQUET_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
        )
    except (pa.ArrowException, OSError) as error:
        raise BadTable(
            path,
            f"cannot be read as Parquet: {first_line(error)}",
            remedy="A file that was not copied or written to its end has no footer: copy it again.",
        ) from error


def batches_of(
    file: ParquetFile, path: Path, size: int, columns: Sequence[str] | None = None, *, row: int = 0
) -> Iterator[tuple[int, RecordBatch]]:
    """Batches of at most `size` rows in order, each with the number of its first row.

    Args:
        file: the open file.
        path: what it is called in errors.
        size: the most rows of a batch.
        columns: those to read; None: all.
        row: where to begin: at the start of the row group that holds this row.

    Raises:
        BadTable: it is damaged, with the row after which.
    """
    import pyarrow as pa

    groups, first = list(range(file.metadata.num_row_groups)), 0
    while groups and first + file.metadata.row_group(groups[0]).num_rows <= row:
        first += file.metadata.row_group(groups.pop(0)).num_rows
    try:
        for batch in file.iter_batches(size, row_groups=groups, columns=columns, use_threads=False):
            yield first, batch
            first += batch.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        what = f"cannot be read after row {first:,}: {first_line(error)}"
        raise BadTable(path, what, remedy="Copy the file again; it is damaged.") from error
