"""Prices in the terminal: what each device costs at least, or every offer for one, and the same as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stoker.devices import CatalogueEntry, PriceList
from stoker.devices.prices import STALE_AFTER, age_days
from stoker.records import Price, to_json
from stoker.records.codec import JSON
from stoker.reporting.panel import marked

_WIDE = 104
"""Columns of a terminal from which on notes have room beside the offers."""


def render_prices(entries: Sequence[CatalogueEntry], prices: PriceList, today: date, console: Console) -> None:
    """Print for each device its lowest and highest price on demand, the lowest on spot, and how old the news is."""
    table = _table(("device", "left"), ("from", "right"), ("at", "left"), ("to", "right"), ("spot from", "right"),
                   ("offers", "right"), ("newest", "right"))  # fmt: skip
    silent = []
    for entry in entries:
        offers = prices.of(entry.name)
        if not offers:
            silent.append(entry.name)
            continue
        on_demand, spot = prices.of(entry.name, "on demand"), prices.cheapest(entry.name, "spot")
        lowest = prices.cheapest(entry.name)
        ages = [age for price in offers if (age := age_days(price, today)) is not None]
        table.add_row(
            Text(entry.name, "bold"), _usd(lowest), Text(lowest.provider if lowest else "", "dim"),
            _usd(on_demand[-1] if len(on_demand) > 1 else None), _usd(spot), str(len(offers)),
            f"{min(ages)} d" if ages else "undated", style="" if ages and not _all_stale(offers) else "dim",
        )  # fmt: skip
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
    is_wide = console.width >= _WIDE
    columns = [("USD/h", "right"), ("provider", "left"), ("region", "left"), ("seen", "left"), ("age", "right")]
    table = _table(*columns, *((("", "left"),) if is_wide else ()))
    for market in ("on demand", "spot"):
        if chosen := prices.of(entry.name, market):
            if market == "spot":
                table.add_row()
            table.add_row("", Text(market, "bold"))
            for price in chosen:
                table.add_row(*_offer(price, today, is_wide=is_wide), style="dim" if price.is_stale else "")
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
        "prices": [{**_fields(price), "age_days": age_days(price, today)} for price in offers],
        "problems": list(prices.problems),
    }


def _fields(price: Price) -> dict[str, JSON]:
    document = to_json(price)
    assert isinstance(document, dict)
    return document


def _offer(price: Price, today: date, *, is_wide: bool) -> list[Text | str]:
    age = age_days(price, today)
    row: list[Text | str] = [
        _usd(price), price.provider, Text(price.region, "dim"), price.seen_on or "undated",
        "" if age is None else f"{age} d",
    ]  # fmt: skip
    return [*row, Text(price.note, "dim")] if is_wide else row


def _usd(price: Price | None) -> Text:
    if price is None:
        return Text("–")
    return Text(f"${price.usd_per_hour:.2f}", "dim" if price.is_stale else "")


def _all_stale(offers: Sequence[Price]) -> bool:
    return all(price.is_stale for price in offers)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for title, justify in columns:
        table.add_column(title, justify="right" if justify == "right" else "left", no_wrap=True)
    return table


def _print_closing(prices: PriceList, console: Console, hint: str) -> None:
    """What is dim, what is left out, and what could not be read."""
    days = STALE_AFTER.days
    said = f"List prices; taxes, storage and egress are left out. Dim: older than {days} days, or undated. {hint}"
    console.print(Text(f"\n{said.strip()}", "dim"))
    for problem in prices.problems:
        console.print(marked("!", "yellow", Text(problem)))
