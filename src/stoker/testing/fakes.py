"""Fakes: a clock that only moves when advanced, devices that need no hardware, and disks that fail.

A disk is full, read-only or loses data (`FaultyDisk`), or goes off after any single operation (`PowerCutAt`).

```python
for at in range(len(operations_of(save)) + 1):     # the last cut comes right after `save` returned
    with PowerCutAt(at, loses="data and names"):
        save()
    assert the files on the disk are usable
```
Losses follow POSIX, the weakest promise a file system may keep: content is safe only after an fsync of the file, names
only after an fsync of the directory. Writes of other libraries are seen only where the store fsyncs them. Needs a POSIX
system, and the temporary directory on the same file system.

Source: T. S. Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014. Theirs loses every subset of the
unsafe changes, ours all or none.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from stoker.records import Device
from stoker.store.files import Disk, installed
from stoker.units import GIB


class FakeClock:
    """Stands in for `time.monotonic`, `time.time` or `time.perf_counter`: call it for the time [s].

    >>> clock = FakeClock(start_s=100.0, tick_s=0.5)
    >>> clock(), clock()
    (100.0, 100.5)
    >>> clock.advance(60)
    >>> clock()
    161.0
    """

    def __init__(self, start_s: float = 0.0, *, tick_s: float = 0.0) -> None:
        self.now_s = start_s
        self.tick_s = tick_s
        """Time that passes with each call [s], so that a timed block takes a known time."""

    def __call__(self) -> float:
        """The time [s]; the next call comes `tick_s` later."""
        now_s = self.now_s
        self.now_s += self.tick_s
        return now_s

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass; raises ValueError below zero."""
        if seconds < 0:
            raise ValueError(f"time does not go back, got {seconds} s")
        self.now_s += seconds


_LAPTOP = Device(
    name="fake-cpu", kind="cpu", model="Fake CPU", cores=4, memory_bytes=8 * GIB, fast_dtypes=("float32", "bfloat16")
)
_GPU = Device(
    name="fake-gpu",
    kind="cuda",
    model="Fake GPU",
    cores=64,
    memory_bytes=16 * GIB,
    fast_dtypes=("float32", "float16", "bfloat16"),
    driver="fake",
)


def fake_device(**changes: Any) -> Device:
    """A Device with 4 cores and 8 GiB, or with `kind="cuda"` a GPU with 16 GiB; `changes` replace any field.

    >>> fake_device(memory_bytes=2**30, name="tiny").name
    'tiny'
    """
    return dataclasses.replace(_GPU if changes.get("kind") == "cuda" else _LAPTOP, **changes)


