"""What lies in a model's directory, as far as a glance tells: whether to look again at what is served."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

Snapshot = tuple[tuple[str, int, int, int], ...]
"""Name, size [bytes], time of the last change [ns] and inode of every file of a model."""

MOST_FILES = 100_000
"""Files of a model that a glance looks at; a model with more of them does not hold up the others."""


def snapshot(model: Path) -> Snapshot:
    """The files of a model's versions and its settings, sorted; nothing where it is gone or cannot be read."""
    return tuple(sorted(itertools.islice(_files(model, "", depth=0), MOST_FILES)))


def settled(seen: Mapping[str, Snapshot], before: Mapping[str, Snapshot], tried: Mapping[str, Snapshot]) -> list[str]:
    """Models to look at: those that changed since they were last `tried`, and rest since the glance `before`.

    A directory that is still being copied into changes from one glance to the next.
    """
    return [name for name, one in seen.items() if one == before.get(name) and one != tried.get(name)]


def _files(directory: Path, prefix: str, *, depth: int) -> Iterator[tuple[str, int, int, int]]:
    """Files below a directory. Links are followed to a version and to the settings, not within a version.

    Within a version a link is listed as one: two links to `.` would otherwise be an endless tree.
    """
    try:
        entries = list(os.scandir(directory))
    except OSError:  # gone between two looks, or not ours to read: loading it would say so
        return
    for entry in entries:
        if entry.name.startswith(".") and depth == 0:
            continue
        try:
            about = entry.stat(follow_symlinks=depth == 0)
            is_directory = entry.is_dir(follow_symlinks=depth == 0)
        except OSError:
            continue
        if is_directory:
            if depth > 0 or entry.name.isdigit():
                yield from _files(Path(entry.path), f"{prefix}{entry.name}/", depth=depth + 1)
        else:
            yield f"{prefix}{entry.name}", about.st_size, about.st_mtime_ns, about.st_ino
