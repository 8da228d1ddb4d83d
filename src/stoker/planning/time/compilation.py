"""How long compiling or capturing a plan takes: once, before its first update is done.

Compiled code is shared by what is alike (a block compiled once serves all of its kind), so what counts is how many
different operations a micro-batch has, not how many it makes. A captured pass is written down operation by operation:
there all of them count.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from stoker.records.estimate import Estimate
from stoker.records.run import Calibration

_START_S = 10.0
"""To load the compiler and compile the least there is [s]."""
_S_PER_OPERATION = 0.25
"""For each different operation of the forward and the backward pass [s]; both as in bench/results/compile_time_*."""
_CAPTURED_S_PER_OPERATION = 2.5e-3
"""To capture each operation of the forward and the backward pass [s]: 5 ms of CPU time on a busy core, for GRUs of 16
and 32 time steps (docs/log.md, 2026-11-22); taken as half of that where it is not busy."""
_FACTOR = 2.0
"""From one machine and cache to another, 8 cases in 10 lie within this factor."""
_LEAST_FACTOR = 1.3
"""The same where it was measured before."""


def compile_seconds(operations: Iterable[tuple[object, str]]) -> Estimate:
    """What compiling takes [s].

    Args:
        operations: of a micro-batch, each with its phase.
    """
    different = {(operation, phase) for operation, phase in operations if phase != "optimizer"}
    seconds = _START_S + _S_PER_OPERATION * len(different)
    return Estimate(value=seconds, low=seconds / _FACTOR, high=seconds * _FACTOR, unit="s", basis="datasheet")


def capture_seconds(num_operations: float) -> Estimate:
    """What capturing a pass of so many operations takes, forward and backward [s]."""
    seconds = _CAPTURED_S_PER_OPERATION * num_operations
    return Estimate(value=seconds, low=seconds / _FACTOR, high=seconds * _FACTOR, unit="s", basis="datasheet")


def as_measured_before(expected: Estimate, calibrations: Sequence[Calibration]) -> Estimate:
    """`expected` corrected by how much longer or shorter compiling took on this device before, if it was measured."""
    known = [c for c in calibrations if c.quantity == "compile_s" and min(c.measured, c.forecast) > 0]
    ratios = [math.log(c.measured / c.forecast) for c in known]
    if not ratios:
        return expected
    middle = statistics.median(ratios)
    spread = max(math.log(_LEAST_FACTOR), *(abs(ratio - middle) for ratio in ratios))
    seconds = expected.value * math.exp(middle)
    low, high = seconds * math.exp(-spread), seconds * math.exp(spread)
    return Estimate(value=seconds, low=low, high=high, unit="s", basis="calibrated")
