"""Tables of CSV, Parquet and JSONL files as samples."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.data.files import table_build
from stoker.data.files.table_store import opened
from stoker.data.files.tables import Table
from stoker.errors import BadJob
from stoker.records import CleanList
from stoker.records.data_check import Dropped
from stoker.store import files, sha256_file
from tests.data.files.making import COUNT, csv_file, jsonl_file, parquet_file, rows_of

FORMATS: dict[str, tuple[Callable[..., Path], Callable[..., Table]]] = {
    "csv": (csv_file, stoker.data.csv),
    "jsonl": (jsonl_file, stoker.data.jsonl),
    "parquet": (parquet_file, stoker.data.parquet),
}
every_format = pytest.mark.parametrize("kind", FORMATS)
every_row = np.arange(COUNT)


def table(kind: str, root: Path, rows: list[dict[str, Any]] | None = None, **given: Any) -> Table:
    """The rows in a file of that kind, as a source."""
    write, read = FORMATS[kind]
    return read(write(root / f"t.{kind}", rows or rows_of()), **given)


def folder_of(source: Table) -> Path:
    """Where a source's table is in the cache."""
    return source.table._folder


def csv_text(root: Path, text: str, **given: Any) -> Table:
    """A CSV file of this text."""
    (root / "t.csv").write_text(text)
    return stoker.data.csv(root / "t.csv", **given)


@every_format
def test_numbers_words_text_and_classes_each_in_their_place(kind: str, tmp_path: Path) -> None:
    """The same in every format."""
    source = table(kind, tmp_path, features=["x1", "x2"], categories=["city"], text=["words"], target="kind")
    batch, rows = source.rows(np.array([5, 0])), rows_of()
    torch.testing.assert_close(batch["features"], torch.tensor([[rows[at]["x1"], rows[at]["x2"]] for at in (5, 0)]))
    assert batch["features"].dtype == torch.float32
    assert batch["categories"].tolist() == [[2], [0]]
    assert batch["words"] == ["line 5, „so“", "line 0, „so“"]
    assert [source.classes[at] for at in batch["target"]] == [rows[5]["kind"], rows[0]["kind"]]
    assert source.categories == {"city": ("Bern", "Rom", "Ulm")}
    assert (source.target, source.sample_id(7), len(source)) == ("target", f"t.{kind}:7", COUNT)


def test_the_same_rows_are_the_same_data_in_every_format(tmp_path: Path) -> None:
    """The fingerprint is of the content."""
    given = {"features": ["x1", "x2"], "categories": ["city"], "target": "kind"}
    assert len({table(kind, tmp_path, **given).fingerprint for kind in FORMATS}) == 1


@every_format
def test_features_left_open_are_all_other_columns(kind: str, tmp_path: Path) -> None:
    """With a target alone a sample is a pair."""
    source = table(kind, tmp_path, [{"b": 1.5, "a": 2, "y": 0.25}, {"b": -1, "a": 3, "y": 4.0}], target="y")
    features, target = source[1]
    assert source.features == ("b", "a")
    assert (features.tolist(), float(target), target.dtype) == ([-1.0, 3.0], 4.0, torch.float32)
    assert source.labels() is None
    assert source.target == 1


def test_a_feature_that_the_first_row_lacks_is_not_left_out(tmp_path: Path) -> None:
    """Sparse objects of JSONL: which features there are is then to be said, and what a row lacks is missing."""
    (tmp_path / "t.jsonl").write_text('{"a": 1, "y": 0}\n{"a": 2, "b": 5, "y": 1}\n')
    with pytest.raises(BadJob, match=r"t\.jsonl has 'b', which the first row or file of the table lacks\n.*features="):
        len(stoker.data.jsonl(tmp_path / "t.jsonl", target="y"))
    source = stoker.data.jsonl(tmp_path / "t.jsonl", features=["a", "b"], target="y", missing=0)
    assert source.rows(np.arange(2))[0].tolist() == [[1.0, 0.0], [2.0, 5.0]]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_feature_that_the_first_file_lacks_is_not_left_out(kind: str, tmp_path: Path) -> None:
    """Of several files the first says what is read: a column more in another is no feature of half the rows."""
    write, read = FORMATS[kind]
    paths = [
        write(tmp_path / f"a.{kind}", [{"a": 1, "y": 0}]),
        write(tmp_path / f"b.{kind}", [{"a": 1, "b": 2, "y": 0}]),
    ]
    with pytest.raises(BadJob, match=rf"b\.{kind} has 'b', which the first row or file"):
        len(read(paths, target="y"))
    assert len(read(paths, features=["a"], target="y")) == 2
    assert len(read(paths[1], like=read(paths[0], target="y"))) == 1


