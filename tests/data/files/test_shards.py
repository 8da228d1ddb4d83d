"""Files that hold many samples: their names, their indices, and reading at a place."""

from __future__ import annotations

import copy
import gzip
import os
from pathlib import Path

import numpy as np
import pytest

from stoker.data.files import sample_files
from stoker.data.files.sample_files import OpenFiles, expanded, indexed, shard_paths
from stoker.errors import BadJob


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{8..10}.tar", ["a-8.tar", "a-9.tar", "a-10.tar"]),
        ("{a,b}-{01..02}", ["a-01", "a-02", "b-01", "b-02"]),
        ("x{,y}", ["x", "xy"]),
        ("a-{02..00}", ["a-02", "a-01", "a-00"]),
    ],
)
def test_braces_stand_for_names(pattern: str, wanted: list[str]) -> None:
    """As in a shell."""
    assert list(expanded(pattern)) == wanted


def test_stars_stand_for_what_is_there(tmp_path: Path) -> None:
    """Sorted; nothing there is an error, as is a name that is missing."""
    for name in ("b.tar", "a.tar"):
        (tmp_path / name).write_bytes(b"x")
    assert [path.name for path in shard_paths(str(tmp_path / "*.tar"))] == ["a.tar", "b.tar"]
    with pytest.raises(BadJob, match="no file is called"):
        shard_paths(str(tmp_path / "*.zip"))
    with pytest.raises(BadJob, match=r"c\.tar is no file"):
        shard_paths([tmp_path / "a.tar", tmp_path / "c.tar"])
    with pytest.raises(BadJob, match="no shards"):
        shard_paths([])


def test_a_shard_is_given_once(tmp_path: Path) -> None:
    """By name and by pattern, or by a link: an epoch would have its samples twice."""
    (tmp_path / "a.tar").write_bytes(b"x")
    with pytest.raises(BadJob, match=r"a\.tar is given twice"):
        shard_paths([tmp_path / "a.tar", str(tmp_path / "*.tar")])
    (tmp_path / "b.tar").symlink_to(tmp_path / "a.tar")
    with pytest.raises(BadJob, match=r"a\.tar is given twice"):
        shard_paths(str(tmp_path / "*.tar"))


def test_a_relative_name_is_of_the_folder_it_was_given_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may be made in one folder, and its data be read in another."""
    monkeypatch.chdir(tmp_path)
    Path("a.tar").write_bytes(b"x")
    for given in ("a.tar", "*.tar", [Path("a.tar")]):
        assert shard_paths(given) == (tmp_path / "a.tar",)


def test_a_compressed_shard_is_refused(tmp_path: Path) -> None:
    """By its content, whatever its name."""
    (tmp_path / "a.tar").write_bytes(gzip.compress(b"x"))
    with pytest.raises(BadJob, match=r"compressed \(gzip\), so that nothing in it can be found"):
        shard_paths(tmp_path / "a.tar")


def test_an_index_is_made_once_for_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when the file changed, or the kept one is damaged."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    path, made = tmp_path / "a", []

    def look(at: Path) -> dict[str, np.ndarray]:
        made.append(at)
        return {"size": np.array([at.stat().st_size])}

    path.write_bytes(b"abc")
    assert [int(indexed(path, "t", look)["size"][0]) for _ in range(2)] == [3, 3]
    assert len(made) == 1
    path.write_bytes(b"abcd")
    assert int(indexed(path, "t", look)["size"][0]) == 4
    (kept,) = (tmp_path / "cache" / "data" / "indices").iterdir()
    kept.write_bytes(kept.read_bytes()[:40])
    assert int(indexed(path, "t", look)["size"][0]) == 4
    assert len(made) == 3


def test_reading_at_places_in_many_files(tmp_path: Path) -> None:
    """More files than are kept open; the end of a file is an error; a copy in another process opens its own."""
    paths = [tmp_path / str(at) for at in range(70)]
    for at, path in enumerate(paths):
        path.write_bytes(f"<{at:03}>".encode())
    files = OpenFiles(paths)
    assert [files.read(at, 1, 3) for at in (0, 69, 5)] == [b"000", b"069", b"005"]
    assert all(files.read(at, 0, 5) == f"<{at:03}>".encode() for at in range(70))
    assert len([*Path("/proc/self/fd").iterdir()]) < 64 + 60
    with pytest.raises(OSError, match="ends 2 bytes before"):
        files.read(0, 3, 4)
    assert copy.deepcopy(files).read(3, 0, 5) == b"<003>"
    files.close()


def test_files_are_closed_after_the_module_was_torn_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the exit of the interpreter, whose order is open: else each script ends with a traceback."""
    (tmp_path / "a").write_bytes(b"content")
    files = OpenFiles([tmp_path / "a"])
    assert files.read(0, 0, 3) == b"con"
    (descriptor,) = files._open.values()
    with monkeypatch.context() as torn_down:
        torn_down.setattr(sample_files, "os", None)
        files.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
