from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from stoker.errors import BadJob
from stoker.predicting.file_sources import find_sources, passed_over
from tests.predicting.builders import write_lines


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        write_lines(folder / name, ["a", "1"])


def _names(*asked: Path | str) -> list[str]:
    return [source.path.name for source in find_sources([str(one) for one in asked])]


def test_a_pattern_and_a_folder_are_sorted(tmp_path: Path) -> None:
    """The order of rows does not depend on the file system."""
    _touch(tmp_path, "b.csv", "a.csv", "c.csv", "readme.txt")
    assert _names(tmp_path) == _names(f"{tmp_path}/*.csv") == ["a.csv", "b.csv", "c.csv"]
    assert _names(tmp_path / "c.csv", tmp_path / "a.csv") == ["c.csv", "a.csv"]


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    """Nothing there, an unknown kind, a file twice, an empty folder, several kinds in one."""
    (tmp_path / "empty").mkdir()
    _touch(tmp_path, "a.csv", "a.xlsx")
    for asked, words in (
        ((tmp_path / "no.csv",), "is not there"),
        ((f"{tmp_path}/*.pq",), "No file matches"),
        ((tmp_path / "a.xlsx",), r"cannot be read \(.xlsx\)"),
        ((tmp_path / "a.csv", tmp_path / "a.csv"), "given twice"),
        ((tmp_path / "empty",), "nothing that can be read"),
    ):
        with pytest.raises(BadJob, match=words):
            _names(*asked)
    _touch(tmp_path, "b.jsonl")
    with pytest.raises(BadJob, match=r"several kinds: \.csv, \.jsonl"):
        _names(tmp_path)
    (tmp_path / "a.csv").unlink()
    _touch(tmp_path, "a.parquet")
    with pytest.raises(BadJob) as told:
        _names(tmp_path)
    assert told.value.remedy == f"Name one kind: {tmp_path}/*.jsonl"


def test_images_beside_a_table_are_not_mixed_in(tmp_path: Path) -> None:
    """A folder of images with their labels in a CSV: which is meant has to be said."""
    _touch(tmp_path, "labels.csv")
    Image.new("L", (2, 2)).save(tmp_path / "a.png")
    with pytest.raises(BadJob, match=r"several kinds: \.csv, \.png"):
        _names(tmp_path)


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is computed, and in words."""
    _touch(tmp_path, "a.csv")

    def deny(path: Path, *_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(BadJob, match=r"a\.csv cannot be read: Permission denied"):
        _names(tmp_path / "a.csv")


def test_what_of_a_folder_is_not_read_is_named(tmp_path: Path) -> None:
    """Packed tables, other kinds and tables in folders below; but not answers, hidden files, or what is named alone."""
    folder = tmp_path / "data"
    for below in (folder / "year=2025", folder / "out", tmp_path / "whole"):
        below.mkdir(parents=True)
    _touch(folder, "jan.csv", "feb.csv.gz", "mar.xlsx", ".hidden", "year=2025/apr.csv", "out/part-0.parquet")
    _touch(tmp_path / "whole", "a.csv")

    def words(*names: Path | str) -> list[str]:
        asked = [str(name) for name in names]
        return passed_over(asked, find_sources(asked), folder / "out")

    assert words(folder) == [f"{folder}: not read: feb.csv.gz, mar.xlsx, year=2025/apr.csv"]
    assert words(f"{tmp_path}/d*", tmp_path / "whole") == words(folder)
    assert words(folder / "jan.csv") == words(tmp_path / "whole") == []
    _touch(folder, *(f"{number}.txt" for number in range(9)))
    assert words(folder)[0].endswith("0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 7 more")


def test_images_of_an_unknown_kind_are_named(tmp_path: Path) -> None:
    """A photograph that cannot be decoded is not silently without an answer."""
    (tmp_path / "below").mkdir()
    for name in ("a.png", "below/b.png"):
        Image.new("L", (2, 2)).save(tmp_path / name)
    _touch(tmp_path, "below/c.heic")
    assert passed_over([str(tmp_path)], find_sources([str(tmp_path)]), tmp_path / "out") == [
        f"{tmp_path}: not read: below/c.heic"
    ]
