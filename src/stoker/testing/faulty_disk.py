"""A disk that fails in a stated way below one directory."""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from stoker.store.files import Disk, installed


class FaultyDisk(Disk):
    """Within a `with` block, everything the store writes below a directory meets this disk; the rest the real one.

    Make one with `full`, `read_only`, `refusing` or `failing_sync`. Files that other libraries write count when they
    are fsynced, as on file systems that allocate late.

    >>> import tempfile
    >>> from stoker.store import write_atomic
    >>> with tempfile.TemporaryDirectory() as place, FaultyDisk.full(Path(place), after_bytes=10):
    ...     write_atomic(Path(place, "weights"), b"x" * 11)  # doctest: +IGNORE_EXCEPTION_DETAIL
    Traceback (most recent call last):
    stoker.errors.RunFailed: Cannot write weights at /tmp/…: the disk is full
    """

    def __init__(
        self,
        below: Path,
        *,
        room_bytes: int | None = None,
        change_errno: int | None = None,
        sync_errno: int | None = None,
    ) -> None:
        self.below = below.resolve()
        self.room_bytes = room_bytes
        """How many bytes can still be written; None for any number. Raise it to free space."""
        self._change_errno = change_errno
        self._sync_errno = sync_errno
        self._known_bytes: dict[tuple[int, int], int] = {}
        self._stack = ExitStack()

    @classmethod
    def full(cls, below: Path, *, after_bytes: int) -> Self:
        """Takes `after_bytes` more bytes, the last write in part, then is full (ENOSPC)."""
        return cls(below, room_bytes=after_bytes)

    @classmethod
    def read_only(cls, below: Path) -> Self:
        """Refuses every change (EROFS)."""
        return cls(below, change_errno=errno.EROFS)

    @classmethod
    def refusing(cls, below: Path, code: int) -> Self:
        """Refuses every change with the error number `code`, such as `errno.EACCES`."""
        return cls(below, change_errno=code)

    @classmethod
    def failing_sync(cls, below: Path) -> Self:
        """Takes everything, and reports at the fsync that it was lost (EIO)."""
        return cls(below, sync_errno=errno.EIO)

    def __enter__(self) -> Self:
        """Take the place of the real disk."""
        for path in self.below.rglob("*"):
            if path.is_file():
                self._known_bytes[_key(path.stat())] = path.stat().st_size
        self._stack.enter_context(installed(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the place back."""
        self._stack.close()

    def open(self, path: Path, flags: int) -> int:
        """As `Disk.open`; opening for writing is a change."""
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._change(path)
        descriptor = super().open(path, flags)
        if self._is_inside(path):
            self._known_bytes.setdefault(_key(os.fstat(descriptor)), 0)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        """As `Disk.write`; takes what there is room for."""
        key = _key(os.fstat(descriptor))
        if self.room_bytes is None or key not in self._known_bytes:
            return super().write(descriptor, data)
        if data and not self.room_bytes:
            self._fail(errno.ENOSPC)
        num_bytes = super().write(descriptor, data[: self.room_bytes])
        self._take(key, num_bytes)
        return num_bytes

    def sync(self, descriptor: int) -> None:
        """As `Disk.sync`; here late errors show."""
        key = _key(os.fstat(descriptor))
        if key in self._known_bytes:
            self._fail(self._sync_errno)
            self._take(key, max(0, os.fstat(descriptor).st_size - self._known_bytes[key]))
        super().sync(descriptor)

    def sync_directory(self, path: Path) -> None:
        """As `Disk.sync_directory`."""
        if self._is_inside(path):
            self._fail(self._sync_errno)
        super().sync_directory(path)

    def make_directory(self, path: Path) -> None:
        """As `Disk.make_directory`."""
        self._change(path)
        super().make_directory(path)

    def rename(self, source: Path, target: Path) -> None:
        """As `Disk.rename`."""
        self._change(source)
        self._change(target)
        super().rename(source, target)

    def remove_file(self, path: Path) -> None:
        """As `Disk.remove_file`."""
        self._change(path)
        super().remove_file(path)

    def remove_directory(self, path: Path) -> None:
        """As `Disk.remove_directory`."""
        self._change(path)
        super().remove_directory(path)

    def _change(self, path: Path) -> None:
        if self._is_inside(path):
            self._fail(self._change_errno)

    def _fail(self, code: int | None) -> None:
        if code is not None:
            raise OSError(code, os.strerror(code))

    def _take(self, key: tuple[int, int], num_bytes: int) -> None:
        """Account for bytes that a file below grew by."""
        self._known_bytes[key] += num_bytes
        if self.room_bytes is not None:
            if num_bytes > self.room_bytes:
                self._fail(errno.ENOSPC)
            self.room_bytes -= num_bytes

    def _is_inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.below)


def _key(status: os.stat_result) -> tuple[int, int]:
    """What identifies an open file, whatever its name."""
    return status.st_dev, status.st_ino
