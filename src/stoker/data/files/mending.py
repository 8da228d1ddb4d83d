"""Files that a run could not read, so that it goes on under the same identity once they are mended.

A source of files is identified by their names, sizes and times. A file that cannot be read ends a run before anything
of it was learned, so another version in its place changes nothing that was: it goes on counting as what it was. Which
file that is, and what it was, is noted in the cache, and taken once: a second change is a change of the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stoker.errors import StokerError
from stoker.store import cache_root, write_atomic
from stoker.store.files import make_directories

Version = tuple[int, int]
"""A file's size [bytes] and time of change [ns]."""


def version_of(path: Path) -> Version:
    """The file as it is now; raises OSError."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def note_unreadable(root: Path, name: str, counts_as: Sequence[int]) -> None:
    """Remember that the file `name` below `root` cannot be read, and as which version the run that met it counts it.

    Without a cache that can be written nothing is remembered, and the mended file makes another job.
    """
    with suppress(OSError, StokerError):
        notes = _read(root)
        now = version_of(root / name)
        if name in notes and list(now) == notes[name]["mended"]:
            notes[name]["mended"] = None  # the mended one was no better: wait for the next
        elif name not in notes:
            notes[name] = {"was": [int(part) for part in counts_as], "mended": None}
        make_directories(_place(root).parent)
        write_atomic(_place(root), json.dumps(notes), what="the note of an unreadable file")


def as_first_seen(root: Path, names: Sequence[str], versions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The versions [N, 2] of the files `names`, with those of mended ones as they were when they could not be read."""
    notes = _read(root)
    if not notes:
        return versions
    seen, is_new = versions.copy(), False
    for index, name in enumerate(names):
        note, now = notes.get(name), versions[index].tolist()
        if note is None or now == note["was"]:
            continue
        if note["mended"] is None:
            note["mended"], is_new = now, True
        if now == note["mended"]:
            seen[index] = np.array(note["was"])
    if is_new:
        with suppress(StokerError):
            write_atomic(_place(root), json.dumps(notes), what="the note of a mended file")
    return seen


def _place(root: Path) -> Path:
    digest = hashlib.sha256(str(root.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return cache_root() / "data" / "unreadable" / f"{digest[:32]}.json"


def _read(root: Path) -> dict[str, dict[str, list[int] | None]]:
    """The notes about files below `root`; none where there are none, or they cannot be read."""
    try:
        found = json.loads(_place(root).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
