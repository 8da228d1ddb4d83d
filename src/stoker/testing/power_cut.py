"""Stopping at every single operation on the disk, with what a power cut takes along.

```python
for at in range(len(operations_of(save)) + 1):     # the last one: the cut comes right after `save` returned
    with PowerCutAt(at, loses="data and names"):
        save()
    assert what is on the disk is usable
```
What is lost is modelled after POSIX, the weakest promise a file system may keep: content is safe only after an fsync of
the file, names only after an fsync of the directory. Writes of other libraries are seen only where the store fsyncs
them. Needs a POSIX system, and the temporary directory on the same file system.

Source: T. S. Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014. Ours loses all that is not safe or
nothing of it, theirs every subset.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from stoker.store.files import Disk, installed

Loses = Literal["nothing", "data", "data and names"]
"""`nothing`: the process was killed. `data`: content without an fsync. `data and names`: also new, changed and removed
names without an fsync of their directory."""


class PowerCut(BaseException):
    """The machine is off: no code that follows reaches the disk, not even that which cleans up."""


def operations_of(action: Callable[[], object]) -> tuple[str, ...]:
    """What `action` does to the disk, in order, such as `write run.json`; it is carried out."""
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
        """What was done so far."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Give the place back, after the power failed; PowerCut goes no further."""
        if not self.is_off and self.at is not None and kind is None:
            self._cut()
        for descriptor, _ in self._unsafe_data.values():
            os.close(descriptor)
        self._stack.close()
        return kind is not None and issubclass(kind, PowerCut)

    def open(self, path: Path, flags: int) -> int:
        """As `Disk.open`; a file it makes has an unsafe name."""
        is_new = bool(flags & os.O_CREAT) and not path.exists()
        self._step(f"{'create' if is_new else 'open'} {path.name}")
        descriptor = super().open(path, flags)
        self._names[descriptor] = path.name
        if is_new:
            self._name_changed(path, undo=os.unlink)
        return descriptor

    def write(self, descriptor: int, data: memoryview) -> int:
        """As `Disk.write`; the content is unsafe until `sync`."""
        key, size = _key(os.fstat(descriptor)), os.fstat(descriptor).st_size
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
        """As `Disk.sync`; the file's content is safe then. The power cut is not real, so no disk is waited for."""
        self._step(f"sync {self._names.get(descriptor, '?')}")
        unsafe = self._unsafe_data.pop(_key(os.fstat(descriptor)), None)
        if unsafe is not None:
            os.close(unsafe[0])

    def sync_directory(self, path: Path) -> None:
        """As `Disk.sync_directory`; the names in it are safe then."""
        self._step(f"sync {path.name}/")
        key = _key(path.stat())
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
        self._name_changed(target, undo=partial(_rename_back, to=source.name))

    def remove_file(self, path: Path) -> None:
        """As `Disk.remove_file`; it comes back with the power unless the directory was synced."""
        self._step(f"remove {path.name}")
        self._remove(path)

    def remove_directory(self, path: Path) -> None:
        """As `Disk.remove_directory`; likewise."""
        self._step(f"remove {path.name}/")
        if any(path.iterdir()):
            super().remove_directory(path)  # says that it is not empty
        self._remove(path)

    def _remove(self, path: Path) -> None:
        path.lstat()  # says that it is not there
        self._to_limbo(path)

    def _step(self, operation: str) -> None:
        """Count one operation; nothing happens any more once the power is off."""
        if self.is_off:
            raise PowerCut
        if len(self.operations) == self.at:
            self._cut()
            raise PowerCut
        self.operations.append(operation)

    def _cut(self) -> None:
        """Lose what is lost with the power."""
        self.is_off = True
        if self.loses != "nothing":
            for descriptor, safe_bytes in self._unsafe_data.values():
                os.ftruncate(descriptor, min(safe_bytes, os.fstat(descriptor).st_size))
        if self.loses == "data and names":
            for _, undo in reversed(self._unsafe_names):
                with suppress(FileNotFoundError):  # lost already, with the directory it was in
                    undo()

    def _name_changed(self, path: Path, *, undo: Callable[..., None]) -> None:
        """Remember how to undo a change of a name; by its directory's descriptor, since that may get another name."""
        parent = os.open(path.parent, os.O_RDONLY)
        self._stack.callback(os.close, parent)
        self._unsafe_names.append((_key(os.fstat(parent)), partial(undo, path.name, dir_fd=parent)))

    def _to_limbo(self, path: Path) -> None:
        """Remove `path` so that it can come back, as the file or directory it is."""
        limbo = self._limbo / str(len(self.operations))
        path.rename(limbo)
        self._name_changed(path, undo=partial(_bring_back, limbo))


def _key(status: os.stat_result) -> tuple[int, int]:
    """What identifies a file or directory, whatever its name."""
    return status.st_dev, status.st_ino


def _rename_back(name: str, *, to: str, dir_fd: int) -> None:
    os.rename(name, to, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def _bring_back(limbo: Path, name: str, *, dir_fd: int) -> None:
    os.rename(limbo, name, dst_dir_fd=dir_fd)
