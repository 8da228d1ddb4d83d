"""The parts of a model's state that one process of a layout holds, to the byte.

Not checked: that the optimiser's state of a parameter is shaped like the parameter.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass

from stoker.layouts import axes_of
from stoker.layouts.trace_division import resized
from stoker.records import Layout, Trace
from stoker.records.profile import ModelParts, Parameter

SCALAR_BYTES = 8
"""A tensor of an optimiser's state up to this size [bytes] is a counter, one for each parameter."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFootprint:
    """An optimiser's state: `like` tensors of each trained parameter's size, and `scalar_bytes` for each parameter."""

    like: float
    scalar_bytes: int

    @classmethod
    def of(cls, trace: Trace, parts: ModelParts) -> OptimizerFootprint:
        """The footprint in a trace of the whole model; the rounded mean if states differ by parameter."""
        state = [
            storage.num_bytes
            for storage in trace.storages
            if storage.category == "optimizer state" and storage.born < 0
        ]
        trained = [parameter for parameter in parts.parameters if parameter.is_trained]
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


def rank_state(parts: ModelParts, layout: Layout, rank: int, moments: OptimizerFootprint) -> RankState:
    """The state of process number `rank`."""
    held = held_parts(parts, layout, rank).parameters
    trained = [one for one in held if one.is_trained]
    gradients = sum(local_bytes(one, layout, rank) for one in trained)
    return RankState(
        parameters=sum(local_bytes(one, layout) for one in held),
        gradients=gradients,
        optimizer=round(moments.like * gradients) + moments.scalar_bytes * len(trained),
    )


def held_parts(parts: ModelParts, layout: Layout, rank: int) -> ModelParts:
    """The parts whose parameters, or parts of them, process number `rank` holds."""
    for axis in axes_of(layout):
        parts = axis.held(parts, layout, rank)
    return parts


def local_bytes(one: Parameter, layout: Layout, rank: int | None = None) -> int:
    """Bytes of a parameter in a process that holds it; without `rank` with the padding that it is stored with."""
    shape = one.shape
    for axis in axes_of(layout):
        shape = axis.local_shape(one, shape, layout, rank)
    return math.prod(shape) * one.item_bytes


def with_local_state(trace: Trace, parts: ModelParts, layout: Layout, kept: tuple[str, ...]) -> Trace:
    """The trace with storages of the categories `kept` as large as a process stores them.

    A storage is recognised by its size: parameters of the same size get the mean of what is stored of them. On a GPU so
    are the temporaries of the optimiser, which works on lists of all parameters there.
    """
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    for parameter in parts.parameters:
        sizes[parameter.num_bytes].append(local_bytes(parameter, layout))
    means = {whole: round(sum(local) / len(local)) for whole, local in sizes.items()}
    optimizer = next((i for i, one in enumerate(trace.occurrences) if one.phase == "optimizer"), len(trace.occurrences))
    first = optimizer if trace.settings.target == "cuda" else len(trace.occurrences)
    storages = tuple(
        resized(storage, means.get(storage.num_bytes, storage.num_bytes))
        if storage.category in kept or (storage.category == "temporary" and storage.born >= first)
        else storage
        for storage in trace.storages
    )
    return dataclasses.replace(trace, storages=storages)