@every_format
def test_a_file_is_given_once(kind: str, tmp_path: Path) -> None:
    """An epoch would have its rows twice."""
    write, read = FORMATS[kind]
    path = write(tmp_path / f"t.{kind}", rows_of())
    with pytest.raises(BadJob, match=rf"t\.{kind} is given twice"):
        read([path, tmp_path / "." / f"t.{kind}"])


@pytest.mark.parametrize(
    ("values", "given", "dtype", "wanted"),
    [
        (["3", "0", "3"], {}, torch.int64, [3, 0, 3]),
        (["3", "0", "3"], {"target_kind": "number"}, torch.float32, [3.0, 0.0, 3.0]),
        (["3", "0", "3"], {"target_kind": "class"}, torch.int64, [1, 0, 1]),
        (["3.0", "0.5", "1"], {}, torch.float32, [3.0, 0.5, 1.0]),
        (["no", "yes", "no"], {}, torch.int64, [0, 1, 0]),
        (["no", "yes", "no"], {"classes": ["yes", "no"]}, torch.int64, [1, 0, 1]),
        (["1", "x", "1"], {}, torch.int64, [0, 1, 0]),
        (["x", "NA", "x"], {}, torch.int64, [1, 0, 1]),
        (["1", "NA", "1"], {"target_kind": "class"}, torch.int64, [0, 1, 0]),
    ],
)
def test_a_target_is_what_its_values_are(
    values: list[str], given: dict[str, Any], dtype: torch.dtype, wanted: list[float], tmp_path: Path
) -> None:
    """Whole numbers, numbers or words; or what is said."""
    source = csv_text(tmp_path, "x,y\n" + "".join(f"1,{value}\n" for value in values), target="y", **given)
    _, target = source.rows(np.arange(3))
    assert (target.dtype, target.tolist()) == (dtype, wanted)


def test_a_target_of_many_numbers_is_no_class(tmp_path: Path) -> None:
    """Words are numbered only while they can be classes."""
    source = csv_text(tmp_path, "x,y\n" + "".join(f"1,{at}.5\n" for at in range(70_000)), target="y")
    assert source.rows(np.array([69_999]))[1].tolist() == [69_999.5]


@every_format
def test_whole_numbers_too_large_to_tell_apart_are_refused(kind: str, tmp_path: Path) -> None:
    """Two ids that float64 rounds to one are two classes, or said to be numbers; they do not become one."""
    rows = [{"x": 1, "y": 2**53}, {"x": 2, "y": 2**53 + 1}]
    with pytest.raises(BadJob, match=r"row 0: the target 'y' is 9007199254740992; from 9,007,199,254,740,992 on"):
        len(table(kind, tmp_path, rows, target="y"))
    source = table(kind, tmp_path, rows, target="y", target_kind="class")
    assert source.classes == (str(2**53), str(2**53 + 1))


def test_a_feature_whose_values_float32_makes_equal_is_refused(tmp_path: Path) -> None:
    """Seconds since 1970 of an hour, in steps of 128 s; not those of a year, nor fractions, nor one that is rounded."""
    hour, year = (np.linspace(1_700_000_000, 1_700_000_000 + span, 500).round() for span in (3_600, 31_536_000))
    rows = [{"at": int(at), "y": 0} for at in hour]
    with pytest.raises(BadJob, match=r"'at' goes from 1700000000 to 1700003600, where float32 has steps of 128"):
        len(stoker.data.parquet(parquet_file(tmp_path / "hour.parquet", rows), features=["at"], target="y"))
    for name, values in (
        ("year", year),
        ("fractions", np.linspace(0.1, 0.7, 500)),
        ("equal", np.full(500, 0.1)),
        ("sums", np.resize([0.3, 0.1 + 0.2], 500)),
    ):
        rows = [{"at": float(at), "y": 0} for at in values]
        path = parquet_file(tmp_path / f"{name}.parquet", rows)
        assert len(stoker.data.parquet(path, features=["at"], target="y")) == 500
    whole = stoker.data.parquet(tmp_path / "year.parquet", features=["at"], target="y")
    assert len(stoker.data.parquet(tmp_path / "hour.parquet", like=whole)) == 500


