"""Clean lists: which of their names mean samples of a source."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.data.files.sample_files import left_out, left_out_of_files, require_known
from stoker.errors import BadJob
from stoker.records import CleanList, dumps
from stoker.records.data_check import Dropped


def listing(source: Path, *names: str) -> CleanList:
    """A clean list that leaves these out."""
    dropped = tuple(Dropped(id=name, why="duplicate") for name in names)
    return CleanList(source=str(source), made_at="2026-01-01T00:00:00Z", kept=5, dropped=dropped)


def test_names_are_relative_to_the_source(tmp_path: Path) -> None:
    """From the same folder as they are; from one above without the way down, and others left aside."""
    below = tmp_path / "train"
    below.mkdir()
    assert left_out(listing(below, "cat/1.png"), below) == {"cat/1.png"}
    assert left_out(listing(tmp_path, "train/cat/1.png", "test/cat/2.png"), below) == {"cat/1.png"}
    assert left_out(None, below) == frozenset()


def test_a_list_of_one_file_names_it(tmp_path: Path) -> None:
    """The file, then the row."""
    (tmp_path / "t.csv").write_text("a\n")
    assert left_out(listing(tmp_path / "t.csv", "t.csv:3"), tmp_path) == {"t.csv:3"}


def test_a_list_is_read_from_its_file(tmp_path: Path) -> None:
    """As `stoker data check -o DIR` writes it."""
    path = tmp_path / "clean.json"
    path.write_text(dumps(listing(tmp_path, "a.png")))
    assert left_out(str(path), tmp_path) == {"a.png"}


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_what_is_no_list_is_refused(content: str | None, tmp_path: Path) -> None:
    """A file that is missing, or holds something else."""
    path = tmp_path / "clean.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BadJob, match="is no clean list"):
        left_out(path, tmp_path)


def test_files_of_many_samples_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    """Two of one name are two files, whatever the list names; other files of the list's folder are left aside."""
    (tmp_path / "sub").mkdir()
    paths = (tmp_path / "t.tar", tmp_path / "sub" / "t.tar")
    for path in paths:
        path.touch()
    clean = listing(tmp_path, "t.tar:0", "sub/t.tar:a:1")
    assert left_out_of_files(clean, paths) == ({"0"}, {"a:1"})
    assert left_out_of_files(clean, (tmp_path / "other.tar",)) == (frozenset(),)
    assert left_out_of_files(listing(tmp_path / "sub", "t.tar:2"), paths) == (frozenset(), {"2"})
    assert left_out_of_files(listing(tmp_path / "sub" / "t.tar", "t.tar:2"), paths[1:]) == ({"2"},)
    assert left_out_of_files(None, paths) == (frozenset(), frozenset())


def test_files_that_were_moved_keep_their_names(tmp_path: Path) -> None:
    """Of a list made elsewhere the paths below their folder count; one with none of them is refused."""
    paths = (tmp_path / "b.tar", tmp_path / "sub" / "t.tar")
    assert left_out_of_files(listing(Path("/absent"), "sub/t.tar:1", "t.tar:2"), paths) == (frozenset(), {"1"})
    with pytest.raises(BadJob, match="none of these names"):
        left_out_of_files(listing(Path("/absent"), "x.tar:1"), paths)
    with pytest.raises(BadJob, match="none of these names"):
        left_out_of_files(listing(tmp_path, "renamed.tar:1"), paths)


def test_a_list_of_other_data_is_refused() -> None:
    """None of its names is here."""
    with pytest.raises(BadJob, match="leaves out 1 samples, as 'x', and pets has none"):
        require_known(frozenset({"x"}), 0, "pets")
    require_known(frozenset(), 0, "pets")
