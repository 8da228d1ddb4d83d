"""The time of one update, from its trace and the times of its operations.

On a CPU operations follow each other, with what Python and autograd take in between. On a GPU the host runs ahead: an
update takes as long as the longer of the two, phase by phase, and the batch has to cross first.

How long each operation takes on a device, which need not be here. No torch.

The seam between what knows a kind of device and what asks for times: one model of operations per kind.

How long compiling or capturing a plan takes: once, before its first update is done.

Compiled code is shared by what is alike (a block compiled once serves all of its kind), so what counts is how many
different operations a micro-batch has, not how many it makes. A captured pass is written down operation by operation:
there all of them count.

What compiling saves: chains of elementwise operations become one kernel each.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from stoker.planning.model.gpu_roofline import PowerModel, flops_by_dtype
from stoker.records.estimate import Estimate
from stoker.records.hardware import Hardware
from stoker.records.plan import Share
from stoker.records.run import Calibration
from stoker.records.trace import Operation, Phase, Trace
from stoker.units import MIB

_FOUR_IN_FIVE = 1.2816
"""Standard deviations on either side that hold 8 cases in 10 of a normal distribution."""
_DRIFT = 0.05
"""Of a machine that was not looked at since it was measured, one standard deviation [fraction]."""
_OF_COMPILED = 0.2
"""Of the time of compiled code, whose kernels nobody sees before it is compiled, the same. A judgement."""
_USUAL_HOST_S = {"forward": 7e-6, "backward": 6e-6, "optimizer": 6e-6, "update": 3e-4}
"""Where no host was measured: to start an operation [s], an update's own. Eager PyTorch 2.x on a 3 GHz core."""
_USUAL_LINK_BYTES_PER_S = 1.2e10
"""Host to device where nobody says: PCIe 3 with 16 lanes, less its overhead."""
_MOST_SHARES = 16
_CROSSING = "the batch's way to the device"
_FRESH_FROM_BYTES = {"retained": math.inf, "default": 32 * MIB, "mapped": 64 * 1024}
"""Blocks that glibc asks the system for each time they are allocated, once a program has run a while."""
_NO_HOST_S = {"forward": 0.0, "backward": 0.0}
_CAPTURED_ON_CPU = 0.7
"""Of the host's time for the passes, what a CPU still takes of it where they are captured: autograd goes, starting each
operation stays. A step of an MLP saved 27 to 80 of 190 µs (docs/log.md, 2026-11-21)."""
_POWER_ERROR = 0.15
"""Of a power model of arithmetic and traffic [fraction]; the best published have 8 to 11 %."""
_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class UpdateTime:
    """The time of one update, and what it is made of.

    `forward_s` and `backward_s` are the parts of these passes [s], `compile_s` what compiling or capturing takes once
    (None: it is neither compiled nor captured);
    `power_w` is the device's mean draw meanwhile (None: nobody knows); `shares` are parts of `step_s`, by operation
    and the user's line.
    """

    step_s: Estimate
    forward_s: float
    compile_s: Estimate | None
    power_w: Estimate | None
    shares: tuple[Share, ...]
    backward_s: float = 0.0


@dataclass(frozen=True)
class UpdateWork:
    """What an update does, counted: the same on every device, however fast it is.

    `counts` says how often each operation is executed in a phase for one of the user's lines or modules. `born_bytes`
    are sizes of the storages an update allocates, and how often.
    """

    trace: Trace
    micro_batches: int
    counts: tuple[tuple[int, Phase, str, float], ...]
    num_parameters: int
    input_bytes: float
    born_bytes: tuple[tuple[int, int], ...]


def counted(trace: Trace, micro_batches: int = 1) -> UpdateWork:
    """The work of an update of `micro_batches` micro-batches.

    The first micro-batch of the trace counts once, the second as often as there are others, the optimiser once; of a
    trace of one micro-batch each is like it.
    """
    repeats = _repeats(trace, micro_batches)
    counts: dict[tuple[int, Phase, str], float] = defaultdict(float)
    for one in trace.occurrences:
        counts[one.operation, one.phase, trace.where(one)] += (
            1 if one.phase == "optimizer" else repeats.get(one.part, 0)
        )
    inputs = sum(storage.num_bytes for storage in trace.storages if storage.category == "input")
    return UpdateWork(
        trace=trace,
        micro_batches=micro_batches,
        counts=tuple((*key, count) for key, count in counts.items()),
        num_parameters=sum(storage.category == "parameter" for storage in trace.storages),
        input_bytes=inputs * micro_batches / trace.settings.parts,
        born_bytes=tuple(Counter(storage.num_bytes for storage in trace.storages if storage.born >= 0).items()),
    )


