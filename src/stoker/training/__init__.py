"""Doing it: the loop, evaluation, checkpoints, recovery, events."""

from stoker.training.agreement import require_seen_by_all
from stoker.training.carrying import Carried, given_by_the_furthest
from stoker.training.checkpoints import KEPT_AT, Checkpointer, keep_weights, kept_at, kept_path
from stoker.training.course import Course
from stoker.training.evaluation import evaluate, evaluation_batch
from stoker.training.hooks import Hook, Hooks, Listening, Update, on
from stoker.training.interrupts import StopRequest, stop_on_signals
from stoker.training.loop import Best, Called, Loop, evaluation_is_due
from stoker.training.recovery import Recovery, Replanned, RollBack, Together, tell_replanned
from stoker.training.resuming import kept_weights, model_weights, newest_together, restore
from stoker.training.snapshots import load_weights
from stoker.training.telemetry import Sink, Telemetry
from stoker.training.threads import ThreadKeeper, thread_keeper
from stoker.training.watchdog import Patience, Watchdog, patience_s, slowest_phase_s

__all__ = [
    "KEPT_AT", "Best", "Called", "Carried", "Checkpointer", "Course", "Hook", "Hooks", "Listening", "Loop", "Patience",
    "Recovery", "Replanned", "RollBack", "Sink", "StopRequest", "Telemetry", "ThreadKeeper", "Together", "Update",
    "Watchdog", "evaluate", "evaluation_batch", "evaluation_is_due", "given_by_the_furthest", "keep_weights",
    "kept_at", "kept_path", "kept_weights", "load_weights",
    "model_weights", "newest_together", "on", "patience_s", "require_seen_by_all", "restore", "slowest_phase_s",
    "stop_on_signals", "tell_replanned", "thread_keeper",
]  # fmt: skip
