"""Money, energy and carbon of a forecast: a rate times a time, with what is assumed said in words.

Two independent uncertainties are joined as relative errors in quadrature, on each side of the value apart. A price is
taken as exact: what is uncertain of it is its age, which the price itself tells.
"""

from __future__ import annotations

import math

from stoker.devices import PUE_DATA_CENTRE, Grid, grid_of
from stoker.records import Basis, Estimate, Price
from stoker.units import format_money

_JOULES_PER_KWH = 3.6e6
_FIRMEST_FIRST: tuple[Basis, ...] = ("measured here", "calibrated", "roofline", "datasheet", "unknown")


def cost_usd(total_s: Estimate, price: Price) -> Estimate:
    """What a time costs at a price [USD]; a start is paid by the second, storage and egress are left out."""
    return total_s.scaled(price.usd_per_hour / 3600, "USD")


def energy_kwh(power_w: Estimate, total_s: Estimate, *, pue: float = PUE_DATA_CENTRE) -> Estimate:
    """Energy of a device over a time, with its share of the building's [kWh].

    Args:
        power_w: the device's mean draw while the job runs [W].
        total_s: how long it runs [s].
        pue: what the building draws for each watt of the device [fraction], at least 1.

    Raises:
        ValueError: `pue` is below 1.
    """
    if not pue >= 1:
        raise ValueError(f"a PUE is at least 1, got {pue}")
    return _product(power_w, total_s, "J").scaled(pue / _JOULES_PER_KWH, "kWh")


def co2_kg(energy: Estimate, grid: Grid | None = None) -> Estimate:
    """What an energy [kWh] emits on a grid, the world's average if None [kg of CO2 equivalent]."""
    return energy.scaled((grid or grid_of()).g_co2_per_kwh / 1000, "kg")


def assumptions(price: Price | None, *, pue: float = PUE_DATA_CENTRE, grid: Grid | None = None) -> str:
    """What money, energy and carbon of a forecast rest on, on one line.

    >>> assumptions(None, pue=1.54)
    'energy: the device × 1.54 for its building · carbon: world average, 481 g/kWh (2023)'
    """
    parts, grid = [], grid or grid_of()
    if price is not None:
        seen = "without a date" if price.seen_on is None else f"seen {price.seen_on}"
        where = f"{price.provider} {price.region}".strip()
        old = ", stale" if price.is_stale else ""
        parts.append(f"money: {format_money(price.usd_per_hour)}/h {price.market} at {where}, {seen}{old}")
    building = f"the device × {pue:g} for its building" if pue > 1 else "the device alone"
    name = grid.name[0].lower() + grid.name[1:] if grid.code == "world" else grid.name
    parts += [f"energy: {building}", f"carbon: {name}, {grid.g_co2_per_kwh:g} g/kWh ({grid.year})"]
    return " · ".join(parts)


def _product(a: Estimate, b: Estimate, unit: str) -> Estimate:
    """The product of two independent quantities that are not negative; it rests on the weaker of the two."""
    value = a.value * b.value
    below = math.hypot(_relative(a.value - a.low, a.value), _relative(b.value - b.low, b.value))
    above = math.hypot(_relative(a.high - a.value, a.value), _relative(b.high - b.value, b.value))
    basis = max(a.basis, b.basis, key=_FIRMEST_FIRST.index)
    return Estimate(value=value, low=max(0.0, value * (1 - below)), high=value * (1 + above), unit=unit, basis=basis)


def _relative(distance: float, value: float) -> float:
    return distance / value if value else 0.0
