"""Updates whose blocks' inputs are on the host: the device's memory and the time, from the trace of one without.

In the trace of checkpointed blocks a block's input is the storage that is made before the block's forward pass, by the
block before or ahead of all, and dies in its part of the backward pass. Offloaded it lives twice: until the next block
begins, and again from when the next block is computed a second time. Nothing is traced for it.

The device waits where a copy takes longer than what it overlaps with: on its way out the block's own forward pass, on
its way back the next block's part of the backward pass. A block's share of these is that of its FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker.planning.model.host import link_rate, rate_error, with_waiting
from stoker.planning.model.update_time import UpdateTime
from stoker.records import Hardware, Share, Storage, Trace
from stoker.records.plan import LEAST_OFFLOADED_BYTES

WAITING = "inputs of blocks on their way from and to the host"
"""What an update waits for."""


@dataclass(frozen=True)
class InputCopy:
    """Inputs of one block in a micro-batch, the size of each [bytes], and what their copies overlap with.

    `forward_share` is the block's share of the forward pass, `backward_share` that of the next block of the backward
    pass [0 to 1].
    """

    sizes: tuple[int, ...]
    forward_share: float
    backward_share: float

    @property
    def num_bytes(self) -> int:
        """Of all of them [bytes]."""
        return sum(self.sizes)


@dataclass(frozen=True)
class ActivationWork:
    """The copies of a micro-batch."""

    copies: tuple[InputCopy, ...]

    @property
    def sent_bytes(self) -> int:
        """What goes to the host in each micro-batch, and comes back [bytes]."""
        return sum(one.num_bytes for one in self.copies)

    @property
    def kept_bytes(self) -> int:
        """Memory of the host for it [bytes]: PyTorch's allocator of pinned memory rounds up to powers of two."""
        return sum(1 << (size - 1).bit_length() for copy in self.copies for size in copy.sizes)

    def waiting_s(self, time: UpdateTime, link_bytes_per_s: float, passes: int) -> float:
        """Time of an update in which the device waits for copies at that rate [s]."""
        forward_s, backward_s = time.forward_s / passes, time.backward_s / passes
        return passes * sum(
            max(0.0, one.num_bytes / link_bytes_per_s - one.forward_share * forward_s)
            + max(0.0, one.num_bytes / link_bytes_per_s - one.backward_share * backward_s)
            for one in self.copies
        )


@dataclass(frozen=True)
class _Sent:
    """Storages of one block's inputs, the last occurrence before they have left, and the one in which they return."""

    block: int
    part: int
    storages: tuple[int, ...]
    leave: int
    come: int


def activation_work(trace: Trace, blocks: Sequence[str]) -> ActivationWork:
    """The copies in a micro-batch of `trace`, in which nothing is offloaded.

    Args:
        trace: of an update with checkpointed blocks.
        blocks: dotted names of the model's repeated blocks, in order.
    """
    numbers = _block_of_modules(trace, blocks)
    flops: defaultdict[tuple[str, int | None], int] = defaultdict(int)
    passes: defaultdict[str, int] = defaultdict(int)
    for one in trace.occurrences:
        if one.part == 0:
            flops[one.phase, numbers[one.module]] += trace.operations[one.operation].flops
            passes[one.phase] += trace.operations[one.operation].flops

    def share(phase: str, block: int) -> float:
        return flops[phase, block] / passes[phase] if passes[phase] else 1 / max(1, len(blocks))

    return ActivationWork(
        copies=tuple(
            InputCopy(
                sizes=tuple(trace.storages[index].num_bytes for index in one.storages),
                forward_share=share("forward", one.block),
                backward_share=share("backward", one.block + 1),
            )
            for one in _sent(trace, numbers)
            if one.part == 0
        )
    )


