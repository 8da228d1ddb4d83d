from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stoker.store.files import Disk, aside_path, disk
from stoker.testing import FakeClock, FaultyDisk, PowerCut, PowerCutAt, fake_device, operations_of


def overwrite(path: Path) -> None:
    """The wrong way to save: the old content is gone before the new one is there."""
    descriptor = disk().open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    disk().write(descriptor, memoryview(b"new content"))
    os.close(descriptor)


def rename_without_sync(path: Path) -> None:
    """The classic mistake: a rename of content that is not on the disk yet."""
    aside = aside_path(path)
    descriptor = disk().open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    disk().write(descriptor, memoryview(b"new content"))
    os.close(descriptor)
    disk().rename(aside, path)
    disk().sync_directory(path.parent)


def sync_without_directory(path: Path) -> None:
    """Safe content under a name that is not."""
    aside = aside_path(path)
    descriptor = disk().open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    disk().write(descriptor, memoryview(b"new content"))
    disk().sync(descriptor)
    os.close(descriptor)
    disk().rename(aside, path)


def outcomes(save, directory: Path, loses: str) -> list[bytes]:
    """What can be read after a power cut at each operation of `save`, the last one after it returned."""
    path = directory / "file"
    path.write_bytes(b"old")
    num_operations = len(operations_of(lambda: save(path)))
    found = []
    for at in range(num_operations + 1):
        path.write_bytes(b"old")
        with PowerCutAt(at, loses=loses):
            save(path)
        found.append(path.read_bytes())
    return found


def test_a_clock_moves_only_when_told() -> None:
    """Never back."""
    clock = FakeClock(5.0)
    assert (clock(), clock()) == (5.0, 5.0)
    clock.advance(2.5)
    assert clock() == 7.5
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_a_device_can_be_anything() -> None:
    """A CPU, a GPU, with any field changed."""
    assert fake_device().torch_name == "cpu"
    assert fake_device(kind="cuda", index=1).torch_name == "cuda:1"
    assert fake_device(cores=2).cores == 2


def test_a_power_cut_tears_a_write(tmp_path: Path) -> None:
    """Half of it is there; the method shows its weakness even if only the process dies."""
    assert outcomes(overwrite, tmp_path, "nothing") == [b"old", b"new c", b"new content"]


def test_a_power_cut_takes_content_that_was_not_synced(tmp_path: Path) -> None:
    """An empty file under the right name, which a killed process alone does not leave."""
    assert outcomes(rename_without_sync, tmp_path, "data")[-1] == b""
    assert set(outcomes(rename_without_sync, tmp_path, "nothing")) == {b"old", b"new content"}


def test_a_power_cut_takes_names_that_were_not_synced(tmp_path: Path) -> None:
    """The replaced file comes back."""
    assert outcomes(sync_without_directory, tmp_path, "data and names")[-1] == b"old"
    assert outcomes(sync_without_directory, tmp_path, "data")[-1] == b"new content"


def test_what_was_removed_comes_back_unless_its_directory_was_synced(tmp_path: Path) -> None:
    """Files and directories, with what was in them."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "file").write_bytes(b"x")
    for synced, left in ((False, ["deep", "deep/file"]), (True, ["new"])):
        with PowerCutAt(100, loses="data and names"):
            disk().remove_file(tmp_path / "deep" / "file")
            disk().remove_directory(tmp_path / "deep")
            disk().make_directory(tmp_path / "new")
            if synced:
                disk().sync_directory(tmp_path)
        assert [p.relative_to(tmp_path).as_posix() for p in sorted(tmp_path.rglob("*"))] == left


def test_nothing_reaches_the_disk_after_the_power_failed(tmp_path: Path) -> None:
    """Not even what cleans up."""
    with PowerCutAt(0):
        try:
            disk().make_directory(tmp_path / "a")
        finally:
            with pytest.raises(PowerCut):
                disk().make_directory(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
    assert type(disk()) is Disk


def test_the_operations_are_named(tmp_path: Path) -> None:
    """In order, and nothing is lost by listing them."""
    assert operations_of(lambda: overwrite(tmp_path / "a")) == ("create a", "write a")
    assert operations_of(lambda: overwrite(tmp_path / "a")) == ("open a", "write a")


def test_other_errors_pass_through_a_power_cut_that_did_not_come(tmp_path: Path) -> None:
    """A test's own failure is not hidden."""
    with pytest.raises(FileNotFoundError), PowerCutAt(100):
        disk().remove_file(tmp_path / "absent")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(OSError, match="not empty"), PowerCutAt(100):
        disk().remove_directory(tmp_path / "full")


def test_a_full_disk_takes_what_there_is_room_for(tmp_path: Path) -> None:
    """Then ENOSPC, until there is room; other directories are not concerned, nor what was there before."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "earlier").write_bytes(bytes(1000))
    with FaultyDisk.full(tmp_path / "a", after_bytes=15) as faulty:
        overwrite(tmp_path / "a" / "1")
        overwrite(tmp_path / "a" / "2")
        with pytest.raises(OSError, match="No space") as caught:
            overwrite(tmp_path / "a" / "3")
        assert caught.value.errno == errno.ENOSPC
        overwrite(tmp_path / "b" / "4")
        faulty.room_bytes = 11
        overwrite(tmp_path / "a" / "3")
        descriptor = disk().open(tmp_path / "a" / "earlier", os.O_RDWR)
        disk().sync(descriptor)
        os.close(descriptor)
    sizes = [(p.name, p.stat().st_size) for p in sorted(tmp_path.rglob("?")) if p.is_file()]
    assert sizes == [("1", 11), ("2", 4), ("3", 11), ("4", 11)]


@pytest.mark.parametrize(
    "make", [FaultyDisk.read_only, lambda p: FaultyDisk.refusing(p, errno.EACCES)], ids=["ro", "no"]
)
def test_a_disk_that_refuses_takes_no_change_at_all(tmp_path: Path, make) -> None:
    """Not files, directories, renames or removals; reading still works."""
    (tmp_path / "d").mkdir()
    (tmp_path / "f").write_bytes(b"x")
    changes = [
        lambda: overwrite(tmp_path / "f"),
        lambda: disk().make_directory(tmp_path / "e"),
        lambda: disk().rename(tmp_path / "f", tmp_path / "g"),
        lambda: disk().remove_file(tmp_path / "f"),
        lambda: disk().remove_directory(tmp_path / "d"),
    ]
    with make(tmp_path):
        for change in changes:
            with pytest.raises(OSError, match=r"Read-only|denied"):
                change()
        os.close(disk().open(tmp_path / "f", os.O_RDONLY))
    assert (tmp_path / "f").read_bytes() == b"x"


def test_a_failing_sync_reports_what_writing_did_not(tmp_path: Path) -> None:
    """For files and for directories."""
    with FaultyDisk.failing_sync(tmp_path):
        descriptor = disk().open(tmp_path / "a", os.O_WRONLY | os.O_CREAT)
        disk().write(descriptor, memoryview(b"x"))
        with pytest.raises(OSError, match="Input/output error"):
            disk().sync(descriptor)
        os.close(descriptor)
        with pytest.raises(OSError, match="Input/output error"):
            disk().sync_directory(tmp_path)
