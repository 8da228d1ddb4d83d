"""How fast this machine's CPU is while a plan is made, beside when `stoker doctor` measured it."""

from __future__ import annotations

import functools
import time

from stoker.planning.time.pace import pace_of
from stoker.profiling.anchors import Turn, measure_anchors
from stoker.records import MicroBenchmark, Pace

_HOLDS_S = 300.0
"""For so long one look has to do [s]: plans of one job are compared at one pace."""


def pace_now(benchmark: MicroBenchmark) -> Pace | None:
    """The pace of the CPU that `benchmark` was measured on, which is here, with as many threads; half a second.

    None where nothing was kept to compare with, as by earlier versions.
    """
    if benchmark.device.kind != "cpu" or not benchmark.anchors_s:
        return None
    return pace_of(benchmark.anchors_s, _turns_now(benchmark.threads, int(time.monotonic() / _HOLDS_S)))


@functools.lru_cache(maxsize=16)
def _turns_now(threads: int, period: int) -> tuple[Turn, ...]:  # noqa: ARG001 - `period` is there to be looked up by
    return measure_anchors(threads=threads)