class FaultyDisk(Disk):
    """Within a `with` block, the store writes to this disk below one directory, and to the real one elsewhere.

    Make one with `full`, `read_only`, `refusing` or `failing_sync`. Files written by other libraries count when they
    are fsynced, as on file systems with delayed allocation.

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
        """Space left [bytes]; None for no limit. Raise it to free space."""
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
                self._known_bytes[_inode_of(path.stat())] = path.stat().st_size
        self._stack.enter_context(installed(self))
        return self

    def __exit__(self, *_: object) -> None:
        """Give the place back."""
        self._stack.close()

    def open(self, path: Path, flags: int) -> int:
        """As `Disk.open`, the descriptor [POSIX file number]; opening for writing is a change."""
        if flags & (os.O_WRONLY | os.O_RDWR):
            self._change(path)
        descriptor = super().open(path, flags)
        if self._is_inside(path):
            self._known_bytes.setdefault(_inode_of(os.fstat(descriptor)), 0)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        """As `Disk.write`, the size written [bytes]; limited by the space left."""
        key = _inode_of(os.fstat(descriptor))
        if self.room_bytes is None or key not in self._known_bytes:
            return super().write(descriptor, data)
        if data and not self.room_bytes:
            self._fail(errno.ENOSPC)
        num_bytes = super().write(descriptor, data[: self.room_bytes])
        self._take(key, num_bytes)
        return num_bytes

    def sync(self, descriptor: int) -> None:
        """As `Disk.sync`; late errors are raised here."""
        key = _inode_of(os.fstat(descriptor))
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
        """Account for the growth of a file."""
        self._known_bytes[key] += num_bytes
        if self.room_bytes is not None:
            if num_bytes > self.room_bytes:
                self._fail(errno.ENOSPC)
            self.room_bytes -= num_bytes

    def _is_inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.below)


def _inode_of(status: os.stat_result) -> tuple[int, int]:
    """Device and inode, which identify a file or directory whatever its name."""
    return status.st_dev, status.st_ino


Loses = Literal["nothing", "data", "data and names"]
"""`nothing`: the process was killed. `data`: content without an fsync. `data and names`: also new, changed and removed
names without an fsync of their directory."""


class PowerCut(BaseException):
    """The machine is off: nothing after this reaches the disk, not even clean-up code."""


def operations_of(action: Callable[[], object]) -> tuple[str, ...]:
    """Run `action` and list its disk operations in order, such as `write run.json`."""
    disk = PowerCutAt(None)
    with disk:
        action()
    return tuple(disk.operations)


class PowerCutAt(Disk):
    """Within a `with` block, the power fails at operation number `at` (from 0) on the disk; the block then ends.

    A write is cut in the middle, everything else before it happens. If the block ends earlier, the power fails then.
    """

    def __init__(self, at: int | None, *, loses: Loses = "nothing") -> None:
        self.at = at
        self.loses = loses
        self.operations: list[str] = []
        """Operations done so far."""
        self.is_off = False
        self._names: dict[int, str] = {}
        self._unsafe_data: dict[tuple[int, int], tuple[int, int]] = {}  # inode -> (copy of its descriptor, safe bytes)
        self._unsafe_names: list[tuple[tuple[int, int], Callable[[], None]]] = []  # (inode of directory, undo)
        self._stack = ExitStack()
        self._limbo = Path()

    def __enter__(self) -> Self:
        """Take the place of the real disk."""
        self._limbo = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="limbo-")))
        self._stack.enter_context(installed(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: object) -> bool:
        """Cut the power if it is still on, restore the real disk, and swallow PowerCut."""
        if not self.is_off and self.at is not None and kind is None:
            self._cut()
        for descriptor, _ in self._unsafe_data.values():
            os.close(descriptor)
        self._stack.close()
        return kind is not None and issubclass(kind, PowerCut)

    def open(self, path: Path, flags: int) -> int:
        """As `Disk.open`, the descriptor [POSIX file number]; a new file has an unsafe name."""
        is_new = bool(flags & os.O_CREAT) and not path.exists()
        self._step(f"{'create' if is_new else 'open'} {path.name}")
        descriptor = super().open(path, flags)
        self._names[descriptor] = path.name
        if is_new:
            self._name_changed(path, undo=os.unlink)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        """As `Disk.write`, the size written [bytes]; the content is unsafe until `sync`."""
        key, size = _inode_of(os.fstat(descriptor)), os.fstat(descriptor).st_size
        if key not in self._unsafe_data:
            self._unsafe_data[key] = (os.dup(descriptor), size)
        if len(self.operations) == self.at and not self.is_off:
            super().write(descriptor, data[: len(data) // 2])
        self._step(f"write {self._names.get(descriptor, '?')}")
        return super().write(descriptor, data)

    def truncate(self, descriptor: int, num_bytes: int) -> None:
        """As `Disk.truncate`; counted as safe at once."""
        self._step(f"truncate {self._names.get(descriptor, '?')}")
        super().truncate(descriptor, num_bytes)

    def sync(self, descriptor: int) -> None:
        """As `Disk.sync`; the file's content is safe then. The power cut is simulated, so nothing is flushed."""
        self._step(f"sync {self._names.get(descriptor, '?')}")
        unsafe = self._unsafe_data.pop(_inode_of(os.fstat(descriptor)), None)
        if unsafe is not None:
            os.close(unsafe[0])

    def sync_directory(self, path: Path) -> None:
        """As `Disk.sync_directory`; the names in it are safe then."""
        self._step(f"sync {path.name}/")
        key = _inode_of(path.stat())
        self._unsafe_names = [(directory, undo) for directory, undo in self._unsafe_names if directory != key]

    def make_directory(self, path: Path) -> None:
        """As `Disk.make_directory`; its name is unsafe."""
        self._step(f"make {path.name}/")
        super().make_directory(path)
        self._name_changed(path, undo=shutil.rmtree)

    def rename(self, source: Path, target: Path) -> None:
        """As `Disk.rename`; both names are unsafe. They must be in one directory."""
        assert source.parent == target.parent, (source, target)
        self._step(f"rename {target.name}")
        if target.exists():
            self._to_limbo(target)
        super().rename(source, target)
        self._name_changed(
            target, undo=lambda name, *, dir_fd: os.rename(name, source.name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        )

    def remove_file(self, path: Path) -> None:
        """As `Disk.remove_file`; it comes back with the power unless the directory was synced."""
        self._step(f"remove {path.name}")
        self._remove(path)

    def remove_directory(self, path: Path) -> None:
        """As `Disk.remove_directory`; likewise."""
        self._step(f"remove {path.name}/")
        if any(path.iterdir()):
            super().remove_directory(path)  # raises: it is not empty
        self._remove(path)

    def _remove(self, path: Path) -> None:
        path.lstat()  # raises where it does not exist
        self._to_limbo(path)

    def _step(self, operation: str) -> None:
        """Count one operation; raise once the power is off."""
        if self.is_off:
            raise PowerCut
        if len(self.operations) == self.at:
            self._cut()
            raise PowerCut
        self.operations.append(operation)

    def _cut(self) -> None:
        """Switch the power off and lose the unsafe changes."""
        self.is_off = True
        if self.loses != "nothing":
            for descriptor, safe_bytes in self._unsafe_data.values():
                os.ftruncate(descriptor, min(safe_bytes, os.fstat(descriptor).st_size))
        if self.loses == "data and names":
            for _, undo in reversed(self._unsafe_names):
                with suppress(FileNotFoundError):  # lost already, with the directory it was in
                    undo()

    def _name_changed(self, path: Path, *, undo: Callable[..., None]) -> None:
        """Remember how to undo a change of a name, by its directory's descriptor: the directory may be renamed."""
        parent = os.open(path.parent, os.O_RDONLY)
        self._stack.callback(os.close, parent)
        self._unsafe_names.append((_inode_of(os.fstat(parent)), partial(undo, path.name, dir_fd=parent)))

    def _to_limbo(self, path: Path) -> None:
        """Move `path` where `undo` can bring it back from."""
        limbo = self._limbo / str(len(self.operations))
        path.rename(limbo)
        self._name_changed(path, undo=lambda name, *, dir_fd: os.rename(limbo, name, dst_dir_fd=dir_fd))
