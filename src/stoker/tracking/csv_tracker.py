"""A CSV file: one line for each point, one column for each value; empty where a point has none."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from stoker.records.run import RunStatus
from stoker.store import write_atomic
from stoker.tracking.base import About, Point

_FIRST = ("samples", "seconds")
"""Columns that every line has: samples trained on, and seconds since the run was made."""


class CsvFile:
    """`metrics.csv`: continued where it is; written anew, aside and renamed, when a column comes to it.

    So it is where its last line was cut off, by a kill or a full disk.
    """

    def __init__(self, path: Path, began_at: float) -> None:
        self._path, self._began_at = path, began_at
        self.id = self.where = str(path)
        self._columns, self._rows, self._is_torn = _read(path)

    def log(self, points: list[Point]) -> None:
        """Add a line for each."""
        rows = [_row(point, self._began_at) for point in points]
        columns = list(dict.fromkeys((*self._columns, *(name for row in rows for name in row))))
        if columns != self._columns or self._is_torn or not self._path.exists():
            head = _lines([dict(zip(columns, columns, strict=True))], columns)
            write_atomic(self._path, head + _lines([*self._rows, *rows], columns), what="metrics as CSV")
        else:
            self._is_torn = True  # unless all of it is written
            with self._path.open("a", encoding="utf-8", newline="") as file:
                file.write(_lines(rows, columns))
        self._columns, self._is_torn = columns, False
        self._rows += rows

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """Nothing: a table has no end."""

    def close(self) -> None:
        """Nothing is open."""


def open_run(about: About, where: str | None, known_id: str | None) -> CsvFile:
    """`metrics.csv` in the run's folder `tracking`; or in the folder `where`, under the run's name."""
    path = about.folder / "metrics.csv" if where is None else Path(where) / f"{about.run}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    return CsvFile(path if known_id is None else Path(known_id), about.created_at)


def table(points: Iterable[Point], began_at: float) -> str:
    """All of a run's points as CSV, its header first."""
    rows = [_row(point, began_at) for point in points]
    columns = list(dict.fromkeys((*_FIRST, *(name for row in rows for name in row))))
    return _lines([dict(zip(columns, columns, strict=True)), *rows], columns)


def _row(point: Point, began_at: float) -> dict[str, str]:
    return {
        "samples": str(point.samples),
        "seconds": f"{point.at - began_at:.3f}",
        **{name: repr(value) for name, value in point.values.items()},
    }


def _lines(rows: Iterable[Mapping[str, str]], columns: list[str]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def _read(path: Path) -> tuple[list[str], list[dict[str, str]], bool]:
    """Columns and whole lines of a file that is there, and whether its last line was cut off."""
    if not path.exists():
        return [*_FIRST], [], False
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(io.StringIO(whole, newline=""))
    rows = [dict(row) for row in reader]
    return [*(reader.fieldnames or _FIRST)], rows, whole != text
