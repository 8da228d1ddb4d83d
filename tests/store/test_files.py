from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import RunFailed
from stoker.store import append_line, files, read_lines, sha256_file, write_atomic
from stoker.store.files import Disk, disk, installed, make_directories, remove_leftovers
from stoker.testing import FaultyDisk, PowerCutAt, operations_of

LOSSES = ("nothing", "data", "data and names")


def test_content_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """The new content is there, and no file aside is."""
    path = tmp_path / "run.json"
    write_atomic(path, "old")
    write_atomic(path, "ä new one")
    assert path.read_text(encoding="utf-8") == "ä new one"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("loses", LOSSES)
def test_a_power_cut_leaves_the_old_content_or_the_new(tmp_path: Path, loses: str) -> None:
    """At every operation of a replacement, readers see one or the other; once it returned, the new one."""
    path = tmp_path / "run.json"
    operations = operations_of(lambda: write_atomic(path, b"new"))
    assert operations
    for at in range(len(operations) + 1):
        path.write_bytes(b"old")
        with PowerCutAt(at, loses=loses):
            write_atomic(path, b"new")
        wanted = {b"new"} if at == len(operations) else {b"old", b"new"}
        assert path.read_bytes() in wanted, operations[:at]
        remove_leftovers(tmp_path)
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "fault",
    [
        lambda place: FaultyDisk.full(place, after_bytes=3),
        FaultyDisk.read_only,
        FaultyDisk.failing_sync,
        lambda place: FaultyDisk.refusing(place, errno.EACCES),
    ],
    ids=["full", "read-only", "failing sync", "not permitted"],
)
def test_a_failed_write_leaves_the_old_content_and_nothing_aside(tmp_path: Path, fault) -> None:
    """Whatever the disk does, there is no half file."""
    path = tmp_path / "run.json"
    path.write_bytes(b"old")
    with fault(tmp_path), pytest.raises(RunFailed, match=r"run\.json"):
        write_atomic(path, b"new content")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("run.json", b"old")]


