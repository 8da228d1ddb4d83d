"""From the operations of a step to its time, with an interval."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from bench.forecast.gpu_steps import Step
from stoker.planning.model.gpu_roofline import kind_of
from stoker.planning.model.gpu_times import GpuTimes
from stoker.records.trace import Operation

_HOST_S = 8e-6
"""What the host needs to start one operation of an eager step [s]: PyTorch on a server of 2023."""
_WAIT_S = 1.5e-4
"""What is lost each time the host waits for the device, as it does for a mask's places: the queue runs empty [s]."""
_QUANTILE = 1.2816
"""Of a normal distribution: 80 % lie within so many standard deviations."""


@dataclass(frozen=True)
class Allocation:
    """Time of asking the driver for memory [s]: expected, and what it may take on top on a machine where it is slow."""

    expected_s: float
    slow_s: float


@dataclass(frozen=True)
class SlowAllocator:
    """What the published harness adds by emptying the allocator's cache before every step.

    The forward pass of training then asks the driver for all its memory anew. `call_s` is a call of `cudaMalloc` [s]:
    nobody documents what one costs, so it was judged from the three training labels of a V100 whose forward passes take
    8 to 15 ms longer than their operations. Those labels (`Label.is_judged_on`) are no test of it, and means are given
    without them too. `slow_s_per_byte` [s/byte] is what it may take besides: on some machines the forward pass takes as
    long as the backward pass for it, and no label says beforehand on which. It widens the upper end alone.
    """

    call_s: float = 45e-6
    slow_s_per_byte: float = 4.5e-12

    def forward(self, operations: Mapping[Operation, int]) -> Allocation:
        """Of the forward pass of training, which frees next to nothing."""
        calls, total = 0.0, 0.0
        for operation, count in operations.items():
            for tensor in operation.outputs:
                size = tensor.numel * (4 if tensor.dtype == "fp32" else 1)
                # Requests below 10 MiB share segments of 20 MiB, those below 1 MiB hardly count.
                calls += count * (1 if size >= 10 * 2**20 else size / (20 * 2**20) if size > 2**20 else 0)
                total += count * size
        return Allocation(self.call_s * calls, self.slow_s_per_byte * total)


@dataclass(frozen=True)
class StepForecast:
    """Time of a step [s] with an interval that holds 8 cases in 10; `shares` of the time by kind of operation."""

    seconds: float
    low_s: float
    high_s: float
    forward_s: float
    backward_s: float
    shares: Mapping[str, float]


def forecast_step(step: Step, times: GpuTimes, *, is_compiled: bool, allocator: SlowAllocator) -> StepForecast:
    """The forecast of a step on a device."""
    parts: dict[str, float] = defaultdict(float)
    spread: dict[str, float] = defaultdict(float)
    phases = []
    chosen = (step.fused_forward, step.fused_backward) if is_compiled else (step.forward, step.backward)
    for counts in chosen:
        on_device = 0.0
        for operation, count in counts.items():
            seconds = times.seconds(operation) * count
            kind = kind_of(operation)[0]
            parts[kind] += seconds
            # Errors of one kind are taken to go together, those of different kinds not.
            spread[kind] += seconds * times.relative_error(operation)
            on_device += seconds
        waits = sum(count for operation, count in counts.items() if operation.name.startswith("nonzero"))
        parts["waiting"] += waits * _WAIT_S
        on_device += waits * _WAIT_S
        # Only where there is nothing to compute does the host hold the device up.
        phases.append(max(on_device, 0.0 if is_compiled else _HOST_S * Counter(counts).total()))
    forward, backward = phases
    slow_s = 0.0
    if step.backward:
        allocation = allocator.forward(step.forward)
        # A driver's call may cost nothing or twice as much.
        parts["allocation"] = spread["allocation"] = allocation.expected_s
        slow_s = allocation.slow_s
        forward += allocation.expected_s
    total = forward + backward
    low, high = interval(total, spread, slow_s)
    shares = {kind: value / total for kind, value in sorted(parts.items(), key=lambda item: -item[1])}
    return StepForecast(total, low, high, forward, backward, shares)


def interval(total_s: float, spread: Mapping[str, float], slow_s: float) -> tuple[float, float]:
    """Between what a step takes in 8 cases of 10 [s].

    Args:
        total_s: the expected time.
        spread: one standard deviation by kind of operation, independent of each other: a factor, up or down.
        slow_s: one standard deviation of what can only come on top: it widens the upper end, and is a sum of time.
    """
    factor = math.exp(_QUANTILE * math.sqrt(sum(value**2 for value in spread.values())) / total_s)
    return total_s / factor, total_s + math.hypot(total_s * (factor - 1), _QUANTILE * slow_s)
