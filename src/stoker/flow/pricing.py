"""What a candidate costs: the price of its device, the energy it takes, and what that puts into the air."""

from __future__ import annotations

import dataclasses

from stoker import planning
from stoker.devices import PUE_DATA_CENTRE, PUE_HERE, Place, cheapest, grid_of
from stoker.errors import BadJob
from stoker.flow.planner import Planner
from stoker.records import Candidate, Price


def price_of(place: Place) -> Price | None:
    """The lowest price of an hour on demand; None for what is here, and where nobody is known to offer it."""
    return None if place.is_here else cheapest(place.name)


def priced(planner: Planner, place: Place, candidate: Candidate) -> Candidate:
    """The candidate with its energy, carbon dioxide and cost, as far as they are known."""
    forecast, price = candidate.forecast, price_of(place)
    pue = PUE_HERE if place.is_here else PUE_DATA_CENTRE
    try:
        energy = planner.forecasts(place).energy_kwh(candidate.plan, forecast, pue=pue)
    except BadJob:  # it cannot be traced, and is planned by trials alone
        energy = None
    return dataclasses.replace(
        candidate,
        price=price,
        forecast=dataclasses.replace(
            forecast,
            energy_kwh=energy,
            co2_kg=None if energy is None else planning.co2_kg(energy, grid_of()),
            cost_usd=None if price is None else planning.cost_usd(forecast.total_s, price),
        ),
    )


def assumptions(candidate: Candidate) -> str:
    """What its money, energy and carbon rest on, on one line."""
    pue = PUE_HERE if candidate.is_here else PUE_DATA_CENTRE
    return planning.assumptions(candidate.price, pue=pue, grid=grid_of())
