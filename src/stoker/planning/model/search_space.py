"""The legal plans of a job on a device.

Legal is what the contract allows: no plan here changes what is learned. Which of them fit, and how fast they are, is
for the forecast; what cannot be better than another is left out before (`ranking.py`).

The legal layouts of a job over so many devices: what divides what is known before anything is spent.

Of all products of axes those with at most two above one are looked at. GPipe is left out: with as many micro-batches it
waits as long as 1F1B, and holds more (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.devices.failure_rates import mtbf_h
from stoker.devices.interconnects import NODE_DEVICES
from stoker.records import Device, Layout, Loader, Malloc, Plan, Precision, Profile
from stoker.records.trace import TraceSettings

HOST_WORKERS = (8, 4)
"""Loader workers beside a GPU, whose record does not say how many cores the host has."""

MOST_BLOCKS_CUT = 12
"""Models of more repeated blocks checkpoint none of them or all."""

_MALLOCS: tuple[Malloc, ...] = ("retained", "default", "mapped")
"""The fastest first, which is also the one that takes the most memory."""

DATA_SHARE = 0.1
"""Training data are kept in a GPU's memory where they take at most this share of it."""

_FP64: tuple[Precision, ...] = ("fp64",)

MemoryFormat = Literal["contiguous", "channels_last"]
OptimizerImplementation = Literal["default", "foreach", "fused"]


def precisions(device: Device) -> tuple[Precision, ...]:
    """Precisions a planner may choose on this device, the fastest first."""
    reduced: tuple[tuple[str, Precision], ...] = (("bf16", "bf16"), ("tf32", "tf32"))
    return (*(precision for dtype, precision in reduced if dtype in device.fast_dtypes), "fp32")


