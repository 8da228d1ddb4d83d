"""Updates whose optimiser is on the host: the device's memory and the update's time, from the trace of one without.

On the device the state is missing, weights of precision bf16 are bf16, and gradients live until they have left: the
oldest goes when the next would make more than `IN_FLIGHT_BYTES` on their way. Where micro-batches are summed on the
device they live as traced. Nothing is traced for it: passes are those of bf16 weights with fp32 masters elsewhere, as
under shards, or of fp32 weights.

The time of an update grows by what overlaps with nothing: gradients that the link takes longer for than the backward
pass, and the longer of the CPU's update and the weights' way back. The CPU's update moves the optimiser's own traffic,
gradients into masters' precision, and new weights out of it, at its memory's sustained rate. That it begins while the
backward pass still runs is left out: only without clipping does it.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.imports import collector_paused
from stoker.layouts.trace_division import resized
from stoker.planning.model.host import link_rate, rate_error, with_waiting
from stoker.planning.model.update_time import UpdateTime
from stoker.records import Hardware, Operation, OptimizerOffload, Share, Storage, Trace
from stoker.records.plan import ALIGNED_BYTES, IN_FLIGHT_BYTES, PIECE, PINNED_BYTES, STAGED_BYTES

OFFLOADED = "offloaded_optimizer"
"""The name of the operations in the place of the optimiser's."""

HOST_SHARES = "the optimiser's update on the host", "gradients' way to the host, beyond the backward pass"
"""What an update waits for."""

MEMORY_SHARE = 0.6
"""Share of the printed rate of a CPU's memory that an update sustains [0 to 1]: a copy reaches 59 of 96 GB/s on two
channels of DDR5-6000 (AIDA64, Ryzen 7 9800X3D). PyTorch's fused AdamW is as fast as a copy of its bytes, on two cores
already."""

USUAL_MEMORY_BYTES_PER_S = 89.6e9
"""The printed rate of the memory of a host that is not known [bytes/s]: two channels of DDR5-5600 (JESD79-5)."""


@dataclass(frozen=True)
class HostWork:
    """What an update does on the host, and what it keeps there, in bytes.

    `masters` are those of all weights, `state` the optimiser's; `gradients` is one copy of them as they leave,
    `weights` one of the weights as they come back; `optimizer` is the memory traffic of the optimiser's step. `sums`
    are fp32 gradients of all parameters. `buffers` is memory besides masters and state: pinned memory that copies go
    through, with what its pieces are rounded up by, and gradients in the masters' dtype.
    """

    masters: float
    state: float
    gradients: float
    weights: float
    optimizer: float
    sums: float
    buffers: float

    @property
    def kept_bytes(self) -> float:
        """Memory that the host needs [bytes], with the copy that a checkpoint is written from."""
        return self.masters + self.state + self.buffers + (self.masters + self.state)

    @property
    def moved_bytes(self) -> float:
        """Memory traffic of an update on the CPU [bytes]."""
        widened = self.gradients + self.sums
        narrowed = self.masters + self.weights if self.weights < self.masters else 0.0
        return self.optimizer + widened + narrowed


