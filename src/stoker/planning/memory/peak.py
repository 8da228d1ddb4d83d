"""How much memory an update needs at most, when, and for what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from stoker.planning.memory.caching_allocator import AllocatorSettings, CachingAllocator
from stoker.planning.memory.pools import rounded
from stoker.planning.memory.system_malloc import ALIGNMENT
from stoker.planning.memory.timeline import Timeline, timeline_of
from stoker.records import Share
from stoker.records.trace import Trace

WORKSPACE = "library workspace"
"""What kernels and libraries take beside the tensors of the trace."""


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """What tensors take of a device at the peak of an update [bytes].

    `allocated` is what lives at once, `reserved` what the allocator then holds of the device (on a CPU the same).
    `before_update` is what outlives an update: parameters, buffers, the optimiser's state, the average, a batch.
    `shares` say for what and in which line, the largest first; they add up to the bytes that live at the peak, which
    may be a little less than `allocated`. `peak_at` is the occurrence. `fits` is False where the allocator ran out of
    `AllocatorSettings.capacity`; the figures are then those up to there.
    """

    allocated: int
    reserved: int
    before_update: int
    shares: tuple[Share, ...]
    peak_at: int
    fits: bool = True

    @property
    def by_category(self) -> dict[str, float]:
        """Bytes at the peak by what they are for, the largest first."""
        totals: dict[str, float] = defaultdict(float)
        for share in self.shares:
            totals[share.what] += share.value
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What an allocator held at most [bytes]. `failed_at` is the event of the timeline it could not serve."""

    allocated: int
    reserved: int
    failed_at: int | None = None


def forecast_memory(
    trace: Trace, settings: AllocatorSettings | None = None, *, micro_batches: int | None = None
) -> MemoryForecast:
    """What the tensors of a trace need; on CUDA by exact replay of the allocator over two updates.

    Args:
        trace: one update, repeated blocks all there.
        settings: the allocator's, on CUDA.
        micro_batches: those of an update; None: as many as were traced.
    """
    timeline = timeline_of(trace, micro_batches=micro_batches)
    on_cuda = trace.settings.target == "cuda"
    size_of = rounded if on_cuda else _aligned
    live, at = live_peak(timeline, size_of)
    before = sum(size_of(timeline.sizes[i]) for i in timeline.persisting)
    occurrence = timeline.occurrences[at] if at >= 0 else -1
    shares = _shares(trace, timeline, at, size_of)
    if not on_cuda:
        return MemoryForecast(
            allocated=live, reserved=live, before_update=before, shares=shares, peak_at=occurrence,
        )  # fmt: skip
    found = replay(timeline, settings)
    return MemoryForecast(
        allocated=found.allocated, reserved=found.reserved, before_update=before, shares=shares, peak_at=occurrence,
        fits=found.failed_at is None,
    )  # fmt: skip


def replay(timeline: Timeline, settings: AllocatorSettings | None = None, *, updates: int = 2) -> Replay:
    """The caching allocator over the first `updates` updates; with a capacity, up to where it runs out.

    A second update may reserve more than the first, since it finds other segments free; later ones rarely do.
    """
    allocator = CachingAllocator(settings)
    events = [i + 1 for i in timeline.before]
    events.extend(timeline.first)
    for _ in range(updates - 1):
        events.extend(timeline.later)
    sizes, addresses = timeline.sizes, [0] * len(timeline.sizes)
    malloc, free = allocator.malloc, allocator.free
    failed_at = None
    for number, event in enumerate(events):
        index = abs(event) - 1
        if sizes[index] == 0:
            continue
        if event < 0:
            free(addresses[index])
            continue
        address = malloc(sizes[index])
        if address is None:
            failed_at = number
            break
        addresses[index] = address
    return Replay(allocated=allocator.peak_allocated, reserved=allocator.peak_reserved, failed_at=failed_at)


def least_capacity(timeline: Timeline, *, expandable: bool = False, precision: int = 16 << 20) -> int:
    """The least memory of a device with which the updates run [bytes], to `precision`; at most what they would reserve.

    Less than is reserved without a limit often does, since the allocator returns cached segments before it gives up.
    """
    free = replay(timeline, AllocatorSettings(expandable=expandable))
    low, high = free.allocated - 1, free.reserved
    while high - low > precision:
        middle = (low + high) // 2
        settings = AllocatorSettings(capacity=middle, expandable=expandable)
        if replay(timeline, settings).failed_at is None:
            high = middle
        else:
            low = middle
    return high


def live_peak(timeline: Timeline, size_of: Callable[[int], int]) -> tuple[int, int]:
    """The most that lives at once in a later update [bytes], and after which of its events; -1: before all."""
    live = sum(size_of(timeline.sizes[i]) for i in timeline.persisting)
    peak, at = live, -1
    rounded_sizes = [size_of(size) for size in timeline.sizes]
    for number, event in enumerate(timeline.later):
        if event < 0:
            live -= rounded_sizes[-event - 1]
            continue
        live += rounded_sizes[event - 1]
        if live > peak:
            peak, at = live, number
    return peak, at


def _shares(trace: Trace, timeline: Timeline, at: int, size_of: Callable[[int], int]) -> tuple[Share, ...]:
    alive = set(timeline.persisting)
    for event in timeline.later[: at + 1]:
        (alive.add if event > 0 else alive.discard)(abs(event) - 1)
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for index in alive:
        totals[_what_and_where(trace, index)] += size_of(timeline.sizes[index])
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Share(what=what, where=where, value=float(value)) for (what, where), value in ordered if value)


def _what_and_where(trace: Trace, index: int) -> tuple[str, str]:
    if index >= len(trace.storages):
        return WORKSPACE, ""
    storage = trace.storages[index]
    if storage.born < 0:
        return storage.category, ""
    return storage.category, trace.where(trace.occurrences[storage.born])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
