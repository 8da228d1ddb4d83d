"""CSV: a header, then a record each, whose quoted fields may hold line breaks (RFC 4180)."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple

from stoker.data.reading.faults import BadTable, RowFault
from stoker.data.reading.lines import LONGEST_LINE_BYTES, Lines, is_utf8, opened


class Record(NamedTuple):
    """A record: where it begins [bytes], its fields, none where they cannot be told apart, and what is wrong."""

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

    def records(self, file: BinaryIO, offset: int = 0) -> Iterator[Record]:
        """The records of the open file from `offset` on [bytes]; from 0, those after the header.

        Bytes that are no UTF-8 become lone surrogates. A record with more or fewer fields than the header is faulty.

        Raises:
            BadTable: a quote is never closed, so that the end of the file cannot be told apart; or as `header`.
        """
        records = self._all(Lines(file, self.path, offset, any_end=True), len(self.header))
        if offset == 0:
            next(records)
        yield from records

    def _all(self, lines: Lines, width: int) -> Iterator[Record]:
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
                fields, fault = [], self._broken(start, error)
            if fields and len(fields) != width:
                fault = RowFault("ragged", f"has {len(fields)} fields, the header has {width}")
            if fields or fault:
                yield Record(start, fields, fault)

    def _line_at(self, offset: int) -> int:
        """The number of the line that begins at `offset` [bytes], from 1 on."""
        with opened(self.path) as file:
            lines = Lines(file, self.path, any_end=True)
            return 1 + sum(lines.offset <= offset for _ in lines)

    def _broken(self, start: int, error: csv.Error) -> RowFault:
        """What is wrong with a record that is no CSV; the reader goes on with the line after it."""
        if str(error).startswith("unexpected end"):
            raise BadTable(
                self.path,
                f"is no CSV from line {self._line_at(start):,} (byte {start:,}) on: a quote is opened there and never "
                f"closed ({error})",
                remedy="A field with a quote or a line break is put in quotes, with the quotes in it doubled.",
            ) from error
        return RowFault("corrupt", f"is no CSV: {error}")
