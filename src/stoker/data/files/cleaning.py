"""Leaving out what a clean list says: which of its names mean samples of a source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import TypeAlias

from stoker.errors import BadJob, first_line
from stoker.records import CleanList, loads
from stoker.records.codec import printable

Clean: TypeAlias = "CleanList | str | Path | None"
"""A clean list, or the file that `stoker data check -o DIR` wrote it to."""


def left_out(clean: Clean, root: Path) -> frozenset[str]:
    """The names of the samples to leave out, relative to `root`, as they are printable (see `stoker.records.codec`).

    A list made of a folder above `root` names its samples from there; those elsewhere are left aside.

    Raises:
        BadJob: the file holds no clean list, or one of another place.
    """
    if clean is None:
        return frozenset()
    found = clean if isinstance(clean, CleanList) else _read(Path(clean))
    prefix = _prefix(Path(found.source), root)
    ids = map(printable, found.dropped_ids())
    if prefix is None:
        return frozenset(ids)
    return frozenset(name.removeprefix(printable(prefix)) for name in ids if name.startswith(printable(prefix)))


def left_out_of_files(clean: Clean, paths: Sequence[Path]) -> tuple[frozenset[str], ...]:
    """For each file of many samples, what follows its name in the names of the samples to leave out.

    A list made of a folder above names each file by its path from there, and may be of other files in it alone. For one
    made elsewhere, as before the files were moved, they are called by their paths below the folder that holds them all.

    Raises:
        BadJob: the file holds no clean list, or one of another place, with none of these names.
    """
    if clean is None:
        return (frozenset(),) * len(paths)
    found = clean if isinstance(clean, CleanList) else _read(Path(clean))
    ids = frozenset(map(printable, found.dropped_ids()))
    source = Path(found.source).expanduser().resolve()
    above = source.parent if source.is_file() else source
    places = [path.expanduser().parent.resolve() / path.name for path in paths]
    if not any(place.is_relative_to(above) for place in places):
        above = Path(os.path.commonpath([place.parent for place in places]))
    names = [place.relative_to(above).as_posix() if place.is_relative_to(above) else None for place in places]
    names = [None if name is None else printable(name) for name in names]
    by_file = _by_file(ids, {name for name in names if name is not None})
    if source.is_file() or not any((above / sample.rpartition(":")[0]).is_file() for sample in ids):
        require_known(ids, sum(map(len, by_file.values())), paths[0].name)
    return tuple(frozenset() if name is None else frozenset(by_file[name]) for name in names)


def _by_file(ids: frozenset[str], files: set[str]) -> dict[str, set[str]]:
    """For each of `files`, what follows its name and a colon in `ids`; keys may have colons as well."""
    by_file: dict[str, set[str]] = {file: set() for file in files}
    for sample in ids:
        for at, letter in enumerate(sample):
            if letter == ":" and sample[:at] in by_file:
                by_file[sample[:at]].add(sample[at + 1 :])
    return by_file


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
