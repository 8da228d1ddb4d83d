from __future__ import annotations

import errno
from pathlib import Path

import pytest

from stoker.errors import BadRun, RunFailed
from stoker.store import disk_errors, write_atomic
from stoker.store.disk_errors import read_errors


def test_a_full_disk_is_told_with_free_and_needed_bytes(tmp_path: Path) -> None:
    """The message has the path, what was written, the room there is and the room it takes, and a remedy."""
    with pytest.raises(RunFailed) as caught, disk_errors(tmp_path / "x", "checkpoint 7", needed_bytes=3 * 2**20):
        raise OSError(errno.ENOSPC, "No space left on device")
    message = caught.value.message
    assert message.startswith(f"Cannot write checkpoint 7 at {tmp_path / 'x'}: the disk is full (free: ")
    assert message.endswith("needed: 3.0 MiB).")
    assert "--run-dir" in str(caught.value.remedy)
    assert isinstance(caught.value.__cause__, OSError)


def test_what_a_file_needs_is_left_out_where_it_is_not_known(tmp_path: Path) -> None:
    """`needed: unknown` helps with nothing."""
    with pytest.raises(RunFailed, match=r"the disk is full \(free: [^,]+\)\.") as caught, disk_errors(tmp_path, "it"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert "needed" not in caught.value.message


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "permission denied"),
        (errno.EIO, "input/output error"),
        (errno.ENOENT, "not there"),
        (errno.EXDEV, "cross-device"),
    ],
)
def test_every_error_number_has_a_meaning_and_a_remedy(tmp_path: Path, code: int, meaning: str) -> None:
    """The usual ones are explained, others say what the operating system says."""
    with pytest.raises(BadRun, match=f"(?i){meaning}") as caught, disk_errors(tmp_path, "it", error=BadRun):
        raise OSError(code, "x")
    assert caught.value.remedy


def test_a_directory_that_never_was_is_named(tmp_path: Path) -> None:
    """The uppermost one: nothing is said of something that was removed, and the file itself is not blamed."""
    with pytest.raises(RunFailed, match=r"Cannot write x.json at .*: there is no directory \S*/never\.(?m:$)"):
        write_atomic(tmp_path / "never" / "was" / "x.json", "content")


def test_errors_of_libraries_in_rust_are_told_by_their_number(tmp_path: Path) -> None:
    """Safetensors raises no OSError on a full disk, only a text with the number in it."""
    with pytest.raises(RunFailed, match="the disk is full"), disk_errors(tmp_path, "weights"):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    """A bug in what writes is not blamed on the disk, and an error explained already is not explained again."""
    with pytest.raises(KeyError), disk_errors(tmp_path, "it"):
        raise KeyError("bug")
    with pytest.raises(BadRun, match="inner"), disk_errors(tmp_path, "it"):
        raise BadRun("inner")


def test_a_path_that_does_not_exist_yet_has_the_room_of_its_parent(tmp_path: Path) -> None:
    """Free bytes are reported even if not one directory of the path was made."""
    with pytest.raises(RunFailed, match=r"free: \d"), disk_errors(tmp_path / "a" / "b" / "c", "it"):
        raise OSError(errno.ENOSPC, "x")


def test_errors_of_reading_name_the_file(tmp_path: Path) -> None:
    """What cannot be read is the user's to mend."""
    with pytest.raises(BadRun, match="cannot be read: No such file") as caught, read_errors(tmp_path / "run.json"):
        (tmp_path / "run.json").read_bytes()
    assert str(tmp_path / "run.json") in caught.value.message
