"""What one process of a layout holds from update to update, exactly as PyTorch lays it out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass

from stoker.planning.communication import gradient_buckets, local_shape, padded_shard_bytes, sharding_groups
from stoker.records import Layout, Trace
from stoker.records.model_parts import ModelParts, Parameter

_GLOO_ONCE, _GLOO_TWICE = 6.0, 9.0
"""See `gloo_buffers`."""
SCALAR_BYTES = 8
"""A tensor of an optimiser's state up to this size counts something, and is there once for each parameter."""


@dataclass(frozen=True, kw_only=True)
class Moments:
    """An optimiser's state: so many tensors like each trained parameter, and `scalar_bytes` for each besides."""

    like: int
    scalar_bytes: int

    @classmethod
    def of(cls, trace: Trace, parts: ModelParts) -> Moments:
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
    parts: ModelParts, layout: Layout, rank: int, moments: Moments, cuts: tuple[int, ...] | None = None
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
