"""One file, read to be trained on, to be checked and to be answered: the same rows, and the same faults at them."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stoker
from stoker.data.files import table_blocks
from stoker.data.files.table_blocks import blocks_of
from stoker.data.files.table_store import TableSpec, table_spec
from stoker.data.reading.file_listing import files_below
from stoker.data.reading.table_readers import Lines
from stoker.errors import BadJob
from stoker.inspecting.image_sources import find_shards
from stoker.inspecting.table_files import CsvTable, JsonlTable, TableSource
from stoker.predicting.file_sources import CsvSource, JsonlSource, TextSource
from stoker.records.prediction import PredictionPart
from tests.data.files.making import png_of

READERS: dict[str, tuple[type[CsvTable | JsonlTable], type[CsvSource | JsonlSource]]] = {
    "csv": (CsvTable, CsvSource),
    "jsonl": (JsonlTable, JsonlSource),
}
on_a_folder = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)

csv_rows = st.lists(
    st.one_of(
        st.just("1,2"),
        st.just('"a ""b"",\r\n\n c",9'),
        st.just('x"y,4'),  # whole ones
        st.just("3"),
        st.just("4,5,6"),
        st.just("   "),  # too short, too long, blanks
        st.just('"x"y,7'),
        st.just('8,"so" and so'),
        st.just('8,"so\n9,"and" so'),  # quotes that are not doubled
        st.just(""),  # none
    ),
    max_size=8,
)
json_rows = st.lists(
    st.one_of(
        st.just('{"a": 1, "b": "x"}'),
        st.just('{"a": 2, "b": null}'),
        st.just("[1]"),
        st.just('{"a": '),
        st.just('{"a": "\udcff"}'),
        st.just(" "),
        st.just(""),
    ),
    max_size=8,
)


def spec_of(kind: str) -> TableSpec:
    """A spec of two columns of text."""
    return table_spec(
        kind, features=None, target=None, categories=(), text=("a", "b"), target_kind="auto", classes=None, missing=None
    )


def trained_on(path: Path, kind: str, dropped: frozenset[int]) -> dict[int, list[Any]]:
    """The rows as training reads them."""
    found: dict[int, list[Any]] = {}
    for block in blocks_of(path, spec_of(kind), ("a", "b"), dropped):
        columns = [column.to_pylist() for column in block.columns.values()]
        found |= {row: list(values) for row, *values in zip(block.rows.tolist(), *columns, strict=True)}
    return found


def checked(table: TableSource) -> tuple[dict[int, list[Any]], dict[int, str]]:
    """The rows as the check reads them, and what is wrong with the others."""
    rows: dict[int, list[Any]] = {}
    faults: dict[int, str] = {}
    for batch in table.batches():
        faults |= {batch.first_row + at: fault.words for at, fault in batch.problems.items()}
        columns = [batch.columns.get(name, [None] * batch.num_rows) for name in ("a", "b")]
        for at, values in enumerate(zip(*columns, strict=True)):
            if at not in batch.problems:
                rows[batch.first_row + at] = list(values)
    return rows, faults


def answered(source: TextSource, part_rows: int) -> tuple[dict[int, list[Any]], dict[int, str]]:
    """The rows as prediction reads them, part by part, and what is wrong with the others."""
    extent, reader = source.extent(part_rows), source.open(("a", "b"))
    rows: dict[int, list[Any]] = {}
    faults: dict[int, str] = {}
    for first, offset in zip(range(0, extent.num_rows, part_rows), extent.offsets, strict=True):
        count = min(part_rows, extent.num_rows - first)
        part = reader.read(PredictionPart(source=0, first_row=first, num_rows=count, offset=offset))
        faults |= {first + at: words for at, words in part.broken.items()}
        for at, values in enumerate(zip(*part.columns.values(), strict=True)):
            if at not in part.broken:
                rows[first + at] = list(values)
    reader.close()
    return rows, faults


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@on_a_folder
@given(lines=csv_rows, part_rows=st.integers(1, 4), is_ended=st.booleans())
def test_a_csv_has_one_reading(end: str, lines: list[str], part_rows: int, is_ended: bool, tmp_path: Path) -> None:
    """The same rows under the same numbers, and the same faults in the same words, whatever ends its lines.

    Training leaves those rows out if asked to; else it says which is the first.
    """
    path = tmp_path / "t.csv"
    path.write_bytes(end.join(["\ufeffa,b", *lines, *[""] * is_ended]).encode())
    rows, faults = checked(CsvTable(path, "t", ""))
    assert answered(CsvSource(path), part_rows) == (rows, faults)
    left_out = frozenset(faults) or frozenset({99})
    assert trained_on(path, "csv", left_out) == rows
    if faults:
        with pytest.raises(BadJob, match=rf"t\.csv: row {min(faults)} "):
            trained_on(path, "csv", frozenset())
    else:
        assert trained_on(path, "csv", frozenset()) == rows


@on_a_folder
@given(text=st.lists(st.sampled_from(["1", ",", "\r", "\n", "\r\n", '"']), max_size=9).map("".join))
def test_lines_are_the_same_from_wherever_reading_begins_again(text: str, tmp_path: Path) -> None:
    """Also where lines end with carriage returns alone, and the last one is a letter without an end."""
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode())
    with path.open("rb") as file:
        whole = list(Lines(file, path, any_end=True))
        assert whole == [line.encode() for line in re.findall(r"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+", text)]
        for at in range(len(whole)):
            assert list(Lines(file, path, sum(map(len, whole[:at])), any_end=True)) == whole[at:]


@on_a_folder
@given(lines=json_rows, part_rows=st.integers(1, 4))
def test_json_lines_have_one_reading(lines: list[str], part_rows: int, tmp_path: Path) -> None:
    """As CSV; a byte order mark is none of its rows."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(
        "\n".join(["\ufeff" + json.dumps({"a": 0, "b": "first"}), *lines, ""]).encode(errors="surrogateescape")
    )
    rows, faults = checked(JsonlTable(path, "t", ""))
    assert answered(JsonlSource(path), part_rows) == (rows, faults)
    assert trained_on(path, "jsonl", frozenset(faults)) == rows
    if faults:
        with pytest.raises(BadJob, match=rf"t\.jsonl: row {min(faults)} "):
            trained_on(path, "jsonl", frozenset())


