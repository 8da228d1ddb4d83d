"""Doing it: the loop, evaluation, checkpoints, recovery, events."""

from stoker.training.carrying import Carried, given_by_the_furthest
from stoker.training.checkpoints import Checkpointer, kept_weights, load_weights, model_weights, restore
from stoker.training.evaluation import evaluate, evaluation_batch
from stoker.training.interrupts import StopRequest, stop_on_signals
from stoker.training.loop import Best, Called, Loop
from stoker.training.recovery import Recovery, Replanned, RollBack, Together, tell_replanned
from stoker.training.telemetry import Sink, Telemetry
from stoker.training.threads import ThreadKeeper, thread_keeper
from stoker.training.watchdog import Watchdog

__all__ = [
    "Best", "Called", "Carried", "Checkpointer", "Loop", "Recovery", "Replanned", "RollBack", "Sink", "StopRequest",
    "Telemetry", "ThreadKeeper", "Together", "Watchdog", "evaluate", "evaluation_batch", "given_by_the_furthest",
    "kept_weights", "load_weights", "model_weights", "restore", "stop_on_signals", "tell_replanned", "thread_keeper",
]  # fmt: skip
