"""Where rows come from: one seam, and a file for each format."""

from stoker.predicting.sources.base import Reader, Source
from stoker.predicting.sources.finding import find_sources

__all__ = ["Reader", "Source", "find_sources"]
