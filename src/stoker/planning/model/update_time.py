"""Time of one update, from its trace and the times of its operations on a device that need not be here. No torch.

On a CPU operations follow each other, with Python and autograd in between. On a GPU the host runs ahead: an update
takes as long as the longer of the two, phase by phase, and the batch has to be copied to the device first.

`OperationTimes` is the interface of the models of CPUs and GPUs.

Compiling turns chains of elementwise operations into one kernel each. Its time, once before the first update, depends
on the number of different operations of a micro-batch, since equal blocks share their code; the time of capturing a
pass depends on the number of all its operations.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from stoker.planning.model.compiled_graphs import chains_of, kernel_shares
from stoker.planning.model.gpu_roofline import PowerModel, flops_by_dtype
from stoker.records.hardware import Hardware
from stoker.records.plan import Estimate, Loader, Share
from stoker.records.run import Calibration
from stoker.records.trace import Operation, Phase, Trace
from stoker.units import MIB

_FOUR_IN_FIVE = 1.2816
"""Standard deviations on either side that hold 8 cases in 10 of a normal distribution."""
_DRIFT = 0.05
"""Drift of a machine since it was measured, one standard deviation [fraction]."""
_OF_COMPILED = 0.2
"""Deviation of the time of compiled code, whose kernels are unknown before [fraction]. A judgement."""
_OF_PROGRAM = 0.05
"""Deviation between versions of libraries and ways to write a program, on a GPU where nothing was measured [fraction].
A judgement."""
_USUAL_HOST_S = {"forward": 7e-6, "backward": 6e-6, "optimizer": 6e-6, "update": 3e-4}
"""Times of an unmeasured host [s]: to start an operation, and once per update. Eager PyTorch 2.x on a 3 GHz core."""
_USUAL_LINK_BYTES_PER_S = 1.2e10
"""Unknown rate from host to device [bytes/s]: PCIe 3 with 16 lanes, less its overhead."""
_MOST_SHARES = 16
_CROSSING = "the batch's way to the device"
_FRESH_FROM_BYTES = {"retained": math.inf, "default": 32 * MIB, "mapped": 64 * 1024}
"""Size from which glibc maps blocks at each allocation [bytes], once a program has run a while."""
_NO_HOST_S = {"forward": 0.0, "backward": 0.0}
_CAPTURED_ON_CPU = 0.7
"""Share of the host's time that a captured pass still takes on a CPU: without autograd, but each operation is started.
A step of an MLP saved 27 to 80 of 190 µs (docs/log.md, 2026-11-21)."""
_POWER_ERROR = 0.15
"""Error of a power model of arithmetic and traffic [fraction]; the best published have 8 to 11 %."""
_PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class UpdateTime:
    """The time of one update, and its parts.

    `forward_s` and `backward_s` are the times of these passes [s], `compile_s` the time of compiling or capturing, once
    (None: it is neither compiled nor captured), `power_w` the device's mean draw (None: unknown); `shares` are parts of
    `step_s`, by operation and the user's line.
    """

    step_s: Estimate
    forward_s: float
    compile_s: Estimate | None
    power_w: Estimate | None
    shares: tuple[Share, ...]
    backward_s: float = 0.0


@dataclass(frozen=True)
class UpdateWork:
    """The operations of an update, counted; the same on every device.

    `counts` is the number of executions of each operation in a phase for one of the user's lines or modules, `keys` for
    each occurrence which of them it is.
    `born_bytes` are sizes of the storages that an update allocates, and their number.
    """

    trace: Trace
    micro_batches: int
    counts: tuple[tuple[int, Phase, str, float], ...]
    keys: Sequence[tuple[int, Phase, str]]
    num_parameters: int
    input_bytes: float
    born_bytes: tuple[tuple[int, int], ...]

    @functools.cached_property
    def chains(self) -> list[tuple[list[int], float]]:
        """Those of the trace, if it is compiled."""
        return chains_of(self.trace, is_on_gpu=self.trace.settings.target == "cuda")


def counted(trace: Trace, micro_batches: int = 1) -> UpdateWork:
    """The work of an update of `micro_batches` micro-batches.

    The first micro-batch of the trace counts once, the second for all others, the optimiser once. A trace of one
    micro-batch stands for all.
    """
    repeats = _repeats(trace, micro_batches)
    counts: dict[tuple[int, Phase, str], float] = defaultdict(float)
    places: dict[tuple[int, int], str] = {}
    keys: list[tuple[int, Phase, str]] = []
    for one in trace.occurrences:
        if (one.module, one.source) not in places:
            places[one.module, one.source] = trace.where(one)
        keys.append((one.operation, one.phase, places[one.module, one.source]))
        counts[keys[-1]] += 1 if one.phase == "optimizer" else repeats.get(one.part, 0)
    inputs = sum(storage.num_bytes for storage in trace.storages if storage.category == "input")
    return UpdateWork(
        trace=trace,
        micro_batches=micro_batches,
        counts=tuple((*key, count) for key, count in counts.items()),
        keys=keys,
        num_parameters=sum(storage.category == "parameter" for storage in trace.storages),
        input_bytes=inputs * micro_batches / trace.settings.parts,
        born_bytes=tuple(Counter(storage.num_bytes for storage in trace.storages if storage.born >= 0).items()),
    )


def _repeats(trace: Trace, micro_batches: int) -> dict[int, int]:
    """Number of executions of each traced micro-batch."""
    return {0: micro_batches} if trace.settings.parts == 1 else {0: 1, 1: micro_batches - 1}


@dataclass
class _Part:
    """One operation in one phase, for one of the user's lines: `count` executions of `seconds`, `kernels` launches."""

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
    loader: Loader = "inline",
) -> UpdateTime:
    """The time of one update.

    Args:
        work: of the whole model (`trace_extrapolation.expanded`).
        times: of the device's operations.
        hardware: the device.
        precision: `tf32` is traced as fp32.
        is_compiled: elementwise chains are one kernel each, and the host starts fewer.
        is_captured: operations are started one after another without autograd, or by one call.
        malloc: a CPU's allocator, as in a Plan.
        loader: as in a Plan. No batch is copied to a GPU that has the data; unless the training process fetches, one is
            copied during the update before, and only what takes longer than that counts.
    """
    parts = _parts(work, times, is_tf32=precision == "tf32", is_compiled=is_compiled)
    is_cuda, host_s, compile_s = hardware.device.kind == "cuda", _host_s(hardware), None
    if is_compiled:
        compile_s = compile_seconds((operation, phase) for operation, phase, _, _ in work.counts)
    elif is_captured:
        compile_s = capture_seconds(sum(count for _, phase, _, count in work.counts if phase != "optimizer"))
    if is_captured:  # a GPU gets the whole pass at once
        host_s |= {phase: (0.0 if is_cuda else _CAPTURED_ON_CPU) * host_s[phase] for phase in _NO_HOST_S}
    others = _without_operations(work, hardware, host_s, malloc)
    if loader == "device":
        others[_CROSSING] = 0.0
    by_phase: dict[Phase, float] = {}
    for phase in _PHASES:
        device_s = sum(part.total_s for part in parts if part.phase == phase)
        # The optimiser's host time goes by its parameters, and is counted once for all of them.
        kernels = 0.0 if phase == "optimizer" else sum(part.kernels for part in parts if part.phase == phase)
        launch_s = host_s[phase] * kernels
        by_phase[phase] = max(device_s, launch_s) if is_cuda else device_s + launch_s
    if is_cuda and loader in ("memory", "workers"):
        others[_CROSSING] = max(0.0, others[_CROSSING] - sum(by_phase.values()))
    total = max(sum(by_phase.values()) + sum(others.values()), 1e-9)
    relative = _error_s(parts, times) / total
    drift = hardware.pace.deviation if hardware.pace else _DRIFT
    program = _OF_PROGRAM if is_cuda and hardware.basis == "datasheet" else 0.0
    deviation = math.hypot(relative, drift, program, _OF_COMPILED if is_compiled else 0.0)
    factor = math.exp(_FOUR_IN_FIVE * deviation)
    return UpdateTime(
        step_s=Estimate(value=total, low=total / factor, high=total * factor, unit="s", basis=hardware.basis),
        forward_s=by_phase["forward"],
        backward_s=by_phase["backward"],
        compile_s=compile_s,
        power_w=_power(parts, hardware, total),
        shares=_shares(parts, _NO_HOST_S if is_cuda else host_s, others),
    )


