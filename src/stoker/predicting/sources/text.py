"""Rows from files of text: CSV, and JSON Lines. A row that cannot be read is broken, and the next is not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, final

import pyarrow as pa

from stoker.data.reading.csv_file import CsvFile
from stoker.data.reading.json_lines import object_in, rows_in
from stoker.data.reading.lines import Lines, is_utf8, opened
from stoker.errors import BadJob
from stoker.predicting.rows import Field, Rows
from stoker.predicting.sources.base import Extent
from stoker.records.prediction import PredictionPart, SourceFormat

_LOOKED_AT = 100
"""Objects whose keys are the columns."""


class TextSource(ABC):
    """A file of text: parts begin at bytes of it, which are found by reading all of it."""

    format: SourceFormat

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> Sequence[Path]:
        """The file."""
        return (self.path,)

    @abstractmethod
    def fields(self) -> tuple[Field, ...]:
        """The columns; see `Source.fields`."""

    @abstractmethod
    def starts(self, file: BinaryIO) -> Iterator[int]:
        """Where each row of the open file begins [bytes]."""

    @abstractmethod
    def values(self, file: BinaryIO, offset: int, columns: Sequence[str]) -> Iterator[tuple[list[Any], str]]:
        """The rows from `offset` on: the values of these columns, and what is wrong with a row that has none."""

    def extent(self, part_rows: int) -> Extent:
        """Found by reading all of it."""
        offsets: list[int] = []
        num_rows = 0
        with opened(self.path) as file:
            for start in self.starts(file):
                if num_rows % part_rows == 0:
                    offsets.append(start)
                num_rows += 1
        return Extent(num_rows, tuple(offsets))

    def open(self, columns: Sequence[str]) -> TextReader:
        """Begin reading these columns."""
        return TextReader(self, columns)


@final
class TextReader:
    """Reads parts where they begin."""

    def __init__(self, source: TextSource, columns: Sequence[str]) -> None:
        self._source = source
        self._columns = tuple(columns)
        self._file = opened(source.path)

    def read(self, part: PredictionPart) -> Rows:
        """The rows of a part."""
        broken: dict[int, str] = {}
        columns: dict[str, list[Any]] = {name: [] for name in self._columns}
        rows = self._source.values(self._file, part.offset, self._columns)
        for row in range(part.num_rows):
            values, problem = next(rows, ([], "is after the end of the file"))
            if problem:
                broken[row] = problem
            for at, column in enumerate(columns.values()):
                column.append(None if problem else values[at])
        return Rows(str(self._source.path), part.first_row, part.num_rows, columns, broken)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class CsvSource(TextSource):
    """One CSV file, or one with tabs between the fields."""

    def __init__(self, path: Path, *, delimiter: str = ",") -> None:
        super().__init__(path)
        self.format = "tsv" if delimiter == "\t" else "csv"
        self._csv = CsvFile(path, delimiter)

    def fields(self) -> tuple[Field, ...]:
        """As the header names them."""
        return tuple(Field(name, pa.string(), is_text=True) for name in self._csv.header)

    def starts(self, file: BinaryIO) -> Iterator[int]:
        """Of every record."""
        return (record.start for record in self._csv.records(file))

    def values(self, file: BinaryIO, offset: int, columns: Sequence[str]) -> Iterator[tuple[list[Any], str]]:
        """Fields as they are written."""
        places = [self._csv.header.index(name) for name in columns]
        for record in self._csv.records(file, offset):
            if record.fault is not None:
                yield [], record.fault.words
            else:
                chosen = [record.fields[place] for place in places]
                yield chosen, "" if all(map(is_utf8, chosen)) else "is not UTF-8"


@final
class JsonlSource(TextSource):
    """One file of JSON Lines."""

    format: SourceFormat = "jsonl"

    def fields(self) -> tuple[Field, ...]:
        """The keys of the first hundred objects."""
        with opened(self.path) as file:
            found = [object_in(line.content)[0] for line in islice(rows_in(Lines(file, self.path)), _LOOKED_AT)]
        names = dict.fromkeys(name for one in found for name in one)
        if not names:
            raise BadJob(f"{self.path} has no JSON object in its first {_LOOKED_AT} lines")
        return tuple(Field(name, None) for name in names)

    def starts(self, file: BinaryIO) -> Iterator[int]:
        """Of every line that is not blank."""
        return (line.start for line in rows_in(Lines(file, self.path)))

    def values(self, file: BinaryIO, offset: int, columns: Sequence[str]) -> Iterator[tuple[list[Any], str]]:
        """Values by their keys; null where a row lacks one."""
        for line in rows_in(Lines(file, self.path, offset)):
            found, fault = object_in(line.content)
            yield [found.get(name) for name in columns], "" if fault is None else fault.words
