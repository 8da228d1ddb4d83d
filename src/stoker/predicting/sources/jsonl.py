"""Rows from JSON Lines: one object a line; blank lines are no rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, final

from stoker.errors import BadJob
from stoker.predicting.rows import Field, Rows
from stoker.predicting.sources.base import Extent
from stoker.predicting.sources.text import Lines, is_utf8
from stoker.records.prediction import PredictionPart, SourceFormat

_LOOKED_AT = 100
"""Rows whose keys are the columns."""


@final
class JsonlSource:
    """One file of JSON Lines."""

    format: SourceFormat = "jsonl"

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> Sequence[Path]:
        """The file."""
        return (self.path,)

    def fields(self) -> tuple[Field, ...]:
        """The keys of the first hundred objects."""
        with self.path.open("rb") as file:
            decoded = [_decoded(line)[0] for line in islice(_objects(Lines(file, self.path)), _LOOKED_AT)]
        names = dict.fromkeys(name for one in decoded if one is not None for name in one)
        if not names:
            raise BadJob(f"{self.path} has no JSON object in its first {_LOOKED_AT} lines")
        return tuple(Field(name, None) for name in names)

    def extent(self, part_rows: int) -> Extent:
        """Found by reading all of it."""
        offsets: list[int] = []
        num_rows = 0
        with self.path.open("rb") as file:
            lines = Lines(file, self.path)
            start = 0
            for _ in _objects(lines):
                if num_rows % part_rows == 0:
                    offsets.append(start)
                num_rows += 1
                start = lines.offset
        return Extent(num_rows, tuple(offsets))

    def open(self, columns: Sequence[str]) -> JsonlReader:
        """Begin reading these columns."""
        return JsonlReader(self.path, columns)


@final
class JsonlReader:
    """Reads parts where they begin."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = tuple(columns)
        self._file = path.open("rb")

    def read(self, part: PredictionPart) -> Rows:
        """The rows of a part; lines that are no JSON object are broken."""
        broken: dict[int, str] = {}
        columns: dict[str, list[Any]] = {name: [] for name in self._columns}
        lines = _objects(Lines(self._file, self._path, part.offset))
        for row in range(part.num_rows):
            found, problem = _decoded(next(lines, ""))
            if found is None:
                broken[row] = problem
            for name, column in columns.items():
                column.append(None if found is None else found.get(name))
        return Rows(str(self._path), part.first_row, part.num_rows, columns, broken)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _objects(lines: Lines) -> Iterator[str]:
    """The lines that are not blank."""
    return (line for line in lines if not line.isspace())


def _decoded(line: str) -> tuple[dict[str, Any] | None, str]:
    """The object in a line, or None and why there is none."""
    if not line:
        return None, "is after the end of the file"
    if not is_utf8(line):
        return None, "is not UTF-8"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, f"is no JSON: {error}"
    return (found, "") if isinstance(found, dict) else (None, "is no JSON object")
