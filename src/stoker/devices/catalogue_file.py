"""Catalogues as JSON: the built-in one, which must be right in every cell, and a user's, of which good rows are used.

A file is an object with `sources` (by key: title, publisher) and `devices` (rows with name, title, kind, aliases,
driver_names and cells, a cell being `[value, source key, ISO date]` or the same with a note).
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any

from stoker.devices.catalogue import COLUMNS, KINDS, Catalogue, CatalogueEntry, Cell, Source, squeezed
from stoker.devices.user_files import user_file
from stoker.errors import nearest


@functools.cache
def catalogue() -> Catalogue:
    """The built-in catalogue and the user's own rows on top, read once.

    The user's are in the file `$STOKER_CATALOGUE`, or in `devices.json` of the configuration directory.
    """
    path = user_file("STOKER_CATALOGUE", "devices.json")
    return builtin_catalogue() if path is None else read_catalogue(path, builtin_catalogue())


@functools.cache
def builtin_catalogue() -> Catalogue:
    """The catalogue that comes with Stoker."""
    return load_catalogue(files("stoker.devices").joinpath("catalogue.json").read_text(encoding="utf-8"))


def load_catalogue(text: str) -> Catalogue:
    """A catalogue from JSON text.

    Raises:
        ValueError: the first thing that does not fit, naming the device and the column.
    """
    entries, problems = _read_rows(json.loads(text), "catalogue", {})
    problems = (*problems, *_clashes(entries, "catalogue"))
    if problems:
        raise ValueError(problems[0])
    return Catalogue(entries)


def read_catalogue(path: Path, builtin: Catalogue) -> Catalogue:
    """The built-in catalogue with a user's rows: those that do not fit are left out and named in `problems`.

    A row may use the sources of the built-in file by their keys. A row of a built-in name replaces that row.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as problem:
        return builtin.with_rows((), (f"{path}: cannot be read ({problem}): the built-in catalogue alone is used.",))
    if not isinstance(document, dict):
        return builtin.with_rows((), (f"{path}: wanted an object with `sources` and `devices`.",))
    entries, problems = _read_rows(document, str(path), _builtin_sources())
    known = builtin.with_rows((), problems)
    for entry in entries:
        wider = known.with_rows((entry,))
        clashes = _clashes(wider.entries, f"{path}, device {entry.name!r}")
        known = known.with_rows((), clashes) if clashes else wider
    return known


@functools.cache
def _builtin_sources() -> Mapping[str, Source]:
    document = json.loads(files("stoker.devices").joinpath("catalogue.json").read_text(encoding="utf-8"))
    return _sources(document)


def _sources(document: Mapping[str, Any]) -> dict[str, Source]:
    return {key: Source(row["title"], row["publisher"]) for key, row in document.get("sources", {}).items()}


def _read_rows(
    document: Mapping[str, Any], where: str, more_sources: Mapping[str, Source]
) -> tuple[tuple[CatalogueEntry, ...], tuple[str, ...]]:
    """The rows that fit, and what is wrong with the others."""
    entries, problems = [], []
    try:
        sources = {**more_sources, **_sources(document)}
    except (AttributeError, KeyError, TypeError) as problem:
        return (), (f"{where}: wanted `sources` as an object of {{title, publisher}} by key, missing {problem}.",)
    rows = document.get("devices")
    if not isinstance(rows, list):
        return (), (f"{where}: wanted `devices` as a list of rows.",)
    for row in rows:
        try:
            entries.append(_entry(row, sources, where))
        except ValueError as problem:
            problems.append(str(problem))
    return tuple(entries), tuple(problems)


def _clashes(entries: Sequence[CatalogueEntry], where: str) -> tuple[str, ...]:
    """Words that would mean two devices."""
    names = [squeezed(entry.name) for entry in entries]
    drivers = [name for entry in entries for name in entry.driver_names]
    twice = sorted({word for words in (names, drivers) for word in words if words.count(word) > 1})
    both = sorted({squeezed(alias) for entry in entries for alias in entry.aliases} & set(names))
    return (
        *(f"{where}: {word!r} stands for two devices" for word in twice),
        *(f"{where}: {word!r} is a name and an alias" for word in both),
    )


def _entry(row: object, sources: Mapping[str, Source], where: str) -> CatalogueEntry:
    """One row, checked."""
    name = str(row.get("name", "") if isinstance(row, dict) else row)
    if not isinstance(row, dict) or not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"{where}: a device is named {name!r}; wanted lower-case letters, digits and '-'")
    where = f"{where}, device {name!r}"
    kind, cells = row.get("kind", "cuda"), row.get("cells")
    if kind not in KINDS:
        raise ValueError(f"{where}: no such kind {kind!r}. {nearest(str(kind), KINDS)}")
    if not isinstance(cells, dict):
        raise ValueError(f"{where}: wanted `cells` by column")  # noqa: TRY004 - a bad file, not a bad call
    checked = {column: _cell(f"{where}, column {column!r}", column, cell, sources) for column, cell in cells.items()}
    for column, about in COLUMNS.items():
        if kind in about.needed_by and column not in checked:
            raise ValueError(f"{where}: column {column!r} is missing")
    aliases, drivers = (_strings(row, key, where) for key in ("aliases", "driver_names"))
    return CatalogueEntry(name, str(row.get("title", name)), kind, aliases, drivers, checked)


def _strings(row: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    words = row.get(key, [])
    if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
        raise ValueError(f"{where}: wanted `{key}` as a list of strings, found {words!r}")
    return tuple(words)


def _cell(where: str, column: str, cell: object, sources: Mapping[str, Source]) -> Cell:
    """One cell, checked: a known column, a believable number, a known source, a date."""
    if column not in COLUMNS:
        raise ValueError(f"{where}: no such column. {nearest(column, COLUMNS)}")
    if not (isinstance(cell, list) and len(cell) in (3, 4)):
        raise ValueError(f"{where}: wanted [value, source, date] or [value, source, date, note], found {cell!r}")
    value, source, day, *note = cell
    about = COLUMNS[column]
    if isinstance(value, bool) or not isinstance(value, int | float) or not about.low <= value <= about.high:
        raise ValueError(f"{where}: wanted {about.low:g} to {about.high:g} {about.unit}, found {value!r}")
    if not isinstance(source, str) or source not in sources:
        raise ValueError(f"{where}: no such source {source!r}. {nearest(str(source), sources)}")
    try:
        compared_on = date.fromisoformat(day)
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{where}: wanted a date such as 2026-11-21, found {day!r}") from problem
    return Cell(float(value), sources[source], compared_on, str(note[0]) if note else "")
