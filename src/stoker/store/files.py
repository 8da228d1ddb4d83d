"""Bytes onto the disk: whole files replaced at once, appended lines, file locks, and the seam they all go through.

After `write_atomic` returns, the new content survives a power cut; before, the old one does. The order is: write a file
aside in the same directory, fsync it, rename it over the target, fsync the directory (whose entry the rename changed).

`flock` belongs to the open file, so it dies with the last process that holds the file open: a killed process leaves no
lock behind. Windows has no `flock`, and neither have some network file systems (Lustre mounted without `-o flock`).

Source: T. S. Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014, section 2.2: a rename is atomic, but
neither the content of a new file nor its name is durable, or ordered, without an fsync of each. flock(2), Linux manual.

Digests of cached files are computed once a boot, and again after a change. A damaged file may have the right size, and
reading all of a cache at every start would take as long as making it, so digests are kept in the user's own cache with
what the system says of each file: device, inode, size, times of change, and the boot. A disk that damages a file
without a write is noticed at the first start after the next boot.

Source: the idea of Git's index (Documentation/technical/racy-git): a file whose stat data are equal is not read again.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import ClassVar, TypeVar

from stoker.errors import BadRun, RunFailed, StokerError
from stoker.records import dumps, loads
from stoker.records.codec import printable
from stoker.store.disk_errors import disk_errors, read_errors
from stoker.store.locations import cache_root, is_own

if sys.platform != "win32":
    import fcntl

R = TypeVar("R")

_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})


class LocksUnsupported(Exception):
    """This platform or this file system has no file locks."""


def try_lock(descriptor: int) -> bool:
    """Whether the open file is now locked for us alone; False if another process holds it. Does not wait.

    Raises:
        LocksUnsupported: the platform or the file system has no locks.
    """
    return _flock(descriptor, wait=False)


def wait_lock(descriptor: int) -> None:
    """Lock the open file for us alone, waiting for its holder; released by closing the file.

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


_BINARY = getattr(os, "O_BINARY", 0)
_ASIDE = re.compile(r"\.writing-.+-\d+-[0-9a-f]{8}")
_TAIL_BYTES = 64 * 1024