def _repeats(trace: Trace, micro_batches: int) -> dict[int, int]:
    """How often each traced micro-batch is executed."""
    return {0: micro_batches} if trace.settings.parts == 1 else {0: 1, 1: micro_batches - 1}


@dataclass
class _Part:
    """What is alike: one operation in one phase, for one of the user's lines.

    `count` executions of `seconds` each, for `kernels` of which the host has to start something.
    """

    operation: Operation
    phase: Phase
    source: str
    seconds: float
    error: float
    count: float = 0.0
    kernels: float = 0.0

    @property
    def total_s(self) -> float:
        return self.count * self.seconds


def update_time(
    work: UpdateWork,
    times: OperationTimes,
    hardware: Hardware,
    *,
    precision: str = "fp32",
    is_compiled: bool = False,
    is_captured: bool = False,
    malloc: str = "default",
    is_data_there: bool = False,
) -> UpdateTime:
    """The time of one update.

    Args:
        work: of the whole model (`planning.expanded`).
        times: of the device's operations.
        hardware: the device.
        precision: `tf32` traces as fp32, and is computed as what it is.
        is_compiled: elementwise chains are one kernel each, and the host starts fewer.
        is_captured: operations are started one after another, without autograd, or by one call.
        malloc: a CPU's allocator, as in a Plan.
        is_data_there: the training data lie in the device's memory: no batch has to cross.
    """
    parts = _parts(work, times, is_tf32=precision == "tf32", is_compiled=is_compiled)
    host_s = _host_s(hardware)
    if is_captured:  # a GPU is given the whole pass at once
        left = _CAPTURED_ON_CPU if hardware.device.kind == "cpu" else 0.0
        host_s |= {phase: left * host_s[phase] for phase in _NO_HOST_S}
    beside = _beside(work, hardware, host_s, malloc)
    if is_data_there:
        beside[_CROSSING] = 0.0
    by_phase = {phase: _phase_s(phase, parts, hardware, host_s[phase]) for phase in _PHASES}
    total = max(sum(by_phase.values()) + sum(beside.values()), 1e-9)
    drift = hardware.pace.deviation if hardware.pace else _DRIFT
    deviation = math.hypot(math.sqrt(_variance(parts)) / total, drift, _OF_COMPILED if is_compiled else 0.0)
    factor = math.exp(_FOUR_IN_FIVE * deviation)
    return UpdateTime(
        step_s=Estimate(value=total, low=total / factor, high=total * factor, unit="s", basis=hardware.basis),
        forward_s=by_phase["forward"],
        backward_s=by_phase["backward"],
        compile_s=_once_s(work, is_compiled=is_compiled, is_captured=is_captured),
        power_w=_power(parts, hardware, total),
        shares=_shares(parts, host_s, beside) if hardware.device.kind == "cpu" else _shares(parts, _NO_HOST_S, beside),
    )


def _once_s(work: UpdateWork, *, is_compiled: bool, is_captured: bool) -> Estimate | None:
    """What compiling or capturing takes before the first update is done [s]."""
    if is_compiled:
        return compile_seconds((operation, phase) for operation, phase, _, _ in work.counts)
    if is_captured:
        return capture_seconds(sum(count for _, phase, _, count in work.counts if phase != "optimizer"))
    return None


def _parts(work: UpdateWork, times: OperationTimes, *, is_tf32: bool, is_compiled: bool) -> list[_Part]:
    """The work with its times."""
    trace = work.trace
    operations = [_in_tf32(operation) if is_tf32 else operation for operation in trace.operations]
    measured = [(times.seconds(operation), times.relative_error(operation)) for operation in operations]
    parts = {
        (operation, phase, where): _Part(
            operations[operation], phase, where, *measured[operation],
            count=count, kernels=count,
        )
        for operation, phase, where, count in work.counts
    }  # fmt: skip
    if is_compiled:
        _fuse(parts, work, [seconds for seconds, _ in measured])
    return list(parts.values())


