"""What a container or a batch system lets this process use: limits of Linux control groups, versions 1 and 2.

Source: Linux kernel documentation, "Control Group v2" (`cpu.max`, `memory.max`), "CFS Bandwidth Control" and "Memory
Resource Controller" (version 1: `cpu.cfs_quota_us`, `memory.limit_in_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT_BYTES = 2**60
"""Version 1 writes 'no limit' as the largest multiple of the page size in 63 bits."""


@dataclass(frozen=True)
class Limits:
    """The tightest limits on this process, None where unlimited: CPU time [CPUs, maybe 1.5] and memory."""

    cpus: float | None = None
    memory_bytes: int | None = None


def read_limits(membership: str, root: Path) -> Limits:
    """The limits that hold for a process, its own group's and those of all groups around it.

    Args:
        membership: content of `/proc/self/cgroup`; inside a container its paths may be the host's, and are then absent.
        root: where control groups are mounted, normally `/sys/fs/cgroup`.
    """
    quotas: list[float] = []
    memories: list[int] = []
    for directory in _group_directories(membership, root):
        quota = _cpu_quota(directory)
        if quota is not None:
            quotas.append(quota)
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = _number(directory / name)
            if limit is not None and limit < _NO_LIMIT_BYTES:
                memories.append(limit)
    return Limits(cpus=min(quotas, default=None), memory_bytes=min(memories, default=None))


def _group_directories(membership: str, root: Path) -> Iterator[Path]:
    """Every directory of a group the process is in, and of the groups around it; they may be absent."""
    for line in membership.splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        controllers, path = fields[1], PurePosixPath(fields[2])
        mounts = (
            [root / name for name in (controllers, *controllers.split(","))]
            if controllers
            else [root, root / "unified"]
        )
        for mount in dict.fromkeys(mounts):
            for group in (path, *path.parents):
                yield mount / str(group).lstrip("/")


def _cpu_quota(directory: Path) -> float | None:
    """CPU time a group may use per second of wall time, in CPUs; None where it is not limited or not said."""
    words = _text(directory / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        return int(words[0]) / int(words[1])
    quota, period = _number(directory / "cpu.cfs_quota_us"), _number(directory / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _number(path: Path) -> int | None:
    """The non-negative whole number in a file; None for `max`, `-1` or a file that is not there."""
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    """The content of a file, empty where it cannot be read: a controller that is not mounted sets no limit."""
    try:
        return path.read_text()
    except OSError:
        return ""
