"""What one update is made of by what it waits for: products, memory, the host, the batch's way to the device.

An operation counts as arithmetic where its FLOPs take longer at the device's rate than its bytes at its bandwidth
(the roofline: Williams, Waterman and Patterson, CACM 2009), else as memory bandwidth; in either case with the time that
is forecast for it, which for small operations is far above the roof. Of each operation on a CPU, the least time that
any takes there is the host's.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stoker.planning.time import OperationTimes
from stoker.planning.time.fusion import kernel_shares
from stoker.planning.time.power import flops_by_dtype
from stoker.planning.time.update import UpdateTime, Work
from stoker.records import Basis, Bound, Ceilings, Hardware, KernelTable, Operation, Share

_START_S = 4e-6
"""The least time of an operation on a CPU that was not measured [s]."""
_UNKNOWN_FLOPS_PER_BYTE = 10.0
"""Where neither rates nor bandwidth are known: CPUs and GPUs of today lie between 5 and 300 in their fastest dtype."""
_PHASES = ("gradient", "forward", "backward", "update")
_PRODUCT = re.compile(r"mm$|conv|attention|dot$|linear|lstm|gru")
_FROM_SYSTEM, _CROSSING = "memory had from the system", "the batch's way to the device"
"""What `UpdateTime.shares` calls them."""


@dataclass(frozen=True, kw_only=True)
class UpdateBounds:
    """One update, forecast.

    `seconds` by what it waits for [s]; of memory bandwidth, `from_system_s` are page faults. `flops` are executed
    ones by dtype, `model_flops` those without recomputation, `num_bytes` what operations read and write.
    `is_profiled` says that arithmetic and memory are told apart by a profile of the run, not by forecast.
    """

    seconds: Mapping[Bound, float]
    flops: Mapping[str, float]
    model_flops: Mapping[str, float]
    num_bytes: float
    num_operations: float
    from_system_s: float
    basis: Basis
    is_profiled: bool = False

    @property
    def total_s(self) -> float:
        """The whole update [s]."""
        return sum(self.seconds.values())


def update_bounds(
    work: Work,
    update: UpdateTime,
    times: OperationTimes,
    hardware: Hardware,
    ceilings: Ceilings | None = None,
    *,
    without_recomputation: Work | None = None,
    precision: str = "fp32",
    is_compiled: bool = False,
) -> UpdateBounds:
    """Split the forecast of an update by what it waits for.

    Args:
        work: what the update does.
        update: its time, as `update_time` gives it for the same work, times and hardware.
        times: of the device's operations.
        hardware: the device.
        ceilings: what it reaches, if that was measured; else the datasheet says which roof an operation is under.
        without_recomputation: the same update without activation checkpointing (None: there is none).
        precision: the plan's; `tf32` traces as fp32, and is computed as what it is.
        is_compiled: elementwise chains are one kernel each.
    """
    operations = work.trace.operations
    left = _left_when_compiled(work, times) if is_compiled else [1.0] * len(operations)
    executed = [(operations[index], count * left[index]) for index, _, _, count in work.counts]
    seconds: defaultdict[Bound, float] = defaultdict(float)
    start_s = _start_s(hardware)
    for operation, count in executed:
        each = times.seconds(operation)
        started = min(start_s, each)
        seconds["host launch"] += count * started
        seconds[_roof(operation, hardware, ceilings, precision)] += count * (each - started)
    from_system_s, crossing_s = _named(update.shares, _FROM_SYSTEM), _named(update.shares, _CROSSING)
    # What is left of the update is Python, autograd, and a GPU's wait for what the host has not started yet.
    of_host = update.step_s.value - sum(seconds.values()) - from_system_s - crossing_s
    seconds["host launch"] += max(0.0, of_host)
    seconds["memory bandwidth"] += from_system_s
    seconds["copies"] += crossing_s
    once = without_recomputation or work
    return UpdateBounds(
        seconds=dict(seconds),
        flops=_flops(work, precision),
        model_flops=_flops(once, precision),
        num_bytes=sum((one.bytes_read + one.bytes_written) * count for one, count in executed),
        num_operations=sum(count for _, count in executed),
        from_system_s=from_system_s,
        basis=update.step_s.basis,
    )


def as_profiled(bounds: UpdateBounds, table: KernelTable) -> UpdateBounds:
    """The same with arithmetic and memory in the proportion in which a profile saw operations take time.

    Products, convolutions, attention and recurrent layers count as arithmetic, all else within updates as memory.
    """
    within = [one for one in table.kernels if one.phase in _PHASES and not one.operation.endswith("Backward0")]
    products_s = sum(table.seconds(one) for one in within if _PRODUCT.search(one.operation))
    whole_s = sum(table.seconds(one) for one in within)
    if whole_s <= 0:
        return bounds
    arithmetic, memory = (bounds.seconds.get(bound, 0.0) for bound in ("arithmetic", "memory bandwidth"))
    share, busy_s = products_s / whole_s, arithmetic + memory
    seconds: dict[Bound, float] = {"arithmetic": busy_s * share, "memory bandwidth": busy_s * (1 - share)}
    return replace(bounds, seconds={**bounds.seconds, **seconds}, is_profiled=True)


def _left_when_compiled(work: Work, times: OperationTimes) -> list[float]:
    """Of each operation's time, the mean share that compiling leaves."""
    trace = work.trace
    shares = kernel_shares(trace, [times.seconds(operation) for operation in trace.operations])
    kept: defaultdict[int, list[float]] = defaultdict(list)
    for one, (of_time, _) in zip(trace.occurrences, shares, strict=True):
        kept[one.operation].append(of_time)
    return [sum(kept[index]) / len(kept[index]) if kept[index] else 1.0 for index in range(len(trace.operations))]


def _start_s(hardware: Hardware) -> float:
    """Of each operation's own time, what is the host's [s]; a GPU's operations do not wait for it in theirs."""
    if hardware.device.kind == "cuda":
        return 0.0
    return hardware.benchmark.launch_s if hardware.benchmark is not None else _START_S


def _roof(operation: Operation, hardware: Hardware, ceilings: Ceilings | None, precision: str) -> Bound:
    """What bounds an operation."""
    if not operation.flops:
        return "memory bandwidth"
    (dtype,) = _in_their_dtype(flops_by_dtype([(operation, 1.0)]), precision)
    rates = {**hardware.dense_flops, **(ceilings.gemm_flops if ceilings is not None else {})}
    bandwidth = ceilings.copy_bytes_per_s if ceilings is not None else hardware.bandwidth_bytes_per_s
    rate = rates.get(dtype, rates.get("fp32"))
    flops_per_byte = rate / bandwidth if rate and bandwidth else _UNKNOWN_FLOPS_PER_BYTE
    num_bytes = operation.bytes_read + operation.bytes_written
    return "arithmetic" if operation.flops >= flops_per_byte * num_bytes else "memory bandwidth"


def _flops(work: Work, precision: str) -> dict[str, float]:
    operations = work.trace.operations
    return _in_their_dtype(flops_by_dtype((operations[index], count) for index, _, _, count in work.counts), precision)


def _in_their_dtype(flops: Mapping[str, float], precision: str) -> dict[str, float]:
    """FLOPs by the dtype they are computed in, where that is not the one they are traced in."""
    return {precision if dtype == "fp32" and precision == "tf32" else dtype: count for dtype, count in flops.items()}


def _named(shares: Sequence[Share], what: str) -> float:
    """A share by its name; 0 where it is too small to be listed."""
    return sum(share.value for share in shares if share.what == what)
