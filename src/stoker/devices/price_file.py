"""Files of prices, as JSON or CSV: good rows are used, bad ones named.

A row has `device`, `provider` and `usd_per_hour`, and may have `market` (on demand, spot), `region`, `seen_on` (an ISO
date), `source` and `note`. As CSV they are the header's words, as JSON a list of objects, or an object with `prices`
and with `sources` that rows name by key.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Literal

from stoker.devices.catalogue import Catalogue
from stoker.errors import nearest
from stoker.records import Price

COLUMNS = ("device", "provider", "usd_per_hour", "market", "region", "seen_on", "source", "note")
_NEEDED = COLUMNS[:3]

Prices = tuple[tuple[Price, ...], tuple[str, ...]]
"""Prices, and what is wrong with the other rows, in words."""


def read_prices(path: Path, known: Catalogue) -> Prices:
    """A user's prices, from CSV or JSON by the file's ending."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        return (), (f"{path}: cannot be read ({problem}): the built-in prices alone are used.",)
    if path.suffix.lower() == ".csv":
        return prices_from_csv(text, str(path), known)
    return prices_from_json(text, str(path), known)


def prices_from_csv(text: str, where: str, known: Catalogue) -> Prices:
    """Prices from CSV text with a header; `where` names the file in problems."""
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    header = reader.fieldnames or ()
    if missing := [name for name in _NEEDED if name not in header]:
        return (), (f"{where}: the header lacks {', '.join(missing)}; wanted {','.join(COLUMNS[:-1])}.",)
    if unknown := [name for name in header if name not in COLUMNS]:
        return (), (f"{where}: no such column {unknown[0]!r}. {nearest(unknown[0], COLUMNS)}",)
    return _read_rows(((f"{where}, line {reader.line_num}", row) for row in reader), {}, known)


def prices_from_json(text: str, where: str, known: Catalogue) -> Prices:
    """Prices from JSON text; `where` names the file in problems."""
    try:
        document = json.loads(text)
    except ValueError as problem:
        return (), (f"{where}: is no JSON ({problem}).",)
    rows = document.get("prices") if isinstance(document, dict) else document
    if not isinstance(rows, list):
        return (), (f"{where}: wanted a list of prices, or an object with `prices`.",)
    sources = document.get("sources", {}) if isinstance(document, dict) else {}
    is_usable = isinstance(sources, dict) and all(isinstance(title, str) for title in sources.values())
    told = () if is_usable else (f"{where}: wanted `sources` as an object of titles by key, found {sources!r}.",)
    numbered = ((f"{where}, price {i}", row) for i, row in enumerate(rows, start=1))
    prices, problems = _read_rows(numbered, sources if is_usable else {}, known)
    return prices, (*told, *problems)


def _read_rows(rows: Iterable[tuple[str, object]], sources: Mapping[str, str], known: Catalogue) -> Prices:
    """The rows that fit, and what is wrong with the others."""
    prices, problems = [], []
    for where, row in rows:
        try:
            prices.append(_price(row, where, sources, known))
        except ValueError as problem:
            problems.append(str(problem))
    return tuple(prices), tuple(problems)


def _price(row: object, where: str, sources: Mapping[str, str], known: Catalogue) -> Price:
    """One row, checked."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: wanted an object, found {row!r}")  # noqa: TRY004 - a bad file, not a bad call
    if None in row:  # where a reader of CSV puts what is beyond the header
        raise ValueError(f"{where}: has {len(row[None])} more cells than the header; is a comma not in quotes?")
    if unknown := [key for key in row if key not in COLUMNS]:
        raise ValueError(f"{where}: no such column {unknown[0]!r}. {nearest(str(unknown[0]), COLUMNS)}")
    words = {key: _word(row, key) for key in COLUMNS if key != "usd_per_hour"}
    if not words["provider"]:
        raise ValueError(f"{where}: column 'provider' is empty")
    return Price(
        device=_device(words["device"], where, known),
        provider=words["provider"],
        usd_per_hour=_amount(row.get("usd_per_hour"), where),
        market=_market(words["market"], where),
        source=sources.get(words["source"], words["source"] or "the user's file"),
        seen_on=_day(words["seen_on"], where),
        region=words["region"],
        note=words["note"],
    )


def _word(row: Mapping[str, Any], key: str) -> str:
    value = row.get(key)
    return "" if value is None else str(value).strip()


def _device(word: str, where: str, known: Catalogue) -> str:
    """The name of the one device a word means."""
    entries = known.find(word) if word else ()
    if not entries:
        raise ValueError(f"{where}, column 'device': no such device {word!r}; `stoker devices` lists all names.")
    if len(entries) > 1:
        names = ", ".join(entry.name for entry in entries)
        raise ValueError(f"{where}, column 'device': {word!r} may be any of {names}; write one of them.")
    return entries[0].name


def _amount(value: object, where: str) -> float:
    """US dollars an hour."""
    try:
        usd = math.nan if isinstance(value, bool) else float(str(value).strip().lstrip("$"))
    except ValueError:
        usd = math.nan
    if not 0 <= usd <= 1000:
        raise ValueError(f"{where}, column 'usd_per_hour': wanted 0 to 1000 US dollars, found {value!r}")
    return usd


def _market(word: str, where: str) -> Literal["on demand", "spot"]:
    match word.lower().replace("-", " "):
        case "" | "on demand":
            return "on demand"
        case "spot":
            return "spot"
    raise ValueError(f"{where}, column 'market': wanted 'on demand' or 'spot', found {word!r}")


def _day(word: str, where: str) -> str | None:
    if not word:
        return None
    try:
        return date.fromisoformat(word).isoformat()
    except ValueError as problem:
        raise ValueError(f"{where}, column 'seen_on': wanted a date such as 2026-11-21, found {word!r}") from problem
