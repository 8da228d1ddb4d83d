"""Advisory locks on open files, where the platform and the file system have them.

`flock` belongs to the open file, so it dies with the last process that holds the file open: a killed process leaves no
lock behind. Windows has no `flock`, and neither have some network file systems (Lustre mounted without `-o flock`).

Source: flock(2), Linux manual pages.
"""

from __future__ import annotations

import errno
import sys

if sys.platform != "win32":
    import fcntl

_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})


class LocksUnsupported(Exception):
    """This platform or this file system has no file locks."""


def try_lock(descriptor: int) -> bool:
    """Whether the open file is now locked for us alone; False if somebody else holds it. Does not wait.

    Raises:
        LocksUnsupported: the platform or the file system has no locks.
    """
    return _flock(descriptor, wait=False)


def wait_lock(descriptor: int) -> None:
    """Lock the open file for us alone, waiting for whoever holds it; released by closing the file.

    Raises:
        LocksUnsupported: the platform or the file system has no locks.
    """
    _flock(descriptor, wait=True)


def _flock(descriptor: int, *, wait: bool) -> bool:
    if sys.platform == "win32":
        raise LocksUnsupported(sys.platform)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as problem:
        if problem.errno in _WITHOUT_LOCKS:
            raise LocksUnsupported(str(problem)) from problem
        raise
    return True
