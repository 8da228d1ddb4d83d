"""Messages between the processes of a layout in an update: bytes, time, and the part of it that nothing hides.

Volumes are those of PyTorch's own layouts. DistributedDataParallel sums gradients in buckets during the backward pass
(Li et al. 2020, arXiv:2006.15704, section 3.2.3). `fully_shard` gathers the parameters of a block before it is used,
forward and, if they were freed, backward, and sums and scatters its gradients after it (Zhao et al. 2023,
arXiv:2304.11277, sections 3.2 and 4.2). Tensor parallel layers add up their partial outputs forward, and the gradients
of their inputs backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3); with sequence parallel each of these sums
is a gather and a scatter (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2). Stages pass on activations and
their gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.records import Layout
from stoker.records.hardware import Collective, Links
from stoker.records.profile import ModelParts, Parameter
from stoker.units import MIB

FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
"""Sizes of DistributedDataParallel's buckets [bytes]: the first to be full, and all others."""

Axis = Literal["stages", "replicas", "shards", "tensor", "data"]
"""The processes of an axis of the layout, or (`data`) all that take parts of a batch."""

LinksOf = Callable[[int, int], Links]
"""Links of a group, by its size and the distance of its members in rank."""

_LOSS_AND_COUNT_BYTES = 40
"""A sum, a count and three signals in float64."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages of one kind: tensors of `sizes` [bytes] one after the other, all of them `times` in an update.

    `beside` is the arithmetic that they overlap with: the backward pass, whose first results are sent first
    (`backward`), that of each block, for the next one (`blocks`), or none. `stops` is the share of messages without
    overlap that stop arithmetic: not those right after other messages, nor those sent before they are needed.
    """

    what: str
    collective: Collective
    axis: Axis
    sizes: tuple[int, ...]
    times: float = 1
    beside: Literal["backward", "blocks", "nothing"] = "nothing"
    stops: float = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages in an update."""
        return round(sum(self.sizes) * self.times)


@dataclass(frozen=True, kw_only=True)
class MessageTime:
    """One kind of message with its time in an update [s], and the part that is not hidden [s]."""

    traffic: Traffic
    seconds: float
    exposed_s: float


def group_of(layout: Layout, axis: Axis) -> tuple[int, int]:
    """Number of processes in a group along an axis, and their distance in rank."""
    strides = {
        "tensor": 1, "shards": layout.tensor, "data": layout.tensor, "replicas": layout.tensor * layout.shards,
        "stages": layout.tensor * layout.data_size,
    }  # fmt: skip
    size = layout.data_size if axis == "data" else getattr(layout, axis)
    return size, strides[axis]


def gradient_buckets(parameters: Sequence[Parameter]) -> tuple[int, ...]:
    """Sizes of DistributedDataParallel's buckets [bytes], in the order in which they are summed: the last ones first.

    They are filled in the order of registration, up to a limit.
    Source: `_compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.
    """
    buckets: list[int] = []
    held, limit = 0, FIRST_BUCKET_BYTES
    for one in parameters:
        held += one.num_bytes if one.is_trained else 0
        if held >= limit:
            buckets.append(held)
            held, limit = 0, BUCKET_BYTES
    return tuple(reversed([*buckets, held] if held else buckets))


def sharding_groups(parts: ModelParts, shards: int, tensor: int = 1) -> tuple[int, ...]:
    """Bytes that each call gathers under `fully_shard`: the root, then each block.

    Every parameter is padded so that its first dimension divides, after the division by tensor parallel.
    """
    sizes = [0] * (1 + len(parts.blocks))
    for one in parts.parameters:
        sizes[0 if one.block is None else one.block + 1] += padded_shard_bytes(one, shards, tensor) * shards
    return tuple(sizes)


def padded_shard_bytes(one: Parameter, shards: int, tensor: int = 1) -> int:
    """Bytes of a parameter in each process under `fully_shard`: as many as in the first one, which has the most."""
    shape = local_shape(one, tensor)
    if not shape:
        return one.num_bytes
    return -(-shape[0] // shards) * math.prod(shape[1:]) * one.item_bytes


def local_shape(one: Parameter, tensor: int) -> tuple[int, ...]:
    """A parameter's shape in each process of a tensor group."""
    if one.division is None or tensor == 1:
        return one.shape
    return tuple(size // tensor if dim == one.division else size for dim, size in enumerate(one.shape))


def replicated_traffic(parts: Sequence[Parameter]) -> tuple[Traffic, ...]:
    """Messages of replicas: gradients once an update, and which parameters were used."""
    sizes = gradient_buckets(parts)
    used = 4 * sum(one.is_trained for one in parts)
    return (
        Traffic(what="gradients summed", collective="all-reduce", axis="data", sizes=sizes, beside="backward"),
        Traffic(what="which parameters were used", collective="all-reduce", axis="data", sizes=(used,), stops=0),
    )


def summed_after(parts: Sequence[Parameter]) -> tuple[Traffic, ...]:
    """Messages of replicas with tensor groups or stages: all gradients after the backward pass, in buckets."""
    return tuple(dataclasses.replace(one, beside="nothing", stops=0) for one in replicated_traffic(parts))


def sharded_traffic(parts: ModelParts, layout: Layout, passes: int) -> tuple[Traffic, ...]:
    """Messages of `fully_shard`: parameters gathered, and gradients summed and scattered, in each pass.

    Without `reshard` parameters stay gathered until the end of a pass, and gradients whole until the last pass of an
    update. Parameters outside of blocks are gathered once a pass, since they are used at both ends of it.

    Args:
        parts: the model's parameters.
        layout: with more than one shard.
        passes: forward and backward passes of an update.
    """
    root, *blocks = sharding_groups(parts, layout.shards, layout.tensor)
    groups = root, *blocks
    used = 8 * sum(one.is_trained for one in parts.parameters)
    traffic = [
        Traffic(what="parameters gathered", collective="all-gather", axis="shards", sizes=groups, times=passes,
                beside="blocks"),
        Traffic(what="gradients summed and scattered", collective="reduce-scatter", axis="shards", sizes=groups[::-1],
                times=passes if layout.reshard else 1, beside="blocks"),
        Traffic(what="which parameters were used", collective="all-reduce", axis="data", sizes=(used,), stops=0),
    ]  # fmt: skip
    if layout.reshard and blocks:
        traffic.insert(1, Traffic(what="parameters gathered again", collective="all-gather", axis="shards",
                                sizes=tuple(blocks[::-1]), times=passes, beside="blocks"))  # fmt: skip
    if layout.replicas > 1:
        shares = tuple(size // layout.shards for size in groups[::-1])
        traffic.append(Traffic(what="gradients summed", collective="all-reduce", axis="replicas", sizes=shares,
                               beside="backward"))  # fmt: skip
    return tuple(traffic)


def loss_traffic() -> Traffic:
    """The loss and the sample count of an update, summed over all."""
    sizes = (_LOSS_AND_COUNT_BYTES,)
    return Traffic(what="loss and count", collective="all-reduce", axis="data", sizes=sizes, stops=0)


def waited_for(traffic: Sequence[Traffic]) -> tuple[Traffic, ...]:
    """The traffic without overlap with blocks, as under gloo.

    `fully_shard` starts its collectives without `async_op` and relies on the device's streams to overlap them; a CPU
    has none. DistributedDataParallel's run in threads.
    """
    return tuple(dataclasses.replace(one, beside="nothing") if one.beside == "blocks" else one for one in traffic)


def num_meetings(traffic: Sequence[Traffic]) -> float:
    """Number of waits of all processes for each other in an update [1]: at its end, and for messages that stop them.

    0 without traffic.
    """
    during = sum(one.stops * len(one.sizes) * one.times for one in traffic if one.beside == "nothing")
    return during + 1 if traffic else 0


def message_time(
    traffic: Traffic, layout: Layout, links_of: LinksOf, *, forward_s: float, backward_s: float, passes: int
) -> MessageTime:
    """The time of messages in an update, and the part of it that is not hidden.

    Args:
        traffic: the messages.
        layout: of the processes.
        links_of: links of groups of them.
        forward_s: arithmetic of all forward passes of an update [s].
        backward_s: arithmetic of all backward passes [s].
        passes: number of forward passes, and of backward passes.
    """
    links = links_of(*group_of(layout, traffic.axis))
    each = [links.seconds(traffic.collective, size) for size in traffic.sizes]
    whole = sum(each) * traffic.times
    if traffic.beside == "nothing" or links.overlap == 0:
        return MessageTime(traffic=traffic, seconds=whole, exposed_s=whole)
    if traffic.beside == "backward":
        # Messages follow each other and go out as their gradients are done, which come evenly by their bytes.
        pass_s, total_bytes = backward_s / max(1, passes), max(1, sum(traffic.sizes))
        end_s, sent_bytes = 0.0, 0
        for seconds, size in zip(each, traffic.sizes, strict=True):
            sent_bytes += size
            end_s = max(end_s, pass_s * sent_bytes / total_bytes) + seconds
        least = max(0.0, end_s - pass_s)
    else:
        # Each message but the first overlaps with the arithmetic of the block before.
        first, *others = each
        block_s = (forward_s if traffic.collective == "all-gather" else backward_s) / max(1, passes) / max(1, len(each))
        least = (first + sum(max(0.0, seconds - block_s) for seconds in others)) * traffic.times
    return MessageTime(traffic=traffic, seconds=whole, exposed_s=whole - links.overlap * (whole - min(least, whole)))
