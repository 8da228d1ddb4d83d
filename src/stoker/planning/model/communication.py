"""What processes of a layout tell each other in an update: how many bytes, how long, and how much of it shows.

Volumes are those of PyTorch's own layouts. DistributedDataParallel sums gradients in buckets while the backward pass
goes on (Li et al. 2020, arXiv:2006.15704, section 3.2.3). `fully_shard` gathers the parameters of a block before it is
used, forward and, where they were let go of, backward, and sums and scatters its gradients after it (Zhao et al. 2023,
arXiv:2304.11277, sections 3.2 and 4.2). Tensor parallel layers add up their partial outputs forward, and the gradients
of their inputs backward (Shoeybi et al. 2019, arXiv:1909.08053, section 3); with sequence parallel each of these sums
is a gather and a scatter (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2). Stages hand on activations and
their gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.records import Layout
from stoker.records.hardware import Collective, Links
from stoker.records.profile import ModelParts, Parameter
from stoker.units import MIB

FIRST_BUCKET_BYTES, BUCKET_BYTES = MIB, 25 * MIB
"""Of DistributedDataParallel [bytes]: the bucket that is full first, and all others."""

Axis = Literal["stages", "replicas", "shards", "tensor", "data"]
"""Among which processes: those of an axis of the layout, or all that take parts of a batch."""

LinksOf = Callable[[int, int], Links]
"""What a group reaches, by its size and the distance between its members in the order of all processes."""

_LOSS_AND_COUNT_BYTES = 40
"""A sum, a count and three signals in float64."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Messages of one kind: tensors of `sizes` [bytes] one after the other, all of them `times` in an update.

    `beside` is the arithmetic next to which they can pass: the backward pass, in which what is done first can be sent
    first (`backward`), that of each block, for the one after it (`blocks`), or none. `stops` is the share of them that
    processes stop for in the middle of arithmetic, where nothing passes beside: not what comes right after other
    messages, nor what was on its way before it was wanted.
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
        """In an update [bytes]."""
        return round(sum(self.sizes) * self.times)


@dataclass(frozen=True, kw_only=True)
class MessageTime:
    """One kind of message with its time in an update [s], and how much of it nothing hides [s]."""

    traffic: Traffic
    seconds: float
    exposed_s: float


def group_of(layout: Layout, axis: Axis) -> tuple[int, int]:
    """How many processes a group along an axis has, and how far they are apart."""
    strides = {
        "tensor": 1, "shards": layout.tensor, "data": layout.tensor, "replicas": layout.tensor * layout.shards,
        "stages": layout.tensor * layout.data_size,
    }  # fmt: skip
    size = layout.data_size if axis == "data" else getattr(layout, axis)
    return size, strides[axis]