def with_activations_offloaded(trace: Trace, blocks: Sequence[str]) -> Trace:
    """The trace of an update whose blocks' inputs are on the host, from that of one without."""
    storages: list[Storage] = list(trace.storages)
    returned: dict[int, int] = {}
    inserted: list[tuple[int, int]] = []  # before which occurrence which event comes
    for one in _sent(trace, _block_of_modules(trace, blocks)):
        for index in one.storages:
            returned[index] = len(storages)
            inserted += [(one.leave + 1, -(index + 1)), (one.come, len(storages) + 1)]
            storages.append(dataclasses.replace(storages[index], born=one.come))
            storages[index] = dataclasses.replace(storages[index], died=one.leave)
    inserted.sort(key=lambda item: item[0], reverse=True)
    events: list[int] = []
    now = 0
    for event in trace.events:
        index = abs(event) - 1
        when = trace.storages[index].born if event > 0 else trace.storages[index].died
        now = max(now, when if when is not None else now)
        while inserted and inserted[-1][0] <= now:
            events.append(inserted.pop()[1])
        events.append(-(returned[index] + 1) if event < 0 and index in returned else event)
    settings = dataclasses.replace(trace.settings, activation_offload=True)
    return dataclasses.replace(trace, settings=settings, storages=tuple(storages), events=tuple(events))


def with_copies(time: UpdateTime, work: ActivationWork, hardware: Hardware, passes: int) -> UpdateTime:
    """The time of an update, with what the device waits for blocks' inputs.

    Args:
        time: of an update in which they stay.
        work: the copies of a micro-batch.
        hardware: the device.
        passes: micro-batches of an update.
    """
    link, factor = link_rate(hardware), rate_error(hardware)
    fast_s, usual_s, slow_s = (work.waiting_s(time, rate, passes) for rate in (factor * link, link, link / factor))
    return with_waiting(time, [Share(what=WAITING, value=usual_s)], fast_s, slow_s, hardware)


def _block_of_modules(trace: Trace, blocks: Sequence[str]) -> list[int | None]:
    """The number of the block that each of the trace's modules is in."""
    numbers = {name: number for number, name in enumerate(blocks)}

    def block_of(module: str) -> int | None:
        parts = module.split(".")
        prefixes = (".".join(parts[: end + 1]) for end in range(len(parts)))
        return next((numbers[prefix] for prefix in prefixes if prefix in numbers), None)

    return [block_of(module) for module in trace.modules]


def _sent(trace: Trace, numbers: Sequence[int | None]) -> Iterator[_Sent]:
    """The inputs that are sent, of all checkpointed blocks but the last."""
    first: dict[tuple[str, int, int], int] = {}
    last: dict[tuple[str, int, int], int] = {}
    for index, one in enumerate(trace.occurrences):
        if (block := numbers[one.module]) is not None:
            first.setdefault((one.phase, one.part, block), index)
            last[one.phase, one.part, block] = index
    kept: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # activations by part, and the block they precede
    count = trace.settings.checkpointed_blocks
    starts = {
        part: [(block, first[key]) for block in range(count) if (key := ("forward", part, block)) in first]
        for part in {one.part for one in trace.occurrences}
    }
    for index, storage in enumerate(trace.storages):
        if storage.category != "activation" or storage.num_bytes < LEAST_OFFLOADED_BYTES or storage.died is None:
            continue
        part = trace.occurrences[storage.born].part
        block = next((block for block, start in starts[part] if storage.born < start), None)
        if block is None:
            continue
        back = "backward", part, block
        if back in first and first[back] <= storage.died <= last[back]:
            kept[part, block].append(index)
    for (part, block), indices in sorted(kept.items()):
        following = block + 1
        if following == count or not {("forward", part, following), ("backward", part, following)} <= first.keys():
            continue
        sizes = {trace.storages[index].num_bytes for index in kept.get((part, 1), ())}
        # Ahead of all blocks other things are made too, such as masks, which stay.
        passed_on = [index for index in indices if block > 0 or trace.storages[index].num_bytes in sizes]
        if passed_on:
            yield _Sent(
                block=block,
                part=part,
                storages=tuple(passed_on),
                leave=first["forward", part, following] - 1,
                come=first["backward", part, following],
            )
