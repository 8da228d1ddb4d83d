"""What it takes to fetch samples one by one, before they are a batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from stoker.loading import Samples

_AT_ONCE = 8
_TURNS = 3


def fetch_seconds(samples: Samples, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds that a process takes to fetch one sample; 0 where samples lie in memory, and a batch is one gathering.

    The first turn, in which files are opened, does not count.
    """
    if samples.is_in_memory:
        return 0.0
    found: list[float] = []
    for turn in range(_TURNS + 1):
        indices = (np.arange(_AT_ONCE, dtype=np.int64) + turn * _AT_ONCE) % len(samples)
        started = clock()
        samples.fetch(indices, 0)
        found.append((clock() - started) / _AT_ONCE)
    return statistics.median(found[1:])
