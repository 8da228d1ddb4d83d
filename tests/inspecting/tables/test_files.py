from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.data.reading.table_readers import BadTable, RowFault
from stoker.inspecting import table_files
from stoker.inspecting.table_files import CsvTable, JsonlTable, ParquetTable, RowBatch, TableSource, TextTable, row_id


def _rows(table: TableSource) -> list[tuple[str, dict[str, Any]]]:
    """Every row that could be read, with its name."""
    return [
        (row_id(table, batch, row), {name: values[row] for name, values in batch.columns.items()})
        for batch in table.batches()
        for row in range(batch.num_rows)
        if row not in batch.problems
    ]


def _problems(table: TableSource) -> dict[str, RowFault]:
    return {row_id(table, batch, row): said for batch in table.batches() for row, said in batch.problems.items()}


@pytest.mark.parametrize("size", [1, 2, 100])
def test_rows_of_csv_are_named_whatever_a_batch_holds(size: int, tmp_path: Path, monkeypatch) -> None:
    """Names count rows from 0, over quoted line breaks, blank lines and rows that are ragged."""
    monkeypatch.setattr(table_files, "ROWS_OF_A_BATCH", size)
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbfa,b\n1,"x\ny"\n\n2\n3,NA\n4,\xff,\n5,z\n')
    table = CsvTable(path, "t.csv", "train")
    assert _rows(table) == [
        ("t.csv:0", {"a": "1", "b": "x\ny"}),
        ("t.csv:2", {"a": "3", "b": None}),
        ("t.csv:4", {"a": "5", "b": "z"}),
    ]
    assert _problems(table) == {
        "t.csv:1": RowFault("ragged", "has 1 fields, the header has 2"),
        "t.csv:3": RowFault("ragged", "has 3 fields, the header has 2"),
    }


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_delimiter_is_the_headers(delimiter: str, tmp_path: Path) -> None:
    """Semicolons and tabs separate where the header has them."""
    path = tmp_path / "t.csv"
    path.write_text(delimiter.join("ab") + "\n" + delimiter.join("12") + "\n")
    assert _rows(CsvTable(path, "t", "")) == [("t:0", {"a": "1", "b": "2"})]


@pytest.mark.parametrize(("text", "words"), [("", "is empty"), ("a,a\n1,2\n", "two columns 'a'")])
def test_a_header_that_names_no_columns_is_refused(text: str, words: str, tmp_path: Path) -> None:
    """Without names for its columns a table cannot be read."""
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(BadTable, match=words):
        list(CsvTable(tmp_path / "t.csv", "t", "").batches())


def test_objects_of_jsonl_may_lack_keys(tmp_path: Path) -> None:
    """A key that comes late was missing before; a line that is no object is a problem of its row."""
    (tmp_path / "t.jsonl").write_bytes(b'{"a": 1}\n\n{"a": 2, "b": [3]}\n{"a"\n4\n{"a": "\xff"}\n')
    table = JsonlTable(tmp_path / "t.jsonl", "t", "")
    assert _rows(table) == [("t:0", {"a": 1, "b": None}), ("t:1", {"a": 2, "b": [3]})]
    assert {name: fault.kind for name, fault in _problems(table).items()} == {
        "t:2": "corrupt",
        "t:3": "corrupt",
        "t:4": "encoding",
    }


def test_damage_in_parquet_is_found_by_its_checksums(tmp_path: Path) -> None:
    """A byte that changed within a page ends the reading, with the row."""
    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"a": list(range(3000))}), path, use_dictionary=False, compression=None, write_page_checksum=True
    )
    table = ParquetTable(path, "t", "")
    assert len(_rows(table)) == 3000
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(BadTable, match="cannot be read after row 0"):
        list(table.batches())


def test_texts_are_rows_with_their_paths_for_names(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 are kept so that they can be reported."""
    (tmp_path / "a.txt").write_bytes(b"\xe9t\xe9")
    (batch,) = TextTable(tmp_path, "", ("a.txt",), ("fr",)).batches()
    assert batch == RowBatch(0, {"text": ["\udce9t\udce9"], "label": ["fr"]}, 1, ids=("a.txt",))


def test_files_that_cannot_be_read_are_told_and_the_others_are_rows(tmp_path: Path) -> None:
    """A link to nothing is listed like a file; it ends no check."""
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    texts = TextTable(tmp_path, "", ("a.txt", "b.txt"), (None, None))
    assert texts.num_bytes == 3
    assert _rows(texts) == [("a.txt", {"text": "one"})]
    assert _problems(texts) == {"b.txt": RowFault("corrupt", "cannot be read: No such file or directory")}
    table = CsvTable(tmp_path / "b.txt", "b.txt", "")
    assert table.num_bytes == 0
    with pytest.raises(BadTable, match="cannot be read"):
        list(table.batches())
