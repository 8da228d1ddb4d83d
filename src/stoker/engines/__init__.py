"""Runs exported models: one protocol, one file per engine."""

from stoker.engines.base import Engine, EngineRecord, Graph, Where
from stoker.engines.loader import default_threads, engine_record, engine_records, load, load_graph

__all__ = [
    "Engine",
    "EngineRecord",
    "Graph",
    "Where",
    "default_threads",
    "engine_record",
    "engine_records",
    "load",
    "load_graph",
]
