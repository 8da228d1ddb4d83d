from __future__ import annotations

import pytest

from stoker.devices import grid_of
from stoker.planning.model.objectives import co2_kg, cost_assumptions, cost_usd, energy_kwh
from stoker.records import Estimate, Price

HOUR = Estimate(value=3600, low=3000, high=4500, unit="s", basis="calibrated")
H100 = Price(
    device="h100", provider="Us", usd_per_hour=3.0, market="on demand", source="s", seen_on="2026-11-01", region="there"
)


def watts(value: float, spread: float = 0.0, basis="datasheet") -> Estimate:
    """A power with a symmetric interval [W]."""
    return Estimate(value=value, low=value * (1 - spread), high=value * (1 + spread), unit="W", basis=basis)


def test_cost_is_price_times_hours():
    """With the time's interval and basis: a price is exact."""
    cost = cost_usd(HOUR, H100)
    assert (cost.value, cost.low, cost.high) == pytest.approx((3.0, 2.5, 3.75))
    assert (cost.unit, cost.basis) == ("USD", "calibrated")


def test_energy_of_a_kilowatt_for_an_hour():
    """One kilowatt-hour at the device, half as much again with a building of PUE 1.5."""
    exact = Estimate(value=3600, low=3600, high=3600, unit="s", basis="measured here")
    assert energy_kwh(watts(1000), exact, pue=1).value == pytest.approx(1)
    energy = energy_kwh(watts(1000), exact, pue=1.5)
    assert (energy.value, energy.low, energy.high) == pytest.approx((1.5, 1.5, 1.5))
    assert (energy.unit, energy.basis) == ("kWh", "datasheet")


def test_uncertainties_are_joined_in_quadrature_on_each_side():
    """3 % and 4 % make 5 %; a side that is certain adds nothing."""
    time = Estimate(value=100, low=96, high=100, unit="s", basis="roofline")
    energy = energy_kwh(watts(100, 0.03), time, pue=1)
    assert energy.low / energy.value == pytest.approx(0.95)
    assert energy.high / energy.value == pytest.approx(1.03)
    assert energy.basis == "datasheet"


def test_the_wider_the_power_the_wider_the_energy():
    """And never below nothing."""
    wide = energy_kwh(watts(100, 0.9), Estimate(value=1, low=0.1, high=2, unit="s", basis="roofline"))
    assert wide.low == 0
    assert wide.high > 2 * wide.value


def test_no_time_no_energy():
    """A forecast of nothing costs nothing."""
    nothing = Estimate(value=0, low=0, high=0, unit="s", basis="roofline")
    assert energy_kwh(watts(100, 0.1), nothing).high == 0
    assert cost_usd(nothing, H100).high == 0


def test_carbon_of_a_grid():
    """A kilowatt-hour on the world's average grid, and on a cleaner one."""
    kwh = Estimate(value=10, low=8, high=12, unit="kWh", basis="calibrated")
    assert co2_kg(kwh).value == pytest.approx(10 * grid_of().g_co2_per_kwh / 1000)
    clean = co2_kg(kwh, grid_of("no"))
    assert clean.high == pytest.approx(12 * grid_of("no").g_co2_per_kwh / 1000)
    assert clean.unit == "kg"


@pytest.mark.parametrize("pue", [0.9, 0.0, float("nan")])
def test_a_building_that_gives_energy_back(pue):
    """A PUE below one is a mistake of the caller's."""
    with pytest.raises(ValueError, match="at least 1"):
        energy_kwh(watts(100), HOUR, pue=pue)


def test_assumptions_in_words():
    """Price with place and day, building, grid with its year; what is stale is said."""
    said = cost_assumptions(H100, pue=1.54, grid=grid_of("fr"))
    assert said.startswith("money: $3.00/h on demand at Us there, seen 2026-11-01 · energy: the device × 1.5 for its ")
    assert "machine × 1.54 for its building" in said
    assert said.endswith("carbon: France, 56 g/kWh (2023)")
    stale = Price(device="h100", provider="Us", usd_per_hour=3, market="spot", source="s", seen_on=None, is_stale=True)
    assert "spot at Us, without a date, stale" in cost_assumptions(stale)
    assert "energy: the device alone" in cost_assumptions(None, pue=1)
