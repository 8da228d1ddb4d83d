"""Files that could not be read, and what they count as once they are mended."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stoker.data.files.sample_files import as_first_seen, note_unreadable, version_of


def versions(root: Path, *names: str) -> np.ndarray:
    """What the files are now."""
    return np.array([version_of(root / name) for name in names], np.int64)


def written(path: Path, content: str, at_ns: int) -> None:
    """A file with a time of change."""
    path.write_text(content)
    os.utime(path, ns=(at_ns, at_ns))


def test_a_mended_file_counts_as_what_it_was(tmp_path: Path) -> None:
    """Nothing of it was learned, so nothing that was has changed."""
    written(tmp_path / "a", "bad", 10)
    written(tmp_path / "b", "fine", 20)
    before = versions(tmp_path, "a", "b")
    note_unreadable(tmp_path, "a", before[0])
    written(tmp_path / "a", "mended", 30)
    for _ in range(2):  # and again at the next start
        assert np.array_equal(as_first_seen(tmp_path, ["a", "b"], versions(tmp_path, "a", "b")), before)


def test_a_second_change_is_a_change_of_the_data(tmp_path: Path) -> None:
    """After it was mended it could be read, and may have been learned from."""
    written(tmp_path / "a", "bad", 10)
    note_unreadable(tmp_path, "a", version_of(tmp_path / "a"))
    written(tmp_path / "a", "mended", 30)
    as_first_seen(tmp_path, ["a"], versions(tmp_path, "a"))
    written(tmp_path / "a", "another", 40)
    now = versions(tmp_path, "a")
    assert np.array_equal(as_first_seen(tmp_path, ["a"], now), now)


def test_a_file_that_was_mended_badly_can_be_mended_again(tmp_path: Path) -> None:
    """It could not be read then either."""
    written(tmp_path / "a", "bad", 10)
    before = versions(tmp_path, "a")
    note_unreadable(tmp_path, "a", before[0])
    written(tmp_path / "a", "still bad", 30)
    seen = as_first_seen(tmp_path, ["a"], versions(tmp_path, "a"))
    note_unreadable(tmp_path, "a", seen[0])
    written(tmp_path / "a", "good", 50)
    assert np.array_equal(as_first_seen(tmp_path, ["a"], versions(tmp_path, "a")), before)


def test_without_a_cache_that_can_be_written_nothing_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error about the file is what counts, and no other takes its place."""
    written(tmp_path / "a", "bad", 10)
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "a"))  # a file, where a folder should be
    note_unreadable(tmp_path, "a", version_of(tmp_path / "a"))
    now = versions(tmp_path, "a")
    assert np.array_equal(as_first_seen(tmp_path, ["a"], now), now)


def test_a_file_that_broke_while_a_run_went_on_counts_as_what_it_was_at_the_start(tmp_path: Path) -> None:
    """That is what the run knows the data by."""
    written(tmp_path / "a", "good", 10)
    at_start = versions(tmp_path, "a")
    written(tmp_path / "a", "broken", 20)
    note_unreadable(tmp_path, "a", at_start[0])
    written(tmp_path / "a", "good", 30)
    assert np.array_equal(as_first_seen(tmp_path, ["a"], versions(tmp_path, "a")), at_start)
