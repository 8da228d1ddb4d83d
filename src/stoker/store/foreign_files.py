"""Reading files of folders that others may have written: no link is followed, nothing but a plain file is opened.

A run's directory may be a download. A link in it could name any file of this machine, a pipe would block its reader,
and a file may be larger than memory. Paths are walked name by name from a folder that the user gave.

Source: openat(2), `O_NOFOLLOW`: the last component only, hence one call for each name.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stoker.errors import BadRun
from stoker.store.disk_errors import read_errors
from stoker.units import format_bytes

_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def open_below(root: Path, name: str) -> int:
    """A file descriptor [number] of the plain file `name`, a relative path below `root`, opened for reading.

    Raises:
        OSError: it is not there, or one of its names is a link (`ELOOP`), or leads out of `root`, or it is no plain
            file (`EINVAL`).
    """
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or ".." in parts or "\0" in name:
        raise OSError(errno.EINVAL, "no path below the folder", name[:200])
    folder = os.open(root, _FOLDER)
    try:
        for part in parts[:-1]:
            inner = os.open(part, _FOLDER | _NO_LINK, dir_fd=folder)
            os.close(folder)
            folder = inner
        # Opening a pipe would wait for its writer.
        descriptor = os.open(parts[-1], os.O_RDONLY | os.O_NONBLOCK | _NO_LINK, dir_fd=folder)
    finally:
        os.close(folder)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no plain file", name[:200])
    return descriptor


def read_below(root: Path, name: str, most_bytes: int) -> bytes | None:
    """The content of a plain file below `root`; None if it is not there.

    Raises:
        BadRun: it is a link, or no plain file, or larger than `most_bytes`, or cannot be read.
    """
    try:
        return b"".join(parts_below(root, name, most_bytes))
    except FileNotFoundError:
        return None


def parts_below(root: Path, name: str, most_bytes: int) -> Iterator[bytes]:
    """The content of a plain file below `root` in parts, so that a large one need not fit in memory.

    Raises:
        FileNotFoundError: it is not there.
        BadRun: as `read_below`.
    """
    try:
        descriptor = open_below(root, name)
    except (FileNotFoundError, NotADirectoryError) as problem:
        raise FileNotFoundError(f"{root / name} is not there") from problem
    except OSError as problem:
        if problem.errno in (errno.ELOOP, errno.EINVAL):
            raise BadRun(f"{root / name} is a link, or no plain file, and is not opened.") from problem
        with read_errors(root / name):
            raise
    try:
        with read_errors(root / name):
            size, done = os.fstat(descriptor).st_size, 0
        if size > most_bytes:
            raise BadRun(f"{root / name} has {format_bytes(size)}; at most {format_bytes(most_bytes)} are read.")
        while True:
            with read_errors(root / name):
                part = os.read(descriptor, min(size + 1, 2**20))
            if not part:
                return
            done += len(part)
            if done > most_bytes:  # it grows while it is read
                raise BadRun(f"{root / name} has more than {format_bytes(most_bytes)}.")
            yield part
    finally:
        with suppress(OSError):
            os.close(descriptor)
