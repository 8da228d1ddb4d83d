"""How much memory an update needs: of a GPU by exact replay of its allocator, of a machine by that of malloc."""

from stoker.planning.memory.caching_allocator import AllocatorSettings, CachingAllocator
from stoker.planning.memory.fit import Residuals, largest_that_fits, needed, probability_it_fits
from stoker.planning.memory.hidden import context_bytes, cublas_workspace_bytes, hidden_bytes
from stoker.planning.memory.peak import MemoryForecast, Replay, forecast_memory, least_capacity, replay
from stoker.planning.memory.resident import resident_peak
from stoker.planning.memory.timeline import Timeline, timeline_of

__all__ = [
    "AllocatorSettings", "CachingAllocator", "MemoryForecast", "Replay", "Residuals", "Timeline", "context_bytes",
    "cublas_workspace_bytes", "forecast_memory", "hidden_bytes", "largest_that_fits", "least_capacity", "needed",
    "probability_it_fits", "replay", "resident_peak", "timeline_of",
]  # fmt: skip