def test_a_real_file_system_error_is_explained(tmp_path: Path) -> None:
    """The kernel's own error, from a limit on file sizes, not a fake's."""
    code = (
        "import resource, sys; from pathlib import Path; from stoker.store import write_atomic\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "write_atomic(Path(sys.argv[1], 'weights'), b'x' * 2000)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "the file is larger than allowed here" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_write_taken_in_parts_is_completed(tmp_path: Path) -> None:
    """The system may take fewer bytes than it is given."""

    class Reluctant(Disk):
        def write(self, descriptor: int, data: memoryview) -> int:
            return super().write(descriptor, data[:3])

    with installed(Reluctant()):
        write_atomic(tmp_path / "a", b"0123456789")
        append_line(tmp_path / "b", "0123456789")
    assert (tmp_path / "a").read_bytes() == b"0123456789"
    assert (tmp_path / "b").read_bytes() == b"0123456789\n"
    assert type(disk()) is Disk


def test_the_digest_is_sha256(tmp_path: Path) -> None:
    """Of the whole content."""
    (tmp_path / "a").write_bytes(b"abc" * 100_000)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(b"abc" * 100_000).hexdigest()


def test_a_file_that_changes_while_others_are_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its digest is of what it was, and must not be kept for what it is."""
    (tmp_path / "first").write_bytes(b"a")
    (tmp_path / "second").write_bytes(b"b")
    digest = sha256_file

    def digest_and_change(path: Path) -> str:
        result = digest(path)
        (tmp_path / "first").write_bytes(b"changed")
        return result

    with monkeypatch.context() as patched:
        patched.setattr(files, "_SETTLED_S", -60.0)  # as if reading had taken a minute
        patched.setattr(files, "sha256_file", digest_and_change)
        files.file_digests(tmp_path, ["first", "second"])
    assert files.file_digests(tmp_path, ["first"])["first"] == sha256_file(tmp_path / "first")


LINES = st.lists(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=20), max_size=6)


@given(before=LINES, after=st.text("xyz", max_size=5), data=st.data())
def test_a_log_cut_off_anywhere_keeps_its_whole_lines(tmp_path_factory, before, after: str, data) -> None:
    """Reading leaves the torn line out; the next line appended comes after the last whole one."""
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    for line in before:
        append_line(path, line)
    whole = path.read_bytes() if path.exists() else b""
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    kept = [line.encode() for line in before][: whole[:cut].count(b"\n")]
    assert read_lines(path) == kept
    append_line(path, after)
    assert path.read_bytes() == b"".join(line + b"\n" for line in [*kept, after.encode()])


def test_a_torn_line_longer_than_what_is_read_at_once_is_removed(tmp_path: Path) -> None:
    """The end of the last whole line is looked for as far back as needed."""
    path = tmp_path / "log"
    path.write_bytes(b"whole\n" + b"x" * 200_000)
    append_line(path, "next")
    assert path.read_bytes() == b"whole\nnext\n"


def test_a_line_on_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path) -> None:
    """What was written of the line is taken back."""
    path = tmp_path / "log"
    append_line(path, "first")
    with FaultyDisk.full(tmp_path, after_bytes=4), pytest.raises(RunFailed, match="the disk is full"):
        append_line(path, "second")
    assert path.read_bytes() == b"first\n"


def test_a_durable_line_survives_a_power_cut_with_its_new_log(tmp_path: Path) -> None:
    """The name of a log that was made for the line is as durable as the line."""
    path = tmp_path / "log"
    with PowerCutAt(100, loses="data and names"):
        append_line(path, "first", is_durable=True)
    assert read_lines(path) == [b"first"]


def test_several_processes_append_whole_lines(tmp_path: Path) -> None:
    """Their lines follow each other and never mix."""
    code = (
        "import sys; from pathlib import Path; from stoker.store import append_line\n"
        "for i in range(200): append_line(Path(sys.argv[1]), f'{sys.argv[2]}{i}' * 50)"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "log"), name]) for name in "ab"]
    assert [child.wait(timeout=60) for child in children] == [0, 0]
    lines = read_lines(tmp_path / "log")
    assert sorted(lines) == sorted(f"{name}{i}".encode() * 50 for name in "ab" for i in range(200))


def test_a_log_is_locked_while_a_line_is_appended(tmp_path: Path) -> None:
    """Else one process would take another's half-written line for a torn one, and remove it."""
    free_meanwhile = []

    class Watching(Disk):
        def write(self, descriptor: int, data: memoryview) -> int:
            other = os.open(tmp_path / "log", os.O_RDWR)
            free_meanwhile.append(files.try_lock(other))
            os.close(other)
            return super().write(descriptor, data)

    with installed(Watching()):
        append_line(tmp_path / "log", "a")
    assert free_meanwhile == [False]


def test_a_line_break_is_refused(tmp_path: Path) -> None:
    """One record is one line."""
    with pytest.raises(ValueError, match="one line"):
        append_line(tmp_path / "log", "a\nb")


def test_an_absent_log_has_no_lines(tmp_path: Path) -> None:
    """Nothing happened yet."""
    assert read_lines(tmp_path / "log") == []


def test_leftovers_are_removed_and_nothing_else(tmp_path: Path) -> None:
    """Files and directories aside go; hidden files of others stay."""
    for name in (".writing-run.json-123-0123abcd", ".hidden", "run.json", ".writing-mine"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / ".writing-000000000001-9-0123abcd" / "deeper").mkdir(parents=True)
    remove_leftovers(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".hidden", ".writing-mine", "run.json"]


def test_directories_are_made_durably_with_all_above_them(tmp_path: Path) -> None:
    """They survive a power cut right after; those that are there are left alone."""
    with PowerCutAt(100, loses="data and names"):
        make_directories(tmp_path / "a" / "b")
        make_directories(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
