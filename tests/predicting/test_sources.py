from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from stoker.errors import BadJob, RunFailed
from stoker.predicting.file_sources import CsvSource, ImageSource, JsonlSource, NumpySource, ParquetSource
from stoker.predicting.row_source import RowSource, SourceRows
from tests.predicting.builders import part, vectors, write_csv, write_jsonl, write_lines, write_parquet


def _in_parts(source: RowSource, part_rows: int, columns: list[str]) -> list[SourceRows]:
    extent = source.extent(part_rows)
    reader = source.open(columns)
    try:
        return [
            reader.read(part(first, min(part_rows, extent.num_rows - first), offset))
            for first, offset in zip(range(0, extent.num_rows, part_rows), extent.offsets, strict=True)
        ]
    finally:
        reader.close()


def _values(column: Any) -> list[Any]:
    return list(column.to_pylist() if isinstance(column, pa.Array) else column)


def _sources(folder: Path, rows: int) -> list[tuple[RowSource, list[str]]]:
    values = vectors(rows, 3)
    np.save(folder / "x.npy", values)
    np.savez(folder / "xs.npz", x=values)
    return [
        (ParquetSource(write_parquet(folder / "x.parquet", values, row_group_size=5)), ["x"]),
        (CsvSource(write_csv(folder / "x.csv", values)), ["x0", "x1", "x2"]),
        (JsonlSource(write_jsonl(folder / "x.jsonl", values)), ["x"]),
        (NumpySource(folder / "x.npy"), ["x"]),
        (NumpySource(folder / "xs.npz"), ["x"]),
    ]


@pytest.mark.parametrize("part_rows", [1, 4, 5, 7, 100])
def test_parts_hold_all_rows_once(tmp_path: Path, part_rows: int) -> None:
    """However a file is cut, its parts one after the other are the file."""
    for source, columns in _sources(tmp_path, 17):
        whole = _in_parts(source, 17, columns)[0]
        parts = _in_parts(source, part_rows, columns)
        for name in columns:
            assert [value for one in parts for value in _values(one.columns[name])] == _values(whole.columns[name])


def test_a_part_can_be_read_alone(tmp_path: Path) -> None:
    """A job that is continued begins in the middle of a file, and may go back."""
    for source, columns in _sources(tmp_path, 17):
        parts = _in_parts(source, 4, columns)
        offsets = source.extent(4).offsets
        reader = source.open(columns)
        for number in (3, 1):
            alone = reader.read(part(4 * number, 4, offsets[number]))
            assert [_values(alone.columns[name]) for name in columns] == [
                _values(parts[number].columns[name]) for name in columns
            ]
        reader.close()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.lists(st.text("a,\"\n\r ä\t'", max_size=5), min_size=2, max_size=2), min_size=1, max_size=8),
    part_rows=st.integers(1, 4),
)
def test_csv_as_python_writes_it_is_read_back(tmp_path: Path, rows: list[list[str]], part_rows: int) -> None:
    """Quotes, commas and line breaks in fields, cut into parts of any size."""
    import csv

    path = tmp_path / "x.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([["a", "b"], *rows])
    parts = _in_parts(CsvSource(path), part_rows, ["a", "b"])
    found = [list(pair) for one in parts for pair in zip(one.columns["a"], one.columns["b"], strict=True)]
    assert found == rows


def test_a_ragged_record_is_broken_and_the_next_is_not(tmp_path: Path) -> None:
    """Too few, too many fields and bytes that are no UTF-8 are reported, blank lines are passed over."""
    path = write_lines(tmp_path / "x.csv", ["\ufeffa,b", "1,2", "3", "", "4,5,6", "\udcff,8", '"9"9,10', "9,10"])
    (rows,) = _in_parts(CsvSource(path), 10, ["a"])
    assert rows.columns["a"] == ["1", None, None, None, None, "9"]
    assert rows.broken == {
        1: "has 1 fields, the header has 2",
        2: "has 3 fields, the header has 2",
        3: "is not UTF-8",
        4: """is no CSV: ',' expected after '"'""",
    }


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["a,b", '1,"2', "3,4"], "unexpected end"),
        (["a,a"], "two columns 'a'"),
        ([], "is empty"),
    ],
)
def test_a_file_that_is_no_csv_is_refused(tmp_path: Path, lines: list[str], words: str) -> None:
    """A quote that is never closed does not swallow the rest of the file."""
    source = CsvSource(write_lines(tmp_path / "x.csv", lines))
    with pytest.raises(BadJob, match=words):
        (source.fields(), source.extent(10))


def test_tabs_may_stand_between_fields(tmp_path: Path) -> None:
    """TSV is CSV with tabs."""
    source = CsvSource(write_lines(tmp_path / "x.tsv", ["a\tb", "1\t2,5"]), delimiter="\t")
    assert _in_parts(source, 1, ["b"])[0].columns["b"] == ["2,5"]
    assert source.format == "tsv"


