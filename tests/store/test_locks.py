from __future__ import annotations

import errno
import json
import os
import platform
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from stoker.errors import BadRun
from stoker.store import RunLock, files, is_held_here, locks
from stoker.store.locks import is_locked
from stoker.testing import FaultyDisk

HOLD = """
import sys
from pathlib import Path
from stoker.store import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""

WITHOUT_FLOCK = """
from stoker.store import files
def none(*_):
    raise files.LocksUnsupported
files.try_lock = none
"""

HOLD_AND_FORK = """
import os, sys
from pathlib import Path
from stoker.store import RunLock
RunLock(Path(sys.argv[1])).acquire()
if os.fork() == 0:
    print(os.getpid(), flush=True)
sys.stdin.readline()
"""


def holder(directory: Path, code: str = HOLD) -> subprocess.Popen[str]:
    """A process that holds the lock until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", code, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def without_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no locks."""

    def unsupported(descriptor: int) -> bool:
        raise files.LocksUnsupported

    monkeypatch.setattr(files, "try_lock", unsupported)


def test_a_second_process_is_told_who_holds_the_run_and_since_when(tmp_path: Path) -> None:
    """The refusal names process, host and time, and what to do."""
    with holder(tmp_path) as child:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(BadRun, match=f"process {child.pid} on {platform.node()} since 20") as caught:
            RunLock(tmp_path).acquire()
        assert "--new" in str(caught.value.remedy)
        child.stdin.close()
    with RunLock(tmp_path):
        assert is_held_here(tmp_path)
    assert not is_held_here(tmp_path)


def test_a_killed_process_leaves_no_lock(tmp_path: Path) -> None:
    """However it ends, the same command may go on at once."""
    with holder(tmp_path) as child:
        child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    with RunLock(tmp_path):
        pass


def test_loader_workers_that_outlive_a_killed_process_do_not_hold_its_lock(tmp_path: Path) -> None:
    """A forked child has a copy of the open lock file, and must not keep the run locked with it."""
    with holder(tmp_path, HOLD_AND_FORK) as parent:
        child_pid = int(parent.stdout.readline())
        with pytest.raises(BadRun, match=f"process {parent.pid} "):
            RunLock(tmp_path).acquire()
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        os.kill(child_pid, 0)  # it lives: it waits for its input
        with RunLock(tmp_path):
            pass
        parent.stdin.close()


def test_the_same_process_cannot_lock_twice(tmp_path: Path) -> None:
    """Two runs in one process are two writers as well; and the refused one does not free the first's lock."""
    with RunLock(tmp_path):
        for _ in range(2):
            with pytest.raises(BadRun, match="in use by this process"):
                RunLock(tmp_path / "." / "../" / tmp_path.name).acquire()
        assert is_held_here(tmp_path)


def test_the_file_says_who_holds_it_as_long_as_it_is_held(tmp_path: Path) -> None:
    """JSON with pid, host and since; empty afterwards."""
    with RunLock(tmp_path, now=lambda: datetime(2025, 3, 1, tzinfo=UTC)) as lock:
        said = json.loads(lock.path.read_text())
    assert said == {"pid": os.getpid(), "host": platform.node(), "since": "2025-03-01T00:00:00+00:00"}
    assert (tmp_path / "lock").read_bytes() == b""


def test_a_directory_the_lock_made_goes_with_it_unless_it_was_used(tmp_path: Path) -> None:
    """A job that fails before it made its run leaves nothing."""
    with RunLock(tmp_path / "runs" / "a"):
        pass
    assert not (tmp_path / "runs").exists()
    with RunLock(tmp_path / "runs" / "b"):
        (tmp_path / "runs" / "b" / "run.json").touch()
    assert (tmp_path / "runs" / "b").exists()
    with RunLock(tmp_path / "runs" / "c"):
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["b"]


def test_a_lock_file_removed_between_opening_and_locking_is_not_the_lock(tmp_path: Path, monkeypatch) -> None:
    """Else two processes would hold two files of one name."""
    path, real, calls = tmp_path / "lock", files.try_lock, []

    def removed_meanwhile(descriptor: int) -> bool:
        calls.append(descriptor)
        if len(calls) == 1:
            path.unlink()
        return real(descriptor)

    monkeypatch.setattr(files, "try_lock", removed_meanwhile)
    with RunLock(tmp_path):
        assert len(calls) == 2
        assert path.exists()


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_disk_that_cannot_be_written_is_the_users_to_mend(tmp_path: Path, code: int) -> None:
    """Nothing was spent yet: exit code 2, and nothing is left behind."""
    with FaultyDisk.refusing(tmp_path, code), pytest.raises(BadRun, match="the run's lock"):
        RunLock(tmp_path / "a").acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_directory_and_no_lock(tmp_path: Path) -> None:
    """The signature does not fit: the lock is given back."""
    with FaultyDisk.full(tmp_path, after_bytes=0), pytest.raises(BadRun, match="the disk is full"):
        RunLock(tmp_path / "a").acquire()
    assert list(tmp_path.iterdir()) == []
    assert not is_held_here(tmp_path / "a")


