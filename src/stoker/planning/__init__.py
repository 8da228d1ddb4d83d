"""Which settings: legal plans, forecasts, the search and its explanation. No torch."""

from stoker.planning.forecast import Extents, forecast
from stoker.planning.search import Search

__all__ = ["Extents", "Search", "forecast"]
