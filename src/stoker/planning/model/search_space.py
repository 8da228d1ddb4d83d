"""The search space of a job: its legal plans on a device, and the layouts of several processes.

Legal is what the contract allows: no plan here changes what is learned. `plan_ranking` leaves out dominated plans, and
forecasts decide which of the rest fit and how fast they are.

Layouts have at most three axes above one. GPipe is left out: with as many micro-batches it waits as long as 1F1B, and
holds more (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal

from stoker.devices.hardware import mtbf_h
from stoker.layouts import all_axes
from stoker.layouts.base import LayoutAxis
from stoker.records import (
    Device,
    Layout,
    Loader,
    Malloc,
    OptimizerOffload,
    OptimizerStates,
    Plan,
    Precision,
    Profile,
)
from stoker.records.layout import ONE_PROCESS
from stoker.records.plan import Checkpointing
from stoker.records.trace import TraceSettings

HOST_WORKERS = (8, 4)
"""Numbers of loader workers for a GPU, whose record does not have the host's cores."""

MOST_BLOCKS_CUT = 12
"""Models of more repeated blocks checkpoint none of them or all."""

_MALLOCS: tuple[Malloc, ...] = ("retained", "default", "mapped")
"""The fastest first, which also takes the most memory."""

DATA_SHARE = 0.1
"""Training data are kept in a GPU's memory if they take at most this share of it."""

LEAST_BLOCKS_OFFLOADED = 3
"""Repeated blocks from which on their inputs are offloaded: those of two at least then, since the last one's stay."""

Offloaded = Literal["activations", "optimizer", "both"]
"""What plans for which a device has too little memory keep on the host."""

OFFLOADED: tuple[Offloaded, ...] = ("activations", "optimizer", "both")
"""The fastest first."""

MemoryFormat = Literal["contiguous", "channels_last"]


def precisions(device: Device, numerics: Collection[str] = ()) -> tuple[Precision, ...]:
    """Precisions a planner may choose on this device, fastest first; `numerics` are the job's.

    fp16 is as fast as bf16, and needs a loss scale: it is for devices without bf16.
    """
    reduced: tuple[Precision, ...] = ("bf16", "tf32")
    if "fp16" in numerics and "bf16" not in device.fast_dtypes:
        reduced = ("fp16", *reduced)
    return (*(precision for precision in reduced if precision in device.fast_dtypes), "fp32")


def allowed_states(numerics: Collection[str]) -> tuple[OptimizerStates, ...]:
    """The optimizer_states of fewer bits that a job allows, those of most bits first."""
    every: tuple[OptimizerStates, ...] = ("bf16", "8bit")
    return tuple(states for states in every if f"{states}-states" in numerics)


