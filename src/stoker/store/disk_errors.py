"""Disk errors of the operating system, as messages that a user can act on."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.errors import BadRun, RunFailed, StokerError
from stoker.units import format_bytes

RUN_DIRECTORY = "--run-dir DIR, or with STOKER_RUNS or STOKER_CACHE"
"""How the user names another place, unless `disk_errors` is given another way."""
_ELSEWHERE = "Choose another place with {option}."
_ON_A_FULL_DISK = f"Free some space there and run the same command again. {_ELSEWHERE}"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_MEANINGS: dict[int, tuple[str, str]] = {
    errno.ENOSPC: ("the disk is full", _ON_A_FULL_DISK),
    errno.EDQUOT: ("the disk quota is used up", _ON_A_FULL_DISK),
    errno.EROFS: ("the file system is read-only", _ELSEWHERE),
    errno.EACCES: ("permission denied", f"Make it writable for this user, or: {_ELSEWHERE}"),
    errno.EPERM: ("the operation is not permitted", f"Make it writable for this user, or: {_ELSEWHERE}"),
    errno.EIO: ("the disk reports an input/output error", f"Check that disk (on Linux: dmesg). {_ELSEWHERE}"),
    errno.EFBIG: ("the file is larger than allowed here", f"Raise the limit (ulimit -f), or: {_ELSEWHERE}"),
    errno.ENOENT: (
        "the directory is not there",
        "Make it, or name another place; if something removed it in between, run the command again.",
    ),
    errno.ENOTDIR: ("part of the path is a file, not a directory", _ELSEWHERE),
    errno.ENAMETOOLONG: ("the name is too long", "Give a shorter name with {option}."),
    errno.EMFILE: ("this process has too many open files", "Raise the limit (ulimit -n), or use fewer loader workers."),
    errno.ESTALE: ("the network file system lost the file", "Mount it again; the same command then continues."),
}
_OS_ERROR_IN_TEXT = re.compile(r"\(os error (\d+)\)")


@contextmanager
def disk_errors(
    path: Path,
    what: str,
    *,
    needed_bytes: int | None = None,
    error: type[StokerError] = RunFailed,
    option: str = RUN_DIRECTORY,
) -> Iterator[None]:
    """Turn errors of writing `what` to `path` into one a user can act on.

    Errors of libraries written in Rust (safetensors among them) are no OSErrors but carry `(os error 28)` in their
    text; they are turned as well. Everything else passes unchanged.

    Args:
        path: The file or directory being written; named in the message.
        what: What it is, for people: `checkpoint 000000027000`.
        needed_bytes: Its whole size [bytes], where known; named when the disk is full.
        error: The class to raise: RunFailed while training, BadRun where nothing was spent yet.
        option: How the user names another place, for the remedy: `-o DIR`.

    Raises:
        StokerError: as `error`, with the meaning of the error number, free and needed bytes of a full disk, a remedy.
    """
    try:
        yield
    except StokerError:
        raise
    except OSError as problem:
        raise explained(
            problem.errno or 0, path, what, needed_bytes=needed_bytes, error=error, option=option
        ) from problem
    except Exception as problem:
        match = _OS_ERROR_IN_TEXT.search(str(problem))
        if match is None:
            raise
        raise explained(int(match[1]), path, what, needed_bytes=needed_bytes, error=error, option=option) from problem


@contextmanager
def read_errors(path: Path, what: str = "") -> Iterator[None]:
    """Turn errors of reading `what` at `path` into one a user can act on.

    Raises:
        BadRun: with the path and what the operating system says.
    """
    try:
        yield
    except OSError as problem:
        said = problem.strerror or str(problem)
        remedy = "Check that it is there and that this user may read it."
        raise BadRun(f"{what} {path} cannot be read: {said}.".lstrip(), remedy=remedy) from problem


def explained(
    code: int,
    path: Path,
    what: str,
    *,
    needed_bytes: int | None = None,
    error: type[StokerError] = RunFailed,
    option: str = RUN_DIRECTORY,
) -> StokerError:
    """The error to raise for error number `code`; see `disk_errors`."""
    said = os.strerror(code) if code else "the operating system gave no error number"
    meaning, remedy = _MEANINGS.get(code, (said, _ELSEWHERE))
    missing = [parent for parent in path.absolute().parents if not parent.exists()] if code == errno.ENOENT else []
    if missing:
        meaning = f"there is no directory {missing[-1]}"
    room = _room(path, needed_bytes) if code in _FULL else ""
    return error(f"Cannot write {what} at {path}: {meaning}{room}.", remedy=remedy.format(option=option))


def _room(path: Path, needed_bytes: int | None) -> str:
    """` (free: 1.0 MiB, needed: 26.4 MiB)`, for the file system `path` is or would be on."""
    needed = "" if needed_bytes is None else f", needed: {format_bytes(needed_bytes)}"
    try:
        there = next(place for place in (path, *path.absolute().parents) if place.exists())
        free = format_bytes(shutil.disk_usage(there).free)
        inodes = ", no inodes left" if _has_no_inodes(there) else ""
    except OSError:
        return f" (free: unknown{needed})"
    return f" (free: {free}{inodes}{needed})"


def _has_no_inodes(place: Path) -> bool:
    """Whether the file system is full of files rather than of bytes; file systems without a count say 0 of 0."""
    if not hasattr(os, "statvfs"):
        return False
    status = os.statvfs(place)
    return status.f_files > 0 and status.f_favail == 0