@pytest.mark.parametrize("kind", READERS)
def test_a_file_that_is_gone_or_a_folder_is_told_by_each(kind: str, tmp_path: Path) -> None:
    """With its name and the system's reason."""
    table, source = READERS[kind]
    (tmp_path / "folder").mkdir()
    for name, words in (("absent", "No such file"), ("folder", "Is a directory")):
        path = tmp_path / name
        for read in (
            lambda path=path: list(table(path, "t", "").batches()),
            lambda path=path: source(path).fields(),
            lambda path=path: trained_on(path, kind, frozenset()),
        ):
            with pytest.raises(BadJob, match=rf"{name} cannot be read: {words}"):
                read()


def test_quotes_that_are_never_closed_are_told_with_their_place(tmp_path: Path) -> None:
    """They would swallow the rest of the file: nothing after them is a row."""
    (tmp_path / "t.csv").write_text('a,b\n1,2\n"3,4\n5,6\n')
    words = r"is no CSV from line 3 \(byte 8\) on: .*never closed"
    with pytest.raises(BadJob, match=words):
        CsvSource(tmp_path / "t.csv").extent(1)
    with pytest.raises(BadJob, match=words):
        checked(CsvTable(tmp_path / "t.csv", "t", ""))
    with pytest.raises(BadJob, match=words):
        trained_on(tmp_path / "t.csv", "csv", frozenset())


