"""Rows from CSV: a header, then a record each, whose quoted fields may hold line breaks (RFC 4180)."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import pyarrow as pa

from stoker.errors import BadJob
from stoker.predicting.rows import Field, Rows
from stoker.predicting.sources.base import Extent
from stoker.predicting.sources.text import LONGEST_LINE_BYTES, Lines, is_utf8
from stoker.records.prediction import PredictionPart, SourceFormat


@final
class CsvSource:
    """One CSV file, or one with tabs between the fields."""

    def __init__(self, path: Path, *, delimiter: str = ",") -> None:
        self.path = path
        self.format: SourceFormat = "tsv" if delimiter == "\t" else "csv"
        self._delimiter = delimiter

    def files(self) -> Sequence[Path]:
        """The file."""
        return (self.path,)

    def fields(self) -> tuple[Field, ...]:
        """As the header names them."""
        return tuple(Field(name, pa.string(), is_text=True) for name in self._header())

    def extent(self, part_rows: int) -> Extent:
        """Found by reading all of it."""
        offsets: list[int] = []
        num_rows = 0
        with self.path.open("rb") as file:
            records = Records(Lines(file, self.path), self.path, self._delimiter)
            next(records)
            start = records.offset
            for _ in records:
                if num_rows % part_rows == 0:
                    offsets.append(start)
                num_rows += 1
                start = records.offset
        return Extent(num_rows, tuple(offsets))

    def open(self, columns: Sequence[str]) -> CsvReader:
        """Begin reading these columns."""
        return CsvReader(self.path, self._header(), columns, self._delimiter)

    def _header(self) -> list[str]:
        with self.path.open("rb") as file:
            header = next(Records(Lines(file, self.path), self.path, self._delimiter), [])
        if not header:
            raise BadJob(f"{self.path} is empty", remedy="The first line names the columns.")
        twice = sorted({name for name in header if header.count(name) > 1})
        if twice:
            raise BadJob(f"{self.path} has two columns {twice[0]!r}", remedy="Rename one in the first line.")
        return header


@final
class Records:
    """Records of a file; blank lines are none."""

    def __init__(self, lines: Lines, path: Path, delimiter: str) -> None:
        csv.field_size_limit(LONGEST_LINE_BYTES)  # of the whole process; the default is 128 KiB
        self._lines = lines
        self._path = path
        self._reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)

    @property
    def offset(self) -> int:
        """Where the next record begins [bytes]."""
        return self._lines.offset

    def __iter__(self) -> Iterator[list[str]]:
        """The next records."""
        return self

    def __next__(self) -> list[str]:
        """The next record."""
        start = self.offset
        try:
            while not (record := next(self._reader)):
                pass
        except csv.Error as error:
            raise BadJob(
                f"{self._path} is no CSV in the record at byte {start:,}: {error}",
                remedy="A field with a quote or a line break is put in quotes, with the quotes in it doubled.",
            ) from error
        return record


@final
class CsvReader:
    """Reads parts where they begin."""

    def __init__(self, path: Path, header: Sequence[str], columns: Sequence[str], delimiter: str) -> None:
        self._path = path
        self._width = len(header)
        self._columns = {name: list(header).index(name) for name in columns}
        self._delimiter = delimiter
        self._file = path.open("rb")

    def read(self, part: PredictionPart) -> Rows:
        """The rows of a part; records with more or fewer fields than the header are broken."""
        records = Records(Lines(self._file, self._path, part.offset), self._path, self._delimiter)
        if part.offset == 0:
            next(records)  # the header
        broken: dict[int, str] = {}
        columns: dict[str, list[Any]] = {name: [] for name in self._columns}
        for row in range(part.num_rows):
            fields = next(records, [])
            if problem := self._problem(fields):
                broken[row] = problem
            for name, column in self._columns.items():
                columns[name].append(None if problem else fields[column])
        return Rows(str(self._path), part.first_row, part.num_rows, columns, broken)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _problem(self, fields: list[str]) -> str:
        if not fields:
            return "is after the end of the file"
        if len(fields) != self._width:
            return f"has {len(fields)} fields, the header has {self._width}"
        return "" if all(map(is_utf8, fields)) else "is not UTF-8"
