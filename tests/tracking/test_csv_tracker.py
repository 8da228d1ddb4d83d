"""Metrics as a table that grows: continued, and whole again after a kill or a full disk."""

from __future__ import annotations

import csv
import errno
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from stoker.tracking.base import MetricPoint
from stoker.tracking.csv_tracker import CsvRun


def loss(samples: int) -> MetricPoint:
    """A loss after so many samples."""
    return MetricPoint(samples=samples, at=100.0 + samples, values={"train/loss": 1 / samples})


def samples_in(path: Path) -> list[int]:
    """The first column of the table, all of whose lines have to be whole."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["train/loss"]) == 1 / int(row["samples"]) for row in rows)
    return [int(row["samples"]) for row in rows]


@pytest.mark.parametrize("kept_bytes", range(1, 12))
def test_a_line_that_was_cut_off_is_left_out_and_told_again(tmp_path: Path, kept_bytes: int) -> None:
    """A kill within a line: what follows does not run on in it."""
    path = tmp_path / "metrics.csv"
    CsvRun(path, 100.0).log([loss(1), loss(2)])
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b"3,3.000,0.333333"[:kept_bytes])
    CsvRun(path, 100.0).log([loss(3)])
    assert path.read_bytes().startswith(whole)
    assert samples_in(path) == [1, 2, 3]


def test_lines_that_are_written_are_not_kept_in_memory(tmp_path: Path) -> None:
    """A run of a week has a million of them, in the process that trains."""
    table = CsvRun(tmp_path / "metrics.csv", 100.0)
    tracemalloc.start()
    try:
        for start in range(1, 4000, 400):
            table.log([loss(samples) for samples in range(start, start + 400)])
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 100_000
    assert samples_in(tmp_path / "metrics.csv") == list(range(1, 4001))


@pytest.mark.parametrize("is_opened_again", [False, True])
def test_lines_that_a_resumed_run_makes_again_are_taken_out(tmp_path: Path, is_opened_again: bool) -> None:
    """The table has each position once, and goes on after the checkpoint; also with a line that a kill cut off."""
    path = tmp_path / "metrics.csv"
    table = CsvRun(path, 100.0)
    table.log([MetricPoint(samples=1, at=101.0, values={"train/loss": 1.0, 'a "b",\nc': 0.5}), loss(2), loss(3)])
    if is_opened_again:
        with path.open("ab") as file:
            file.write(b"4,4.0")
        table = CsvRun(path, 100.0)
    table.go_back(2)
    assert samples_in(path) == [1, 2]
    table.log([loss(3), loss(4)])
    assert samples_in(path) == [1, 2, 3, 4]


def test_a_run_without_a_table_yet_goes_back_to_nothing(tmp_path: Path) -> None:
    """A tracker that is opened by a resumed run has nothing to take out."""
    table = CsvRun(tmp_path / "metrics.csv", 100.0)
    table.go_back(2)
    table.log([loss(3)])
    assert samples_in(tmp_path / "metrics.csv") == [3]


def test_a_column_that_comes_late_leaves_what_is_there(tmp_path: Path) -> None:
    """Names of columns that have to be quoted too, and after the table was taken up again."""
    path = tmp_path / "metrics.csv"
    CsvRun(path, 100.0).log([MetricPoint(samples=1, at=101.0, values={'a "b", c': 0.5})])
    table = CsvRun(path, 100.0)
    table.log([MetricPoint(samples=2, at=102.0, values={'a "b", c': 0.25, "d\ne": 1.0})])
    table.log([MetricPoint(samples=3, at=103.0, values={"f": 3.0})])
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["samples", "seconds", 'a "b", c', "d\ne", "f"],
        ["1", "1.000", "0.5", "", ""],
        ["2", "2.000", "0.25", "1.0", ""],
        ["3", "3.000", "", "", "3.0"],
    ]


def test_what_could_not_be_written_is_in_the_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up within a line; the same points come again, and later a column."""
    path, opened = tmp_path / "metrics.csv", Path.open
    table = CsvRun(path, 100.0)
    table.log([loss(1)])

    def fills_up(self: Path, mode: str = "r", **how: Any) -> Any:
        with opened(self, mode, **how) as file:
            file.write("2,2.000,0.5\n3,3.0")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "open", fills_up)
        with pytest.raises(OSError, match="No space"):
            table.log([loss(2), loss(3)])
    table.log([loss(2), loss(3)])
    table.log([MetricPoint(samples=4, at=104.0, values={"train/loss": 0.25, "valid/loss": 0.5})])
    assert samples_in(path) == [1, 2, 3, 4]