def _error_s(parts: Sequence[_Part], times: OperationTimes) -> float:
    """One standard deviation of the parts' sum [s].

    Errors are the same wherever an operation is executed, and independent from one operation to another; on top, those
    of a family, such as all products on tensor cores, share one, since their rate is one constant.
    """
    own: defaultdict[object, float] = defaultdict(float)
    shared_error = times.shared_error if isinstance(times, SharesErrors) else None
    for part in parts:
        own[id(part.operation)] += part.total_s * part.error
        if shared_error is not None:
            family, error = shared_error(part.operation)
            own[family] += part.total_s * error
    return math.sqrt(sum(error**2 for error in own.values()))


def _parts(work: UpdateWork, times: OperationTimes, *, is_tf32: bool, is_compiled: bool) -> list[_Part]:
    """The work with its times."""
    operations = list(work.trace.operations)
    if is_tf32:  # only products and convolutions round to TF32
        for index, operation in enumerate(operations):
            if operation.flops and "attention" not in operation.name:
                inputs = (replace(one, dtype="tf32") if one.dtype == "fp32" else one for one in operation.inputs)
                operations[index] = replace(operation, inputs=tuple(inputs))
    measured = [(times.seconds(operation), times.relative_error(operation)) for operation in operations]
    parts = {
        (operation, phase, where): _Part(
            operations[operation],
            phase,
            where,
            *measured[operation],
            count=count,
            kernels=count,
        )
        for operation, phase, where, count in work.counts
    }
    if is_compiled:
        each_s, moving = [each_s for each_s, _ in measured], moving_by(times, work.trace)
        _fuse(parts, work, kernel_shares(work.trace, each_s, moving, work.chains))
    return list(parts.values())


