"""Messages between the processes of a layout in an update: their time, and the part of it that nothing hides."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.layouts.base import Traffic
from stoker.records import Layout
from stoker.records.hardware import Links

LinksOf = Callable[[int, int], Links]
"""Links of a group, by its size and the distance of its members in rank."""

_LOSS_AND_COUNT_BYTES = 40
"""A sum, a count and three signals in float64."""


@dataclass(frozen=True, kw_only=True)
class MessageTime:
    """One kind of message with its time in an update [s], and the part that is not hidden [s]."""

    traffic: Traffic
    seconds: float
    exposed_s: float


def loss_traffic() -> Traffic:
    """The loss and the sample count of an update, summed over all."""
    sizes = (_LOSS_AND_COUNT_BYTES,)
    return Traffic(what="loss and count", collective="all-reduce", axis="data", sizes=sizes, stops=0)


def waited_for(traffic: Sequence[Traffic]) -> tuple[Traffic, ...]:
    """The traffic without overlap with blocks, as under gloo.

    `fully_shard` starts its collectives without `async_op` and relies on the device's streams to overlap them; a CPU
    has none. DistributedDataParallel's run in threads.
    """
    return tuple(
        dataclasses.replace(one, overlaps="nothing") if one.overlaps.endswith("blocks") else one for one in traffic
    )


def num_meetings(traffic: Sequence[Traffic]) -> float:
    """Number of waits of all processes for each other in an update [1]: at its end, and for messages that stop them.

    0 without traffic.
    """
    during = sum(one.stops * len(one.sizes) * one.times for one in traffic if one.overlaps == "nothing")
    return during + 1 if traffic else 0


def message_times(
    traffic: Sequence[Traffic], layout: Layout, links_of: LinksOf, *, forward_s: float, backward_s: float, passes: int
) -> tuple[MessageTime, ...]:
    """The time of messages in an update, and the part of it that is not hidden.

    Messages that overlap with the same blocks, as gathers and sums of shards in a backward pass, share links and the
    arithmetic that hides them: the earlier kind takes of it first.

    Args:
        traffic: the messages.
        layout: of the processes.
        links_of: links of groups of them.
        forward_s: arithmetic of all forward passes of an update [s].
        backward_s: arithmetic of all backward passes [s].
        passes: number of forward passes, and of backward passes.
    """
    passes = max(1, passes)
    free_s: dict[str, list[float]] = {}  # what is left of each block's arithmetic in a pass
    for overlaps, pass_s in (("forward blocks", forward_s / passes), ("backward blocks", backward_s / passes)):
        blocks = max((len(one.sizes) for one in traffic if one.overlaps == overlaps), default=0)
        free_s[overlaps] = [pass_s / max(1, blocks)] * blocks
    return tuple(
        _message_time(one, links_of(*layout.group(one.axis)), free_s.get(one.overlaps, []), backward_s / passes)
        for one in traffic
    )


def _message_time(traffic: Traffic, links: Links, free_s: list[float], backward_s: float) -> MessageTime:
    """The time of messages of one kind; what they overlap with is taken from `free_s`, by block of a pass."""
    each = [links.seconds(traffic.collective, size) for size in traffic.sizes]
    whole = sum(each) * traffic.times
    if traffic.overlaps == "nothing" or links.overlap == 0 or not each:
        return MessageTime(traffic=traffic, seconds=whole, exposed_s=whole)
    if traffic.overlaps == "backward":
        # Messages follow each other and go out as their gradients are done, which come evenly by their bytes.
        total_bytes = max(1, sum(traffic.sizes))
        end_s, sent_bytes = 0.0, 0
        for seconds, size in zip(each, traffic.sizes, strict=True):
            sent_bytes += size
            end_s = max(end_s, backward_s * sent_bytes / total_bytes) + seconds
        least = max(0.0, end_s - backward_s)
    else:
        # Each message but the first overlaps with the arithmetic of the block before.
        least = each[0]
        for block, seconds in enumerate(each[1:]):
            hidden = min(seconds, free_s[block])
            free_s[block] -= hidden
            least += seconds - hidden
        least *= traffic.times
    return MessageTime(traffic=traffic, seconds=whole, exposed_s=whole - links.overlap * (whole - min(least, whole)))
