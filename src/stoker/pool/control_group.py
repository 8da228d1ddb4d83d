"""Limits that the kernel keeps for a whole group of processes: memory, processes, share of the CPU.

What: a control group of its own for each isolated job, of version 1 or 2, where this user may make one. Use when:
always; without it `isolation.py` falls back to limits of each process and a watch. Costs: nothing.

Source: Linux kernel, admin-guide/cgroup-v1 and cgroup-v2.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids", "cpu")
_PERIOD_US = 100_000
_EMPTY_WITHIN_S = 10.0
_LEFT_S = 60.0


@dataclass(frozen=True)
class ControlGroup:
    """The folders of one group: one of version 2, or one for each controller of version 1."""

    folders: Mapping[str, Path]

    @classmethod
    def make(
        cls, name: str, *, memory_bytes: int, processes: int, cores: float, root: Path = _ROOT
    ) -> ControlGroup | None:
        """A new group with these limits; None where this user may not make one, or a controller is missing."""
        whole = (root / "cgroup.controllers").exists()
        parents = _delegated(root) if whole else {one: _own_v1(root, one) for one in _CONTROLLERS}
        if parents is None or any(parent is None for parent in parents.values()):
            return None
        for left in (
            path for parent in parents.values() if parent is not None for path in parent.glob("stoker-" + "?" * 12)
        ):
            with suppress(OSError):  # of a killed agent; one that still has processes stays
                if time.time() - left.stat().st_mtime > _LEFT_S:
                    left.rmdir()
        group = cls({one: parent / name for one, parent in parents.items() if parent is not None})
        quota_us = max(1000, int(cores * _PERIOD_US))
        limits = {
            "memory": {"memory.max": memory_bytes, "memory.swap.max": 0}
            if whole
            else {"memory.limit_in_bytes": memory_bytes, "memory.memsw.limit_in_bytes": memory_bytes},
            "pids": {"pids.max": processes},
            "cpu": {"cpu.max": f"{quota_us} {_PERIOD_US}"}
            if whole
            else {"cpu.cfs_period_us": _PERIOD_US, "cpu.cfs_quota_us": quota_us},
        }
        try:
            for folder in set(group.folders.values()):
                folder.mkdir(exist_ok=True)
            for controller, values in limits.items():
                for file, value in values.items():
                    path = group.folders[controller] / file
                    if path.exists() or "swap" not in file + "memsw" * ("memsw" in file):
                        path.write_text(str(value))
        except OSError:
            group.remove()
            return None
        return group

    @property
    def entrances(self) -> tuple[Path, ...]:
        """Files into which a process writes its number to join."""
        return tuple(sorted({folder / "cgroup.procs" for folder in self.folders.values()}))

    def members(self) -> set[int]:
        """Processes in the group."""
        found: set[int] = set()
        for path in self.entrances:
            with suppress(OSError):
                found |= {int(line) for line in path.read_text().split()}
        return found

    def memory_failures(self) -> int:
        """How often the kernel ended a process of the group since memory ran out [times]."""
        folder = self.folders["memory"]
        for name, word in (("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill")):
            with suppress(OSError):
                for line in (folder / name).read_text().splitlines():
                    key, _, value = line.partition(" ")
                    if key == word:
                        return int(value)
        return 0

    def kill(self) -> None:
        """End every process of the group, including those that they start during it."""
        until = time.monotonic() + _EMPTY_WITHIN_S
        while (members := self.members()) and time.monotonic() < until:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def remove(self) -> None:
        """End what is left, and remove the group."""
        self.kill()
        for folder in set(self.folders.values()):
            until = time.monotonic() + 2.0
            while folder.exists() and time.monotonic() < until:
                with suppress(OSError):  # busy until the kernel has let the last process go
                    folder.rmdir()
                    break
                time.sleep(0.01)


def joining(group: ControlGroup | None) -> list[str]:
    """A shell that joins the group before it becomes the command."""
    if group is None:
        return []
    names = [str(path) for path in group.entrances]
    script = 'for _ in $0; do echo $$ > "$1" || exit 125; shift; done; exec "$@"'
    return ["/bin/sh", "-c", script, " ".join("+" for _ in names), *names]


def _own_v1(root: Path, controller: str) -> Path | None:
    """The group of this process below a controller of version 1, if it may make groups there."""
    mount = root / controller
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if controller in names.split(","):
                own = mount / path.lstrip("/")
                for folder in (own, mount):
                    if folder.is_dir() and os.access(folder, os.W_OK):
                        return folder
    return None


def _delegated(root: Path) -> dict[str, Path] | None:
    """The group above this process in version 2, if this user may make groups with limits there."""
    with suppress(OSError, IndexError):
        own = root / Path("/proc/self/cgroup").read_text().split("::", 1)[1].strip().lstrip("/")
        for folder in (own, own.parent):
            has_all = set(_CONTROLLERS) <= set((folder / "cgroup.subtree_control").read_text().split())
            if has_all and os.access(folder, os.W_OK):
                return dict.fromkeys(_CONTROLLERS, folder)
    return None