def moving_by(times: OperationTimes, trace: Trace) -> Callable[[float], float] | None:
    """Time of a kernel on a GPU by the bytes it moves [s]; None for a CPU."""
    if trace.settings.target != "cuda":
        return None

    def seconds(num_bytes: float) -> float:
        moved = round(num_bytes)
        return times.seconds(Operation(name="mul", inputs=(), outputs=(), flops=0, bytes_read=moved, bytes_written=0))

    return seconds


def _fuse(parts: dict[tuple[int, Phase, str], _Part], work: UpdateWork, shares: Sequence[tuple[float, float]]) -> None:
    """Count chains of operations as one kernel each."""
    repeats = _repeats(work.trace, work.micro_batches)
    for part in parts.values():
        part.count = part.kernels = 0.0
    for one, key, (of_time, of_kernel) in zip(work.trace.occurrences, work.keys, shares, strict=True):
        times_over = 1 if one.phase == "optimizer" else repeats.get(one.part, 0)
        part = parts[key]
        part.count += times_over * of_time
        part.kernels += times_over * of_kernel


def _host_s(hardware: Hardware) -> dict[str, float]:
    """Host time of an operation by phase, and of an update [s]."""
    benchmark = hardware.benchmark
    if benchmark is None:
        return _USUAL_HOST_S | hardware.host_s
    # On a GPU the host has to start each operation; on a CPU that is in the operation's own time.
    launch_s = benchmark.launch_s if hardware.device.kind == "cuda" else None
    started = {} if launch_s is None else {"forward": launch_s, "backward": launch_s}
    return {what: hardware.slowdown * one for what, one in {**_USUAL_HOST_S, **started, **benchmark.host_s}.items()}


def _without_operations(
    work: UpdateWork, hardware: Hardware, host_s: dict[str, float], malloc: str
) -> dict[str, float]:
    """Times of an update outside of operations [s]: Python, and the batch's copy or page faults."""
    python_s = host_s["update"] + host_s["optimizer"] * work.num_parameters
    if hardware.device.kind == "cuda":
        link = hardware.host_link_bytes_per_s or _USUAL_LINK_BYTES_PER_S
        return {"Python": python_s, _CROSSING: work.input_bytes / link}
    # Page faults of blocks that are mapped for each use; 0 if they were not measured.
    timings = hardware.benchmark.timings if hardware.benchmark else ()
    zeros = [one for one in timings if one.operation.name == "zeros"]
    per_byte = hardware.slowdown * max((one.seconds / one.operation.bytes_written for one in zeros), default=0.0)
    fresh = sum(size * count for size, count in work.born_bytes if size >= _FRESH_FROM_BYTES[malloc])
    fault_s = per_byte * fresh * work.micro_batches / work.trace.settings.parts
    return {"Python": python_s, "memory had from the system": fault_s}


def _power(parts: Sequence[_Part], hardware: Hardware, total_s: float) -> Estimate | None:
    """Mean draw of the device [W]; None if its limit is unknown."""
    if not hardware.power_w:
        return None
    flops = flops_by_dtype((part.operation, part.count) for part in parts)
    num_bytes = sum(part.count * (part.operation.bytes_read + part.operation.bytes_written) for part in parts)
    value = PowerModel.of(hardware).energy_j(total_s, flops, num_bytes) / total_s
    low, high = value * (1 - _POWER_ERROR), min(value * (1 + _POWER_ERROR), max(value, hardware.power_w))
    return Estimate(value=value, low=low, high=high, unit="W", basis="datasheet")


