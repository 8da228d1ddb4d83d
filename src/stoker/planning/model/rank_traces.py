"""From the trace of an update in one process to what one process of a layout does of it and holds.

Parts of a batch need no change: they are a trace of fewer samples. What shards, tensor groups and stages divide is
divided here, operation by operation and storage by storage, so that malloc and the caching allocator are replayed over
the result as over any other trace.

Not checked: that what lies between two divided layers is divided as they are, as in attention and feed-forward layers.

What one process of a layout holds from update to update, exactly as PyTorch lays it out.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.planning.model.communication import gradient_buckets, local_shape, padded_shard_bytes, sharding_groups
from stoker.records import Layout, Occurrence, Operation, Storage, TensorShape, Trace
from stoker.records.profile import Division, ModelParts, Parameter

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_STATE = ("parameter", "optimizer state", "average")


def with_buckets(trace: Trace) -> Trace:
    """The trace where gradients lie in buckets for good, and are copied there as they come about."""
    storages = list(trace.storages)
    gradients = [index for index, one in enumerate(storages) if one.category == "gradient" and one.born >= 0]
    before = []
    for index in gradients:
        one = storages[index]
        storages[index] = dataclasses.replace(one, category="temporary", died=one.born)
        storages.append(dataclasses.replace(one, born=-1, died=None))
        before.append(len(storages))
    moved = set(gradients)
    events: list[int] = []
    waiting: list[int] = []
    for event in trace.events:
        index = abs(event) - 1
        if event < 0 and index in moved:
            continue
        events.append(event)
        events.extend(waiting)
        waiting = [-event] if event > 0 and index in moved else []
    start = sum(1 for event in trace.events if event > 0 and trace.storages[event - 1].born < 0)
    events = [*events[:start], *before, *events[start:], *waiting]
    return dataclasses.replace(trace, storages=tuple(storages), events=tuple(events))


def with_shards(trace: Trace, parts: ModelParts, layout: Layout) -> Trace:
    """The trace where each process keeps its shard of parameters, gradients and optimiser state, and moves that."""
    stored = _stored(parts, layout)
    share = 1 / layout.shards
    # Where parameters stay gathered, gradients of all passes but the last are added up whole.
    are_divided = layout.reshard or trace.settings.parts == 1
    kept = ("gradient", *_STATE) if are_divided else _STATE
    storages = [
        dataclasses.replace(one, num_bytes=stored(one.num_bytes)) if one.category in kept else one
        for one in trace.storages
    ]
    return _with_operations(
        dataclasses.replace(trace, storages=tuple(storages)),
        lambda one, operation: _in_rows(operation, share) if one.phase == "optimizer" else operation,
    )


def with_divided_layers(trace: Trace, parts: ModelParts, layout: Layout) -> Trace:
    """The trace of one process of a tensor group."""
    divided = _DividedLayers(trace, parts, layout.tensor)
    stored = _stored(parts, layout)
    factors = [divided.output_share(one) for one in trace.occurrences]
    storages = []
    for one in trace.storages:
        if one.category in ("gradient", *_STATE):
            storages.append(dataclasses.replace(one, num_bytes=stored(one.num_bytes)))
        elif one.born >= 0 and factors[one.born] < 1:
            storages.append(dataclasses.replace(one, num_bytes=math.ceil(one.num_bytes * factors[one.born])))
        else:
            storages.append(one)
    share = sum(stored_bytes(one, layout) for one in parts.parameters) / max(
        1, sum(one.num_bytes for one in parts.parameters)
    )
    return _with_operations(
        dataclasses.replace(trace, storages=tuple(storages)),
        lambda one, operation: (
            _in_rows(operation, share) if one.phase == "optimizer" else divided.operation(one, operation)
        ),
    )


def of_blocks(trace: Trace, parts: ModelParts, cuts: Sequence[int], stage: int) -> Trace:
    """What one stage does, the optimiser for its share of the parameters; its storages are those it allocates.

    `cuts` are the first blocks of all stages but the first. What belongs to no block is done by the first stage where
    it comes before all blocks in the forward pass, and by the last one where it comes after them.
    """
    places = _stages(trace, parts, cuts)
    keep = [place is None or place == stage for place in places]
    number, new_index = 0, list[int]()
    for one in keep:
        number += one
        new_index.append(number - 1)
    kept = [
        index for index, one in enumerate(trace.storages)
        if (one.born < 0 and one.category in ("input", "buffer")) or (one.born >= 0 and keep[one.born])
    ]  # fmt: skip
    renumbered = {old: new for new, old in enumerate(kept)}
    storages = [_moved(trace.storages[old], new_index) for old in kept]
    events = [
        (1 if event > 0 else -1) * (renumbered[abs(event) - 1] + 1) for event in trace.events
        if abs(event) - 1 in renumbered
    ]  # fmt: skip
    occurrences = [one for one, is_mine in zip(trace.occurrences, keep, strict=True) if is_mine]
    share = _share_of_stage(parts, cuts, stage)
    made = dataclasses.replace(
        trace, occurrences=tuple(occurrences), storages=tuple(storages), events=tuple(events), repetition=None
    )
    return _with_operations(
        made, lambda one, operation: _in_rows(operation, share) if one.phase == "optimizer" else operation
    )


def boundary_bytes(trace: Trace, parts: ModelParts) -> int:
    """What a stage hands on of one micro-batch [bytes]: the first tensor that a block in the middle reads."""
    middle = parts.blocks[len(parts.blocks) // 2]
    for one in trace.occurrences:
        name = trace.modules[one.module]
        if one.phase == "forward" and one.part == 0 and (name == middle or name.startswith(f"{middle}.")):
            return _bytes_of(trace.operations[one.operation].inputs[0])
    return 0


_ITEM_BYTES = {"fp64": 8, "int64": 8, "bf16": 2, "fp16": 2, "bool": 1, "uint8": 1}


def batch_norms_of(trace: Trace) -> tuple[Operation, ...]:
    """The batch norms that one micro-batch passes through, one for each forward pass of one."""
    operations = (trace.operations[one.operation] for one in trace.occurrences
                  if one.part == 0 and one.phase == "forward")  # fmt: skip
    return tuple(one for one in operations if "batch_norm" in one.name)


def synced_norm_work(norm: Operation) -> Operation:
    """One of the elementwise operations of which a batch norm over several processes is made on top of PyTorch's.

    `SYNCED_NORM_WORK` of them, each over tensors as large as the norm's input.
    """
    x = norm.inputs[0]
    num_bytes = _bytes_of(x)
    return Operation(name="mul", inputs=(x, x), outputs=(x,), flops=0, bytes_read=2 * num_bytes,
                     bytes_written=num_bytes)  # fmt: skip


SYNCED_NORM_WORK = 5
"""See `stoker.stepping.batch_norm`: its passes over a tensor, less those of PyTorch's own kernels."""


