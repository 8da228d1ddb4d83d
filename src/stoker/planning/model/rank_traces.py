"""The trace and the state of one process of a layout, from the trace of an update in one process.

A part of a batch needs no change: its trace is one of fewer samples. Shards, tensor groups and stages divide operations
and storages here, one by one, so that malloc and the caching allocator are replayed over the result as over any trace.

Not checked: that everything between two divided layers is divided as they are, as in attention and feed-forward layers.

`rank_state` is what PyTorch keeps in a process from update to update, to the byte.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.planning.model.communication import gradient_buckets, local_shape, padded_shard_bytes, sharding_groups
from stoker.records import Layout, Occurrence, Operation, TensorShape, Trace
from stoker.records.profile import Division, ModelParts, Parameter

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_STATE = ("parameter", "optimizer state", "average")


def with_buckets(trace: Trace) -> Trace:
    """The trace with gradients in permanent buckets, into which each is copied when it is made."""
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
    """The trace with one shard of parameters, gradients and optimiser state, and the optimiser's work on it."""
    stored = _stored(parts, layout)
    share = 1 / layout.shards
    # If parameters stay gathered, gradients of all passes but the last are added up whole.
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
    """The trace of one stage, with the optimiser's work on its share of the parameters, and the storages it allocates.

    `cuts` are the first blocks of all stages but the first. Operations outside of blocks belong to the first stage if
    they come before all blocks in the forward pass, and to the last one if they come after them.
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
    storages = []
    for old in kept:
        storage = trace.storages[old]
        died, born = storage.died, new_index[storage.born] if storage.born >= 0 else storage.born
        if died is not None:
            died = max(0, born, new_index[min(died, len(new_index) - 1)])
        storages.append(dataclasses.replace(storage, born=born, died=died))
    events = [
        (1 if event > 0 else -1) * (renumbered[abs(event) - 1] + 1) for event in trace.events
        if abs(event) - 1 in renumbered
    ]  # fmt: skip
    occurrences = [one for one, is_mine in zip(trace.occurrences, keep, strict=True) if is_mine]
    first_block = next((n for n, one in enumerate(parts.parameters) if one.block is not None), len(parts.parameters))
    trained_bytes = 0
    for index, parameter in enumerate(parts.parameters):
        if parameter.block is not None:
            at_stage = sum(parameter.block >= cut for cut in cuts)
        else:
            at_stage = len(cuts) if first_block <= index else 0
        trained_bytes += parameter.num_bytes if parameter.is_trained and at_stage == stage else 0
    share = trained_bytes / max(1, parts.trained_bytes)
    staged = dataclasses.replace(
        trace, occurrences=tuple(occurrences), storages=tuple(storages), events=tuple(events), repetition=None
    )
    return _with_operations(
        staged, lambda one, operation: _in_rows(operation, share) if one.phase == "optimizer" else operation
    )


def boundary_bytes(trace: Trace, parts: ModelParts) -> int:
    """Bytes that a stage passes on for one micro-batch: the first tensor that a block in the middle reads."""
    middle = parts.blocks[len(parts.blocks) // 2]
    for one in trace.occurrences:
        name = trace.modules[one.module]
        if one.phase == "forward" and one.part == 0 and (name == middle or name.startswith(f"{middle}.")):
            return _bytes_of(trace.operations[one.operation].inputs[0])
    return 0


_ITEM_BYTES = {"fp64": 8, "int64": 8, "bf16": 2, "fp16": 2, "bool": 1, "uint8": 1}


def batch_norms_of(trace: Trace) -> tuple[Operation, ...]:
    """The batch norms in the forward pass of one micro-batch."""
    operations = (trace.operations[one.operation] for one in trace.occurrences
                  if one.part == 0 and one.phase == "forward")  # fmt: skip
    return tuple(one for one in operations if "batch_norm" in one.name)


def synced_norm_work(norm: Operation) -> Operation:
    """One of the `SYNCED_NORM_WORK` elementwise operations that a batch norm over several processes adds to PyTorch's.

    Each is over tensors as large as the norm's input.
    """
    x = norm.inputs[0]
    num_bytes = _bytes_of(x)
    return Operation(name="mul", inputs=(x, x), outputs=(x,), flops=0, bytes_read=2 * num_bytes,
                     bytes_written=num_bytes)  # fmt: skip


SYNCED_NORM_WORK = 5
"""Passes of `stoker.stepping.batch_norm` over a tensor, less those of PyTorch's own kernels."""


