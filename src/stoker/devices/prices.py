"""What an hour of a device costs: list prices with who said so and when, and a user's own in their place.

The built-in prices are in `prices.json`: what was published for one device with its share of the host, taxes, storage
and egress left out. Prices move every week and by zone; what is old is marked, and a user's file is the remedy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import date, timedelta
from importlib.resources import files
from typing import Literal

from stoker.devices.catalogue import Catalogue
from stoker.devices.catalogue_file import builtin_catalogue, catalogue
from stoker.devices.price_file import prices_from_json, read_prices
from stoker.devices.user_files import user_file
from stoker.records import Price

Market = Literal["on demand", "spot"]

STALE_AFTER = timedelta(days=180)
"""Age from which a price is marked: between October 2025 and March 2026 the rent of an H100 rose by 40 % (SemiAnalysis,
quoted by CompuX, "GPU pricing trends in 2026")."""


@dataclass(frozen=True)
class PriceList:
    """Prices, and in words which rows of a user's file could not be used."""

    prices: tuple[Price, ...]
    problems: tuple[str, ...] = ()

    def of(self, device: str | None = None, market: Market | None = None) -> tuple[Price, ...]:
        """Prices by device, those of one device from cheap to dear.

        Args:
            device: name of the catalogue; every device's if None.
            market: `on demand`, or `spot`, which may be taken back at any time; both if None.
        """
        chosen = (p for p in self.prices if device in (None, p.device) and market in (None, p.market))
        return tuple(sorted(chosen, key=lambda price: (price.device, price.usd_per_hour, price.provider)))

    def cheapest(self, device: str, market: Market = "on demand") -> Price | None:
        """The lowest price that is not stale, the lowest stale one where all are, None where nobody offers it."""
        offers = self.of(device, market)
        return next((price for price in offers if not price.is_stale), offers[0] if offers else None)


def price_list(today: date, known: Catalogue | None = None) -> PriceList:
    """The built-in prices and the user's, marked where they are stale on that day.

    The user's are in the file `$STOKER_PRICES`, or in `prices.csv` or `prices.json` of the configuration directory: a
    device it names is priced by it alone.

    Args:
        today: the day prices are looked at.
        known: the catalogue that device names are looked up in; the user's if None.
    """
    known = catalogue() if known is None else known
    path = user_file("STOKER_PRICES", "prices.csv", "prices.json")
    own = PriceList(()) if path is None else PriceList(*read_prices(path, known))
    named = {price.device for price in own.prices}
    kept = tuple(price for price in builtin_prices() if price.device not in named)
    return PriceList(marked((*kept, *own.prices), today), own.problems)


def cheapest(device: str, market: Market = "on demand", *, today: date | None = None) -> Price | None:
    """The lowest price of a device, as in `PriceList.cheapest`, on a day or on this one."""
    return _price_list(today or date.today()).cheapest(device, market)  # noqa: DTZ011 - the user's day


_price_list = functools.cache(price_list)


def marked(prices: Iterable[Price], today: date) -> tuple[Price, ...]:
    """Prices with `is_stale` set for that day: those older than `STALE_AFTER`, and those without a date."""
    return tuple(replace(price, is_stale=(age := age_days(price, today)) is None or age > STALE_AFTER.days)
                 for price in prices)  # fmt: skip


def age_days(price: Price, today: date) -> int | None:
    """Days since a price was seen; None where its source has no date."""
    return None if price.seen_on is None else (today - date.fromisoformat(price.seen_on)).days


@functools.cache
def builtin_prices() -> tuple[Price, ...]:
    """The prices that come with Stoker, as they were seen: none is marked."""
    text = files("stoker.devices").joinpath("prices.json").read_text(encoding="utf-8")
    prices, problems = prices_from_json(text, "prices", builtin_catalogue())
    if problems:
        raise ValueError(problems[0])
    return prices
