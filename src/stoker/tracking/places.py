"""Where a tracker that writes files keeps those of a run."""

from __future__ import annotations

import itertools
from pathlib import Path

from stoker.tracking.base import About


def place_of(about: About, where: str | None, known_id: str | None, *, name: str, ending: str = "") -> Path:
    """The file or folder of a run: the one it has, else a new one, so that no two runs write into one.

    Args:
        about: the run.
        where: a folder for many runs, in which this one's is called like the run; None for the run's own folder, which
            may have been moved or copied since it was written to last: only its name then counts, not its place.
        known_id: where this run's was until now, by `str`; None if it has none.
        name: what it is called in the run's own folder.
        ending: of a file's name, with its dot.
    """
    if where is None:
        return about.folder / Path(known_id).name if known_id is not None else _free(about.folder, name, ending)
    return Path(known_id) if known_id is not None else _free(Path(where), about.run, ending)


def _free(folder: Path, name: str, ending: str) -> Path:
    """`NAME` in the folder, or the first of `NAME-2`, `NAME-3`, … that nothing is called."""
    numbers = itertools.chain([""], (f"-{number}" for number in itertools.count(2)))
    return next(path for number in numbers if not (path := folder / f"{name}{number}{ending}").exists())
