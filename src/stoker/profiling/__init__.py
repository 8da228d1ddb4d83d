"""What one step does: its facts, trials on the device, and what the device really reaches."""

from stoker.profiling.memory import PeakMemory, ran_out_of_memory
from stoker.profiling.profile import profile
from stoker.profiling.surroundings import environment
from stoker.profiling.trial import threads, try_plan

__all__ = ["PeakMemory", "environment", "profile", "ran_out_of_memory", "threads", "try_plan"]
