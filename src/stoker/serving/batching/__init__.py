"""Requests that come one by one, computed in batches: who is let in, what goes together, and when."""

from stoker.serving.batching.batcher import Batcher
from stoker.serving.batching.executed import CutReason, Executed

__all__ = ["Batcher", "CutReason", "Executed"]
