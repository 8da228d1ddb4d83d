"""What one step does: its facts, trials on the device, and what the device really reaches."""

from stoker.profiling.memory import PeakMemory
from stoker.profiling.profile import profile
from stoker.profiling.surroundings import environment
from stoker.profiling.thread_count import threads
from stoker.profiling.tracing import trace_step, trace_update
from stoker.profiling.tracing.repetition import trace_with_repetition
from stoker.profiling.trial import try_plan

__all__ = [
    "PeakMemory", "environment", "profile", "threads",
    "trace_step", "trace_update", "trace_with_repetition", "try_plan",
]  # fmt: skip
