"""Which settings: legal plans, forecasts on any device, the choice among them and its explanation. No torch."""

from stoker.planning.choosing import ENOUGH_S, advice, choose, rental_advice
from stoker.planning.derivation import NotDerivable, derived
from stoker.planning.expansion import expanded
from stoker.planning.explanation import explain
from stoker.planning.forecast import Extents, forecast
from stoker.planning.guesses import unforecast
from stoker.planning.limits import Limits, Objective, parse_duration, parse_money
from stoker.planning.money import assumptions, co2_kg, cost_usd
from stoker.planning.ranking import least_demanding, rank
from stoker.planning.search import Search
from stoker.planning.traced import Needs, TracedForecasts, Traces

__all__ = [
    "ENOUGH_S", "Extents", "Limits", "Needs", "NotDerivable", "Objective", "Search", "TracedForecasts", "Traces",
    "advice", "assumptions", "choose", "co2_kg", "cost_usd", "derived", "expanded", "explain", "forecast",
    "least_demanding", "parse_duration", "parse_money", "rank", "rental_advice", "unforecast",
]  # fmt: skip
