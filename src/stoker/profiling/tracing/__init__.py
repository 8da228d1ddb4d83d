"""Tracing one update on fake tensors of a device that need not be here."""

from stoker.profiling.tracing.answers import Hints
from stoker.profiling.tracing.fake_device import can_pretend_cuda, pretending, why_not_cuda
from stoker.profiling.tracing.step_function import trace_step
from stoker.profiling.tracing.update import Shortening, trace_update

__all__ = ["Hints", "Shortening", "can_pretend_cuda", "pretending", "trace_step", "trace_update", "why_not_cuda"]
