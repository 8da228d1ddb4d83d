"""The files of a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def files_below(root: Path) -> Iterator[str]:
    """Files in and below `root`, sorted folder by folder, as paths from it with slashes.

    Links are followed, but into no folder twice; what begins with a dot is left out.
    """
    seen: set[str] = set()
    for folder, inner, names in os.walk(root, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        between = Path(folder).relative_to(root).as_posix()
        start = "" if between == "." else f"{between}/"
        yield from (f"{start}{name}" for name in sorted(names) if not name.startswith("."))