def gradient_buckets(parameters: Sequence[Parameter]) -> tuple[int, ...]:
    """Sizes of DistributedDataParallel's buckets [bytes], in the order in which they are summed: the last ones first.

    They are filled in the order of registration, since which parameters are used may change from pass to pass; one is
    full once it has its limit. Source: `_compute_bucket_assignment_by_size` in torch/csrc/distributed/c10d/reducer.cpp.
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
    """Bytes that each call gathers under `fully_shard`: those of the root, then those of each block, padded as it does.

    Every parameter is padded so that its first dimension divides; what tensor parallel divides is divided already.
    """
    sizes = [0] * (1 + len(parts.blocks))
    for one in parts.parameters:
        sizes[0 if one.block is None else one.block + 1] += padded_shard_bytes(one, shards, tensor) * shards
    return tuple(sizes)


def padded_shard_bytes(one: Parameter, shards: int, tensor: int = 1) -> int:
    """What a process keeps of a parameter under `fully_shard` [bytes]: as much as the first one, which has the most."""
    shape = local_shape(one, tensor)
    if not shape:
        return one.num_bytes
    rest = one.item_bytes
    for size in shape[1:]:
        rest *= size
    return -(-shape[0] // shards) * rest


def local_shape(one: Parameter, tensor: int) -> tuple[int, ...]:
    """A parameter's shape in each process of a tensor group."""
    if one.division is None or tensor == 1:
        return one.shape
    return tuple(size // tensor if dim == one.division else size for dim, size in enumerate(one.shape))


def replicated_traffic(parts: Sequence[Parameter]) -> tuple[Traffic, ...]:
    """Of whole copies: their gradients, once an update, and which of them there are."""
    sizes = gradient_buckets(parts)
    used = 4 * sum(one.is_trained for one in parts)
    return (
        Traffic(what="gradients summed", collective="all-reduce", axis="data", sizes=sizes, beside="backward"),
        Traffic(what="which parameters were used", collective="all-reduce", axis="data", sizes=(used,), stops=0),
    )


def summed_after(parts: Sequence[Parameter]) -> tuple[Traffic, ...]:
    """Of replicas combined with tensor groups or stages: all gradients after the backward pass, in buckets."""
    return tuple(dataclasses.replace(one, beside="nothing", stops=0) for one in replicated_traffic(parts))


def sharded_traffic(parts: ModelParts, layout: Layout, passes: int) -> tuple[Traffic, ...]:
    """Of `fully_shard`: parameters gathered, and gradients summed and scattered, in each pass.

    Without `reshard` parameters stay gathered until the end of a pass, and gradients whole until the last pass of an
    update. What belongs to no block is gathered once a pass, since it is used at both ends of it.

    Args:
        parts: the model's parameters.
        layout: with more than one shard.
        passes: forward and backward passes of an update.
    """
    root, *blocks = sharding_groups(parts, layout.shards, layout.tensor)
    groups = root, *blocks
    used = 8 * sum(one.is_trained for one in parts.parameters)
    found = [
        Traffic(what="parameters gathered", collective="all-gather", axis="shards", sizes=groups, times=passes,
                beside="blocks"),
        Traffic(what="gradients summed and scattered", collective="reduce-scatter", axis="shards", sizes=groups[::-1],
                times=passes if layout.reshard else 1, beside="blocks"),
        Traffic(what="which parameters were used", collective="all-reduce", axis="data", sizes=(used,), stops=0),
    ]  # fmt: skip
    if layout.reshard and blocks:
        found.insert(1, Traffic(what="parameters gathered again", collective="all-gather", axis="shards",
                                sizes=tuple(blocks[::-1]), times=passes, beside="blocks"))  # fmt: skip
    if layout.replicas > 1:
        shares = tuple(size // layout.shards for size in groups[::-1])
        found.append(Traffic(what="gradients summed", collective="all-reduce", axis="replicas", sizes=shares,
                             beside="backward"))  # fmt: skip
    return tuple(found)


def loss_traffic() -> Traffic:
    """The loss and the count of an update, summed by all."""
    sizes = (_LOSS_AND_COUNT_BYTES,)
    return Traffic(what="loss and count", collective="all-reduce", axis="data", sizes=sizes, stops=0)


def waited_for(traffic: Sequence[Traffic]) -> tuple[Traffic, ...]:
    """The same where no message passes beside blocks, as under gloo.

    `fully_shard` starts its collectives without `async_op` and counts on streams of the device to go on meanwhile; a
    CPU has none. DistributedDataParallel's go on in threads.
    """
    return tuple(dataclasses.replace(one, beside="nothing") if one.beside == "blocks" else one for one in traffic)


def num_meetings(traffic: Sequence[Traffic]) -> float:
    """How often all stop for each other in an update: at its end, and for messages that come after arithmetic.

    Never where they tell each other nothing.
    """
    during = sum(one.stops * len(one.sizes) * one.times for one in traffic if one.beside == "nothing")
    return during + 1 if traffic else 0


def message_time(
    traffic: Traffic, layout: Layout, links_of: LinksOf, *, forward_s: float, backward_s: float, passes: int
) -> MessageTime:
    """How long messages take in an update, and how much of that shows.

    Args:
        traffic: the messages.
        layout: among whose processes.
        links_of: what groups of them reach.
        forward_s: arithmetic of all forward passes of an update [s].
        backward_s: of all backward passes [s].
        passes: how many of each there are.
    """
    links = links_of(*group_of(layout, traffic.axis))
    each = [links.seconds(traffic.collective, size) for size in traffic.sizes]
    whole = sum(each) * traffic.times
    if traffic.beside == "nothing" or links.overlap == 0:
        return MessageTime(traffic=traffic, seconds=whole, exposed_s=whole)
    if traffic.beside == "backward":
        least = _left_behind(each, traffic.sizes, backward_s / max(1, passes))
    else:
        beside_s = (forward_s if traffic.collective == "all-gather" else backward_s) / max(1, passes)
        least = _left_between(each, beside_s)
        least *= traffic.times
    return MessageTime(traffic=traffic, seconds=whole, exposed_s=whole - links.overlap * (whole - min(least, whole)))


def _left_behind(each: Sequence[float], sizes: Sequence[int], backward_s: float) -> float:
    """What is left after a backward pass of messages that go out as their gradients are done [s].

    Gradients are taken to come about evenly by their bytes; messages follow each other.
    """
    done, at, whole = 0.0, 0, max(1, sum(sizes))
    for seconds, size in zip(each, sizes, strict=True):
        at += size
        done = max(done, backward_s * at / whole) + seconds
    return max(0.0, done - backward_s)


def _left_between(each: Sequence[float], beside_s: float) -> float:
    """What shows of messages each of which passes beside the arithmetic of the block before it [s]; the first does."""
    first, *others = each
    share = beside_s / max(1, len(each))
    return first + sum(max(0.0, seconds - share) for seconds in others)
