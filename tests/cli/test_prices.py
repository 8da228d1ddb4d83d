"""`stoker prices`: the overview, every offer for one device, and JSON."""

from __future__ import annotations

import io
import json
import re
from datetime import date

import pytest
from rich.console import Console

from stoker.cli.devices import prices_document, render_offers, render_prices
from stoker.devices import PriceList
from stoker.devices.catalogue import builtin_catalogue
from stoker.devices.prices import marked
from stoker.records import Price
from tests.cli.page import Page
from tests.flow.command import stoker_here

KNOWN = builtin_catalogue()
TODAY = date(2026, 11, 21)


def offer(usd: float, provider: str, seen_on: str | None, *, market="on demand", note: str = "") -> Price:
    """An offer of an L4."""
    return Price(
        device="l4",
        provider=provider,
        usd_per_hour=usd,
        market=market,
        source="a page",
        seen_on=seen_on,
        region="us-1",
        note=note,
    )


OFFERS = (
    offer(2, "Dear", "2026-11-20", note="an eighth of eight"),
    offer(0.5, "Cheap", "2026-10-22"),
    offer(0.4, "Old", "2026-01-01"),
    offer(0.3, "Whenever", None),
    offer(0.1, "Auction", "2026-11-01", market="spot"),
)
PRICES = PriceList(marked(OFFERS, TODAY), ("mine.csv, line 2: a slip",))


@pytest.fixture
def console() -> Page:
    """A terminal of 80 columns without colours."""
    return Page(80)


def test_the_overview_has_a_line_a_device(console):
    """The lowest that is not stale and who asks it, the highest, spot, how many, and how old the newest is."""
    render_prices([*KNOWN.find("l4"), *KNOWN.find("p4")], PRICES, TODAY, console)
    shown = console.text
    assert "l4      $0.50  Cheap  $2.00      $0.10       5     1 d" in shown
    assert "No price known: p4." in shown
    assert "! mine.csv, line 2: a slip" in shown
    assert "older than 180 days" in shown


def test_offers_go_from_cheap_to_dear_with_their_age(console):
    """On demand, then spot; the day and the days since, or undated; the sources once."""
    render_offers(*KNOWN.find("l4"), PRICES, TODAY, console)
    lines = [line.split() for line in console.text.splitlines()]
    rows = [line for line in lines if line and line[0].startswith("$")]
    assert [row[1] for row in rows] == ["Whenever", "Old", "Cheap", "Dear", "Auction"]
    assert rows[0][2:] == ["us-1", "undated"]
    assert rows[2] == ["$0.50", "Cheap", "us-1", "2026-10-22", "30", "d"]
    assert lines.index(["on", "demand"]) < lines.index(rows[0]) < lines.index(["spot"]) < lines.index(rows[4])
    assert ["Sources:", "a", "page."] in lines


def test_stale_offers_are_dim():
    """And only those."""
    console = Console(file=io.StringIO(), width=120, color_system="standard", force_terminal=True)
    render_offers(*KNOWN.find("l4"), PRICES, TODAY, console)
    shown = console.file.getvalue()
    dim = {name: re.search(rf"\x1b\[2m *{name}", shown) is not None for name in ("Old", "Whenever", "Cheap", "Dear")}
    assert dim == {"Old": True, "Whenever": True, "Cheap": False, "Dear": False}


def test_a_wide_terminal_has_room_for_notes():
    """What an offer really is: an eighth of a machine."""
    console = Page()
    render_offers(*KNOWN.find("l4"), PRICES, TODAY, console)
    assert "an eighth of eight" in console.text


def test_nobody_offers_it(console):
    """A sentence, and what a user can do."""
    render_offers(*KNOWN.find("p4"), PRICES, TODAY, console)
    assert "No price is known. A file named by $STOKER_PRICES can say one." in console.text


def test_json_is_one_document():
    """Every offer with its age in days; the day it was looked at; problems."""
    document = json.loads(json.dumps(prices_document(KNOWN.find("l4"), PRICES, TODAY)))
    assert document["today"] == "2026-11-21"
    assert [(one["provider"], one["age_days"], one["is_stale"]) for one in document["prices"]] == [
        ("Auction", 20, False),
        ("Whenever", None, True),
        ("Old", 324, True),
        ("Cheap", 30, False),
        ("Dear", 1, False),
    ]
    assert document["problems"] == ["mine.csv, line 2: a slip"]


def test_the_command():
    """The overview, one device's offers, and JSON."""
    assert "h100" in stoker_here("prices").out
    assert "AWS" in stoker_here("prices", "h100").out
    document = json.loads(stoker_here("prices", "H100", "--json").out)
    assert {one["device"] for one in document["prices"]} == {"h100"}