def _shares(parts: Sequence[_Part], host_s: dict[str, float], others: dict[str, float]) -> tuple[Share, ...]:
    """The largest parts, with the host's time for them; the rest in one."""
    seconds_of: defaultdict[tuple[str, str], float] = defaultdict(float)
    for part in parts:
        started = 0.0 if part.phase == "optimizer" else host_s[part.phase] * part.kernels
        seconds_of[f"{part.operation.name.strip('_')}, {part.phase}", part.source] += part.total_s + started
    for what, seconds in others.items():
        seconds_of[what, ""] += seconds
    ranked = sorted(seconds_of.items(), key=lambda item: -item[1])
    shares = [Share(what=what, value=value, where=where) for (what, where), value in ranked[:_MOST_SHARES]]
    rest = sum(value for _, value in ranked[_MOST_SHARES:])
    return (*shares, Share(what="all else", value=rest)) if rest > 0 else tuple(shares)


class OperationTimes(Protocol):
    """Times of operations, one after the other on one device."""

    def seconds(self, operation: Operation) -> float:
        """Time on the device [s], queued behind others: on a GPU without the host's launch."""
        ...

    def relative_error(self, operation: Operation) -> float:
        """One standard deviation of `seconds` [fraction]."""
        ...


@runtime_checkable
class SharesErrors(Protocol):
    """Times of operations some of whose errors are common to a family of them."""

    def shared_error(self, operation: Operation) -> tuple[str, float]:
        """The family, and one standard deviation of its common error [fraction]."""
        ...


def operation_times(hardware: Hardware, *, is_alone: bool = True) -> OperationTimes:
    """The time model for this device, alone or one of several in a run; only its module is imported."""
    if hardware.device.kind == "cuda":
        from stoker.planning.model.gpu_times import GpuTimes  # noqa: PLC0415 - loaded only for the kind of device asked for

        return GpuTimes.of(hardware, is_alone=is_alone)
    from stoker.planning.model.cpu_times import CpuTimes  # noqa: PLC0415 - likewise

    return CpuTimes.of(hardware)


_START_S = 10.0
"""Time to load the compiler and compile the least [s]."""
_S_PER_OPERATION = 0.25
"""Time for each different operation of the passes [s]; both as in bench/results/compile_time_*."""
_CAPTURED_S_PER_OPERATION = 2.5e-3
"""Time to capture each operation of the forward and the backward pass [s]: 5 ms of CPU time on a busy core, for GRUs of
16 and 32 time steps (docs/log.md, 2026-11-22); taken as half of that where it is not busy."""
_FACTOR = 2.0
"""8 cases in 10 are within this factor, from one machine and cache to another."""
_LEAST_FACTOR = 1.3
"""The least such factor after measurements."""


def compile_seconds(operations: Iterable[tuple[object, str]]) -> Estimate:
    """Time of compiling [s].

    Args:
        operations: of a micro-batch, each with its phase.
    """
    different = {(operation, phase) for operation, phase in operations if phase != "optimizer"}
    seconds = _START_S + _S_PER_OPERATION * len(different)
    return Estimate(value=seconds, low=seconds / _FACTOR, high=seconds * _FACTOR, unit="s", basis="datasheet")


def capture_seconds(num_operations: float) -> Estimate:
    """Time of capturing so many operations, forward and backward [s]."""
    seconds = _CAPTURED_S_PER_OPERATION * num_operations
    return Estimate(value=seconds, low=seconds / _FACTOR, high=seconds * _FACTOR, unit="s", basis="datasheet")


def as_measured_before(expected: Estimate, calibrations: Sequence[Calibration]) -> Estimate:
    """`expected` times the median ratio of measured to forecast compile times on this device, if there are any."""
    known = [c for c in calibrations if c.quantity == "compile_s" and min(c.measured, c.forecast) > 0]
    ratios = [math.log(c.measured / c.forecast) for c in known]
    if not ratios:
        return expected
    middle = statistics.median(ratios)
    spread = max(math.log(_LEAST_FACTOR), *(abs(ratio - middle) for ratio in ratios))
    seconds = expected.value * math.exp(middle)
    low, high = seconds * math.exp(-spread), seconds * math.exp(spread)
    return Estimate(value=seconds, low=low, high=high, unit="s", basis="calibrated")