class Disk:
    """Every change the store makes to a disk, one method each: the seam where tests make a disk fail.

    Methods raise OSError as the operating system does; they do not translate.
    """

    def open(self, path: Path, flags: int) -> int:
        """Open `path` and return its file descriptor [number]; `flags` as for `os.open`."""
        return os.open(path, flags | _BINARY, 0o666)

    def write(self, descriptor: int, data: memoryview) -> int:
        """Number of bytes of `data` that were written, from the first on [bytes]."""
        return os.write(descriptor, data)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """Cut the file to `num_bytes`."""
        os.ftruncate(descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        """Return when the file's content is on the disk."""
        os.fsync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """Return when the names in `path` are on the disk, where the file system can say so."""
        if os.name == "nt":  # Windows opens no directories; NTFS journals names itself
            return
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as problem:
            if problem.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no directories
                raise
        finally:
            os.close(descriptor)

    def make_directory(self, path: Path) -> None:
        """Make one directory; its parent must exist."""
        path.mkdir()

    def rename(self, source: Path, target: Path) -> None:
        """Give `source` the name `target` in one step, replacing a file of that name."""
        source.replace(target)

    def remove_file(self, path: Path) -> None:
        """Remove one file."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove one empty directory."""
        path.rmdir()


class _Seam:
    current: Disk = Disk()


def disk() -> Disk:
    """The disk all writing goes to: the real one, unless a test installed another."""
    return _Seam.current


@contextmanager
def installed(replacement: Disk) -> Iterator[None]:
    """Send all writing of this process to `replacement` within the block. For tests."""
    before, _Seam.current = _Seam.current, replacement
    try:
        yield
    finally:
        _Seam.current = before


def write_atomic(
    path: Path, content: str | bytes, *, what: str | None = None, error: type[StokerError] = RunFailed
) -> None:
    """Replace the whole of `path` by `content`, durably: readers see all of the old content or all of the new.

    The directory must exist. After an error the old content is intact and the file aside is removed where it can be.

    Raises:
        StokerError: as `error`, when it cannot be written; see `disk_errors`. A directory that is not there is named.
    """
    data = printable(content).encode() if isinstance(content, str) else content
    with disk_errors(path, what or path.name, needed_bytes=len(data), error=error):
        with written_aside(path) as aside:
            write_file(aside, data)
        disk().sync_directory(path.parent)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A path next to `path` for a file or folder that the block writes, and that has the name `path` after it.

    After an error `path` is as it was, and what was written is removed where it can be. The block syncs what it writes;
    the name is durable once the directory is synced too.

    Raises:
        OSError: untranslated.
    """
    aside = aside_path(path)
    try:
        yield aside
        disk().rename(aside, path)
    except BaseException:
        with suppress(OSError):  # it may never have come to be; the first error is the one to report
            remove_tree(aside)
        raise


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and fsync it; its name is durable only once the directory is synced too.

    Raises:
        OSError: untranslated; FileExistsError if `path` is there already.
    """
    descriptor = disk().open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        _write_all(descriptor, data)
        disk().sync(descriptor)
    finally:
        os.close(descriptor)


class Appended:
    """A new file that is written block by block; durable once it is synced (`sync_file`) and so is its directory.

    Raises:
        OSError: untranslated, by each method.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = disk().open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def write(self, data: bytes) -> None:
        """Add all of `data`."""
        _write_all(self._descriptor, data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def sync_file(path: Path) -> None:
    """Return when the content of a file that something else wrote is on the disk.

    Raises:
        OSError: untranslated.
    """
    descriptor = disk().open(path, os.O_RDWR)
    try:
        disk().sync(descriptor)
    finally:
        os.close(descriptor)


def sha256_file(path: Path) -> str:
    """SHA-256 (hex) of the content of `path`.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def append_line(
    path: Path, line: str, *, what: str | None = None, error: type[StokerError] = RunFailed, is_durable: bool = False
) -> None:
    """Add one line to a log, in one write, after removing a last line that was cut off.

    It survives the death of the process, and a power cut where `is_durable`. Several processes may append at once.

    Raises:
        StokerError: as `error`, when it cannot be written; the log then is as it was.
        ValueError: `line` holds a line break.
    """
    if "\n" in line:
        raise ValueError(f"one line at a time, got {line!r}")
    data = printable(line).encode() + b"\n"
    with (
        disk_errors(path, what or path.name, needed_bytes=len(data), error=error),
        _open_log(path) as descriptor,
        _whole_or_not(descriptor, _drop_torn_line(descriptor)),
    ):
        _write_all(descriptor, data)
        if is_durable:
            disk().sync(descriptor)
            disk().sync_directory(path.parent)  # the log's name may be as new as the line


def append_at(path: Path, offset: int, data: bytes, *, what: str, error: type[StokerError] = RunFailed) -> bool:
    """Add bytes to a log of `offset` bytes, all or none; False where it has another size by now.

    Raises:
        StokerError: `error`, with a remedy, if the disk does not take them.
    """
    with disk_errors(path, what, needed_bytes=len(data), error=error):
        make_directories(path.parent)
        with _open_log(path) as descriptor:
            if os.lseek(descriptor, 0, os.SEEK_END) != offset:
                return False
            with _whole_or_not(descriptor, offset):
                _write_all(descriptor, data)
    return True


@contextmanager
def _open_log(path: Path) -> Iterator[int]:
    """The descriptor of a log that is appended to, locked for this process where locks work."""
    descriptor = disk().open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        with suppress(LocksUnsupported):  # then only one process at a time may append
            wait_lock(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def _whole_or_not(descriptor: int, end: int) -> Iterator[None]:
    """Cut a log back to `end` [bytes] if what is appended in the block fails."""
    try:
        yield
    except BaseException:
        with suppress(OSError):
            disk().truncate(descriptor, end)
        raise


def read_lines(path: Path, offset: int = 0) -> list[bytes]:
    """The whole lines of a log from byte `offset` on, without line breaks; a last line that was cut off is left out.

    No log, no lines. Each takes its length and one byte more.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def read_record(path: Path, kind: type[R], *, remedy: str) -> R:
    """The record in a file.

    Raises:
        BadRun: it cannot be read, is damaged (the field is named) or of another version; with `remedy`.
    """
    try:
        with read_errors(path):
            return loads(path.read_bytes(), kind)
    except ValueError as problem:
        raise BadRun(f"{path} cannot be used: {problem}.", remedy=remedy) from problem


def make_directories(path: Path) -> None:
    """Make `path` and what is missing above it, durably; nothing happens if it is there.

    Raises:
        OSError: untranslated.
    """
    missing = [place for place in (path, *path.parents) if not place.exists()]
    for place in reversed(missing):
        with suppress(FileExistsError):  # another process was faster
            disk().make_directory(place)
        disk().sync_directory(place.parent)


def remove_tree(path: Path) -> None:
    """Remove a directory and all in it, or a file.

    Raises:
        OSError: untranslated; what was not removed stays.
    """
    if path.is_dir() and not path.is_symlink():
        for entry in sorted(path.iterdir()):
            remove_tree(entry)
        disk().remove_directory(path)
    else:
        disk().remove_file(path)


def aside_path(path: Path) -> Path:
    """A name next to `path`, hidden and unique, for what is not yet whole."""
    return path.with_name(f".writing-{path.name}-{os.getpid()}-{secrets.token_hex(4)}")


def remove_leftovers(directory: Path) -> None:
    """Remove what killed writers left aside in `directory`. Only for its sole writer.

    Raises:
        OSError: untranslated.
    """
    for entry in sorted(directory.iterdir()):
        if is_aside(entry):
            remove_tree(entry)


def is_aside(path: PurePath) -> bool:
    """Whether `path` has a name that `aside_path` gives."""
    return _ASIDE.fullmatch(path.name) is not None


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`; the system may take it in parts (Linux takes at most 2 GiB at once)."""
    rest = memoryview(data)
    while rest:
        rest = rest[disk().write(descriptor, rest) :]


def _drop_torn_line(descriptor: int) -> int:
    """Cut the log after its last line break; its size then [bytes]."""
    size = os.lseek(descriptor, 0, os.SEEK_END)
    if size and _read_at(descriptor, size - 1, 1) != b"\n":
        size = whole_bytes(descriptor)
        disk().truncate(descriptor, size)
    return size


def whole_bytes(descriptor: int) -> int:
    """Size of an open log up to the end of its last whole line [bytes]."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        newline = _read_at(descriptor, start, end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _read_at(descriptor: int, offset: int, num_bytes: int) -> bytes:
    os.lseek(descriptor, offset, os.SEEK_SET)
    return os.read(descriptor, num_bytes)


_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SETTLED_S = 2.0
"""A file that changed in the last so many seconds may change again within the resolution of its time of change [s]."""

Stamp = tuple[int, ...]
"""Device, inode, size [bytes], times of change of content and of the inode [ns]."""


@dataclass(frozen=True)
class _Known:
    """Digests of the files of one folder, as they were in one boot."""

    schema: ClassVar[int] = 1
    folder: str
    boot: str
    stamps: dict[str, tuple[int, ...]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


def file_digests(
    folder: Path, names: Iterable[str], *, reading: Callable[[int], None] = lambda _bytes: None
) -> dict[str, str]:
    """SHA-256 (hex) of files in `folder`; in the order given, without those that are not there.

    Args:
        folder: where they are.
        names: of the files.
        reading: receives how much has to be read [bytes], if anything.

    Raises:
        OSError: a file cannot be read.
    """
    known, stamps = _known(folder), _stamps(folder, names)
    fresh = {name: known.digests[name] for name in stamps if known.stamps.get(name) == stamps[name]}
    missing = [name for name in stamps if name not in fresh]
    if not missing:
        return fresh
    reading(sum(stamps[name][2] for name in missing))
    digests = {name: fresh.get(name) or sha256_file(folder / name) for name in stamps}
    _remember(folder, stamps, digests)
    return digests


def _remember(folder: Path, stamps: Mapping[str, Stamp], digests: Mapping[str, str]) -> None:
    """Keep digests of files that had these stamps before they were read, and have them still.

    A cache that cannot be written costs the next start a reading.
    """
    latest, now = time.time_ns() - int(_SETTLED_S * 1e9), _stamps(folder, stamps)
    settled = {name: stamp for name, stamp in stamps.items() if now.get(name) == stamp and stamp[4] < latest}
    known = _known(folder)
    whole = _Known(
        str(folder.resolve()),
        _boot(),
        known.stamps | settled,
        known.digests | {name: digests[name] for name in settled},
    )
    with suppress(OSError, StokerError):
        make_directories(_path(folder).parent)
        write_atomic(_path(folder), dumps(whole, indent=None), what="digests of a cache")


def _stamps(folder: Path, names: Iterable[str]) -> dict[str, Stamp]:
    stamps: dict[str, Stamp] = {}
    for name in names:
        with suppress(FileNotFoundError):
            status = (folder / name).stat()
            stamps[name] = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return stamps


def _known(folder: Path) -> _Known:
    with suppress(OSError, ValueError):
        known = loads(_path(folder).read_bytes(), _Known) if is_own(_path(folder)) else _Known("", "")
        is_current = (known.folder, known.boot) == (str(folder.resolve()), _boot())
        if is_current and known.stamps.keys() == known.digests.keys():
            return known
    return _Known(str(folder.resolve()), _boot())


def _path(folder: Path) -> Path:
    name = hashlib.sha256(str(folder.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return cache_root() / "verified" / f"{name[:32]}.json"


def _boot() -> str:
    """Identifies this boot of the machine; "" where the system does not say."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return ""
