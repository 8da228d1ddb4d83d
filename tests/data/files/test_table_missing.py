"""What a user says of missing values, and cannot mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.data.files import table_blocks
from stoker.errors import BadJob
from stoker.loading.datasets import datasets_of


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
        ({"y": 0}, r"missing=\{'y': 0\}: 'y' is the target, which nothing can stand in for"),
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


def csv_of_targets(path: Path, targets: list[str]) -> Path:
    """A feature and the targets."""
    path.write_text("a,y\n" + "".join(f"{at},{target}\n" for at, target in enumerate(targets)), encoding="utf-8")
    return path


@pytest.mark.parametrize("word", ["nan", "NA", "null", " n/a ", "-NaN", ""])
@pytest.mark.parametrize("kind", ["auto", "number"])
def test_one_missing_number_makes_no_classes_of_a_regression(word: str, kind: str, tmp_path: Path) -> None:
    """It is refused with its row, or its row is left out; it made ranks of the others, silently."""
    path = csv_of_targets(tmp_path / "t.csv", ["1.5", word, "2.5", "10.25"])
    with pytest.raises(BadJob, match=r"values are missing: 1 of 'y' \(t.csv:1\)") as caught:
        len(stoker.data.csv(path, target="y", target_kind=kind))
    assert 'missing="drop"' in str(caught.value.remedy)
    kept = stoker.data.csv(path, target="y", target_kind=kind, missing="drop").rows(np.arange(3))[1]
    assert (kept.dtype, kept.tolist()) == (torch.float32, [1.5, 2.5, 10.25])


@pytest.mark.parametrize("kind", ["auto", "integer"])
def test_one_missing_label_keeps_the_others_what_they_are(kind: str, tmp_path: Path) -> None:
    """Whole numbers stay those numbers, where their row is not left out by the absent one."""
    path = csv_of_targets(tmp_path / "t.csv", ["2", "10", "NA"])
    with pytest.raises(BadJob, match=r"1 of 'y' \(t.csv:2\)"):
        len(stoker.data.csv(path, target="y", target_kind=kind))
    source = stoker.data.csv(path, target="y", target_kind=kind, missing={"y": "drop"})
    assert (source.rows(np.arange(2))[1].tolist(), source.classes) == ([2, 10], ())
    assert "1 rows are left out for them" in str(source.note)


def test_among_words_a_word_for_nothing_is_one_of_them(tmp_path: Path) -> None:
    """`NA` is a country; only an empty field is missing there."""
    source = stoker.data.csv(csv_of_targets(tmp_path / "t.csv", ["DE", "NA", "", "7"]), target="y", missing="drop")
    assert (source.classes, len(source)) == (("7", "DE", "NA"), 3)


@pytest.mark.parametrize("missing", [None, "drop"])
def test_words_after_a_number_that_was_taken_for_missing_are_refused(
    missing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are read once: what one of them left out is not had back when a later one has words."""
    monkeypatch.setattr(table_blocks, "_BLOCK_BYTES", 16)
    path = csv_of_targets(tmp_path / "t.csv", ["1", "NA", "2", "cat", "3"])
    words = r"begins with numbers, among which row 1 of .*t\.csv is 'NA'.*it has words"
    with pytest.raises(BadJob, match=words) as told:
        len(stoker.data.csv(path, target="y", missing=missing))
    assert 'target_kind="class"' in str(told.value.remedy)
    source = stoker.data.csv(path, target="y", target_kind="class", missing=missing)
    assert source.classes == ("1", "2", "3", "NA", "cat")


def test_means_that_saw_what_is_set_aside_are_noted(tmp_path: Path) -> None:
    """After a split and for a holdout; not where nothing is missing, no part is set aside, or means are of another."""
    rows = [f"{'' if at == 3 else at},{at % 2}" for at in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["a,y", *rows]))
    table = stoker.data.csv(tmp_path / "t.csv", target="y", missing={"a": "mean"})
    words = "the means in place of missing values of 'a' are of all rows, those set aside included"
    parts = table.split(valid=0.2)
    assert [words in (part.note or "") for part in (parts.train, parts.valid, table)] == [True, False, False]
    like = stoker.data.csv(tmp_path / "t.csv", like=table)
    assert words not in (like.split(valid=0.2).train.note or "")
    for data, valid, is_noted in ((table, stoker.holdout(0.2), True), (table, table, False), (like, table, False)):
        job = stoker.Job(
            model=object,
            data=data,
            valid=valid,
            loss="mse",
            optimizer=stoker.SGD(lr=0.1),
            batch=4,
            until=stoker.epochs(1),
        )
        assert (words in (datasets_of(job).note or "")) == is_noted
    (tmp_path / "t.csv").write_text("\n".join(["a,y", *(f"{at},0" for at in range(20))]))
    whole = stoker.data.csv(tmp_path / "t.csv", target="y", missing={"a": "mean"})
    assert words not in (whole.split(valid=0.2).train.note or "")
