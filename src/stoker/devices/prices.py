"""Prices of an hour of a device, and the carbon intensity of power grids.

Prices are list prices with source and date; a user's own replace them. The built-in ones are in `prices.json`:
published ones for one device with its share of the host, without taxes, storage and egress. Prices change every week
and by zone; old ones are marked as stale.

A user's file is JSON or CSV; its bad rows are left out and reported. A row has `device`, `provider` and `usd_per_hour`,
and may have `market` (on demand, spot), `region`, `seen_on` (an ISO date), `source`, `note`, `most_devices` (which
train together there at most): columns of a CSV with a header, or a JSON list of objects, or an object with `prices` and
with `sources` that rows name by key.

Carbon intensity and power usage effectiveness are in `grid.json`, each with its source. Emissions cover the life cycle
of the plants, averaged over a country and a year; they differ by hour and by contract.
"""

from __future__ import annotations

import csv
import functools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import date, timedelta
from importlib.resources import files
from pathlib import Path
from typing import Literal

from stoker.devices.catalogue import Catalogue, builtin_catalogue, catalogue, user_file
from stoker.errors import BadJob, nearest
from stoker.records import Price

Market = Literal["on demand", "spot"]

COLUMNS = ("device", "provider", "usd_per_hour", "market", "region", "seen_on", "source", "note", "most_devices")
_NEEDED = COLUMNS[:3]

Prices = tuple[tuple[Price, ...], tuple[str, ...]]
"""Prices, and what is wrong with the other rows."""


def read_prices(path: Path, known: Catalogue) -> Prices:
    """A user's prices, from CSV or JSON by the file's suffix."""
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
    first = () if is_usable else (f"{where}: wanted `sources` as an object of titles by key, found {sources!r}.",)
    numbered = ((f"{where}, price {i}", row) for i, row in enumerate(rows, start=1))
    prices, problems = _read_rows(numbered, sources if is_usable else {}, known)
    return prices, (*first, *problems)


def _read_rows(rows: Iterable[tuple[str, object]], sources: Mapping[str, str], known: Catalogue) -> Prices:
    """The good rows, and what is wrong with the others."""
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
    if None in row:  # Python's CSV reader puts cells beyond the header there
        raise ValueError(f"{where}: has {len(row[None])} more cells than the header; is a comma not in quotes?")
    if unknown := [key for key in row if key not in COLUMNS]:
        raise ValueError(f"{where}: no such column {unknown[0]!r}. {nearest(str(unknown[0]), COLUMNS)}")
    words = {key: "" if row.get(key) is None else str(row[key]).strip() for key in COLUMNS if key != "usd_per_hour"}
    if not words["provider"]:
        raise ValueError(f"{where}: column 'provider' is empty")
    value = row.get("usd_per_hour")
    try:
        usd = math.nan if isinstance(value, bool) else float(str(value).strip().lstrip("$"))
    except ValueError:
        usd = math.nan
    if not 0 <= usd <= 1000:
        raise ValueError(f"{where}, column 'usd_per_hour': wanted 0 to 1000 US dollars, found {value!r}")
    word = words["device"]
    entries = known.find(word) if word else ()
    if not entries:
        raise ValueError(f"{where}, column 'device': no such device {word!r}; `stoker devices` lists all names.")
    if len(entries) > 1:
        names = ", ".join(entry.name for entry in entries)
        raise ValueError(f"{where}, column 'device': {word!r} may be any of {names}; write one of them.")
    return Price(
        device=entries[0].name,
        provider=words["provider"],
        usd_per_hour=usd,
        market=_market(words["market"], where),
        source=sources.get(words["source"], words["source"] or "the user's file"),
        seen_on=_day(words["seen_on"], where),
        region=words["region"],
        note=words["note"],
        most_devices=_count(words["most_devices"], where),
    )


def _count(word: str, where: str) -> int | None:
    if word and not (word.isdigit() and int(word) > 0):
        raise ValueError(f"{where}, column 'most_devices': wanted a number of devices, found {word!r}")
    return int(word) if word else None


def _market(word: str, where: str) -> Market:
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


STALE_AFTER = timedelta(days=180)
"""Age from which a price is marked: between October 2025 and March 2026 the rent of an H100 rose by 40 % (SemiAnalysis,
quoted by CompuX, "GPU pricing trends in 2026")."""


