"""Runs exported models: one protocol, one file per engine."""

from stoker.engines.base import Engine, Graph
from stoker.engines.loader import default_threads, engine_record, engine_records, load, load_graph
