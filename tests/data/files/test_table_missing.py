"""What a user says of missing values, and cannot mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.errors import BadJob


def csv_at(path: Path) -> Path:
    """Two columns of numbers, one of words, a class; one number is missing."""
    path.write_text("a,b,city,y\n1,2,Rom,0\n3,,Ulm,1\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"aa": 0.0}, r"missing=\{'aa': …\}: the table has no such column. Did you mean 'a'"),
        ({"b": "avg"}, r"missing=\{'b': 'avg'\}: 'b' is a column of numbers"),
        ({"b": [1]}, "'b' is a column of numbers"),
        ({"b": None, "a": True}, "is a column of numbers"),
    ],
)
def test_a_word_that_no_column_can_have_is_refused(missing: dict[str, Any], words: str, tmp_path: Path) -> None:
    """A typo left values missing without a word, or said only that some are."""
    table = stoker.data.csv(csv_at(tmp_path / "t.csv"), target="y", categories=["city"], missing=missing)
    with pytest.raises(BadJob, match=words):
        len(table)


def test_a_validation_file_may_lack_what_was_said_of_the_other(tmp_path: Path) -> None:
    """What is like another table takes its settings."""
    train = stoker.data.csv(csv_at(tmp_path / "t.csv"), target="y", categories=["city"], missing={"b": "mean"})
    other = tmp_path / "v.csv"
    other.write_text("a,b,city,y\n1,,Ulm,1\n", encoding="utf-8")
    assert stoker.data.csv(other, like=train).sample(0)["features"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_a_folder_is_no_table(kind: str, tmp_path: Path) -> None:
    """Said at once, with how many such files are in it and how they are named."""
    for number in range(3):
        (tmp_path / f"{number}.{kind}").touch()
    with pytest.raises(
        BadJob, match=rf"is a folder, and stoker.data.{kind} reads files; 3 in it end in .{kind}"
    ) as told:
        getattr(stoker.data, kind)(tmp_path, target="y")
    assert f'glob("*.{kind}")' in str(told.value.remedy)
