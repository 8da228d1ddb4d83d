"""One process at a time in a run directory.

The lock is a `flock` on `DIR/lock`, so it dies with its holder, however that ends; the file's content only says who
holds it. Where there are no file locks, a file made exclusively takes their place: one whose process is gone is taken
over on the same host, and must be deleted by hand on another.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from stoker.errors import BadRun
from stoker.records import loads
from stoker.store import files
from stoker.store.disk_errors import disk_errors
from stoker.store.files import disk, make_directories

LOCK_FILE = "lock"
HELD_FILE = "lock.held"
"""Stands in for the `flock` where there is none; its presence is the lock."""
TAKING_FILE = "lock.taking"
"""Is there while a process removes the stand-in of a dead one."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock: process number, host name, and since when (ISO 8601, UTC)."""

    pid: int
    host: str
    since: str


def _now() -> datetime:
    return datetime.now(UTC)


class RunLock:
    """Holds a run directory for this process, as a context manager; the directory is made if it is not there.

    Directories the lock made are removed again if nothing was put into them. Processes forked while it is held (loader
    workers) do not hold it: it is free as soon as this process is gone, even if they live on.
    """

    def __init__(self, directory: Path, *, now: Callable[[], datetime] = _now) -> None:
        self.directory = directory
        self.path = directory / LOCK_FILE
        self._now = now
        self._descriptor: int | None = None
        self._stand_in: Path | None = None
        self._made: list[Path] = []
        self._key = directory

    def acquire(self) -> None:
        """Take the lock; does not wait.

        Raises:
            BadRun: a process holds it (named, with host and since when), or the lock file cannot be written.
        """
        if is_held_here(self.directory):
            raise self._refusal(_read_holder(self.path))
        with disk_errors(self.directory, "the run's lock", error=BadRun):
            self._made = [place for place in (self.directory, *self.directory.parents) if not place.exists()]
            make_directories(self.directory)
            try:
                self._descriptor = self._locked_file()
                self._key = self.directory.resolve()
                _held[self._key] = self
                disk().truncate(self._descriptor, 0)
                disk().write(self._descriptor, memoryview(self._signature()))
            except BaseException:
                self.release()
                with suppress(OSError):  # they may hold something by now; the first error is the one to report
                    self._remove_made()
                raise

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        try:
            with suppress(OSError):  # what the file says is for people; closing it is what frees the lock
                if self._stand_in is not None:
                    disk().remove_file(self._stand_in)
                    self._stand_in = None
                if self._made and [e.name for e in self.directory.iterdir()] == [LOCK_FILE]:
                    disk().remove_file(self.path)
                    self._remove_made()
                else:
                    disk().truncate(descriptor, 0)
        finally:
            _held.pop(self._key, None)  # not before: another thread would take our stand-in for a dead process's
            os.close(descriptor)

    def _remove_made(self) -> None:
        """Remove the directories that were made, the deepest first; one that is not empty stays, and those above it."""
        for directory in self._made:
            disk().remove_directory(directory)

    def __enter__(self) -> Self:
        """Acquire."""
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release."""
        self.release()

    def _locked_file(self) -> int:
        """The lock file, open and locked."""
        while True:
            descriptor = disk().open(self.path, os.O_RDWR | os.O_CREAT)
            try:
                try:
                    if not files.try_lock(descriptor):
                        raise self._refusal(_read_holder(self.path))
                except files.LocksUnsupported:
                    self._make_stand_in()
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), self.path.stat()):
                        return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # its last holder removed it between our opening and our locking

    def _make_stand_in(self) -> None:
        """Take the lock by making a file that must not exist; one left by a dead process of this host is replaced."""
        path = self.directory / HELD_FILE
        holder = _read_holder(path)
        if _is_dead(holder):
            self._remove_stale(path)
        try:
            descriptor = disk().open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise self._refusal(holder, delete=path) from None
        try:
            disk().write(descriptor, memoryview(self._signature()))
        except BaseException:
            with suppress(OSError):
                disk().remove_file(path)  # unsigned, it could not be taken over
            raise
        finally:
            os.close(descriptor)
        self._stand_in = path

    def _remove_stale(self, path: Path) -> None:
        """Remove what a dead process left, one process at a time.

        Else a second one, which read it before, would remove what the first one made in its place.

        Raises:
            BadRun: another process is at it.
        """
        token = self.directory / TAKING_FILE
        try:
            descriptor = disk().open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except FileExistsError:
            raise self._refusal(_read_holder(token), delete=token) from None
        try:
            disk().write(descriptor, memoryview(self._signature()))
            if _is_dead(_read_holder(path)):
                disk().remove_file(path)
        finally:
            os.close(descriptor)
            disk().remove_file(token)

    def _signature(self) -> bytes:
        since = self._now().isoformat(timespec="seconds")
        return json.dumps(asdict(Holder(pid=os.getpid(), host=platform.node(), since=since))).encode()

    def _refusal(self, holder: Holder | None, *, delete: Path | None = None) -> BadRun:
        who = "another process"
        if holder is not None:
            who = f"process {holder.pid} on {holder.host} since {holder.since}"
            if holder.pid == os.getpid() and holder.host == platform.node():
                who = f"this process ({holder.pid}) since {holder.since}"
        remedy = "Wait for it, stop it, or start another run with --new."
        if delete is not None:
            remedy += f" If that process is gone, delete {delete}."
        return BadRun(f"The run {self.directory} is in use by {who}.", remedy=remedy)

    def disown(self) -> None:
        """In a forked child: close the copy of the lock file which the fork made; the parent keeps the lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def is_locked(directory: Path) -> bool:
    """Whether a living process of this host signed the lock of `directory`; the lock itself is not touched."""
    holders = (_read_holder(directory / name) for name in (LOCK_FILE, HELD_FILE))
    is_held = any(holder is not None and holder.host == platform.node() and not _is_dead(holder) for holder in holders)
    return is_held or is_held_here(directory)


def is_held_here(directory: Path) -> bool:
    """Whether this very process holds the lock of `directory`."""
    return directory.resolve() in _held


_held: dict[Path, RunLock] = {}


def _forget_all() -> None:
    """In a forked child: the locks belong to the parent."""
    for lock in _held.values():
        lock.disown()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


def _read_holder(path: Path) -> Holder | None:
    """Who signed the file; None if it is not there or not (yet) signed."""
    try:
        return loads(path.read_bytes(), Holder)
    except (OSError, ValueError):
        return None


def _is_dead(holder: Holder | None) -> bool:
    """Whether a process of this host signed, and is gone.

    One with our own number is: `acquire` has refused what this process holds, so it is our predecessor in a container
    that was started again. Host names distinguish containers.
    """
    if holder is None or holder.host != platform.node():
        return False
    return holder.pid == os.getpid() or not is_alive(holder.pid)


def is_alive(pid: int) -> bool:
    """Whether a process of this host has the number `pid`; where that cannot be asked, it counts as alive."""
    if sys.platform == "win32":  # os.kill ends processes there
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
