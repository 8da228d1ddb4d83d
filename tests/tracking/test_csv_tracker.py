"""Metrics as a table that grows: continued, and whole again after a kill or a full disk."""

from __future__ import annotations

import csv
import errno
from pathlib import Path
from typing import Any

import pytest

from stoker.tracking.base import Point
from stoker.tracking.csv_tracker import CsvFile


def loss(samples: int) -> Point:
    """A loss after so many samples."""
    return Point(samples=samples, at=100.0 + samples, values={"train/loss": 1 / samples})


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
    CsvFile(path, 100.0).log([loss(1), loss(2)])
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b"3,3.000,0.333333"[:kept_bytes])
    CsvFile(path, 100.0).log([loss(3)])
    assert path.read_bytes().startswith(whole)
    assert samples_in(path) == [1, 2, 3]


def test_what_could_not_be_written_is_in_the_table_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up within a line; the same points come again, and later a column."""
    path, opened = tmp_path / "metrics.csv", Path.open
    table = CsvFile(path, 100.0)
    table.log([loss(1)])

    def fills_up(self: Path, mode: str = "r", **how: Any) -> Any:
        with opened(self, mode, **how) as file:
            file.write("2,2.0")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "open", fills_up)
        with pytest.raises(OSError, match="No space"):
            table.log([loss(2)])
    table.log([loss(2)])
    table.log([Point(samples=4, at=104.0, values={"train/loss": 0.25, "valid/loss": 0.5})])
    assert samples_in(path) == [1, 2, 4]