def tensor_sums(trace: Trace, parts: ModelParts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tensor group sums in the passes of one micro-batch [bytes]: forward outputs, backward gradients.

    Forward the outputs of layers divided by rows or by vocabulary, backward the gradient of what layers divided by
    columns take: once for those of one parent, such as queries, keys and values, since they take the same.
    """
    forward: list[int] = []
    backward: dict[str, int] = {}
    for one in trace.occurrences:
        name = trace.modules[one.module]
        division, operation = parts.divided.get(name), trace.operations[one.operation]
        if division is None or one.phase != "forward" or one.part != 0:
            continue
        if division == "columns" and operation.name in _PRODUCTS:
            backward[name.rpartition(".")[0]] = _bytes_of(operation.inputs[-2])
        elif division == "vocabulary" or operation.name in _PRODUCTS:
            forward.append(_bytes_of(operation.outputs[0]))
    return tuple(forward), tuple(backward.values())


def _bytes_of(shape: TensorShape) -> int:
    return shape.numel * _ITEM_BYTES.get(shape.dtype, 4)


def _stored(parts: ModelParts, layout: Layout) -> Callable[[int], int]:
    """From a whole tensor's bytes to what a process stores of it; of sizes that mean several parameters, in turn."""
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    for one in parts.parameters:
        sizes[one.num_bytes].append(stored_bytes(one, layout))
    means = {whole: round(sum(found) / len(found)) for whole, found in sizes.items()}
    return lambda num_bytes: means.get(num_bytes, num_bytes)


def _stages(trace: Trace, parts: ModelParts, cuts: Sequence[int]) -> list[int | None]:
    """The stage of each occurrence; None of those of the optimiser."""
    block_of = _blocks_by_module(trace, parts)
    found: list[int | None] = []
    last, has_passed = 0, False
    for one in trace.occurrences:
        block = block_of[one.module]
        if one.phase == "optimizer":
            found.append(None)
            continue
        if block is not None:
            last, has_passed = sum(block >= cut for cut in cuts), True
        elif one.phase == "forward":
            # Before the first block of a micro-batch, or after its last one.
            has_passed = has_passed and not _begins_again(trace, one, parts)
            last = len(cuts) if has_passed else 0
        found.append(last)
    return found


def _begins_again(trace: Trace, one: Occurrence, parts: ModelParts) -> bool:
    """Whether an occurrence outside of blocks belongs to a module registered before them."""
    name = trace.modules[one.module]
    first = next((index for index, p in enumerate(parts.parameters) if p.block is not None), 0)
    return bool(name) and any(p.name.rpartition(".")[0] == name for p in parts.parameters[:first])


def _blocks_by_module(trace: Trace, parts: ModelParts) -> list[int | None]:
    found: list[int | None] = []
    for name in trace.modules:
        parents = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
        found.append(next((parts.blocks.index(parent) for parent in parents if parent in parts.blocks), None))
    return found


def _share_of_stage(parts: ModelParts, cuts: Sequence[int], stage: int) -> float:
    """Of all trained bytes, those of a stage."""
    whole, mine = parts.trained_bytes, 0
    places = [place for place, one in enumerate(parts.parameters) if one.block is not None]
    for place, one in enumerate(parts.parameters):
        outside = 0 if not places or place < places[0] else len(cuts)
        at = outside if one.block is None else sum(one.block >= cut for cut in cuts)
        mine += one.num_bytes if one.is_trained and at == stage else 0
    return mine / max(1, whole)


def _moved(one: Storage, new_index: Sequence[int]) -> Storage:
    if one.born < 0:
        return dataclasses.replace(one, died=None if one.died is None else max(0, new_index[one.died]))
    died = None if one.died is None else max(new_index[one.born], new_index[min(one.died, len(new_index) - 1)])
    return dataclasses.replace(one, born=new_index[one.born], died=died)


def _with_operations(trace: Trace, change: Callable[[Occurrence, Operation], Operation]) -> Trace:
    """The trace with each occurrence's operation changed; operations alike stay one."""
    operations: list[Operation] = []
    numbers: dict[tuple[int, str, int], int] = {}
    occurrences = []
    for one in trace.occurrences:
        key = one.operation, one.phase, one.module
        if key not in numbers:
            changed = change(one, trace.operations[one.operation])
            if not operations or changed not in operations[-64:]:
                operations.append(changed)
            numbers[key] = len(operations) - 1 - operations[::-1].index(changed)
        occurrences.append(dataclasses.replace(one, operation=numbers[key]))
    return dataclasses.replace(trace, operations=tuple(operations), occurrences=tuple(occurrences))


def _in_rows(operation: Operation, share: float) -> Operation:
    """The same over so much of the first dimension of every tensor."""
    return _scaled(operation, share, lambda shape: _with_dim(shape, 0, share) if shape.shape else shape)


def _scaled(operation: Operation, share: float, narrowed: Callable[[TensorShape], TensorShape]) -> Operation:
    return dataclasses.replace(
        operation,
        inputs=tuple(map(narrowed, operation.inputs)), outputs=tuple(map(narrowed, operation.outputs)),
        flops=round(operation.flops * share), bytes_read=round(operation.bytes_read * share),
        bytes_written=round(operation.bytes_written * share),
    )  # fmt: skip


def _with_dim(shape: TensorShape, dim: int, share: float) -> TensorShape:
    sizes = list(shape.shape)
    sizes[dim] = max(1, math.ceil(sizes[dim] * share))
    return TensorShape(shape=tuple(sizes), dtype=shape.dtype)


class _DividedLayers:
    """Which of a trace's operations a tensor group divides, and how."""

    def __init__(self, trace: Trace, parts: ModelParts, tensor: int) -> None:
        self._trace, self._share = trace, 1 / tensor
        self._divided: dict[str, Division] = parts.divided
        self._weights = {one.name.rpartition(".")[0]: one.shape for one in parts.parameters if len(one.shape) == 2}
        between: defaultdict[str, set[Division]] = defaultdict(set)
        for name, division in self._divided.items():
            between[name.rpartition(".")[0]].add(division)
        self._between = {name for name, kinds in between.items() if name and len(kinds) > 1}

    def output_share(self, one: Occurrence) -> float:
        """What is left of an occurrence's outputs."""
        operation = self._trace.operations[one.operation]
        after = self.operation(one, operation)
        whole = sum(shape.numel for shape in operation.outputs)
        return sum(shape.numel for shape in after.outputs) / whole if whole else 1.0

    def operation(self, one: Occurrence, operation: Operation) -> Operation:
        """What a process does of an occurrence's operation."""
        name = self._trace.modules[one.module]
        division = self._divided.get(name)
        if division is not None and operation.name in _PRODUCTS:
            return self._product(operation, division, self._weights.get(name, ()), is_forward=one.phase == "forward")
        if name in self._between or division == "columns":
            return _scaled(operation, self._share, self._between_layers)
        return operation

    def _between_layers(self, shape: TensorShape) -> TensorShape:
        """Heads, the second dimension of four, or features, the last one, are divided."""
        if not shape.shape:
            return shape
        return _with_dim(shape, 1 if len(shape.shape) == 4 else len(shape.shape) - 1, self._share)

    def _product(
        self, operation: Operation, division: Division, weight: tuple[int, ...], *, is_forward: bool
    ) -> Operation:
        """m, k or n of [m, k] @ [k, n] divided: whichever the layer's outputs (columns) or inputs (rows) are there."""
        *more, a, b = operation.inputs
        out = operation.outputs[0]
        if is_forward:
            dim = "n" if division == "columns" else "k"
        elif sorted(out.shape[-2:]) == sorted(weight):
            is_as_stored = out.shape[-2:] == tuple(weight)
            dim = "m" if (division == "columns") == is_as_stored else "n"
        else:
            dim = "k" if division == "columns" else "n"
        share = self._share
        if dim == "m":
            a, out = _with_dim(a, -2, share), _with_dim(out, -2, share)
        elif dim == "k":
            a, b = _with_dim(a, -1, share), _with_dim(b, -2, share)
        else:
            b, out = _with_dim(b, -1, share), _with_dim(out, -1, share)
            more = [_with_dim(one, -1, share) if one.shape else one for one in more]
        before = sum(one.numel for one in operation.inputs)
        after = sum(one.numel for one in (*more, a, b))
        written = out.numel / max(1, operation.outputs[0].numel)
        return dataclasses.replace(
            operation, inputs=(*more, a, b), outputs=(out, *operation.outputs[1:]),
            flops=round(operation.flops * share), bytes_read=round(operation.bytes_read * after / max(1, before)),
            bytes_written=round(operation.bytes_written * written),
        )  # fmt: skip


_GLOO_ONCE, _GLOO_TWICE = 6.0, 9.0
"""See `gloo_buffers`."""
SCALAR_BYTES = 8
"""A tensor of an optimiser's state up to this size counts something, and is there once for each parameter."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFootprint:
    """An optimiser's state: so many tensors like each trained parameter, and `scalar_bytes` for each besides."""

    like: int
    scalar_bytes: int

    @classmethod
    def of(cls, trace: Trace, parts: ModelParts) -> OptimizerFootprint:
        """As a trace of the whole model has it; of states that differ by parameter, the mean, rounded."""
        state = [one.num_bytes for one in trace.storages if one.category == "optimizer state" and one.born < 0]
        trained = [one for one in parts.parameters if one.is_trained]
        scalars = [size for size in state if size <= SCALAR_BYTES]
        like = (sum(state) - sum(scalars)) / max(1, parts.trained_bytes)
        return cls(like=round(like), scalar_bytes=round(sum(scalars) / max(1, len(trained))))


@dataclass(frozen=True, kw_only=True)
class RankState:
    """What a process keeps [bytes]: its part of parameters, of their gradients, and of the optimiser's state.

    `parameters` are counted as they are stored: `fully_shard` pads them so that every process has as much as the first.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it [bytes]."""
        return self.parameters + self.gradients + self.optimizer


def rank_state(
    parts: ModelParts, layout: Layout, rank: int, moments: OptimizerFootprint, cuts: tuple[int, ...] | None = None
) -> RankState:
    """The state of process number `rank`; `cuts` as in `stage_of`.

    Not checked: that the optimiser's state of a parameter is shaped like the parameter.
    """
    stage, _, shard, _ = layout.coordinates(rank)
    mine = [one for one in parts.parameters if stage_of(one, parts, layout.stages, cuts) == stage]
    trained = [one for one in mine if one.is_trained]
    local = {one.name: local_bytes(one, layout, shard) for one in mine}
    gradients = sum(local[one.name] for one in trained)
    return RankState(
        parameters=sum(stored_bytes(one, layout) for one in mine),
        gradients=gradients,
        optimizer=moments.like * gradients + moments.scalar_bytes * len(trained),
    )


def local_bytes(one: Parameter, layout: Layout, shard: int) -> int:
    """What of a parameter belongs to a shard [bytes]: the last ones may have less than the others, or none."""
    shape = local_shape(one, layout.tensor)
    if not shape or layout.shards == 1:
        return math.prod(shape) * one.item_bytes
    each = -(-shape[0] // layout.shards)
    rows = min(each, max(0, shape[0] - shard * each))
    return rows * math.prod(shape[1:]) * one.item_bytes


def stored_bytes(one: Parameter, layout: Layout) -> int:
    """What a process stores of a parameter [bytes], padding included."""
    if layout.shards > 1:
        return padded_shard_bytes(one, layout.shards, layout.tensor)
    return math.prod(local_shape(one, layout.tensor)) * one.item_bytes


def stage_of(one: Parameter, parts: ModelParts, stages: int, cuts: tuple[int, ...] | None = None) -> int:
    """The stage that holds a parameter: that of its block, else the first or the last.

    What is registered before the first block feeds it, what comes after the last one takes what it gives. `cuts` are
    the first blocks of all stages but the first; evenly spread where none are given.
    """
    if stages == 1:
        return 0
    if one.block is None:
        places = [place for place, other in enumerate(parts.parameters) if other.block is not None]
        return 0 if parts.parameters.index(one) < places[0] else stages - 1
    return sum(one.block >= cut for cut in cuts or even_cuts(len(parts.blocks), stages))


def even_cuts(num_blocks: int, stages: int) -> tuple[int, ...]:
    """First blocks of all stages but the first, where stages hold equally many, give or take one.

    >>> even_cuts(6, 4)
    (1, 3, 4)
    """
    return tuple(num_blocks * stage // stages for stage in range(1, stages))


def communication_buffers(parts: ModelParts, layout: Layout) -> int:
    """What is allocated beside the model to tell each other of it, at the most [bytes].

    Of whole copies the buckets, which hold the gradients themselves; nothing comes on top. Of shards two gathered
    blocks, the one in use and the next, with the buffer they came in, and the gradients of a block before and after
    they are put in order for their sum.
    """
    if layout.shards == 1:
        return 0
    sizes = Counter[int | None]()
    for one in parts.parameters:
        sizes[one.block] += padded_shard_bytes(one, layout.shards, layout.tensor) * layout.shards
    blocks = sorted((size for block, size in sizes.items() if block is not None), reverse=True)
    root, largest = sizes[None], blocks[0] if blocks else 0
    gathered = root + (2 * largest if layout.reshard else sum(blocks))
    return gathered + 2 * max(root, largest)


def gloo_buffers(parts: ModelParts, layout: Layout) -> int:
    """The same on a CPU [bytes]: gloo copies what it gathers and scatters, in threads that keep the memory they had.

    In multiples of all that is gathered, fitted on `calibration` of `bench/many/forecast.py`, PyTorch 2.13: 6 where
    parameters stay gathered, 8 and 10 where blocks are gathered twice.
    """
    if layout.shards == 1:
        return 0
    whole = sum(sharding_groups(parts, layout.shards, layout.tensor))
    return round((_GLOO_TWICE if layout.reshard and parts.blocks else _GLOO_ONCE) * whole)


def buckets_bytes(parts: ModelParts) -> int:
    """Of DistributedDataParallel's buckets, which hold all gradients for good [bytes]."""
    return sum(gradient_buckets(parts.parameters))


def of_stage(parts: ModelParts, stage: int, stages: int, cuts: tuple[int, ...] | None = None) -> ModelParts:
    """What one stage holds, its blocks numbered from 0; `cuts` as in `stage_of`."""
    cuts = cuts or even_cuts(len(parts.blocks), stages)
    first, last = (0, *cuts, len(parts.blocks))[stage : stage + 2]
    mine = [one for one in parts.parameters if stage_of(one, parts, stages, cuts) == stage]
    return dataclasses.replace(
        parts,
        parameters=tuple(
            dataclasses.replace(one, block=None if one.block is None else one.block - first) for one in mine
        ),
        blocks=parts.blocks[first:last],
    )
