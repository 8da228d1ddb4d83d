"""Doing it: the loop, evaluation, checkpoints, events."""

from stoker.training.checkpoints import Checkpointer, kept_weights, load_weights, model_weights, restore
from stoker.training.evaluation import evaluate, evaluation_batch
from stoker.training.interrupts import StopRequest, stop_on_signals
from stoker.training.loop import Best, Loop
from stoker.training.telemetry import Sink, Telemetry

__all__ = [
    "Best", "Checkpointer", "Loop", "Sink", "StopRequest", "Telemetry", "evaluate", "evaluation_batch", "kept_weights",
    "load_weights", "model_weights", "restore", "stop_on_signals",
]  # fmt: skip