def test_numbers_that_float32_does_not_hold_are_told(tmp_path: Path) -> None:
    """A feature or target that would become infinite ends it here, with its row, and not as a loss that is none."""
    with pytest.raises(BadJob, match=r"t\.csv, row 1: 'b' is 1e\+39, and float32 ends at 3\.4e38"):
        len(csv_text(tmp_path, "a,b,y\n1,2,0\n3,1e39,1\n", target="y"))
    with pytest.raises(BadJob, match=r"t\.csv, row 1: 'y' is -1e\+39"):
        len(csv_text(tmp_path, "a,y\n1,2.5\n3,-1e39\n", target="y"))


def test_nan_is_no_word(tmp_path: Path) -> None:
    """Of a column of floats that is taken for categories, NaN is missing and not called so."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": [1.0, 2.0], "c": pa.array([1.0, float("nan")], from_pandas=False)}), path)
    with pytest.raises(BadJob, match=r"values are missing: 1 of 'c' \(t\.parquet:1\)"):
        len(stoker.data.parquet(path, features=["a"], categories=["c"]))
    source = stoker.data.parquet(path, features=["a"], categories=["c"], missing={"c": "none"})
    assert source.categories == {"c": ("1", "none")}


def test_missing_values_are_counted_and_placed(tmp_path: Path) -> None:
    """In all columns at once, before anything is learned."""
    text = "a,b,city,y\n1,,Rom,0\n,NA,,1\n3,4,Ulm,\n" + "nan,1,Rom,1\n" * 4
    with pytest.raises(BadJob) as caught:
        len(csv_text(tmp_path, text, features=["a", "b"], categories=["city"], target="y"))
    assert caught.value.message == (
        "values are missing: 5 of 'a' (t.csv:1, t.csv:3, t.csv:4 and 2 more); 2 of 'b' (t.csv:0, t.csv:1); "
        "1 of 'city' (t.csv:1); 1 of 'y' (t.csv:2)"
    )


@every_format
def test_missing_values_become_what_is_said(kind: str, tmp_path: Path) -> None:
    """A mean of what is there, a number, a word, or the row is left out; and it is reported."""
    rows = [
        {"a": 1.0, "b": None, "c": "x", "y": 0},
        {"a": None, "b": 2.0, "c": None, "y": 1},
        {"a": 4.0, "b": 3.0, "c": "y", "y": None},
        {"a": 6.0, "b": 5.0, "c": "x", "y": 1},
    ]
    source = table(
        kind,
        tmp_path,
        rows,
        features=["a", "b"],
        categories=["c"],
        target="y",
        missing={"a": "mean", "b": -9, "c": "unknown", "y": "drop"},
    )
    batch = source.rows(np.arange(3))
    torch.testing.assert_close(batch["features"], torch.tensor([[1.0, -9.0], [3.5, 2.0], [6.0, 5.0]]))
    assert source.categories == {"c": ("unknown", "x")}  # what only a row that is left out has does not count
    assert [source.categories["c"][at] for at in batch["categories"][:, 0]] == ["x", "unknown", "x"]
    assert [source.sample_id(at) for at in range(3)] == [f"t.{kind}:{row}" for row in (0, 1, 3)]
    assert source.note is not None
    assert "1 of 'a'" in source.note
    assert "1 rows are left out for them" in source.note


def test_one_choice_for_all_is_for_features(tmp_path: Path) -> None:
    """A mean makes no target."""
    with pytest.raises(BadJob, match=r"values are missing: 1 of 'y' \(t\.csv:1\)"):
        len(csv_text(tmp_path, "a,y\n1,1\n,\n3,1\n", target="y", missing="mean"))
    source = csv_text(tmp_path, "a,y\n1,1\n,\n3,1\n", target="y", missing="drop")
    assert len(source) == 2


def test_a_table_like_another_takes_its_numbers(tmp_path: Path) -> None:
    """Categories, classes and means are those of training, whatever the other file has."""
    (tmp_path / "valid.csv").write_text("city,y,a\nUlm,b,\n")
    train = csv_text(
        tmp_path,
        "a,city,y\n1,Rom,a\n,Ulm,b\n4,Bern,c\n",
        features=["a"],
        categories=["city"],
        target="y",
        missing={"a": "mean"},
    )
    valid = stoker.data.csv(tmp_path / "valid.csv", like=train)
    batch = valid.rows(np.array([0]))
    assert batch["features"].tolist() == [[2.5]]
    assert batch["categories"].tolist() == [[2]]
    assert (valid.classes, batch["target"].tolist()) == (("a", "b", "c"), [1])
    (tmp_path / "valid.csv").write_text("city,y,a\nUlm,b,1\nUlmm,b,1\n")
    with pytest.raises(BadJob, match=r"valid\.csv, row 1: 'city' is 'Ulmm'.*Did you mean 'Ulm'"):
        len(stoker.data.csv(tmp_path / "valid.csv", like=train))
    with pytest.raises(BadJob, match="takes all columns from the other"):
        len(stoker.data.csv(tmp_path / "valid.csv", like=train, target="y"))


@pytest.mark.parametrize("value", ["inf", "-Infinity", "1e400"])
def test_a_mean_of_infinite_numbers_stands_for_nothing(value: str, tmp_path: Path) -> None:
    """It would be infinite in every row that lacks the number."""
    text = f"a,y\n2,1.5\n{value},0.5\n"
    assert len(csv_text(tmp_path, text, target="y", missing={"a": "mean"})) == 2
    source = csv_text(tmp_path, f"{text},0.5\n", target="y", missing={"a": "mean"})
    with pytest.raises(BadJob, match=r"the mean of 'a', for 1 missing values, is -?inf: the column has infinite ones"):
        len(source)


def test_a_file_may_be_read_like_a_part_of_a_table(tmp_path: Path) -> None:
    """As what `split` gives for training; anything else is refused in words."""
    whole = csv_text(
        tmp_path,
        "a,c,y\n" + "".join(f"{row},{'uv'[row % 2]},no\n" for row in range(9)) + "9,u,yes\n",
        target="y",
        categories=["c"],
    )
    (tmp_path / "valid.csv").write_text("a,c,y\n1,v,yes\n")
    part = whole.split(valid=0.2).train
    assert part is not None
    sample = stoker.data.csv(tmp_path / "valid.csv", like=part)[0]
    assert (sample["categories"].tolist(), int(sample["target"])) == ([1], 1)
    with pytest.raises(BadJob, match=r"like='valid\.csv' is no table"):
        stoker.data.csv(tmp_path / "valid.csv", like="valid.csv")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        ("a,b\n1,2\n3\n5,6\n", {}, r"row 1 has 1 fields, the header has 2: '3'"),
        ("a,b\n1,2\n3,4,5\n", {}, r"row 1 has 3 fields"),
        ('a,b\n"1\n",2\n3\n', {}, r"row 1 has 1 fields"),
        ("a,b\n1,2\n3,four\n", {}, r"row 1: 'b' is 'four', which is no number\n.*categories=\['b'\]"),
        ("a;y\n1;2\n", {"target": "y"}, r"header is one column, 'a;y'.\nIf ';' is between fields, give delimiter=';'"),
        ("a, y\n1, 2\n", {"target": "y"}, r"spaces around names: ' y'.\nTake them out of the file"),
        ("a,b\n1,2\n", {"target": "c"}, r"has no column 'c'. Known: a, b"),
        ("age,b\n1,2\n", {"features": ["agee"]}, r"no column 'agee'. Did you mean 'age'\?"),
        ("a,a\n1,2\n", {}, "two columns 'a'"),
        ("", {}, "has no columns"),
        ("a,b\n", {}, "has no rows"),
        ("a,b\n1,2\n", {"target": "b", "classes": ["2", "3"]}, "no row has the target 'b' of '3'"),
        ("a,b\n1,2\n", {"target": "b", "classes": ["3", "4"]}, r"row 0: 'b' is '2', which is not among its 2 values"),
        ("a,b\n1,2.5\n", {"target": "b", "target_kind": "integer"}, "no whole numbers"),
        ("a,b\n1,2\n1,x\n", {"target": "b", "target_kind": "number"}, "row 1: 'b' is 'x', which is no number"),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_told(
    text: str, given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """With the file, the row from 0 without the header, and the names near."""
    with pytest.raises(BadJob, match=message):
        len(csv_text(tmp_path, text, **given))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'a,b\n1,"he said\n2,x\n3,y\n',
            r"t\.csv is no CSV from line 2 \(byte 4\) on: a quote is opened there and never closed",
        ),
        ('a,b\n1,"he said\n2,x\n3,"y" z\n4,w\n', r"t\.csv: row 0 is no CSV: ',' expected after '\"'"),
        ('a,b\n0,"x"y\n', r"t\.csv: row 0 is no CSV"),
    ],
)
def test_a_stray_quote_does_not_swallow_the_rows_up_to_the_next(text: str, message: str, tmp_path: Path) -> None:
    """They would be one text of one row, and no sample of their own."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadJob, match=message):
        len(stoker.data.csv(tmp_path / "t.csv", features=["a"], text=["b"]))