@pytest.mark.parametrize(("text", "line"), [('a,b\n"x\ny",2\n"3,4\n5,6\n', 4), ('a,b\r1,2\r3,4\r"5,6\r7,8\r', 4)])
def test_the_line_of_an_unclosed_quote_is_that_of_an_editor(text: str, line: int, tmp_path: Path) -> None:
    """Line breaks within quotes count, and so do carriage returns alone."""
    (tmp_path / "t.csv").write_bytes(text.encode())
    with pytest.raises(BadJob, match=rf"from line {line} \(byte \d+\)"):
        CsvSource(tmp_path / "t.csv").extent(1)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", "is empty"),
        (b'"a"b,c\n', "has a first line that is no CSV"),
        (b"a,\xff\n", r"has a column b'\\xff'"),
        (b"a,a\n", "two columns 'a'"),
    ],
)
def test_a_header_that_names_no_columns_is_told(header: bytes, words: str, tmp_path: Path) -> None:
    """By each that reads it."""
    path = tmp_path / "t.csv"
    path.write_bytes(header)
    for read in (
        lambda: list(CsvTable(path, "t", "").batches()),
        lambda: CsvSource(path).fields(),
        lambda: trained_on(path, "csv", frozenset()),
    ):
        with pytest.raises(BadJob, match=words):
            read()


def test_a_row_that_is_left_out_far_into_a_file_moves_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader of records takes over in the middle of it, and gives what pyarrow would."""
    monkeypatch.setattr(table_blocks, "_BLOCK_BYTES", 2**12)
    lines = [f'{at},"x,{at % 7}"' for at in range(4000)]
    (tmp_path / "whole.csv").write_text("\n".join(["a,b", *lines, ""]))
    lines[3000] = "3000"
    (tmp_path / "broken.csv").write_text("\n".join(["a,b", *lines, ""]))
    wanted = trained_on(tmp_path / "whole.csv", "csv", frozenset({7, 3000}))
    assert trained_on(tmp_path / "broken.csv", "csv", frozenset({7, 3000})) == wanted
    assert list(wanted) == [at for at in range(4000) if at not in {7, 3000}]
    with pytest.raises(BadJob, match=r"broken\.csv: row 3000 has 1 fields, the header has 2: '3000'"):
        trained_on(tmp_path / "broken.csv", "csv", frozenset({7}))


def test_a_shard_has_the_samples_for_the_check_that_it_has_in_training(tmp_path: Path) -> None:
    """Under the same names, as a clean list needs: with `./` before them, among folders and hidden files."""
    inside = tmp_path / "inside"
    (inside / "more").mkdir(parents=True)
    for name in ("a", "more/b", "c.v2"):
        (inside / f"{name}.png").write_bytes(png_of(1))
        (inside / f"{name}.cls").write_text("1")
    for name in ("README", "._a.png", "more/.hidden"):
        (inside / name).write_bytes(b"x")
    path = tmp_path / "t.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(inside, ".")
    found = find_shards(path, [path])
    (unit,) = found.units
    items = {(one := unit.item(at)).id: one for at in range(len(unit))}
    samples = stoker.data.webdataset(path, fields=["png;v2.png", "cls;v2.cls"])
    assert set(items) == {samples.sample_id(at) for at in range(len(samples))} == {"t.tar:a", "t.tar:c", "t.tar:more/b"}
    assert {(one.problem, one.label, one.suffix) for one in items.values() if one.id != "t.tar:c"} == {
        ("", "1", ".png")
    }
    assert found.findings == ()
    path.write_bytes(path.read_bytes()[: -(-samples.members.offset.max() // 512) * 512])
    (told,) = find_shards(path, [path]).findings
    assert "cannot be read as tar" in told.detail


def test_files_of_a_folder_come_sorted_through_links_and_once(tmp_path: Path) -> None:
    """What is hidden is left out; a link back up ends where it began."""
    for name in ("b/2.png", "b/.thumbs/2.png", "a/._1.png", "a/1.png", "z.png"):
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).touch()
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "3.png").touch()
    (tmp_path / "root" / "c").symlink_to(tmp_path / "else")
    (tmp_path / "root" / "b" / "up").symlink_to(tmp_path / "root")
    assert list(files_below(tmp_path / "root")) == ["z.png", "a/1.png", "b/2.png", "c/3.png"]