def tensor_sums(trace: Trace, parts: ModelParts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes of the tensors that a tensor group sums for one micro-batch [bytes]: forward outputs, backward gradients.

    Forward the outputs of layers divided by rows or by vocabulary, backward the input gradient of layers divided by
    columns: once for the layers of one parent, such as queries, keys and values, since they share their input.
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
    """Bytes that a process stores, by a whole tensor's bytes; the mean for parameters of the same size."""
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    for one in parts.parameters:
        sizes[one.num_bytes].append(stored_bytes(one, layout))
    means = {whole: round(sum(local) / len(local)) for whole, local in sizes.items()}
    return lambda num_bytes: means.get(num_bytes, num_bytes)


def _stages(trace: Trace, parts: ModelParts, cuts: Sequence[int]) -> list[int | None]:
    """The stage of each occurrence; None for the optimiser's."""
    block_of: list[int | None] = []
    for name in trace.modules:
        parents = [name.rsplit(".", cut)[0] for cut in range(name.count(".") + 1)]
        block_of.append(next((parts.blocks.index(parent) for parent in parents if parent in parts.blocks), None))
    first_block = next((index for index, p in enumerate(parts.parameters) if p.block is not None), 0)
    before_blocks = {p.name.rpartition(".")[0] for p in parts.parameters[:first_block]} - {""}
    stages: list[int | None] = []
    last, has_passed = 0, False
    for one in trace.occurrences:
        block = block_of[one.module]
        if one.phase == "optimizer":
            stages.append(None)
            continue
        if block is not None:
            last, has_passed = sum(block >= cut for cut in cuts), True
        elif one.phase == "forward":
            # Before the first block of a micro-batch, or after its last one; a module registered before the blocks
            # begins the next micro-batch.
            has_passed = has_passed and trace.modules[one.module] not in before_blocks
            last = len(cuts) if has_passed else 0
        stages.append(last)
    return stages


def _with_operations(trace: Trace, change: Callable[[Occurrence, Operation], Operation]) -> Trace:
    """The trace with each occurrence's operation changed; equal operations stay one."""
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
    """The operation over a share of the first dimension of every tensor."""
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
    """The operations of a trace as a tensor group divides them."""

    def __init__(self, trace: Trace, parts: ModelParts, tensor: int) -> None:
        self._trace, self._share = trace, 1 / tensor
        self._divided: dict[str, Division] = parts.divided
        self._weights = {one.name.rpartition(".")[0]: one.shape for one in parts.parameters if len(one.shape) == 2}
        between: defaultdict[str, set[Division]] = defaultdict(set)
        for name, division in self._divided.items():
            between[name.rpartition(".")[0]].add(division)
        self._between = {name for name, kinds in between.items() if name and len(kinds) > 1}

    def output_share(self, one: Occurrence) -> float:
        """Share of an occurrence's outputs in one process [0 to 1]."""
        operation = self._trace.operations[one.operation]
        after = self.operation(one, operation)
        whole = sum(shape.numel for shape in operation.outputs)
        return sum(shape.numel for shape in after.outputs) / whole if whole else 1.0

    def operation(self, one: Occurrence, operation: Operation) -> Operation:
        """One process's part of an occurrence's operation."""
        name = self._trace.modules[one.module]
        division = self._divided.get(name)
        if division is not None and operation.name in _PRODUCTS:
            return self._product(operation, division, self._weights.get(name, ()), is_forward=one.phase == "forward")
        if name in self._between or division == "columns":

            def narrowed(shape: TensorShape) -> TensorShape:
                if not shape.shape:
                    return shape
                dim = 1 if len(shape.shape) == 4 else len(shape.shape) - 1  # heads, or features
                return _with_dim(shape, dim, self._share)

            return _scaled(operation, self._share, narrowed)
        return operation

    def _product(
        self, operation: Operation, division: Division, weight: tuple[int, ...], *, is_forward: bool
    ) -> Operation:
        """The product with m, k or n of [m, k] @ [k, n] divided: the layer's outputs (columns) or inputs (rows)."""
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
"""A tensor of an optimiser's state up to this size [bytes] is a counter, one for each parameter."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFootprint:
    """An optimiser's state: `like` tensors of each trained parameter's shape, and `scalar_bytes` for each parameter."""

    like: int
    scalar_bytes: int

    @classmethod
    def of(cls, trace: Trace, parts: ModelParts) -> OptimizerFootprint:
        """The footprint in a trace of the whole model; the rounded mean if states differ by parameter."""
        state = [one.num_bytes for one in trace.storages if one.category == "optimizer state" and one.born < 0]
        trained = [one for one in parts.parameters if one.is_trained]
        scalars = [size for size in state if size <= SCALAR_BYTES]
        like = (sum(state) - sum(scalars)) / max(1, parts.trained_bytes)
        return cls(like=round(like), scalar_bytes=round(sum(scalars) / max(1, len(trained))))


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of a process [bytes]: its part of parameters, of their gradients, and of the optimiser's state.

    `parameters` include the padding of `fully_shard`, by which every process has as much as the first.
    """

    parameters: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """Parameters, gradients and optimiser state [bytes]."""
        return self.parameters + self.gradients + self.optimizer


def rank_state(
    parts: ModelParts, layout: Layout, rank: int, moments: OptimizerFootprint, cuts: tuple[int, ...] | None = None
) -> RankState:
    """The state of process number `rank`; `cuts` as in `stage_of`.

    Not checked: that the optimiser's state of a parameter is shaped like the parameter.
    """
    stage, _, shard, _ = layout.coordinates(rank)
    held = [one for one in parts.parameters if stage_of(one, parts, layout.stages, cuts) == stage]
    trained = [one for one in held if one.is_trained]
    gradients = sum(local_bytes(one, layout, shard) for one in trained)
    return RankState(
        parameters=sum(stored_bytes(one, layout) for one in held),
        gradients=gradients,
        optimizer=moments.like * gradients + moments.scalar_bytes * len(trained),
    )


def local_bytes(one: Parameter, layout: Layout, shard: int) -> int:
    """Bytes of a parameter in a shard; the last shards may have less than the others, or none."""
    shape = local_shape(one, layout.tensor)
    if not shape or layout.shards == 1:
        return math.prod(shape) * one.item_bytes
    each = -(-shape[0] // layout.shards)
    rows = min(each, max(0, shape[0] - shard * each))
    return rows * math.prod(shape[1:]) * one.item_bytes


def stored_bytes(one: Parameter, layout: Layout) -> int:
    """Bytes of a parameter in a process, with padding."""
    if layout.shards > 1:
        return padded_shard_bytes(one, layout.shards, layout.tensor)
    return math.prod(local_shape(one, layout.tensor)) * one.item_bytes


def stage_of(one: Parameter, parts: ModelParts, stages: int, cuts: tuple[int, ...] | None = None) -> int:
    """Index of the stage that holds a parameter [0 to stages - 1]: that of its block, else the first or the last.

    Parameters registered before the first block are assumed to feed it, those after to use the last block's output.
    `cuts` are the first blocks of all stages but the first; evenly spaced if None.
    """
    if stages == 1:
        return 0
    if one.block is None:
        first_block = next(index for index, other in enumerate(parts.parameters) if other.block is not None)
        return 0 if parts.parameters.index(one) < first_block else stages - 1
    return sum(one.block >= cut for cut in cuts or even_cuts(len(parts.blocks), stages))


def even_cuts(num_blocks: int, stages: int) -> tuple[int, ...]:
    """First blocks of all stages but the first, if stages hold equally many, give or take one.

    >>> even_cuts(6, 4)
    (1, 3, 4)
    """
    return tuple(num_blocks * stage // stages for stage in range(1, stages))


def communication_buffers(parts: ModelParts, layout: Layout) -> int:
    """Peak memory of buffers for communication on a GPU [bytes].

    Replicas need none: their buckets hold the gradients themselves. Shards need two gathered blocks, the one in use and
    the next, with the buffer they came in, and the gradients of a block before and after they are reordered for their
    sum.
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
    """Peak memory of buffers for communication on a CPU [bytes]: gloo copies tensors, in threads that keep the memory.

    In multiples of all gathered bytes, fitted on `calibration` of `bench/many/forecast.py`, PyTorch 2.13: 6 if
    parameters stay gathered, 8 and 10 if blocks are gathered twice.
    """
    if layout.shards == 1:
        return 0
    whole = sum(sharding_groups(parts, layout.shards, layout.tensor))
    return round((_GLOO_TWICE if layout.reshard and parts.blocks else _GLOO_ONCE) * whole)


def buckets_bytes(parts: ModelParts) -> int:
    """Size of DistributedDataParallel's buckets, which hold all gradients permanently [bytes]."""
    return sum(gradient_buckets(parts.parameters))


def of_stage(parts: ModelParts, stage: int, stages: int, cuts: tuple[int, ...] | None = None) -> ModelParts:
    """The parts of one stage, its blocks numbered from 0; `cuts` as in `stage_of`."""
    cuts = cuts or even_cuts(len(parts.blocks), stages)
    first, last = (0, *cuts, len(parts.blocks))[stage : stage + 2]
    held = [one for one in parts.parameters if stage_of(one, parts, stages, cuts) == stage]
    return dataclasses.replace(
        parts,
        parameters=tuple(
            dataclasses.replace(one, block=None if one.block is None else one.block - first) for one in held
        ),
        blocks=parts.blocks[first:last],
    )
