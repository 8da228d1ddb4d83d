"""The trace of one update: its operations, the life of every storage, and their order.

A trace is made without computing anything, for a target that need not be here. It is short: recurring operations are
stored once, and of repeated blocks only a few are in it (see `Repetition`).

A timeline is the trace as one sequence of executions, births and deaths. Events of one block form *runs*, and runs of
all blocks form *sweeps*: forwards when the batch passes through them, backwards with the gradients, forwards again when
the optimiser goes through a list of parameters. A repeated block is *proved* equal to the next one if in every sweep
both have the same events, on storages in the same place relative to the block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

from stoker.records.codec import JSON
from stoker.records.device import Precision
from stoker.records.plan import Checkpointing, OptimizerOffload, OptimizerStates

Phase = Literal["forward", "backward", "optimizer"]
"""Where in an update: the forward pass and loss; the backward pass, recomputation included; what follows (clipping,
the optimiser, the average of weights)."""

Category = Literal["parameter", "buffer", "gradient", "optimizer state", "average", "input", "activation", "temporary"]
"""The use of a storage. An `activation` is made in a forward pass and outlives it; a `temporary` does not, or is made
later and is neither a gradient nor state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """Sizes of a tensor and its dtype, such as `fp32`, `bf16` or `int64`."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Number of scalars [elements]."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """An ATen operation as the device executes it; views and what moves no data are left out.

    `name` is ATen's, without namespace and overload: `addmm`, `convolution_backward`, `_foreach_add_`. Lists of tensors
    are flattened into `inputs`. `flops` counts a multiply-add as two, a causal attention's mask not at all (as
    `torch.utils.flop_counter` does). Bytes count what has to cross memory once; broadcast dimensions count once.
    `attributes` are what else sets the time, sorted by name: of convolutions `stride`, `padding`, `dilation`, `groups`,
    `transposed`, `channels_last`, of backward passes `output_mask`, of attention `is_causal`, of matrix products
    `transpose_a` and `transpose_b` (whether the operand is transposed in memory), of softmaxes and reductions `dim`.
    """

    name: str
    inputs: tuple[TensorShape, ...]
    outputs: tuple[TensorShape, ...]
    flops: int
    bytes_read: int
    bytes_written: int
    attributes: tuple[tuple[str, JSON], ...] = ()

    def attribute(self, name: str, default: JSON = None) -> JSON:
        """An attribute's value."""
        return next((value for key, value in self.attributes if key == name), default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Occurrence:
    """One execution.

    `operation`, `module` and `source` are places in `Trace.operations`, `Trace.modules` and `Trace.sources`; `part` is
    the number of the micro-batch, from 0.
    """

    operation: int
    phase: Phase
    part: int
    module: int
    source: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Memory that is allocated once and freed once.

    `born` is the index of the occurrence that allocates it (-1: before the update), `died` of the one after which it is
    freed (None: it outlives the update). `num_bytes` is what PyTorch asks the allocator for. `block` is the repeated
    block it belongs to (None: outside of them). `compiled_share` is the share of its bytes that compiled code holds in
    its place: 0 for what is computed again in the backward pass.
    """

    num_bytes: int
    category: Category
    born: int
    died: int | None
    block: int | None = None
    compiled_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Occurrences start <= i < stop: what one repeated block does in one go."""

    block: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Widened:
    """The whole model's operation in place of an occurrence whose operation goes over tensors of many blocks."""

    occurrence: int
    operation: Operation


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """A model of `num_blocks` equal blocks of which only `traced` were traced.

    `module` is the list of the blocks; empty where they are the time steps of its recurrent layers.
    `segments` are in the order of execution. `copies` says which blocks stand for more than themselves: after each
    traced block (its number among those traced) so many more like it. `widened` are the operations over lists of
    tensors, `grown` the storages whose sizes [bytes] go with the number of blocks. `trace_extrapolation.expanded` adds
    the missing blocks in their places.
    """

    schema: ClassVar[int] = 1
    module: str
    num_blocks: int
    traced: int
    segments: tuple[Segment, ...]
    copies: tuple[tuple[int, int], ...]
    widened: tuple[Widened, ...] = ()
    grown: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TraceSettings:
    """The settings of a trace, besides the job.

    `capability` is the compute capability of a CUDA target, such as `8.9`, and empty for a CPU: it decides which
    attention kernel runs. `parts` is 1, or 2 for an update of several micro-batches, whose second stands for all but
    the first. `checkpointed_blocks`, `checkpointing` and `loss_chunks` as in a Plan. `gathered_in` is the dtype that a
    layout gathers parameters in and computes with, while masters, summed gradients and the optimiser's state are fp32
    (`fully_shard` with `MixedPrecisionPolicy(param_dtype, reduce_dtype=fp32)`); None: weights are used as they are
    stored, and `precision` bf16 is autocast. `optimizer_states`, `optimizer_offload` and `activation_offload` as in a
    Plan; what is traced has full ones, and all on the device.
    """

    schema: ClassVar[int] = 1
    target: Literal["cpu", "cuda"]
    capability: str
    micro_batch: int
    parts: int = 1
    precision: Precision = "fp32"
    memory_format: Literal["contiguous", "channels_last"] = "contiguous"
    optimizer_implementation: Literal["default", "foreach", "fused"] = "default"
    checkpointed_blocks: int = 0
    checkpointing: Checkpointing = "full"
    loss_chunks: int = 1
    gathered_in: Literal["bf16"] | None = None
    optimizer_states: OptimizerStates = "full"
    optimizer_offload: OptimizerOffload = "none"
    activation_offload: bool = False

    def on_device(self) -> TraceSettings:
        """The same update with nothing offloaded."""
        return replace(self, optimizer_offload="none", activation_offload=False)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One update, with the optimiser's state already there.

    `occurrences` in order of execution; `events` is the exact order of allocations and frees: `i + 1` for the birth of
    storage `i`, `-(i + 1)` for its death, those that live before the update first. `modules` are dotted names
    (`''` for none), `sources` the user's lines, as `train_me.py:42`. `is_fallback` says that the target could not be
    pretended, and a CPU was traced in its place; `is_balanced` that sizes, or the time of grouped products, rest on the
    assumption that a router spreads tokens evenly over its experts. `exchanging` are names of modules that a layout
    makes send messages within their pass: compiled code ends at them. A trace of the whole model has none.
    """

    schema: ClassVar[int] = 1
    settings: TraceSettings
    operations: tuple[Operation, ...]
    occurrences: tuple[Occurrence, ...]
    storages: tuple[Storage, ...]
    events: tuple[int, ...]
    modules: tuple[str, ...]
    sources: tuple[str, ...]
    repetition: Repetition | None = None
    is_fallback: bool = False
    is_balanced: bool = False
    exchanging: tuple[str, ...] = ()
    took_s: float = 0.0

    def where(self, occurrence: Occurrence) -> str:
        """Origin of an occurrence: the user's line, or the module if the line is Stoker's own."""
        line = self.sources[occurrence.source] if self.sources else ""
        is_own = line.startswith("stoker/") and not line.startswith("stoker/zoo/")
        return (self.modules[occurrence.module] if self.modules else "") if is_own else line

    @property
    def flops(self) -> int:
        """FLOPs of all occurrences."""
        return sum(self.operations[occurrence.operation].flops for occurrence in self.occurrences)


class TraceItem(NamedTuple):
    """One thing that happens: an occurrence is executed, or a storage is born or dies.

    `number` is that of the occurrence or storage. `lag` is by how much a storage's `born` or `died` differs from the
    number of the last occurrence before this item: 0, but for allocations by what is not an operation.
    """

    kind: Literal["execution", "birth", "death"]
    number: int
    lag: int = 0


class BlockRun(NamedTuple):
    """Items start <= i < stop of a timeline: what happens for one block (None: for none) in one go."""

    block: int | None
    start: int
    stop: int


class BlockPlace(NamedTuple):
    """Where a repeated block's item is: the block, the sweep, and which item of the block's run it is."""

    block: int
    sweep: int
    offset: int


class NotPeriodic(ValueError):
    """The blocks of a shortened trace do not do the same, so the blocks left out are not known."""


@dataclass(frozen=True)
class TraceTimeline:
    """Items of a trace, the runs they fall into, and which runs belong to which sweep (-1: to none)."""

    items: tuple[TraceItem, ...]
    runs: tuple[BlockRun, ...]
    sweeps: tuple[int, ...]

    def births(self) -> dict[int, BlockPlace]:
        """The places where storages are born, of those that are born in a sweep."""
        return self._places("birth")

    def deaths(self) -> dict[int, BlockPlace]:
        """The places where storages die, of those that die in a sweep."""
        return self._places("death")

    def _places(self, kind: str) -> dict[int, BlockPlace]:
        places: dict[int, BlockPlace] = {}
        for run, sweep in zip(self.runs, self.sweeps, strict=True):
            if run.block is not None and sweep >= 0:
                for offset, item in enumerate(self.items[run.start : run.stop]):
                    if item.kind == kind:
                        places[item.number] = BlockPlace(run.block, sweep, offset)
        return places


def in_order(trace: Trace) -> tuple[TraceItem, ...]:
    """All items of a trace, in order.

    An event whose stated occurrence is after that of a later event happened before the latter.
    """
    stated: list[int] = []  # the occurrence of each event
    for event in trace.events:
        storage = trace.storages[abs(event) - 1]
        occurrence = storage.born if event > 0 else storage.died
        assert occurrence is not None, "a storage that outlives the update has no death"
        stated.append(occurrence)
    happened = list(itertools.accumulate(reversed(stated), min))[::-1]
    items: list[TraceItem] = []
    executed = 0
    for event, said, after in zip(trace.events, stated, happened, strict=True):
        items.extend(TraceItem("execution", index) for index in range(executed, after + 1))
        executed = max(executed, after + 1)
        items.append(TraceItem("birth" if event > 0 else "death", abs(event) - 1, said - (executed - 1)))
    items.extend(TraceItem("execution", index) for index in range(executed, len(trace.occurrences)))
    return tuple(items)


def settled(events: Sequence[int], storages: Sequence[Storage]) -> tuple[int, ...]:
    """Events with deaths that follow each other at one occurrence in the order of the births.

    PyTorch frees some by the addresses of tensors (the weights that autocast has cast), so that their order says
    nothing; nothing depends on it either, since no memory is asked for in between.
    """
    result: list[int] = []
    for _, group in itertools.groupby(events, key=lambda event: storages[-event - 1].died if event < 0 else -2):
        members = list(group)
        result.extend(sorted(members, reverse=True) if members[0] < 0 else members)
    return tuple(result)


def timeline(trace: Trace, repetition: Repetition) -> TraceTimeline:
    """The timeline of a shortened trace, divided into runs and sweeps.

    Runs of deaths alone may be outside of sweeps: storages that the outermost blocks pass to their surroundings.

    Raises:
        NotPeriodic: a sweep covers some of the blocks only.
    """
    items = in_order(trace)
    runs = _runs(trace, items, repetition)

    def has_only_deaths(index: int) -> bool:
        return all(item.kind == "death" for item in items[runs[index].start : runs[index].stop])

    return TraceTimeline(items, runs, sweeps_of([run.block for run in runs], repetition.traced, has_only_deaths))


def prove(trace: Trace, repetition: Repetition) -> TraceTimeline:
    """The timeline of a shortened trace in which each repeated block is equal to the next.

    Raises:
        NotPeriodic: it is not, with the reason.
    """
    proved = timeline(trace, repetition)
    births, deaths = proved.births(), proved.deaths()
    repeated = {block for block, _ in repetition.copies}
    for storage in deaths.keys() & births.keys():
        born, died = births[storage].block, deaths[storage].block
        if {born, died} & repeated and abs(died - born) > 1:  # further than the missing blocks are known
            raise NotPeriodic(f"what block {born} makes is freed by block {died}")
    for storage in deaths.keys() - births.keys():
        if {deaths[storage].block} & {b for t in repeated for b in (t, t + 1)}:
            raise NotPeriodic(f"storage {storage} is not of a repeated block, which frees it")
    by_sweep = {(run.block, sweep): run for run, sweep in zip(proved.runs, proved.sweeps, strict=True) if sweep >= 0}
    view = _Relative(trace, repetition.module, births, deaths)
    for sweep, template in itertools.product(sorted({s for s in proved.sweeps if s >= 0}), sorted(repeated)):
        one, other = (by_sweep[block, sweep] for block in (template, template + 1))
        if one.stop - one.start != other.stop - other.start:
            raise NotPeriodic(f"blocks {template} and {template + 1} do different numbers of things in sweep {sweep}")
        for first, second in zip(
            proved.items[one.start : one.stop], proved.items[other.start : other.stop], strict=True
        ):
            if view.of(first, template) != view.of(second, template + 1):
                raise NotPeriodic(f"blocks {template} and {template + 1} differ in sweep {sweep}: {first}, {second}")
    return proved


@dataclass(frozen=True)
class _Relative:
    """Items relative to their block, so that those of equal blocks are equal."""

    trace: Trace
    module: str
    births: dict[int, BlockPlace]
    deaths: dict[int, BlockPlace]

    def of(self, item: TraceItem, block: int) -> tuple[object, ...]:
        if item.kind == "execution":
            occurrence = self.trace.occurrences[item.number]
            name = renamed(self.trace.modules[occurrence.module], self.module, block, 0)
            return (occurrence.operation, occurrence.phase, occurrence.part, occurrence.source, name)
        if item.kind == "birth":
            storage, death = self.trace.storages[item.number], self.deaths.get(item.number)
            # What dies outside of the blocks does so at one occurrence, whichever block made it.
            dies = storage.died if death is None else (death.block - block, death.sweep)
            return (storage.num_bytes, storage.category, item.lag, dies)
        born, freed = self.births.get(item.number), self.trace.storages[item.number]
        if born is None:
            return (item.lag, None)
        # The neighbour may be the first or the last block, in which other things stand before what is freed.
        offset = born.offset if born.block == block else (freed.num_bytes, freed.category)
        return (item.lag, born.block - block, born.sweep, offset)


def renamed(module: str, blocks: str, before: int, after: int) -> str:
    """A module's name, with its block's number in the list `blocks` changed from `before` to `after`.

    >>> renamed("layers.1.mlp.up", "layers", 1, 17), renamed("layers.12.mlp", "layers", 1, 17)
    ('layers.17.mlp.up', 'layers.12.mlp')
    """
    prefix = f"{blocks}.{before}"
    if module != prefix and not module.startswith(prefix + "."):
        return module
    return f"{blocks}.{after}{module[len(prefix) :]}"


def _runs(trace: Trace, items: Sequence[TraceItem], repetition: Repetition) -> tuple[BlockRun, ...]:
    """Neighbours of the same block together.

    Within a segment all is its block's. Outside, a storage's life is its own block's: parameters, gradients, optimiser
    state, and what operations over lists of them make.
    """
    block_of: list[int | None] = [None] * len(trace.occurrences)
    for segment in repetition.segments:
        block_of[segment.start : segment.stop] = [segment.block] * (segment.stop - segment.start)
    labels: list[int | None] = []
    current: int | None = None
    for item in items:
        if item.kind == "execution":
            current = block_of[item.number]
            labels.append(current)
        else:
            labels.append(trace.storages[item.number].block if current is None else current)
    runs: list[BlockRun] = []
    for label, group in itertools.groupby(range(len(labels)), key=labels.__getitem__):
        members = list(group)
        runs.append(BlockRun(label, members[0], members[-1] + 1))
    return tuple(runs)


def sweeps_of(
    blocks: Sequence[int | None], traced: int, may_be_alone: Callable[[int], bool] = lambda _place: False
) -> tuple[int, ...]:
    """The sweep (from 0) that each of a sequence of runs belongs to; -1 for those of no block.

    A sweep goes through all blocks, from the first to the last or back. Where it turns around, one run is the end of a
    sweep and the beginning of the next; it counts to the former. `may_be_alone` says for the place of a run of the
    first or last block whether it need not be part of a sweep.

    Raises:
        NotPeriodic: the runs go through some of the blocks only.

    >>> sweeps_of([None, 0, 1, 2, 3, 2, 1, 0, None], 4)
    (-1, 0, 0, 0, 0, 1, 1, 1, -1)
    """
    sweeps = [-1] * len(blocks)
    passes: list[list[int | None]] = [[*range(traced)], [*reversed(range(traced))]]
    number = index = 0
    while index < len(blocks):
        block = blocks[index]
        if block is None:
            index += 1
            continue
        before = blocks[index - 1] if index and sweeps[index - 1] >= 0 else None
        start = index - 1 if before in (0, traced - 1) and abs(before - block) == 1 else index
        if blocks[start : start + traced] in passes:
            sweeps[index : start + traced] = [number] * (start + traced - index)
            number, index = number + 1, start + traced
        elif block in (0, traced - 1) and may_be_alone(index):
            index += 1
        else:
            raise NotPeriodic(f"runs of blocks {list(blocks[index : index + traced])} are not all {traced} in order")
    return tuple(sweeps)