@pytest.mark.usefixtures("without_flock")
def test_without_file_locks_a_file_stands_in(tmp_path: Path) -> None:
    """It refuses others while it is held, and is gone afterwards."""
    with RunLock(tmp_path):
        assert json.loads((tmp_path / "lock.held").read_text())["pid"] == os.getpid()
    assert not (tmp_path / "lock.held").exists()
    (tmp_path / "lock.held").write_text(json.dumps({"pid": os.getppid(), "host": platform.node(), "since": "noon"}))
    with pytest.raises(BadRun, match=f"process {os.getppid()} on .* since noon") as caught:
        RunLock(tmp_path).acquire()
    assert "delete" in str(caught.value.remedy)


@pytest.mark.usefixtures("without_flock")
def test_without_file_locks_a_dead_holder_of_this_host_is_replaced(tmp_path: Path) -> None:
    """One of another host cannot be asked, and stays."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    held = {"pid": child.pid, "host": platform.node(), "since": "noon"}
    (tmp_path / "lock.held").write_text(json.dumps(held))
    with RunLock(tmp_path):
        pass
    (tmp_path / "lock.held").write_text(json.dumps({**held, "host": "elsewhere"}))
    with pytest.raises(BadRun, match="on elsewhere"):
        RunLock(tmp_path).acquire()


@pytest.mark.usefixtures("without_flock")
def test_without_file_locks_a_container_that_was_started_again_takes_its_run_over(tmp_path: Path) -> None:
    """Its process has the number that its predecessor had, on the same host; what it holds itself stays refused."""
    left = json.dumps({"pid": os.getpid(), "host": platform.node(), "since": "noon"})
    for name in ("lock", "lock.held"):
        (tmp_path / name).write_text(left)
    assert not is_locked(tmp_path)
    with RunLock(tmp_path):
        assert is_locked(tmp_path)
        with pytest.raises(BadRun, match="in use by this process"):
            RunLock(tmp_path).acquire()
    assert not (tmp_path / "lock.held").exists()


@pytest.mark.usefixtures("without_flock")
def test_a_stale_lock_is_taken_over_by_one_process_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one takes it over between our reading who left it and our removing it: we are refused."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    held = tmp_path / "lock.held"
    held.write_text(json.dumps({"pid": child.pid, "host": platform.node(), "since": "noon"}))
    read, others = locks._read_holder, []

    def read_slowly(path: Path) -> locks.Holder | None:
        found = read(path)
        if path == held and not others:
            others.append(holder(tmp_path, WITHOUT_FLOCK + HOLD))
            assert others[0].stdout.readline() == "held\n"
        return found

    monkeypatch.setattr(locks, "_read_holder", read_slowly)
    with pytest.raises(BadRun, match="in use by process"):
        RunLock(tmp_path).acquire()
    (other,) = others
    assert json.loads(held.read_text())["pid"] == other.pid
    other.communicate("\n")
    assert not held.exists()
    assert not (tmp_path / "lock.taking").exists()


@pytest.mark.usefixtures("without_flock")
def test_while_a_stale_lock_is_being_taken_over_others_are_refused(tmp_path: Path) -> None:
    """By the file that says so; what to delete is named, for a process that died at it."""
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    (tmp_path / "lock.held").write_text(json.dumps({"pid": child.pid, "host": platform.node(), "since": "noon"}))
    (tmp_path / "lock.taking").write_text("")
    with pytest.raises(BadRun, match="in use") as caught:
        RunLock(tmp_path).acquire()
    assert "lock.taking" in str(caught.value.remedy)
    assert (tmp_path / "lock.held").exists()


@pytest.mark.usefixtures("without_flock")
def test_a_stand_in_that_cannot_be_signed_is_no_lock(tmp_path: Path) -> None:
    """A full disk: with space again the run is free."""
    with FaultyDisk.full(tmp_path, after_bytes=0), pytest.raises(BadRun, match="the disk is full"):
        RunLock(tmp_path).acquire()
    with RunLock(tmp_path):
        pass