def test_json_lines_that_are_no_objects_are_broken(tmp_path: Path) -> None:
    """Each line stands for itself; a key that a row lacks is null."""
    lines = ['{"x": 1}', "[1]", '{"x": 1', "", '{"y": 2}', "\udcff", "[" * 20000]
    (rows,) = _in_parts(JsonlSource(write_lines(tmp_path / "x.jsonl", lines)), 10, ["x"])
    assert rows.columns["x"] == [1, None, None, None, None, None]
    assert rows.broken[1] == "is no JSON object but a list"
    assert rows.broken[2].startswith("is no JSON: ")
    assert rows.broken[4] == "is not UTF-8 at byte 0 of the line"
    assert rows.broken[5].startswith("is no JSON: ")
    assert 3 not in rows.broken


def test_a_file_without_objects_is_refused(tmp_path: Path) -> None:
    """Whatever was renamed to .jsonl is found out before a model is loaded."""
    with pytest.raises(BadJob, match="no JSON object in its first 100 lines"):
        JsonlSource(write_lines(tmp_path / "x.jsonl", ["[", "1", "]"])).fields()


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A JSON array of a hundred gigabytes in one line is not read into memory."""
    monkeypatch.setattr("stoker.data.reading.table_readers.LONGEST_LINE_BYTES", 100)
    with pytest.raises(BadJob, match=r"line of more than 100 B.*byte 9"):
        JsonlSource(write_lines(tmp_path / "x.jsonl", ['{"x": 1}', "[" + "1," * 100])).extent(10)


def test_a_cut_off_parquet_file_is_refused(tmp_path: Path) -> None:
    """Without its footer nothing can be read: said with what to do."""
    path = write_parquet(tmp_path / "x.parquet", vectors(100))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(BadJob, match="cannot be read as Parquet") as caught:
        ParquetSource(path).fields()
    assert "copy it again" in str(caught.value)


def test_damage_inside_a_parquet_file_names_the_rows(tmp_path: Path) -> None:
    """A page that cannot be decoded ends the job where it is, with the rows."""
    path = write_parquet(tmp_path / "x.parquet", vectors(5000), row_group_size=1000)
    content = bytearray(path.read_bytes())
    place = pq.read_metadata(path).row_group(2).column(0).dictionary_page_offset
    place = pq.read_metadata(path).row_group(2).column(0).data_page_offset if place is None else place
    content[place : place + 40] = b"\xff" * 40
    path.write_bytes(bytes(content))
    reader = ParquetSource(path).open(["x"])
    with pytest.raises(RunFailed, match="damaged at rows 2000 to 2999"):
        reader.read(part(2000, 1000))
    reader.close()


def test_dictionaries_of_parquet_are_decoded(tmp_path: Path) -> None:
    """A column stored as codes is read as what the codes mean."""
    codes = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array(["a", "b"]))
    pq.write_table(pa.table({"c": codes}), tmp_path / "x.parquet")
    (rows,) = _in_parts(ParquetSource(tmp_path / "x.parquet"), 3, ["c"])
    assert _values(rows.columns["c"]) == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.array([object()]), "holds object"),
        (np.asfortranarray(np.zeros((2, 3))), "Fortran"),
        (np.float32(1), "single number"),
    ],
    ids=["objects", "columns first", "scalar"],
)
def test_arrays_that_are_no_rows_are_refused(tmp_path: Path, array: Any, words: str) -> None:
    """Pickles in NumPy files are never opened."""
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(BadJob, match=words):
        NumpySource(tmp_path / "x.npy").fields()


def test_arrays_of_several_lengths_are_refused(tmp_path: Path) -> None:
    """Rows of an archive are the arrays side by side."""
    np.savez(tmp_path / "x.npz", a=np.zeros(2), b=np.zeros(3))
    with pytest.raises(BadJob, match=r"several lengths: \[2, 3\]"):
        NumpySource(tmp_path / "x.npz").extent(1)


def test_a_cut_off_array_is_told(tmp_path: Path) -> None:
    """A copy that stopped half-way ends the job at its end, not with zeros."""
    np.save(tmp_path / "x.npy", np.zeros((10, 2)))
    (tmp_path / "x.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-8])
    reader = NumpySource(tmp_path / "x.npy").open(["x"])
    with pytest.raises(RunFailed, match="ends before row 10"):
        reader.read(part(5, 5))
    reader.close()


def test_a_folder_of_images_is_sorted_by_path(tmp_path: Path) -> None:
    """Images in folders below count too; each is a row of its own file."""
    for name in ("b/2.png", "b/1.PNG", "a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / name)
    (tmp_path / "notes.txt").touch()
    (first, second) = _in_parts(ImageSource(tmp_path), 2, ["path"])
    assert first.columns["path"] == ["a.png", "b/1.PNG"]
    assert second.origin(0) == (str(tmp_path / "b/2.png"), 0)