def _fuse(parts: dict[tuple[int, Phase, str], _Part], work: UpdateWork, seconds: Sequence[float]) -> None:
    """Count chains of elementwise operations as one kernel each."""
    repeats = _repeats(work.trace, work.micro_batches)
    for part in parts.values():
        part.count = part.kernels = 0.0
    for one, (of_time, of_kernel) in zip(work.trace.occurrences, kernel_shares(work.trace, seconds), strict=True):
        times_over = 1 if one.phase == "optimizer" else repeats.get(one.part, 0)
        part = parts[one.operation, one.phase, work.trace.where(one)]
        part.count += times_over * of_time
        part.kernels += times_over * of_kernel


def _in_tf32(operation: Operation) -> Operation:
    """The same on tensor cores: only products and convolutions round to TF32."""
    if not operation.flops or "attention" in operation.name:
        return operation
    inputs = (replace(one, dtype="tf32") if one.dtype == "fp32" else one for one in operation.inputs)
    return replace(operation, inputs=tuple(inputs))


def _host_s(hardware: Hardware) -> dict[str, float]:
    """What the host takes, by phase [s]."""
    benchmark = hardware.benchmark
    if benchmark is None:
        return dict(_USUAL_HOST_S)
    # On a GPU the host has to start each operation; on a CPU that is in the operation's own time.
    launch_s = benchmark.launch_s if hardware.device.kind == "cuda" else None
    started = {} if launch_s is None else {"forward": launch_s, "backward": launch_s}
    return {what: hardware.slowdown * one for what, one in {**_USUAL_HOST_S, **benchmark.host_s, **started}.items()}


def _phase_s(phase: Phase, parts: Sequence[_Part], hardware: Hardware, host_s: float) -> float:
    """Time of a phase [s]: one after the other on a CPU, side by side with the host on a GPU."""
    device = sum(part.total_s for part in parts if part.phase == phase)
    # The optimiser's host time goes by its parameters, and is counted once for all of them.
    host = 0.0 if phase == "optimizer" else host_s * sum(part.kernels for part in parts if part.phase == phase)
    return max(device, host) if hardware.device.kind == "cuda" else device + host


def _beside(work: UpdateWork, hardware: Hardware, host_s: dict[str, float], malloc: str) -> dict[str, float]:
    """What is no operation [s]."""
    own = host_s["update"] + host_s["optimizer"] * work.num_parameters
    if hardware.device.kind == "cuda":
        link = hardware.host_link_bytes_per_s or _USUAL_LINK_BYTES_PER_S
        return {"Python": own, _CROSSING: work.input_bytes / link}
    return {"Python": own, "memory had from the system": _fresh_s(work, hardware, malloc)}


def _fresh_s(work: UpdateWork, hardware: Hardware, malloc: str) -> float:
    """Page faults of blocks that are had from the system for each use [s]; 0 where they were not measured."""
    timings = hardware.benchmark.timings if hardware.benchmark else ()
    zeros = [one for one in timings if one.operation.name == "zeros"]
    per_byte = hardware.slowdown * max((one.seconds / one.operation.bytes_written for one in zeros), default=0.0)
    fresh = sum(size * count for size, count in work.born_bytes if size >= _FRESH_FROM_BYTES[malloc])
    return per_byte * fresh * work.micro_batches / work.trace.settings.parts


def _variance(parts: Sequence[_Part]) -> float:
    """Of the sum of all parts [s^2]: an operation errs alike wherever it is executed, others by themselves."""
    by_operation: defaultdict[int, float] = defaultdict(float)
    for part in parts:
        by_operation[id(part.operation)] += part.total_s * part.error
    return sum(error**2 for error in by_operation.values())


