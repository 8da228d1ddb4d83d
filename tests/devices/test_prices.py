from __future__ import annotations

import json
from datetime import date, timedelta
from importlib.resources import files

import pytest

from stoker.devices import cheapest, price_list
from stoker.devices.catalogue import builtin_catalogue
from stoker.devices.prices import STALE_AFTER, PriceList, age_days, builtin_prices, marked
from stoker.records import Price

TODAY = date(2026, 11, 21)
KNOWN = builtin_catalogue()


def price(usd: float, *, market="on demand", seen_on: str | None = "2026-11-01", device: str = "l4") -> Price:
    """An offer."""
    return Price(device=device, provider="p", usd_per_hour=usd, market=market, source="s", seen_on=seen_on)


@pytest.fixture(autouse=True)
def no_files_of_a_user(monkeypatch, tmp_path):
    """Only what a test writes is found."""
    monkeypatch.delenv("STOKER_PRICES", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_every_built_in_price_says_who_and_when():
    """A provider, a source and a day that is not in the future, or none."""
    assert len(builtin_prices()) >= 100
    for one in builtin_prices():
        assert one.provider, one
        assert one.source, one
        assert one.seen_on is None or date(2025, 12, 1) <= date.fromisoformat(one.seen_on) <= TODAY, one
        assert 0.01 < one.usd_per_hour < 30, one


def test_sources_are_named_and_used():
    """No key without words, no words without a price."""
    document = json.loads(files("stoker.devices").joinpath("prices.json").read_text(encoding="utf-8"))
    assert {row["source"] for row in document["prices"]} == set(document["sources"])


def test_the_large_providers_are_there():
    """On-demand and spot prices of common devices."""
    providers = {one.provider.split(" (")[0] for one in builtin_prices()}
    assert {"AWS", "Google Cloud", "Azure", "Lambda", "RunPod", "Vast.ai", "Spheron", "CoreWeave"} <= providers
    assert {one.market for one in builtin_prices()} == {"on demand", "spot"}


def test_spot_costs_less_than_the_same_provider_on_demand():
    """A spot price copied from the on-demand column, as one catalogue has them, would show."""
    listed = price_list(TODAY, KNOWN)
    for spot in listed.of(market="spot"):
        others = [one for one in listed.of(spot.device, "on demand") if one.provider == spot.provider]
        assert all(spot.usd_per_hour < one.usd_per_hour for one in others), spot


def test_no_offer_twice():
    """One price for a device, provider, market and region."""
    keys = [(one.device, one.provider, one.market, one.region) for one in builtin_prices()]
    assert len(keys) == len(set(keys))


def test_what_is_old_or_undated_is_stale():
    """On the last day of the term a price still counts; the day after it is marked."""
    last = (TODAY - STALE_AFTER).isoformat()
    older = (TODAY - STALE_AFTER - timedelta(days=1)).isoformat()
    flags = [one.is_stale for one in marked([price(1, seen_on=day) for day in (last, older, None)], TODAY)]
    assert flags == [False, True, True]
    assert age_days(price(1, seen_on=last), TODAY) == STALE_AFTER.days
    assert age_days(price(1, seen_on=None), TODAY) is None


def test_the_lowest_that_is_not_stale():
    """A stale offer counts only where there is no other; spot never stands in for on demand."""
    offers = marked([price(1, seen_on=None), price(3), price(2), price(0.5, market="spot")], TODAY)
    listed = PriceList(offers)
    assert listed.cheapest("l4").usd_per_hour == 2
    assert listed.cheapest("l4", "spot").usd_per_hour == 0.5
    assert PriceList(offers[:1]).cheapest("l4").usd_per_hour == 1
    assert listed.cheapest("h100") is None
    assert [one.usd_per_hour for one in listed.of("l4")] == [0.5, 1, 2, 3]


def test_a_user_prices_a_device_alone(monkeypatch, tmp_path):
    """A device in the user's file has no other price, dear as it may be; all others keep theirs."""
    path = tmp_path / "mine.csv"
    path.write_text("device,provider,usd_per_hour,seen_on\nh100,our cluster,9,2026-11-20\nh1000,x,1,\n")
    monkeypatch.setenv("STOKER_PRICES", str(path))
    listed = price_list(TODAY, KNOWN)
    assert [one.provider for one in listed.of("h100")] == ["our cluster"]
    assert listed.cheapest("l4") == PriceList(marked(builtin_prices(), TODAY)).cheapest("l4")
    (problem,) = listed.problems
    assert "mine.csv, line 3" in problem


def test_the_cheapest_on_a_day():
    """What plans ask for: on the day of these prices an H100 is offered at a price that is not stale."""
    offer = cheapest("h100", today=TODAY)
    assert offer is not None
    assert not offer.is_stale
    assert cheapest("h100", today=TODAY + timedelta(days=1000)).is_stale
    assert cheapest("p4", today=TODAY) is None
