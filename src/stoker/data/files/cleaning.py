"""Leaving out what a clean list says: which of its names mean samples of a source."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import TypeAlias

from stoker.errors import BadJob, first_line
from stoker.records import CleanList, loads

Clean: TypeAlias = "CleanList | str | Path | None"
"""A clean list, or the file that `stoker data check -o DIR` wrote it to."""


def left_out(clean: Clean, root: Path) -> frozenset[str]:
    """The names of the samples to leave out, relative to `root`.

    A list made of a folder above `root` names its samples from there; those elsewhere are left aside.

    Raises:
        BadJob: the file holds no clean list, or one of another place.
    """
    if clean is None:
        return frozenset()
    found = clean if isinstance(clean, CleanList) else _read(Path(clean))
    prefix = _prefix(Path(found.source), root)
    if prefix is None:
        return found.dropped_ids()
    return frozenset(name.removeprefix(prefix) for name in found.dropped_ids() if name.startswith(prefix))


def require_known(dropped: frozenset[str], num_found: int, name: str) -> None:
    """Refuse a clean list none of whose names mean a sample here.

    Raises:
        BadJob: it is of other data.
    """
    if dropped and not num_found:
        example = min(dropped)
        raise BadJob(
            f"the clean list leaves out {len(dropped):,} samples, as {example!r}, and {name} has none of these names",
            remedy="Give the list that `stoker data check` made of these files.",
        )


def _read(path: Path) -> CleanList:
    try:
        return loads(path.read_text(encoding="utf-8"), CleanList)
    except (OSError, ValueError) as error:
        raise BadJob(
            f"{path} is no clean list: {first_line(error)}",
            remedy="Give the clean.json that `stoker data check PATH -o DIR` writes.",
        ) from error


def _prefix(source: Path, root: Path) -> str | None:
    """What names in a list of `source` have before those below `root`; None where one is not below the other."""
    above, below = source.expanduser().resolve(), root.expanduser().resolve()
    if above.is_file():
        above = above.parent
    if not below.is_relative_to(above):
        return None
    between: PurePath = below.relative_to(above)
    return "" if between == PurePath() else f"{between.as_posix()}/"