def test_a_csv_that_is_no_utf8_is_told(tmp_path: Path) -> None:
    """With its row."""
    (tmp_path / "t.csv").write_bytes("a,b\nx,0\nM\xfcller,1\n".encode("latin-1"))
    with pytest.raises(BadJob, match=r"t\.csv: row 1 is not UTF-8: 'M\ufffdller,1'"):
        len(stoker.data.csv(tmp_path / "t.csv", text=["a"], target="b"))


def test_a_parquet_with_a_missing_column_a_type_without_numbers_or_damage_is_told(tmp_path: Path) -> None:
    """Each with the file."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": [1.0], "when": [pa.scalar(0, pa.timestamp("s"))]}), path)
    with pytest.raises(BadJob, match=r"t\.parquet has no column 'b'. Known: a, when"):
        len(stoker.data.parquet(path, features=["a", "b"]))
    with pytest.raises(BadJob, match=r"'when' is of type timestamp\[ms\], which has no numbers"):
        len(stoker.data.parquet(path))
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(BadJob, match=r"t\.parquet cannot be read as Parquet"):
        len(stoker.data.parquet(path))
    with pytest.raises(BadJob, match=r"absent\.parquet cannot be read: No such file"):
        len(stoker.data.parquet(tmp_path / "absent.parquet"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": \n', r"row 1 is no JSON: .*: '\{\"a\":"),
        ('{"a": 1}\n\n[2]\n', r"row 1 is no JSON object but a list: '\[2\]"),
        ('{"a": 1}\n{"a": "x"}\n', r"row 1: 'a' is 'x', a string, where others are a number"),
        ('{"a": "x"}\n{"a": "y"}\n', r"row 0: 'a' is 'x', which is no number"),
        ('{"a": 1}\n{"a": 99999999999999999999}\n', r"t\.jsonl: 'a' cannot be read: .*too large"),
        ('{"a": "\\ud800"}\n', r"t\.jsonl: 'a' cannot be read: .*surrogates not allowed"),
    ],
)
def test_a_jsonl_line_that_is_not_as_it_should_be_is_told(text: str, message: str, tmp_path: Path) -> None:
    """Blank lines do not count."""
    (tmp_path / "t.jsonl").write_text(text)
    with pytest.raises(BadJob, match=message):
        len(stoker.data.jsonl(tmp_path / "t.jsonl", features=["a"]))


def test_a_clean_list_leaves_rows_out_even_ragged_ones(tmp_path: Path) -> None:
    """The rows after them keep their numbers."""
    dropped = tuple(Dropped(id=f"t.csv:{row}", why="ragged") for row in (1, 3))
    clean = CleanList(source=str(tmp_path / "t.csv"), made_at="2026-01-01T00:00:00Z", kept=3, dropped=dropped)
    source = csv_text(tmp_path, "a,b\n0,0\n1\n2,2\n3,x\n4,4\n", target="b", clean=clean)
    assert [source.sample_id(at) for at in range(len(source))] == ["t.csv:0", "t.csv:2", "t.csv:4"]
    assert source.rows(np.arange(3))[0][:, 0].tolist() == [0.0, 2.0, 4.0]
    assert source.note == "t.csv: 2 rows are left out by the clean list"


def test_a_clean_list_leaves_the_first_line_out_as_any_other(tmp_path: Path) -> None:
    """The keys are those of the first object that is left."""
    (tmp_path / "t.jsonl").write_text('{"a": \n{"a": 1, "b": 2}\n')
    clean = CleanList(
        source=str(tmp_path / "t.jsonl"),
        made_at="2026-01-01T00:00:00Z",
        kept=1,
        dropped=(Dropped(id="t.jsonl:0", why="corrupt"),),
    )
    source = stoker.data.jsonl(tmp_path / "t.jsonl", target="b", clean=clean)
    assert (source.features, source.sample_id(0)) == (("a",), "t.jsonl:1")


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    """Names tell which."""
    (tmp_path / "more").mkdir()
    for name, first in (("a.csv", 0), ("more/b.csv", 10)):
        (tmp_path / name).write_text("x,y\n" + "".join(f"{first + at},{at}\n" for at in range(3)))
    source = stoker.data.csv([tmp_path / "a.csv", tmp_path / "more" / "b.csv"], target="y")
    assert source.rows(np.arange(6))[0][:, 0].tolist() == [0, 1, 2, 10, 11, 12]
    assert [source.sample_id(at) for at in (2, 3)] == ["a.csv:2", "more/b.csv:0"]


def test_a_table_is_read_once_and_anew_when_it_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By size and time; a copy that lacks a part is made again; the fingerprint is of the content."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    first = csv_text(tmp_path, "a,y\n1,2\n", target="y")
    assert len(first) == 1
    (place,) = (tmp_path / "cache" / "data" / "tables").iterdir()
    made = (place / "table.json").stat().st_mtime_ns
    again = stoker.data.csv(tmp_path / "t.csv", target="y")
    assert len(again) == 1
    assert (place / "table.json").stat().st_mtime_ns == made
    (place / "features.f32").write_bytes(b"")
    assert stoker.data.csv(tmp_path / "t.csv", target="y")[0][0].tolist() == [1.0]
    os.utime(tmp_path / "t.csv", ns=(5, 5))
    assert stoker.data.csv(tmp_path / "t.csv", target="y").fingerprint == first.fingerprint
    changed = csv_text(tmp_path, "a,y\n1,3\n", target="y")
    assert changed.fingerprint != first.fingerprint


def test_what_a_killed_process_left_half_made_is_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what a living one makes, nor one of another machine that shares the cache, whose number is unknown here."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    parent = tmp_path / "cache" / "data" / "tables"
    dead, living = parent / ".writing-abc-4194999-00000000", parent / f".writing-abc-{os.getpid()}-00000000"
    elsewhere = parent / ".writing-abc-4194999-00000001"
    for path in (dead, living, elsewhere):
        path.mkdir(parents=True)
        (path / "features.f32").write_bytes(b"")
        if path != elsewhere:
            os.utime(path / "features.f32", (5, 5))
            os.utime(path, (5, 5))
    len(csv_text(tmp_path, "a,y\n1,2\n", target="y"))
    assert not dead.exists()
    assert living.exists()
    assert elsewhere.exists()


def test_a_table_that_another_process_made_meanwhile_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that make the same at once end with one, whole."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    one, other = csv_text(tmp_path, "a,y\n1,2\n", target="y"), stoker.data.csv(tmp_path / "t.csv", target="y")
    read = table_build.blocks_of

    def slowly(*given: Any) -> Any:
        monkeypatch.setattr(table_build, "blocks_of", read)
        assert len(other) == 1
        return read(*given)

    monkeypatch.setattr(table_build, "blocks_of", slowly)
    assert one[0][0].tolist() == other[0][0].tolist() == [1.0]
    assert len([*(tmp_path / "cache" / "data" / "tables").iterdir()]) == 1


def test_a_copy_for_another_process_maps_the_table_for_itself(tmp_path: Path) -> None:
    """What is pickled holds no arrays."""
    source = csv_text(tmp_path, "a,y\n" + "1,2\n" * 5000, target="y")
    assert len(source) == 5000
    content = pickle.dumps(source)
    assert len(content) < 2000
    assert len(pickle.loads(content)) == 5000  # noqa: S301 - our own


numbers = st.floats(allow_nan=False, width=32)
words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=6)


@pytest.mark.parametrize("kind", FORMATS)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.tuples(numbers, words, words), min_size=1, max_size=12))
def test_what_was_written_is_what_is_read(kind: str, rows: list[tuple[float, str, str]], tmp_path: Path) -> None:
    """Any numbers, words and text, whatever quotes, commas and accents are in them."""
    source = table(
        kind,
        tmp_path,
        [{"x": x, "word": word, "line": line} for x, word, line in rows],
        features=["x"],
        categories=["word"],
        text=["line"],
    )
    batch = source.rows(np.arange(len(rows)))
    assert batch["features"][:, 0].tolist() == [x for x, _, _ in rows]
    assert [source.categories["word"][at] for at in batch["categories"][:, 0]] == [word for _, word, _ in rows]
    assert batch["line"] == [line for _, _, line in rows]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"features": "a"}, r"one word\nGive a list of columns: features=\['a'\]"),
        ({"features": ["a"], "target": "a"}, "named for two things"),
        ({"missing": "median"}, "'median'"),
        ({"target_kind": "word"}, "target_kind"),
        ({"target": "a", "target_kind": "number", "classes": ["b"]}, "exclude"),
        ({"classes": ["b"]}, "none is named"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(given: dict[str, Any], message: str) -> None:
    """Before any file is looked at."""
    with pytest.raises(BadJob, match=message):
        stoker.data.csv("absent.csv", **given)


@pytest.mark.parametrize("changed", ["features.f32", "target.bin", "table.json"])
def test_a_damaged_table_in_the_cache_is_made_again(tmp_path: Path, changed: str) -> None:
    """Of the same size, but another number, all labels swapped, or a record that says another thing."""
    source = table("csv", tmp_path, features=["x1", "x2"], target="kind")
    expected, fingerprint = source.rows(every_row), source.fingerprint
    path = folder_of(source) / changed
    content = path.read_bytes()
    damaged = (
        content.replace(b'"num_dropped": 0', b'"num_dropped": 1')
        if changed == "table.json"
        else bytes(byte ^ 1 if place % 8 == 0 else byte for place, byte in enumerate(content))
    )
    assert damaged != content
    path.write_bytes(damaged)
    again = stoker.data.csv(tmp_path / "t.csv", features=["x1", "x2"], target="kind")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(again.rows(every_row), expected, strict=True))
    assert again.fingerprint == fingerprint


def test_a_whole_table_in_the_cache_is_read_once_a_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later starts look at what the system says of its files; a touched file is read again, and opens."""
    source = table("csv", tmp_path, features=["x1"], target="kind")
    folder = folder_of(source)
    for path in folder.iterdir():
        os.utime(path, (1.0, 1.0))
    monkeypatch.setattr(files, "_SETTLED_S", -1e9)
    read: list[str] = []
    monkeypatch.setattr(files, "sha256_file", lambda path: (read.append(path.name), sha256_file(path))[1])
    counts = []
    for _ in range(3):
        assert opened(folder) is not None
        counts.append(len(read))
    assert counts == [counts[0]] * 3
    assert counts[0] > 0
    read.clear()
    (folder / "features.f32").touch()
    assert opened(folder) is not None
    assert read == ["features.f32"]


@pytest.mark.parametrize("make", [stoker.data.parquet, stoker.data.jsonl])
def test_an_option_that_only_csv_has_is_refused(make: Callable[..., Table]) -> None:
    """A Parquet or JSONL file has no delimiter: giving one is a mistake, not ignored."""
    with pytest.raises(TypeError, match="delimiter"):
        make("t", delimiter=";")
