"""Running an exported model: one seam, and an engine a file."""

from stoker.engines.base import Engine, Graph, Where
from stoker.engines.loader import default_threads, load, load_graph

__all__ = ["Engine", "Graph", "Where", "default_threads", "load", "load_graph"]