def _power(parts: Sequence[_Part], hardware: Hardware, total_s: float) -> Estimate | None:
    """Mean draw of the device [W]; None where nobody knows its limit."""
    if not hardware.power_w:
        return None
    flops = flops_by_dtype((part.operation, part.count) for part in parts)
    num_bytes = sum(part.count * (part.operation.bytes_read + part.operation.bytes_written) for part in parts)
    value = PowerModel.of(hardware).energy_j(total_s, flops, num_bytes) / total_s
    low, high = value * (1 - _POWER_ERROR), min(value * (1 + _POWER_ERROR), max(value, hardware.power_w))
    return Estimate(value=value, low=low, high=high, unit="W", basis="datasheet")


def _shares(parts: Sequence[_Part], host_s: dict[str, float], beside: dict[str, float]) -> tuple[Share, ...]:
    """The largest parts, what the host takes for them included; what is left in one."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for part in parts:
        started = 0.0 if part.phase == "optimizer" else host_s[part.phase] * part.kernels
        found[f"{part.operation.name.strip('_')}, {part.phase}", part.source] += part.total_s + started
    for what, seconds in beside.items():
        found[what, ""] += seconds
    ranked = sorted(found.items(), key=lambda item: -item[1])
    shares = [Share(what=what, value=value, where=where) for (what, where), value in ranked[:_MOST_SHARES]]
    rest = sum(value for _, value in ranked[_MOST_SHARES:])
    return (*shares, Share(what="all else", value=rest)) if rest > 0 else tuple(shares)


class OperationTimes(Protocol):
    """Times of operations, one after the other on one device."""

    def seconds(self, operation: Operation) -> float:
        """Time on the device [s], queued behind others: on a GPU the host's part in starting it is not in it."""
        ...

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds`, as a fraction of it."""
        ...


def operation_times(hardware: Hardware) -> OperationTimes:
    """The model for this device: `cuda` devices by tiles and waves, CPUs by their own.

    Each model is imported when it is asked for: a laptop never loads the GPUs' constants.
    """
    if hardware.device.kind == "cuda":
        from stoker.planning.model.gpu_times import GpuTimes  # noqa: PLC0415 - loaded only for the kind of device asked for

        return GpuTimes.of(hardware)
    from stoker.planning.model.cpu_times import CpuTimes  # noqa: PLC0415 - likewise

    return CpuTimes.of(hardware)


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


_CHAINED = frozenset({
    "abs", "add", "addcdiv", "addcmul", "bitwise_and", "bitwise_not", "bitwise_or", "ceil", "clamp", "clamp_max",
    "clamp_min", "clone", "copy", "cos", "div", "eq", "erf", "exp", "floor", "ge", "gelu", "gelu_backward", "gt",
    "hardswish", "hardswish_backward", "hardtanh", "hardtanh_backward", "leaky_relu", "log", "le", "logical_and",
    "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mul", "native_dropout",
    "native_dropout_backward", "ne", "neg", "pow", "reciprocal", "relu", "rsqrt", "rsub", "sigmoid",
    "sigmoid_backward", "silu", "silu_backward", "sin", "sqrt", "sub", "tanh", "tanh_backward",
    "threshold_backward", "to_copy", "where", "fill", "zero",
})  # fmt: skip
"""Operations without a trailing or leading underscore that Inductor writes into the kernel of a neighbour."""


def kernel_shares(trace: Trace, seconds: Sequence[float]) -> list[tuple[float, float]]:
    """For each occurrence, the share of its own time that is left, and of a kernel that has to be started for it.

    A chain reads its inputs and writes its result once: it takes as long as the longest of its operations.

    Args:
        trace: of an update.
        seconds: time of each of `trace.operations` [s].
    """
    shares = [(1.0, 1.0)] * len(trace.occurrences)
    for chain in _chains(trace):
        each = [seconds[trace.occurrences[index].operation] for index in chain]
        left = max(each) / sum(each) if sum(each) > 0 else 1.0
        for index in chain:
            shares[index] = (left, 1 / len(chain))
    return shares


def _chains(trace: Trace) -> Iterator[list[int]]:
    """Runs of such operations that follow each other within a phase of a micro-batch."""
    chain: list[int] = []
    where = None
    for index, one in enumerate(trace.occurrences):
        is_chained = trace.operations[one.operation].name.strip("_") in _CHAINED
        if chain and (not is_chained or (one.phase, one.part) != where):
            yield chain
            chain = []
        if is_chained:
            chain.append(index)
            where = one.phase, one.part
    if chain:
        yield chain
