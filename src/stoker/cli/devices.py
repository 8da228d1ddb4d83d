"""The catalogue and what each device costs; as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from itertools import groupby

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stoker.cli.terminal import column_table, print_document
from stoker.devices import (
    COLUMNS,
    Catalogue,
    CatalogueEntry,
    Cell,
    PriceList,
    attached_devices,
    catalogue,
    find_devices,
    hardware_of,
    price_list,
)
from stoker.devices.prices import STALE_AFTER, Market, age_days
from stoker.records import Device, Price, to_json
from stoker.records.codec import JSON
from stoker.reporting.panel import EMBER, marked
from stoker.units import format_bytes

_WIDE, _WIDEST = 96, 132
"""Columns of a terminal from which on providers, and from which on full names have room as well."""

_MARKETS: tuple[Market, ...] = ("on demand", "spot")

_UNKNOWN = "–"

_LEGEND = (
    "",
    "Dense matrix products in TFLOP/s; USD an hour for one device on demand, * stale.",
    "° no time model yet: memory can be compared, time cannot be forecast.",
    "stoker devices NAME shows each figure's source; stoker prices NAME every offer.",
)


def show_devices(name: str | None, *, as_json: bool) -> None:
    """Print all devices, or one."""
    known, attached, prices = catalogue(), attached_devices(), price_list(date.today())  # noqa: DTZ011 - local day
    entries = known.entries if name is None else find_devices(name, known)
    if as_json:
        print_document(devices_document(entries, known, prices, attached))
    elif name is None:
        render_devices(known, prices, attached, Console())
    else:
        for entry in entries:
            render_device(entry, prices, attached, Console())


def show_prices(name: str | None, *, as_json: bool) -> None:
    """Print the prices of all devices, or every offer for one."""
    today = date.today()  # noqa: DTZ011 - the user's day
    offers = price_list(today)
    entries = catalogue().entries if name is None else find_devices(name)
    if as_json:
        print_document(prices_document(entries, offers, today))
    elif name is None:
        render_prices(entries, offers, today, Console())
    else:
        for entry in entries:
            render_offers(entry, offers, today, Console())


def render_devices(known: Catalogue, prices: PriceList, attached: Sequence[Device], console: Console) -> None:
    """Print every device on a line, what is attached first; then what could not be read."""
    extra = (console.width >= _WIDE) + (console.width >= _WIDEST)
    # Not every terminal has room for the last two.
    more = ("at", "model")[:extra]
    table = column_table("", ">memory", ">bandwidth", ">bf16", ">fp32", ">power", ">from", *more)
    _add_section(table, "here")
    for device in attached:
        _add_attached(table, device, known, extra)
    for title, entries in groupby(known.entries, key=_family):
        _add_section(table, title)
        for entry in entries:
            is_here = any(entry is known.describing(device) for device in attached)
            _add_entry(table, entry, prices, extra, is_here=is_here)
    console.print(table)
    for line in _LEGEND:
        console.print(Text(line, "dim"))
    _print_problems((*known.problems, *prices.problems), console)


def render_device(entry: CatalogueEntry, prices: PriceList, attached: Sequence[Device], console: Console) -> None:
    """Print one device: each figure with its source and the day it was compared, and what it costs."""
    names = " · ".join((entry.name, *entry.aliases))
    here = [device.torch_name for device in attached if device.model in entry.driver_names]
    place = f"   ● here: {', '.join(here)}" if here else ""
    console.print(Text.assemble((entry.title, "bold"), (f"   {names}", "dim"), (place, EMBER)))
    use = f"To plan for it: stoker plan JOB.py --on {entry.name}"
    if not entry.can_be_planned:
        use = "No time model yet: memory can be compared, time cannot be forecast."
    console.print(Text(use, "dim"))
    sources = list(dict.fromkeys(cell.source for cell in entry.cells.values()))
    console.print()
    for column, cell in entry.cells.items():
        _print_cell(column, cell, sources.index(cell.source) + 1, console)
    if missing := [COLUMNS[column].title for column in COLUMNS if _is_missing(column, entry)]:
        console.print(Text(f"  not known: {'; '.join(missing)}", "dim"))
    console.print()
    for number, source in enumerate(sources, start=1):
        citation = Text(f"{source.title}. {source.publisher}.", "dim")
        console.print(Padding(marked(f"[{number}]", "dim", citation), (0, 0, 0, 2)))
    _print_prices(entry, prices, console)


def devices_document(
    entries: Sequence[CatalogueEntry], known: Catalogue, prices: PriceList, attached: Sequence[Device]
) -> dict[str, JSON]:
    """The same for `--json`: figures in the units of their columns, bytes where the name says so."""
    return {
        "schema": 1,
        "attached": [to_json(device) for device in attached],
        "devices": [_entry_document(entry, prices, attached) for entry in entries],
        "problems": [*known.problems, *prices.problems],
    }


def _entry_document(entry: CatalogueEntry, prices: PriceList, attached: Sequence[Device]) -> dict[str, JSON]:
    cheapest = prices.cheapest(entry.name)
    return {
        "name": entry.name,
        "title": entry.title,
        "kind": entry.kind,
        "aliases": list(entry.aliases),
        "attached": [device.torch_name for device in attached if device.model in entry.driver_names],
        "can_be_planned": entry.can_be_planned,
        "usable_memory_bytes": entry.usable_memory_bytes,
        "cells": {
            column: {
                "value": cell.value,
                "unit": COLUMNS[column].unit,
                "source": {"title": cell.source.title, "publisher": cell.source.publisher},
                "compared_on": cell.compared_on.isoformat(),
                "note": cell.note,
            }
            for column, cell in entry.cells.items()
        },
        "cheapest": None if cheapest is None else to_json(cheapest),
        "prices": [to_json(price) for price in prices.of(entry.name)],
    }


def _add_section(table: Table, title: str) -> None:
    if table.row_count:
        table.add_row()
    table.add_row(Text(title, style="bold"))


def _add_attached(table: Table, device: Device, known: Catalogue, extra: int) -> None:
    """A device that is here, with what is known of its model."""
    hardware = hardware_of(device, known)
    bandwidth = hardware.bandwidth_bytes_per_s
    power = "" if hardware.power_w is None else f"{hardware.power_w:,.0f} W"
    rates = [hardware.dense_flops.get(dtype) for dtype in ("bf16", "fp32")]
    cells = [
        format_bytes(device.memory_bytes) if device.memory_bytes else _UNKNOWN,
        _rate(bandwidth / 1e9 if bandwidth else None),
        *(_number(None if rate is None else rate / 1e12) for rate in rates),
        power or _UNKNOWN,
        "",
    ]
    name = Text.assemble(("● ", EMBER), device.torch_name)
    unit = "core" if device.kind == "cpu" else "multiprocessor"
    cores = f"{device.cores} {unit}{'' if device.cores == 1 else 's'}" if device.cores else "size unknown"
    table.add_row(name, *(Text(cell) for cell in cells), *[Text(f"{device.model}, {cores}", "dim")][:extra])


def _add_entry(table: Table, entry: CatalogueEntry, prices: PriceList, extra: int, *, is_here: bool) -> None:
    """A device of the catalogue."""
    name = Text.assemble(("● " if is_here else "  ", EMBER), entry.name)
    price = prices.cheapest(entry.name)
    power = entry.power_w
    cells = [
        Text(f"{entry.memory_bytes / 2**30:,.0f} GiB"),
        Text(_rate(entry.value("bandwidth_gb_per_s"))),
        Text(_number(entry.value("dense_tflops_bf16"))),
        Text(_number(entry.value("dense_tflops_fp32"))),
        Text(_UNKNOWN if power is None else f"{power:,.0f} W"),
        _usd(price, fresh=" ", stale="*"),
    ]
    more = [Text(price.provider if price else "", "dim"), Text(entry.title, "dim")]
    table.add_row(name, *cells, *more[:extra])


def _rate(gb_per_s: float | None) -> str:
    if gb_per_s is None:
        return _UNKNOWN
    return f"{gb_per_s / 1000:.2f} TB/s" if gb_per_s >= 1000 else f"{gb_per_s:.0f} GB/s"


def _number(tflops: float | None) -> str:
    """TFLOP/s with about three figures."""
    if tflops is None:
        return _UNKNOWN
    return f"{tflops:,.0f}" if tflops >= 99.5 else f"{tflops:.1f}"


def _family(entry: CatalogueEntry) -> str:
    match entry.kind:
        case "cuda":
            return "GeForce, RTX" if entry.name.startswith("rtx-") else "NVIDIA data centre"
        case "rocm":
            return "AMD Instinct °"
        case "tpu":
            return "Google TPU °"
        case "cpu":
            return "CPU, one socket"


def _is_missing(column: str, entry: CatalogueEntry) -> bool:
    """Whether a figure that a device of this kind surely has is not known."""
    always = ("power_w", "idle_w", "l2_mib", "pcie_gb_per_s", "dense_tflops_fp32")
    expected = (*always, "memory_reported_mib") if entry.kind == "cuda" else always
    return column in expected and column not in entry.cells


def _print_cell(column: str, cell: Cell, number: int, console: Console) -> None:
    about = COLUMNS[column]
    value = f"{cell.value:,.4g}" if cell.value < 1000 else f"{cell.value:,.0f}"
    shown = f"{cell.value:.1f}" if column == "compute_capability" else f"{value} {about.unit}"
    line = Text.assemble(f"  {about.title:<34}{shown:>15}  ", (f"[{number}]", "dim"))
    line.pad_right(58 - len(line))
    console.print(line.append(cell.compared_on.isoformat(), "dim"))
    if cell.note:
        console.print(Text(f"    {cell.note}", "dim italic"))


def _print_prices(entry: CatalogueEntry, prices: PriceList, console: Console) -> None:
    """What it costs at least, on each market."""
    offers = prices.of(entry.name)
    console.print()
    if not offers:
        console.print(Text("  No price is known. A file named by $STOKER_PRICES can say one.", "dim"))
        return
    for market in _MARKETS:
        if (price := prices.cheapest(entry.name, market)) is not None:
            seen = "undated" if price.seen_on is None else f"seen {price.seen_on}"
            amount = f"${price.usd_per_hour:.2f}/h"
            console.print(Text.assemble(f"  {market:<9} from {amount} at {price.provider}", (f", {seen}", "dim")))
    console.print(Text(f"  all {len(offers)}: stoker prices {entry.name}", "dim"))


def _print_problems(problems: Sequence[str], console: Console) -> None:
    for problem in problems:
        console.print(marked("!", "yellow", Text(problem)))


_WIDE_OFFERS = 104
"""Columns of a terminal from which on notes have room next to the offers."""


def render_prices(entries: Sequence[CatalogueEntry], prices: PriceList, today: date, console: Console) -> None:
    """Print for each device its lowest and highest price on demand, the lowest on spot, and how old the news is."""
    table = column_table("device", ">from", "at", ">to", ">spot from", ">offers", ">newest")
    silent = []
    for entry in entries:
        offers = prices.of(entry.name)
        if not offers:
            silent.append(entry.name)
            continue
        on_demand, spot = prices.of(entry.name, "on demand"), prices.cheapest(entry.name, "spot")
        lowest = prices.cheapest(entry.name)
        ages = [age for price in offers if (age := age_days(price, today)) is not None]
        is_current = bool(ages) and not all(price.is_stale for price in offers)
        table.add_row(
            Text(entry.name, "bold"),
            _usd(lowest),
            Text(lowest.provider if lowest else "", "dim"),
            _usd(on_demand[-1] if len(on_demand) > 1 else None),
            _usd(spot),
            str(len(offers)),
            f"{min(ages)} d" if ages else "undated",
            style="" if is_current else "dim",
        )
    console.print(table)
    if silent:
        console.print(Text(f"\nNo price known: {', '.join(silent)}.", "dim"))
    _print_closing(prices, console, "`stoker prices DEVICE` shows every offer.")


def render_offers(entry: CatalogueEntry, prices: PriceList, today: date, console: Console) -> None:
    """Print every offer for one device, cheap to dear: on demand, then spot; stale ones dim."""
    offers = prices.of(entry.name)
    console.print(Text.assemble((entry.title, "bold"), (f"   {entry.name}, one device", "dim")))
    if not offers:
        console.print(Text("No price is known. A file named by $STOKER_PRICES can say one.", "dim"))
        return
    is_wide = console.width >= _WIDE_OFFERS
    table = column_table(">USD/h", "provider", "region", "seen", ">age", *[""] * is_wide)
    for market in ("on demand", "spot"):
        if chosen := prices.of(entry.name, market):
            if market == "spot":
                table.add_row()
            table.add_row("", Text(market, "bold"))
            for price in chosen:
                age = age_days(price, today)
                table.add_row(
                    _usd(price),
                    price.provider,
                    Text(price.region, "dim"),
                    price.seen_on or "undated",
                    "" if age is None else f"{age} d",
                    *((Text(price.note, "dim"),) if is_wide else ()),
                    style="dim" if price.is_stale else "",
                )
    console.print(table)
    sources = dict.fromkeys(price.source for price in offers)
    console.print(Text(f"\nSources: {'; '.join(sources)}.", "dim"))
    _print_closing(prices, console, "")


def prices_document(entries: Sequence[CatalogueEntry], prices: PriceList, today: date) -> dict[str, JSON]:
    """The same for `--json`: every offer as a record, with its age in days (null: undated)."""
    offers = [price for entry in entries for price in prices.of(entry.name)]
    return {
        "schema": 1,
        "today": today.isoformat(),
        "stale_after_days": STALE_AFTER.days,
        "prices": [dict[str, JSON](to_json(price)) | {"age_days": age_days(price, today)} for price in offers],
        "problems": list(prices.problems),
    }


def _usd(price: Price | None, *, fresh: str = "", stale: str = "") -> Text:
    """USD an hour, with a mark behind it; dim where it is stale."""
    if price is None:
        return Text(f"{_UNKNOWN}{fresh}")
    return Text(f"${price.usd_per_hour:.2f}{stale if price.is_stale else fresh}", "dim" if price.is_stale else "")


def _print_closing(prices: PriceList, console: Console, hint: str) -> None:
    """The closing lines: what is dim, what is left out, and what could not be read."""
    days = STALE_AFTER.days
    text = f"List prices; taxes, storage and egress are left out. Dim: older than {days} days, or undated. {hint}"
    console.print(Text(f"\n{text.strip()}", "dim"))
    _print_problems(prices.problems, console)