def execution_settings(profile: Profile, device: Device, compiling: Sequence[bool] = (False,)) -> Iterator[Plan]:
    """Every way to execute the job apart from its micro-batch, 1 in the plans given back, and what saves memory.

    `compiling` says whether plans are compiled: not unless asked for, since that needs a compiler and a forecast.
    """
    formats: tuple[MemoryFormat, ...] = ("channels_last", "contiguous") if profile.has_convolutions else ("contiguous",)
    threads = (device.cores, max(1, device.cores // 2), 1) if device.kind == "cpu" else (1,)
    arithmetic = _FP64 if profile.is_double else precisions(device)
    for is_compiled, precision, memory_format, implementation, count, (loader, workers) in itertools.product(
        compiling, arithmetic, formats, _implementations(profile, device), dict.fromkeys(threads),
        loaders(profile, device),
    ):  # fmt: skip
        yield Plan(
            device=device.torch_name, micro_batch=1, precision=precision, memory_format=memory_format,
            optimizer_implementation=implementation, compile=is_compiled, threads=count, loader=loader,
            num_workers=workers, device_mtbf_h=mtbf_h(device.kind, profile.device_mtbf_h),
        )  # fmt: skip


def _implementations(profile: Profile, device: Device) -> tuple[OptimizerImplementation, ...]:
    """Of the optimiser; on a GPU the first alone, since a fused one starts the fewest kernels and moves the least."""
    known = profile.optimizer_implementations
    return known if device.kind == "cpu" else known[:1]  # type: ignore[return-value]  # they are its names


def saving_memory(plan: Plan, profile: Profile) -> Iterator[Plan]:
    """`plan`, then with what saves memory, the least costly in time first.

    Some of the blocks checkpointed is thought of in models of few blocks: under autocast such an update does not repeat
    from block to block, so that all of them have to be traced.
    """
    num_blocks = profile.num_blocks
    quarters = (1, 2, 3) if num_blocks <= MOST_BLOCKS_CUT else ()
    counts = dict.fromkeys((0, *(num_blocks * quarter // 4 for quarter in quarters), num_blocks))
    # A loss in chunks computes nothing twice: it comes before checkpointing, and stays. Models of many blocks, each
    # trace of which takes seconds, are looked at with both or neither.
    chunked = [(count, profile.loss_chunks) for count in counts if count or num_blocks <= MOST_BLOCKS_CUT]
    ways = dict.fromkeys(((0, 1), *chunked))
    for count, chunks in ways:
        for malloc in _MALLOCS if plan.device == "cpu" else ("default",):
            yield dataclasses.replace(plan, checkpointed_blocks=count, loss_chunks=chunks, malloc=malloc)


def saving_of(plan: Plan) -> tuple[int, int, Malloc]:
    """What the plan does of what `saving_memory` thinks of."""
    return plan.checkpointed_blocks, plan.loss_chunks, plan.malloc


def loaders(profile: Profile, device: Device) -> tuple[tuple[Loader, int], ...]:
    """Loaders with their workers."""
    if profile.is_in_memory:
        return (("device" if _goes_on_the_device(profile, device) else "memory", 0),)
    counts = (device.cores, max(1, device.cores // 2)) if device.kind == "cpu" else HOST_WORKERS
    allowed = (count if profile.most_workers is None else min(count, profile.most_workers) for count in counts)
    return (("inline", 0), *(("workers", count) for count in dict.fromkeys(allowed)))


def _goes_on_the_device(profile: Profile, device: Device) -> bool:
    """Whether all training data lie in a GPU's memory, beside the model: then no batch has to cross."""
    is_known = profile.data_bytes is not None and device.kind == "cuda" and device.memory_bytes is not None
    return is_known and profile.data_bytes <= DATA_SHARE * device.memory_bytes  # type: ignore[operator]  # known


def trace_settings(plan: Plan, profile: Profile, capability: str) -> TraceSettings:
    """What has to be traced to forecast `plan`: tf32 computes on the tensors of fp32.

    `capability` is the compute capability of a CUDA device, empty for a CPU.
    """
    return TraceSettings(
        target="cuda" if plan.device.startswith("cuda") else "cpu",
        capability=kernel_generation(capability),
        micro_batch=plan.micro_batch,
        parts=1 if plan.micro_batch >= profile.batch else 2,
        precision="bf16" if plan.precision == "bf16" else "fp32",  # the others are alike but for the types in the trace
        memory_format=plan.memory_format,
        optimizer_implementation=plan.optimizer_implementation,
        checkpointed_blocks=plan.checkpointed_blocks,
        loss_chunks=plan.loss_chunks,
    )


def kernel_generation(capability: str) -> str:
    """The least capability whose devices run the same kernels in the same memory: traces are shared by generation.

    From 8.0 on attention is fused in bf16; from 9.0 on cuBLAS has a larger workspace.

    >>> [kernel_generation(one) for one in ("7.5", "8.9", "12.0", "")]
    ['7.5', '8.0', '9.0', '']
    """
    major = int(capability.partition(".")[0] or 0)
    return capability if major < 8 else "8.0" if major == 8 else "9.0"


MOST_AXES = 2
"""Axes of a layout that may be above one."""

Problem = Callable[[Layout], str | None]
"""Why a layout does not go with the model; None where it does, or nobody can tell before it is tried."""


def _none_known(_layout: Layout) -> str | None:
    return None


@dataclass(frozen=True, kw_only=True)
class LayoutRules:
    """What layouts of a job have to keep.

    `alone` says why its updates cannot be spread at all (None: they can), `whole_copies` why every process must hold
    all of the model (None: it need not). `objection` is what those who divide models say of a layout that does so.
    """

    profile: Profile
    alone: str | None = None
    whole_copies: str | None = None
    objection: Problem = _none_known

    def problem_with(self, layout: Layout) -> str | None:
        """Why a layout is not legal, with the numbers and what would be; None where it is."""
        if layout.world_size == 1:
            return None
        checks = (lambda _: self.alone, self._copies, self._samples, self._tensor, self._divided)
        return next((problem for check in checks if (problem := check(layout)) is not None), None)

    def _copies(self, layout: Layout) -> str | None:
        """Of whole models."""
        return None if layout.is_replicated else self.whole_copies

    def _samples(self, layout: Layout) -> str | None:
        """Of parts of a batch."""
        profile = self.profile
        return layout.problem_with(profile.coupling, min(profile.batch, profile.num_train))

    def _tensor(self, layout: Layout) -> str | None:
        """Of tensor groups, which are of no use over slow links."""
        if layout.tensor > NODE_DEVICES:
            return f"{layout.tensor} tensor processes are more than the {NODE_DEVICES} devices of a node"
        return None

    def _divided(self, layout: Layout) -> str | None:
        """Of a model in parts."""
        return None if layout.is_replicated else self.objection(layout)


def layouts_of(count: int) -> Iterator[Layout]:
    """Layouts of `count` processes, the simplest first: along one axis, then along two."""
    names = ("replicas", "shards", "tensor", "stages")
    if count == 1:
        yield Layout()
        return
    for name in names:
        yield from _variants(Layout(**{name: count}))  # type: ignore[arg-type]  # each is a number
    for one, other in itertools.combinations(names, MOST_AXES):
        for first in range(2, count // 2 + 1):
            if count % first == 0:
                yield from _variants(Layout(**{one: first, other: count // first}))  # type: ignore[arg-type]


def _variants(layout: Layout) -> Iterator[Layout]:
    """A layout as it is, and with what its axes allow to choose."""
    sizes = {"replicas": layout.replicas, "shards": layout.shards, "tensor": layout.tensor, "stages": layout.stages}
    reshards = (True, False) if layout.shards > 1 else (True,)
    sequences = (False, True) if layout.tensor > 1 else (False,)
    for reshard, sequence in itertools.product(reshards, sequences):
        yield Layout(**sizes, reshard=reshard, sequence=sequence)  # type: ignore[arg-type]
