"""What lies in a model's directory, as far as a glance tells: whether to look again at what is served."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

Snapshot = tuple[tuple[str, int, int, int], ...]
"""Name, size [bytes], time of the last change [ns] and inode of every file of a model."""


def snapshot(model: Path) -> Snapshot:
    """The files of a model's versions and its settings, sorted; nothing where it is gone or cannot be read."""
    return tuple(sorted(_files(model, "", depth=0)))


def settled(seen: Mapping[str, Snapshot], before: Mapping[str, Snapshot], tried: Mapping[str, Snapshot]) -> list[str]:
    """Models to look at: those that changed since they were last `tried`, and rest since the glance `before`.

    A directory that is still being copied into changes from one glance to the next.
    """
    return [name for name, one in seen.items() if one == before.get(name) and one != tried.get(name)]


def _files(directory: Path, prefix: str, *, depth: int) -> Iterator[tuple[str, int, int, int]]:
    try:
        entries = list(os.scandir(directory))
    except OSError:  # gone between two looks, or not ours to read: loading it would say so
        return
    for entry in entries:
        if entry.name.startswith("."):
            continue
        try:
            about = entry.stat()
            is_directory = entry.is_dir()
        except OSError:
            continue
        if is_directory:
            if depth > 0 or entry.name.isdigit():
                yield from _files(Path(entry.path), f"{prefix}{entry.name}/", depth=depth + 1)
        else:
            yield f"{prefix}{entry.name}", about.st_size, about.st_mtime_ns, about.st_ino