def host_work(trace: Trace) -> HostWork:
    """The host's part of the update of `trace`, which is one on the device."""
    is_bf16 = trace.settings.gathered_in is not None
    held = {
        category: sum(float(s.num_bytes) for s in trace.storages if s.category == category and s.born < 0)
        for category in ("parameter", "optimizer state")
    }
    sizes = [s.num_bytes for s in trace.storages if _is_gradient(s)][::-1]  # of parameters in their order
    gradients = float(sum(sizes))
    leave_as_bf16 = is_bf16 and trace.settings.parts == 1
    steps = [trace.operations[item.operation] for item in trace.occurrences if item.phase == "optimizer"]
    fused = [item for item in steps if item.name.startswith("_fused")] or steps
    staged = max((STAGED_BYTES, *map(_aligned, sizes)))
    # Masters are pinned, too, where weights are copies of them.
    pinned = pinned_bytes([size // 2 for size in sizes] if leave_as_bf16 else sizes if is_bf16 else 2 * sizes)
    return HostWork(
        masters=held["parameter"],
        state=held["optimizer state"],
        gradients=gradients / 2 if leave_as_bf16 else gradients,
        weights=held["parameter"] / 2 if is_bf16 else held["parameter"],
        optimizer=sum(float(item.bytes_read + item.bytes_written) for item in fused),
        sums=gradients,
        buffers=staged + (pinned if is_bf16 else max(0.0, pinned - held["parameter"])),
    )


def pinned_bytes(sizes: Iterable[int]) -> int:
    """Pinned memory that tensors of these sizes take [bytes], cut from pieces that PyTorch rounds to powers of two."""
    total = left = 0
    for size in map(_aligned, sizes):
        if left < size:
            left = max(size, PINNED_BYTES)
            total += 1 << (left - 1).bit_length()
        left -= size
    return total


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNED_BYTES) * ALIGNED_BYTES


@collector_paused()
def with_offload(trace: Trace, offload: OptimizerOffload) -> Trace:
    """The trace of an update on the device, as one whose optimiser is on the host."""
    settings = dataclasses.replace(trace.settings, optimizer_offload=offload)
    if offload == "none":
        return dataclasses.replace(trace, settings=settings)
    is_bf16, is_sent = settings.gathered_in is not None, settings.parts == 1 or offload == "gradients"
    storages = list(trace.storages)
    for index, item in enumerate(storages):
        is_of_optimizer = item.born >= 0 and trace.occurrences[item.born].phase == "optimizer"
        if item.category == "optimizer state" or is_of_optimizer:
            storages[index] = resized(item, 0)
        elif is_bf16 and (item.category == "parameter" or (is_sent and _is_gradient(item))):
            storages[index] = resized(item, item.num_bytes // 2)
    nothing = Operation(name=OFFLOADED, inputs=(), outputs=(), flops=0, bytes_read=0, bytes_written=0)
    occurrences = tuple(
        dataclasses.replace(item, operation=len(trace.operations)) if item.phase == "optimizer" else item
        for item in trace.occurrences
    )
    events = trace.events
    if is_sent:
        storages, events = _leaving(trace, storages)
    if settings.parts > 1 and (offload == "gradients" or is_bf16):
        # A piece of a sum that comes back, and one in its precision; or a gradient on its way into a sum of fp32.
        most = max((item.num_bytes for item in trace.storages if _is_gradient(item)), default=0)
        size = 2 * min(most, 4 * PIECE) if offload == "gradients" else most
        storages.append(Storage(num_bytes=size, category="gradient", born=-1, died=None))
        events = (len(storages), *events)
    return dataclasses.replace(
        trace,
        settings=settings,
        storages=tuple(storages),
        operations=(*trace.operations, nothing),
        occurrences=occurrences,
        events=tuple(events),
    )


def _leaving(trace: Trace, storages: list[Storage]) -> tuple[list[Storage], tuple[int, ...]]:
    """Storages and events in which each gradient dies when it has left the device.

    Those that are made in the forward pass, by a loss in chunks, leave with the first of the backward pass.
    """
    storages, events = list(storages), list[int]()
    waiting: list[int] = []
    in_flight: deque[int] = deque()
    last = max((index for index, item in enumerate(trace.occurrences) if item.phase == "backward"), default=0)

    def leave(index: int, now: int) -> None:
        item = storages[index]
        storages[index] = dataclasses.replace(item, died=max(now, item.born))
        events.append(-(index + 1))

    is_over = False
    for event in trace.events:
        index = abs(event) - 1
        item, is_gradient = storages[index], _is_gradient(storages[index])
        now = item.born if event > 0 else (item.died if item.died is not None else last)
        if not is_over and now > last:
            while in_flight or waiting:
                leave(in_flight.popleft() if in_flight else waiting.pop(), last)
            is_over = True
        if event < 0 and is_gradient:
            continue
        events.append(event)
        if event < 0 or not is_gradient:
            continue
        waiting.append(index)
        if trace.occurrences[now].phase == "backward":
            in_flight.extend(waiting)
            waiting.clear()
            while len(in_flight) > 1 and sum(storages[each].num_bytes for each in in_flight) > IN_FLIGHT_BYTES:
                leave(in_flight.popleft(), now)
    while in_flight or waiting:
        leave(in_flight.popleft() if in_flight else waiting.pop(), last)
    return storages, tuple(events)


def _is_gradient(storage: Storage) -> bool:
    return storage.category == "gradient" and storage.born >= 0


def memory_rate(hardware: Hardware) -> float:
    """Sustained rate of the memory of the device's host [bytes/s]."""
    return MEMORY_SHARE * (hardware.host_bandwidth_bytes_per_s or USUAL_MEMORY_BYTES_PER_S)


def with_host(
    time: UpdateTime, work: HostWork, hardware: Hardware, offload: OptimizerOffload, passes: int
) -> UpdateTime:
    """The time of an update on the device, with the host's part of it in the optimiser's place.

    Args:
        time: of the device's passes.
        work: the host's.
        hardware: the device.
        offload: what is on the host.
        passes: micro-batches of an update.
    """
    link = link_rate(hardware)
    backward_s = time.backward_s / max(1, passes)
    copies = [work.gradients / link] * (passes if offload == "gradients" else 1)
    copies[1:] = [item + work.sums / link for item in copies[1:]]
    leaving_s = sum(max(0.0, item - backward_s) for item in copies)
    updating_s, returning_s = work.moved_bytes / memory_rate(hardware), work.weights / link
    host_s = max(updating_s, returning_s)
    parts = [Share(what=what, value=value) for what, value in zip(HOST_SHARES, (host_s, leaving_s), strict=True)]
    factor, more_s = rate_error(hardware), host_s + leaving_s
    return with_waiting(time, parts, more_s / factor, more_s * factor, hardware)
