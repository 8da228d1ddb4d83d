"""Which settings: legal plans, forecasts on any device, the choice among them and its explanation. No torch."""

from stoker.planning.adding_up import adding_up
from stoker.planning.bottleneck import find_bottleneck
from stoker.planning.choosing import ENOUGH_S, advice, choose, rental_advice
from stoker.planning.crowding import crowded, words_on_others
from stoker.planning.derivation import NotDerivable, derived
from stoker.planning.expansion import expanded
from stoker.planning.explanation import explain, why_not_compiled
from stoker.planning.forecast import Extents, forecast
from stoker.planning.guesses import has_plenty, unforecast
from stoker.planning.limits import Limits, Objective, parse_duration, parse_memory, parse_money
from stoker.planning.money import assumptions, co2_kg, cost_usd
from stoker.planning.past_errors import errors_so_far
from stoker.planning.ranking import least_demanding, rank
from stoker.planning.remedies import Remedy, RunTimes
from stoker.planning.search import Search
from stoker.planning.traced import Needs, TracedForecasts, Traces
from stoker.planning.update_bounds import UpdateBounds, as_profiled, update_bounds

__all__ = [
    "ENOUGH_S", "Extents", "Limits", "Needs", "NotDerivable", "Objective", "Remedy", "RunTimes", "Search",
    "TracedForecasts", "Traces", "UpdateBounds", "adding_up", "advice", "as_profiled", "assumptions", "choose",
    "co2_kg", "cost_usd", "crowded", "derived", "errors_so_far", "expanded", "explain", "find_bottleneck", "forecast",
    "has_plenty", "least_demanding", "parse_duration", "parse_memory", "parse_money", "rank", "rental_advice",
    "unforecast", "update_bounds", "why_not_compiled", "words_on_others",
]  # fmt: skip
