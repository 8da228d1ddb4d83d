"""Runs exported models: one protocol, one file per engine."""

from stoker.engines.base import Engine, Graph, Where
from stoker.engines.loader import default_threads, load, load_graph

__all__ = ["Engine", "Graph", "Where", "default_threads", "load", "load_graph"]
