"""What an update draws: the power model over what the device does.

Source: the terms are those of `power`; their spread is what published estimates of the same form reach: EnergAIzer
(arXiv 2604.20105) 7 to 8 %, an architecture-aware model of DGX nodes 11 %, estimates by TDP alone 27 to 37 %.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from stoker.planning.time.bandwidth import ROW_KERNELS, row_bytes, stream_bytes
from stoker.planning.time.power import PowerModel
from stoker.records.estimate import Estimate
from stoker.records.hardware import Hardware
from stoker.records.trace import Operation

_QUANTILE = 1.2816
"""Of a normal distribution: 80 % lie within so many standard deviations."""
_POWER_ERROR = 0.15
"""One standard deviation of the mean power, where the limit does not hold it [fraction]."""
_LIMITED_ERROR = 0.05
"""The same where it does: the driver keeps a board at its limit."""


def energy_joules(
    operations: Iterable[tuple[Operation, int]], update_s: Estimate, hardware: Hardware
) -> Estimate | None:
    """Energy that a device takes for an update [J], without the rest of the machine; None where its limit is unknown.

    Args:
        operations: the update's operations, and how often each runs.
        update_s: the update's time [s], gaps in which the device waits included.
        hardware: the device.
    """
    if hardware.power_w is None:
        return None
    power = PowerModel.of(hardware)
    flops: Mapping[str, float]
    flops, num_bytes = _work(operations, hardware)
    value = power.energy_j(update_s.value, flops, num_bytes)
    is_limited = value >= 0.98 * hardware.power_w * update_s.value
    spread = 1 + _QUANTILE * (_LIMITED_ERROR if is_limited else _POWER_ERROR)
    # A slower update draws its floor for longer; the work in it stays.
    ends = [power.energy_j(seconds, flops, num_bytes) for seconds in (update_s.low, update_s.high)]
    low, high = min(*ends, value) / spread, max(*ends, value) * spread
    ceiling = hardware.power_w * update_s.high
    return Estimate(value=value, low=low, high=max(value, min(high, ceiling)), unit="J", basis=update_s.basis)


def _work(operations: Iterable[tuple[Operation, int]], hardware: Hardware) -> tuple[dict[str, float], float]:
    """FLOPs by dtype, and bytes across memory."""
    flops: dict[str, float] = defaultdict(float)
    num_bytes = 0.0
    for operation, count in operations:
        if operation.flops:
            dtype = next((tensor.dtype for tensor in reversed(operation.inputs)), "fp32")
            flops[dtype if dtype in hardware.dense_flops else "fp32"] += float(operation.flops * count)
        if operation.name in ROW_KERNELS and operation.inputs:
            element = operation.bytes_written / max(1, sum(tensor.numel for tensor in operation.outputs))
            num_bytes += row_bytes(operation, hardware, element) * count
        else:
            num_bytes += stream_bytes(operation, hardware) * count
    return dict(flops), num_bytes