@dataclass(frozen=True)
class PriceList:
    """Prices, and which rows of a user's file could not be used."""

    prices: tuple[Price, ...]
    problems: tuple[str, ...] = ()

    def of(self, device: str | None = None, market: Market | None = None) -> tuple[Price, ...]:
        """Prices by device, for each in ascending order.

        Args:
            device: name of the catalogue; every device's if None.
            market: `on demand`, or `spot`, which the provider may end at any time; both if None.
        """
        chosen = (p for p in self.prices if device in (None, p.device) and market in (None, p.market))
        return tuple(sorted(chosen, key=lambda price: (price.device, price.usd_per_hour, price.provider)))

    def cheapest(self, device: str, market: Market = "on demand", count: int = 1) -> Price | None:
        """The lowest price of one of `count` devices that is not stale, else the lowest stale one; None without any."""
        offers = [
            offer for offer in self.of(device, market) if offer.most_devices is None or offer.most_devices >= count
        ]
        return next((price for price in offers if not price.is_stale), offers[0] if offers else None)


def price_list(today: date, known: Catalogue | None = None) -> PriceList:
    """The built-in prices and the user's, marked if they are stale on that day.

    The user's are in the file `$STOKER_PRICES`, or in `prices.csv` or `prices.json` of the configuration directory;
    they replace the built-in prices of the devices they name.

    Args:
        today: the day that staleness refers to.
        known: the catalogue with the devices' names; the user's if None.
    """
    known = catalogue() if known is None else known
    path = user_file("STOKER_PRICES", "prices.csv", "prices.json")
    own = PriceList(()) if path is None else PriceList(*read_prices(path, known))
    named = {price.device for price in own.prices}
    kept = tuple(price for price in builtin_prices() if price.device not in named)
    return PriceList(marked((*kept, *own.prices), today), own.problems)


def cheapest(device: str, market: Market = "on demand", *, count: int = 1, today: date | None = None) -> Price | None:
    """The lowest price of a device, as in `PriceList.cheapest`, on a day; default today."""
    return _price_list(today or date.today()).cheapest(device, market, count)  # noqa: DTZ011 - the user's day


_price_list = functools.cache(price_list)


def marked(prices: Iterable[Price], today: date) -> tuple[Price, ...]:
    """Prices with `is_stale` set for that day: those older than `STALE_AFTER`, and those without a date."""
    return tuple(
        replace(price, is_stale=(age := age_days(price, today)) is None or age > STALE_AFTER.days) for price in prices
    )


def age_days(price: Price, today: date) -> int | None:
    """Days since a price was seen [days]; None if its source has no date."""
    return None if price.seen_on is None else (today - date.fromisoformat(price.seen_on)).days


@functools.cache
def builtin_prices() -> tuple[Price, ...]:
    """Stoker's own prices, not marked as stale."""
    text = files("stoker.devices").joinpath("prices.json").read_text(encoding="utf-8")
    prices, problems = prices_from_json(text, "prices", builtin_catalogue())
    if problems:
        raise ValueError(problems[0])
    return prices


PUE_DATA_CENTRE = 1.54
"""Power usage effectiveness: power of a data centre over power of its machines [1].

Source: Uptime Institute, Global Data Center Survey 2025 (weighted average; 1.56 in 2024). The largest operators report
about 1.1 for their newest sites.
"""

HOST_SHARE = 1.5
"""Power of a machine over that of its devices: processors, memory, network and fans draw the rest [1].

Source: I. Latif et al., "Empirical Measurements of AI Training Power Demand on a GPU-Accelerated Node", 2024,
arXiv:2412.08602: at most 8.4 kW of a machine of eight H100 of 700 W (10.2 kW as printed, which would be 1.8). Machines
of other devices are assumed to take the same share; of the local machine only the device is counted.
"""

PUE_HERE = 1.0
"""The same for this machine, whose building is not known: its own energy only [1]."""

WORLD = "world"


@dataclass(frozen=True)
class Grid:
    """A grid. `code` is `world` or a country's ISO 3166 code; `g_co2_per_kwh` grams of CO2 equivalent over `year`."""

    code: str
    name: str
    g_co2_per_kwh: float
    year: int
    source: str


@functools.cache
def grids() -> tuple[Grid, ...]:
    """All known grids, the world's average first."""
    document = json.loads(files("stoker.devices").joinpath("grid.json").read_text(encoding="utf-8"))
    return tuple(Grid(source=document["sources"][row.pop("source")], **row) for row in document["grids"])


def grid_of(code: str = WORLD) -> Grid:
    """The grid with that code, in any case.

    Raises:
        BadJob: there is none; the remedy names the nearest code.
    """
    by_code = {grid.code: grid for grid in grids()}
    if code.lower() not in by_code:
        raise BadJob(f"There is no grid {code!r}.", remedy=nearest(code.lower(), list(by_code)))
    return by_code[code.lower()]
