"""Replicas: each process holds the whole model and takes a part of every batch (data parallel).

Volumes are those of DistributedDataParallel, which sums gradients in buckets during the backward pass (Li et al. 2020,
arXiv:2006.15704, section 3.2.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stoker.layouts.base import DividedUpdate, LayoutAxis, Traffic, gradient_buckets
from stoker.layouts.local_state import local_bytes
from stoker.layouts.shards import sharding_groups
from stoker.records import Layout, Trace
from stoker.records.profile import ModelParts, Parameter

_PASS_S, _PARAMETER_S = 2.6e-4, 2.4e-5
"""Overhead of DistributedDataParallel: a pass, and each parameter in an update [s]."""


class Replicas(LayoutAxis):
    """See `stoker.layouts.base.LayoutAxis`."""

    name = "replicas"
    explanation = "each process holds the whole model and takes a part of every batch"
    complexity = 0
    compiles = True

    def traffic(self, update: DividedUpdate) -> Sequence[Traffic]:
        """As `LayoutAxis.traffic`; of shards, which were summed already, each process's part."""
        layout, parts = update.layout, update.held
        if layout.shards > 1:
            sums = sharding_groups(parts, layout, of_gradients=True)[::-1]
            shares = tuple(size // layout.shards for size in sums if size)
            return (
                Traffic(
                    what="gradients summed", collective="all-reduce", axis="replicas", sizes=shares, overlaps="backward"
                ),
            )
        if layout.is_replicated:
            return replicated_traffic(parts.parameters)
        # Each process sums its part of a matrix with those of the same part.
        local = ((parameter, local_bytes(parameter, layout) // parameter.item_bytes) for parameter in parts.parameters)
        return summed_after([dataclasses.replace(one, shape=(numel,)) for one, numel in local])

    def overhead_s(self, parts: ModelParts, layout: Layout, passes: int) -> float:
        """As `LayoutAxis.overhead_s`; shards have their own."""
        if layout.shards > 1:
            return 0.0
        num_parameters = sum(parameter.is_trained for parameter in parts.parameters) / layout.stages
        return passes * _PASS_S + num_parameters * _PARAMETER_S

    def trace_of(self, trace: Trace, parts: ModelParts, layout: Layout, rank: int) -> Trace:
        """As `LayoutAxis.trace_of`."""
        return with_buckets(trace) if layout.is_replicated else trace

    def bucket_bytes(self, parts: ModelParts) -> int:
        """As `LayoutAxis.bucket_bytes`."""
        return sum(gradient_buckets(parts.parameters))


AXIS = Replicas()


def replicated_traffic(parts: Sequence[Parameter]) -> tuple[Traffic, ...]:
    """Messages of replicas: gradients once an update, and which parameters were used."""
    sizes = gradient_buckets(parts)
    used = 4 * sum(part.is_trained for part in parts)
    return (
        Traffic(what="gradients summed", collective="all-reduce", axis="data", sizes=sizes, overlaps="backward"),
        Traffic(what="which parameters were used", collective="all-reduce", axis="data", sizes=(used,), stops=0),
    )


def summed_after(parts: Sequence[Parameter]) -> tuple[Traffic, ...]:
    """Messages of replicas with tensor groups or stages: all gradients after the backward pass, in buckets."""
    return tuple(dataclasses.replace(one, overlaps="nothing", stops=0) for one in replicated_traffic(parts))


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
