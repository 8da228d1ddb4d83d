"""Where runs and caches are kept unless the user says otherwise."""

from __future__ import annotations

import getpass
import os
import re
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from stoker.errors import BadRun
from stoker.store.disk_errors import disk_errors

_NETWORK = frozenset(
    {
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "lustre",
        "gpfs",
        "beegfs",
        "ceph",
        "afs",
        "9p",
        "ocfs2",
        "gfs2",
        "wekafs",
        "sshfs",
        "glusterfs",
        "s3fs",
        "gcsfuse",
        "rclone",
        "juicefs",
        "ceph-fuse",
        "moosefs",
        "davfs",
        "orangefs",
    }
)
"""File systems of several machines, and those of FUSE that stand for one."""


def runs_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory runs are made in: `$STOKER_RUNS`, or `runs` in the working directory. It may not exist yet."""
    given = environ.get("STOKER_RUNS")
    return Path(given).expanduser() if given else Path("runs")


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory of what may be deleted without loss of work. It may not exist yet.

    `$STOKER_CACHE`, or `stoker` in `$XDG_CACHE_HOME`, or `~/.cache/stoker`; for a user without a home, a directory of
    that user among the temporary files, which is made here, closed to others.

    Raises:
        BadRun: that directory among the temporary files is another user's, a link, or open to others' writing: its name
            is known beforehand, and who may write to it may decide what is read from it.

    Source: XDG Base Directory Specification 0.8: a relative `$XDG_CACHE_HOME` is ignored.
    """
    if given := environ.get("STOKER_CACHE"):
        return Path(given).expanduser()
    xdg = Path(environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():
        return xdg / "stoker"
    try:
        return Path.home() / ".cache" / "stoker"
    except RuntimeError:
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a number without a name: containers started with a bare user number
            user = str(os.getuid()) if hasattr(os, "getuid") else "anyone"
        return _own_directory(Path(tempfile.gettempdir()) / f"stoker-cache-{user}")


def is_own(path: Path) -> bool:
    """Whether a file was written by this user, or by root, and no other user can change it.

    Of what decides how a job is executed or what it learns: a cache may be shared, and what another user put there is
    not taken.

    Raises:
        OSError: it is not there.
    """
    status = path.stat()
    return not hasattr(os, "getuid") or (status.st_uid in (os.getuid(), 0) and not status.st_mode & stat.S_IWOTH)


def is_on_network(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Whether `path` is on a file system that other machines may write to as well; False where that is not known.

    Source: proc(5), /proc/pid/mountinfo: the fifth field is the mount point, the first after ` - ` the kind.
    """
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
        place = path.resolve()
    except OSError:
        return False
    mount, depth = "", -1
    for line in lines:
        left, _, right = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), left.split()[4]))
        if place.is_relative_to(point) and len(point.parts) >= depth:
            mount, depth = right.split()[0], len(point.parts)
    return mount.removeprefix("fuse.") in _NETWORK


def _own_directory(path: Path) -> Path:
    """The directory, made if it is not there; raises BadRun where it is not this user's alone."""
    with disk_errors(path, "the cache", error=BadRun):
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    if hasattr(os, "getuid") and not (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    ):
        raise BadRun(
            f"The cache {path} is not this user's alone: it belongs to user {status.st_uid}, mode "
            f"{stat.S_IMODE(status.st_mode):o}{', and is a link' if stat.S_ISLNK(status.st_mode) else ''}.",
            remedy="Name another place with STOKER_CACHE, or remove it.",
        )
    return path