def execution_settings(profile: Profile, device: Device, compiling: Sequence[bool] = (False,)) -> Iterator[Plan]:
    """Every way to execute the job, except its micro-batch (1 in these plans) and settings that save memory.

    `compiling` are the values of `Plan.compile`: off by default, since it needs a compiler and a forecast.
    """
    formats: tuple[MemoryFormat, ...] = ("channels_last", "contiguous") if profile.has_convolutions else ("contiguous",)
    threads = (device.cores, max(1, device.cores // 2), 1) if device.kind == "cpu" else (1,)
    arithmetic: tuple[Precision, ...] = ("fp64",) if profile.is_double else precisions(device, profile.numerics)
    optimizers: list[tuple[Any, OptimizerStates]] = [(one, "full") for one in profile.optimizer_implementations]
    if device.kind != "cpu":  # the first is fused, if it can be: it starts the fewest kernels and moves the least
        optimizers = optimizers[:1]
    optimizers += [("default", states) for states in allowed_states(profile.numerics)]
    for is_compiled, precision, memory_format, (implementation, states), count, (loader, workers) in itertools.product(
        compiling, arithmetic, formats, optimizers, dict.fromkeys(threads), loaders(profile, device)
    ):
        yield Plan(
            device=device.torch_name,
            micro_batch=1,
            precision=precision,
            memory_format=memory_format,
            optimizer_implementation=implementation,
            optimizer_states=states,
            compile=is_compiled,
            threads=count,
            loader=loader,
            num_workers=workers,
            device_mtbf_h=mtbf_h(device.kind, profile.device_mtbf_h),
        )


def offloaded_settings(profile: Profile, device: Device, what: Offloaded) -> Iterator[Plan]:
    """Ways to execute the job with a part of it on the host, the fastest first; none where it cannot be.

    They are for jobs that fit no other way. Of precisions and memory formats the fastest is taken; the precision also
    needs the least memory.

    Args:
        profile: the job's facts.
        device: where it is to run.
        what: is on the host.
    """
    has_optimizer, has_activations = what != "activations", what != "optimizer"
    if device.kind != "cuda" or not profile.can_offload or (has_optimizer and profile.offload_problem is not None):
        return
    if has_activations and profile.num_blocks < LEAST_BLOCKS_OFFLOADED:
        return
    kinds: tuple[OptimizerOffload, ...] = ("state", "gradients") if has_optimizer else ("none",)
    plain = [
        settings
        for settings in execution_settings(profile, device)
        if settings.optimizer_states == "full"
        and not (has_optimizer and (settings.precision == "fp16" or settings.memory_format != "contiguous"))
    ]
    blocks = profile.num_blocks if has_activations else 0
    for settings, offload in itertools.product(plain, kinds):
        if (settings.precision, settings.memory_format) == (plain[0].precision, plain[0].memory_format):
            yield dataclasses.replace(
                settings, optimizer_offload=offload, activation_offload=has_activations, checkpointed_blocks=blocks
            )


def saving_memory(plan: Plan, profile: Profile) -> Iterator[Plan]:
    """`plan`, then with settings that save memory, the least costly in time first.

    Where activations are offloaded, all blocks are checkpointed.

    Only models of few blocks checkpoint some of them: under autocast such an update does not repeat from block to
    block, so that all blocks have to be traced. On a CPU, where the time between products is a large part, selective
    checkpointing is for pinned plans.
    """
    num_blocks, on_cpu = profile.num_blocks, plan.device == "cpu"
    quarters = (1, 2, 3) if num_blocks <= MOST_BLOCKS_CUT else ()
    counts = dict.fromkeys((*(num_blocks * quarter // 4 for quarter in quarters), num_blocks))
    checkpointed: list[tuple[int, Checkpointing]] = [(count, "full") for count in counts if count]
    if checkpointed and not on_cpu:
        checkpointed.insert(0, (num_blocks, "selective"))
    # A loss in chunks computes nothing twice: it comes before checkpointing, and stays.
    ways: list[tuple[int, Checkpointing, int]] = [
        (0, "full", chunks) for chunks in dict.fromkeys((1, profile.loss_chunks))
    ]
    ways += [(count, checkpointing, profile.loss_chunks) for count, checkpointing in checkpointed]
    if plan.activation_offload:
        ways = [(num_blocks, "full", profile.loss_chunks)]
    for count, checkpointing, chunks in ways:
        for malloc in _MALLOCS if on_cpu else ("default",):
            yield dataclasses.replace(
                plan, checkpointed_blocks=count, checkpointing=checkpointing, loss_chunks=chunks, malloc=malloc
            )


def saving_of(plan: Plan) -> tuple[int, Checkpointing, int, Malloc]:
    """The plan's settings of `saving_memory`."""
    return plan.checkpointed_blocks, plan.checkpointing, plan.loss_chunks, plan.malloc


def loaders(profile: Profile, device: Device) -> tuple[tuple[Loader, int], ...]:
    """Loaders with their number of workers; data that fit on a GPU with the model are kept there."""
    if profile.is_in_memory:
        is_small = profile.data_bytes is not None and profile.data_bytes <= DATA_SHARE * (device.memory_bytes or 0)
        return (("device" if device.kind == "cuda" and is_small else "memory", 0),)
    counts = (device.cores, max(1, device.cores // 2)) if device.kind == "cpu" else HOST_WORKERS
    allowed = (count if profile.most_workers is None else min(count, profile.most_workers) for count in counts)
    return (("inline", 0), *(("workers", count) for count in dict.fromkeys(allowed)))


def num_micro_batches(profile: Profile, plan: Plan) -> int:
    """Number of micro-batches of an update [1], which has all training samples at most."""
    return math.ceil(min(profile.batch, profile.num_train) / plan.micro_batch)


def trace_settings(plan: Plan, profile: Profile, capability: str, layout: Layout = ONE_PROCESS) -> TraceSettings:
    """The trace that a forecast of `plan` needs: tf32 computes on the tensors of fp32.

    Args:
        plan: of one process.
        profile: of its part of the job.
        capability: the compute capability of a CUDA device, empty for a CPU.
        layout: of all processes, which says what parameters are gathered in.
    """
    is_cuda, parts = plan.device.startswith("cuda"), 1 if plan.micro_batch >= profile.batch else 2
    sums_nothing = parts == 1 and plan.is_offloaded  # then both kinds of offload are one
    return TraceSettings(
        target="cuda" if is_cuda else "cpu",
        capability=kernel_generation(capability),
        micro_batch=plan.micro_batch,
        parts=parts,
        precision=plan.precision
        if plan.precision in ("bf16", "fp8", "fp16")
        else "fp32",  # the others differ in dtypes
        memory_format=plan.memory_format,
        optimizer_implementation=_traced_optimizer(plan, profile),
        optimizer_states=plan.optimizer_states,
        optimizer_offload="state" if sums_nothing else plan.optimizer_offload,
        checkpointed_blocks=plan.checkpointed_blocks,
        checkpointing=plan.checkpointing,
        activation_offload=plan.activation_offload,
        loss_chunks=plan.loss_chunks,
        gathered_in=computes_in(plan, layout),
    )


def computes_in(plan: Plan, layout: Layout = ONE_PROCESS) -> Literal["bf16"] | None:
    """The dtype of the weights that a device computes with, while their masters are fp32; None: as they are stored."""
    return "bf16" if plan.is_offloaded and plan.precision == "bf16" else layout.gathered_in(plan.precision)


def _traced_optimizer(plan: Plan, profile: Profile) -> Literal["default", "foreach", "fused"]:
    """The implementation in a plan's trace; states of fewer bits are forecast from the trace of a fused step."""
    is_fused = plan.optimizer_states != "full" and "fused" in profile.optimizer_implementations
    return "fused" if is_fused else plan.optimizer_implementation


def kernel_generation(capability: str) -> str:
    """The least compute capability with the same kernels and workspaces: traces are shared by generation.

    From 8.0 on attention is fused in bf16; from 9.0 on cuBLAS has a larger workspace.

    >>> [kernel_generation(one) for one in ("7.5", "8.9", "12.0", "")]
    ['7.5', '8.0', '9.0', '']
    """
    major = int(capability.partition(".")[0] or 0)
    return capability if major < 8 else "8.0" if major == 8 else "9.0"


MOST_AXES = 3
"""Axes of a layout that may be above one."""


def layouts_of(count: int) -> Iterator[Layout]:
    """Layouts of `count` processes, simplest first: along one axis, then along two, then along three."""
    if count == 1:
        yield Layout()
        return
    for num in range(1, MOST_AXES + 1):
        for axes in itertools.combinations(all_axes(), num):
            for sizes in _factors(count, num):
                layout = Layout()
                for axis, size in zip(axes, sizes, strict=True):
                    layout = axis.of_size(layout, size)
                yield from _variants(layout, axes)


def _factors(count: int, num: int) -> Iterator[tuple[int, ...]]:
    """The `num` factors above one whose product is `count`, in each order.

    >>> list(_factors(12, 2))
    [(2, 6), (3, 4), (4, 3), (6, 2)]
    """
    if num == 1:
        yield (count,)
        return
    for first in range(2, count // 2 + 1):
        if count % first == 0:
            for others in _factors(count // first, num - 1):
                yield first, *others


def _variants(layout: Layout, axes: Sequence[LayoutAxis]) -> Iterator[Layout]:
    """A layout with each choice of its axes' settings."""
    if not axes:
        yield layout
        return
    for variant in axes[0].variants(layout):
        yield from _variants(variant, axes[1:])
