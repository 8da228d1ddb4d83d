"""The CSV tracker: one line for each point, one column for each value, empty where a point has no such value."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from stoker.records.run import RunStatus
from stoker.store import write_atomic
from stoker.tracking.base import MetricPoint, RunDescription, output_path

_FIRST = ("samples", "seconds")
"""Columns of every line: samples trained on, and seconds since the run was created."""


class CsvRun:
    """`metrics.csv`, appended to; rewritten, atomically, when a column is added or its last line was cut off.

    Written lines are not kept in memory: a run of a week has a million of them.
    """

    def __init__(self, path: Path, began_at: float) -> None:
        self._path, self._began_at = path, began_at
        self.id = self.where = str(path)
        self._columns, self._whole_bytes, self._is_torn = _read(path)

    def log(self, points: list[MetricPoint]) -> None:
        """Add a line for each point."""
        rows = [_row(point, self._began_at) for point in points]
        columns = list(dict.fromkeys((*self._columns, *(name for row in rows for name in row))))
        lines = _lines(rows, columns)
        if columns != self._columns or self._is_torn or not self._path.exists():
            written = self._path.read_bytes()[: self._whole_bytes].decode() if self._path.exists() else ""
            known, body = _header(written)
            head = _lines([dict(zip(columns, columns, strict=True))], columns)
            table = (head + body.replace("\n", "," * (len(columns) - len(known)) + "\n") + lines).encode()
            write_atomic(self._path, table, what="metrics as CSV")
            self._whole_bytes = len(table)
        else:
            self._is_torn = True  # until all of it is written
            with self._path.open("a", encoding="utf-8", newline="") as file:
                file.write(lines)
            self._whole_bytes += len(lines.encode())
        self._columns, self._is_torn = columns, False

    def go_back(self, samples: int) -> None:
        """Write the table again without its lines after `samples` samples."""
        if not self._path.exists():
            return
        written = self._path.read_bytes()[: self._whole_bytes].decode()
        _, body = _header(written)
        lines = body.splitlines(keepends=True)
        kept = [line for line in lines if int(line.partition(",")[0]) <= samples]
        if len(kept) < len(lines):
            table = (written.removesuffix(body) + "".join(kept)).encode()
            write_atomic(self._path, table, what="metrics as CSV")
            self._whole_bytes, self._is_torn = len(table), False

    def end(self, status: RunStatus, files: list[Path]) -> None:
        """A table has no end."""

    def close(self) -> None:
        """No file is open."""


def open_run(about: RunDescription, where: str | None, known_id: str | None) -> CsvRun:
    """`metrics.csv` in the run's folder `tracking`; or in the folder `where`, under the run's name."""
    path = output_path(about, where, known_id, name="metrics", ending=".csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    return CsvRun(path, about.created_at)


def table(points: Iterable[MetricPoint], began_at: float) -> str:
    """All of a run's points as CSV, its header first."""
    rows = [_row(point, began_at) for point in points]
    columns = list(dict.fromkeys((*_FIRST, *(name for row in rows for name in row))))
    return _lines([dict(zip(columns, columns, strict=True)), *rows], columns)


def _row(point: MetricPoint, began_at: float) -> dict[str, str]:
    return {
        "samples": str(point.samples),
        "seconds": f"{point.at - began_at:.3f}",
        **{name: repr(value) for name, value in point.values.items()},
    }


def _lines(rows: Iterable[Mapping[str, str]], columns: list[str]) -> str:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue()


def _read(path: Path) -> tuple[list[str], int, bool]:
    """Columns of an existing file, the size of its complete lines [bytes], and whether its last line was cut off."""
    if not path.exists():
        return [*_FIRST], 0, False
    content = path.read_bytes()
    num_bytes = content.rfind(b"\n") + 1
    columns, _ = _header(content[:num_bytes].decode())
    return columns or [*_FIRST], num_bytes, num_bytes < len(content)


def _header(table: str) -> tuple[list[str], str]:
    """The columns of a table, and its lines after the header."""
    reader = csv.reader(io.StringIO(table, newline=""))
    columns = next(reader, [])
    return columns, table.split("\n", reader.line_num)[-1]
