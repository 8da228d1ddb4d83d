"""Memory of an update: on a GPU by exact replay of its allocator, on a CPU by that of malloc; and whether it fits.

A timeline orders allocations and frees, hidden temporaries included: the first update, and every later one.

On a CPU the peak of the process is what it has before training (interpreter, libraries, data in memory: measured while
planning), plus what malloc holds for the tensors (its replay over the first updates), plus what libraries take once
training begins: their code as it is first run, buffers of MKL and oneDNN, kernels compiled on the fly. Under `mapped`
the replay is all of malloc. Under `default` small allocations, which no trace has, lie between tensors and keep holes
in the heap; that share is fitted, and differs by a tenth between runs of the same job, since the system places the heap
at random. Constants are fitted on the calibration set of `bench/forecast/resident_memory.py`, errors are measured on
its held-out set.

Whether a plan fits is a probability, from the ratios measured / forecast of earlier runs. Of n earlier ratios and a new
one, each order is equally likely, so the new one is at most the k-th smallest with probability k / (n + 1): the
split-conformal interval, without an assumption on the shape of the errors. A prior supplies missing cases: ratios at
the quantiles of a normal distribution, fewer of them the more was measured.
Source: V. Vovk, A. Gammerman and G. Shafer, "Algorithmic Learning in a Random World" (2005), section 2.3; J. Lei et
al., "Distribution-Free Predictive Inference for Regression" (2018), section 2. The pseudo-cases of the prior are ours.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

from stoker.imports import collector_paused
from stoker.planning.model.caching_allocator import AllocatorSettings, CachingAllocator, rounded
from stoker.planning.model.system_malloc import ALIGNMENT, DEFAULT, MAPPED, RETAINED, MallocSettings, SystemMalloc
from stoker.planning.model.workspaces import cublas_workspace_bytes, hidden_blocks, is_product
from stoker.records import Estimate, Share
from stoker.records.plan import Basis, Malloc
from stoker.records.trace import Operation, Trace

WORKSPACE = "library workspace"
"""Memory of kernels and libraries that is not in the tensors of the trace."""


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Memory of tensors at the peak of an update [bytes].

    `allocated` are live tensors, `reserved` is what the allocator then holds of the device (on a CPU the same).
    `before_update` outlives an update: parameters, buffers, the optimiser's state, the average, a batch. `shares` split
    the peak by purpose and line, largest first; they add up to the bytes that live at the peak, which may be a little
    less than `allocated`. `peak_at` is the occurrence. `fits` is False if the allocator ran out of
    `AllocatorSettings.capacity`; the figures are then those up to there.
    """

    allocated: int
    reserved: int
    before_update: int
    split: Callable[[], tuple[Share, ...]] = field(repr=False, compare=False)
    peak_at: int
    fits: bool = True

    @functools.cached_property
    def shares(self) -> tuple[Share, ...]:
        """See above; computed at the first access, which most forecasts never see."""
        return self.split()

    @property
    def by_category(self) -> dict[str, float]:
        """Bytes at the peak by purpose, largest first."""
        totals: dict[str, float] = defaultdict(float)
        for share in self.shares:
            totals[share.what] += share.value
        return dict(sorted(totals.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Peak memory of an allocator [bytes]. `failed_at` is the event of the timeline that it could not serve."""

    allocated: int
    reserved: int
    failed_at: int | None = None


def forecast_memory(trace: Trace, settings: AllocatorSettings | None = None) -> MemoryForecast:
    """Memory of the tensors of a trace; on CUDA by exact replay of the allocator over two updates.

    Args:
        trace: one update, with all repeated blocks.
        settings: the allocator's, on CUDA.
    """
    return memory_along(trace, timeline_of(trace), settings)


@collector_paused()
def memory_along(
    trace: Trace, timeline: AllocationTimeline, settings: AllocatorSettings | None = None
) -> MemoryForecast:
    """As `forecast_memory`, by the trace's timeline."""

    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // ALIGNMENT) * ALIGNMENT

    on_cuda = trace.settings.target == "cuda"
    size_of = rounded if on_cuda else aligned
    live, event = live_peak(timeline, size_of)
    peak = replay(timeline, settings) if on_cuda else Replay(allocated=live, reserved=live)
    return MemoryForecast(
        allocated=peak.allocated,
        reserved=peak.reserved,
        before_update=sum(size_of(timeline.sizes[i]) for i in timeline.persisting),
        split=lambda: _shares(trace, timeline, event, size_of),
        peak_at=timeline.occurrences[event] if event >= 0 else -1,
        fits=peak.failed_at is None,
    )


@collector_paused()
def replay(timeline: AllocationTimeline, settings: AllocatorSettings | None = None) -> Replay:
    """Replay the caching allocator over the first two updates, or until it exceeds its capacity.

    A second update may reserve more than the first, since other segments are free; later ones rarely do.
    """
    allocator = CachingAllocator(settings)
    events = [*(i + 1 for i in timeline.before), *timeline.first, *timeline.later]
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


_CAPACITY_STEPS = 5
"""Halvings of what an allocator holds beyond what lives, in the search for what it can do with."""


def least_capacities(is_enough: Callable[[int], bool], allocated: int, reserved: int) -> Iterator[tuple[int, int]]:
    """Ever closer bounds of the least memory with which the allocator serves a GPU's updates [bytes].

    The last differ by 1/32 of what it can give back. Near its capacity the caching allocator frees cached segments
    before it fails.

    Args:
        is_enough: whether the allocator serves them with that capacity [bytes].
        allocated: peak of live tensors [bytes]: no capacity below that is enough.
        reserved: what is held without a limit [bytes]: that is enough.
    """
    low, high = allocated, reserved
    yield low, high
    for _ in range(_CAPACITY_STEPS):
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
        yield low, high


def live_peak(timeline: AllocationTimeline, size_of: Callable[[int], int]) -> tuple[int, int]:
    """Peak of live memory in a later update [bytes], and the event that reaches it; -1: before all events."""
    by_size = {size: size_of(size) for size in set(timeline.sizes)}  # equal blocks have equal sizes
    rounded_sizes = [by_size[size] for size in timeline.sizes]
    live = sum(rounded_sizes[i] for i in timeline.persisting)
    peak, peak_event = live, -1
    for number, event in enumerate(timeline.later):
        if event < 0:
            live -= rounded_sizes[-event - 1]
            continue
        live += rounded_sizes[event - 1]
        if live > peak:
            peak, peak_event = live, number
    return peak, peak_event


KeptByBlocks = Literal["all", "fused", "products"]
"""What blocks keep for the backward pass: all that is needed; the results of arithmetic, where kernels compute others
again; those of products and convolutions, as selective checkpointing does (of attention's only where it drops nothing).
"""

_PRODUCTS_KEPT = frozenset({"mm", "addmm", "bmm", "baddbmm", "convolution"})


def kept_by_blocks(trace: Trace, kind: KeptByBlocks = "all") -> int:
    """Memory that the blocks of a micro-batch keep for the backward pass where none is checkpointed [bytes], or less.

    Derived from a trace on a GPU in which all are checkpointed: before its backward pass a block recomputes what it
    would have kept. Those are the storages of its part of the backward pass that are made in the order of its forward
    pass, without the last, and live when the first other one is made.
    """
    made: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for index, storage in enumerate(trace.storages):
        if storage.block is not None and storage.born >= 0 and trace.occurrences[storage.born].part == 0:
            made[trace.occurrences[storage.born].phase, storage.block].append(index)

    def is_kept(operation: Operation) -> bool:
        return operation.name in _PRODUCTS_KEPT if kind == "products" else kind == "all" or operation.flops > 0

    def form(index: int) -> tuple[int, int]:
        storage = trace.storages[index]
        return trace.occurrences[storage.born].operation, storage.num_bytes

    kept = 0
    for (phase, block), back in made.items():
        forward = made["forward", block] if phase == "backward" and ("forward", block) in made else []
        # What the gradient of the block's output needs may be made first.
        begin = next((at for at, index in enumerate(back) if forward and form(index) == form(forward[0])), len(back))
        again = back[begin:]
        pairs = itertools.takewhile(lambda pair: form(pair[0]) == form(pair[1]), zip(again, forward, strict=False))
        same = sum(1 for _ in pairs)
        if 0 < same < len(again):
            storages, end = [trace.storages[index] for index in again[: same - 1]], trace.storages[again[same]].born
            kept += sum(
                rounded(one.num_bytes)
                for one in storages
                if (one.died is None or one.died >= end)
                and is_kept(trace.operations[trace.occurrences[one.born].operation])
            )
    return kept


def gradients_between(trace: Trace) -> int:
    """Gradients of the first micro-batch that live until the second's backward pass [bytes]; 0 of one micro-batch."""
    parts = trace.occurrences
    begin = next((i for i, one in enumerate(parts) if one.part == 1 and one.phase == "backward"), -1)
    return sum(
        rounded(one.num_bytes)
        for one in trace.storages
        if one.category == "gradient"
        and 0 <= one.born < begin
        and parts[one.born].part == 0
        and (one.died is None or one.died >= begin)
    )


def _alive_after(alive: Iterable[int], events: Iterable[int]) -> set[int]:
    """Storages alive after events of a timeline."""
    result = set(alive)
    add, discard = result.add, result.discard
    for event in events:
        if event > 0:
            add(event - 1)
        else:
            discard(-event - 1)
    return result


def _shares(
    trace: Trace, timeline: AllocationTimeline, last_event: int, size_of: Callable[[int], int]
) -> tuple[Share, ...]:
    """Bytes alive after an event of a later update, by category and line."""
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for index in _alive_after(timeline.persisting, timeline.later[: last_event + 1]):
        what, where = WORKSPACE, ""
        if index < len(trace.storages):
            storage = trace.storages[index]
            what = storage.category
            where = trace.where(trace.occurrences[storage.born]) if storage.born >= 0 else ""
        totals[what, where] += size_of(timeline.sizes[index])
    ordered = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    return tuple(Share(what=what, where=where, value=float(value)) for (what, where), value in ordered if value)


_Timed = tuple[int, int]
"""An occurrence's index, and an event at that occurrence."""


@dataclass(frozen=True, kw_only=True)
class AllocationTimeline:
    """Allocations and frees of a run's updates.

    `sizes` [bytes] are those of the trace's storages, then of hidden ones. `before` are the storages alive before the
    first update. `first` and `later` are events as in a Trace: `i + 1` for the birth of storage `i`, `-(i + 1)` for its
    death; in the first update the optimiser allocates its state, and cuBLAS a workspace for each of the two threads
    that start products: the loop's, and autograd's in the backward pass. Each ends with events that restore the
    storages alive at its beginning. `occurrences` are those of the events of `later`.
    """

    sizes: tuple[int, ...]
    before: tuple[int, ...]
    first: tuple[int, ...]
    later: tuple[int, ...]
    occurrences: tuple[int, ...]

    @functools.cached_property
    def persisting(self) -> tuple[int, ...]:
        """Storages alive before a later update."""
        return tuple(sorted(_alive_after(self.before, self.first)))


@collector_paused()
def timeline_of(trace: Trace, *, micro_batches: int | None = None) -> AllocationTimeline:
    """The timeline of a trace with all repeated blocks.

    `micro_batches` are those of an update (None: as many as were traced): its batch is as large.
    """
    parts = trace.settings.parts
    share = max(micro_batches or parts, parts) / parts
    sizes = [storage.num_bytes for storage in trace.storages]
    kept = {i for i, storage in enumerate(trace.storages) if storage.born < 0}
    made = {i for i in kept if trace.storages[i].category == "optimizer state"}
    for i in kept:
        if trace.storages[i].category == "input":
            sizes[i] = round(sizes[i] * share)
    hidden: dict[int, list[int]] = {}  # births and deaths of hidden temporaries by occurrence
    temporary = [
        hidden_blocks(operation, target=trace.settings.target, capability=trace.settings.capability)
        for operation in trace.operations
    ]
    for occurrence, one in enumerate(trace.occurrences):
        for num_bytes in temporary[one.operation]:
            sizes.append(num_bytes)
            hidden.setdefault(occurrence, []).extend((len(sizes), -len(sizes)))
    during, end = _with_hidden(trace, hidden), len(trace.occurrences)
    alive = _alive_after(kept, [event for _, event in during])
    restoring = [*(-(i + 1) for i in sorted(alive - kept)), *(i + 1 for i in sorted(kept - alive))]
    later = [*during, *((end, event) for event in restoring)]
    optimizer = next((i for i, one in enumerate(trace.occurrences) if one.phase == "optimizer"), end)
    products = [is_product(operation) for operation in trace.operations]
    additions = [(optimizer, i + 1) for i in sorted(made)]
    for is_backward in (False, True) if trace.settings.target == "cuda" else ():
        first_product = next(
            (
                i
                for i, one in enumerate(trace.occurrences)
                if products[one.operation] and (one.phase == "backward") is is_backward
            ),
            None,
        )
        if first_product is not None:
            sizes.append(cublas_workspace_bytes(trace.settings.capability))
            additions.append((first_product, len(sizes)))
    return AllocationTimeline(
        sizes=tuple(sizes),
        before=tuple(sorted(kept - made)),
        # A sort keeps the order of events of one occurrence; additions come before them.
        first=tuple([event for _, event in sorted([*additions, *later], key=operator.itemgetter(0))]),
        later=tuple([event for _, event in later]),
        occurrences=tuple([occurrence for occurrence, _ in later]),
    )


def _with_hidden(trace: Trace, hidden: dict[int, list[int]]) -> list[_Timed]:
    """The update's own events, none earlier than those before it, and the hidden ones.

    Those are after the births of their occurrence, and before its deaths.
    """
    storages, end, waiting = trace.storages, len(trace.occurrences), iter(sorted(hidden))
    timed: list[_Timed] = []
    now, following = 0, next(waiting, end)
    for event in trace.events:
        when = storages[event - 1].born if event > 0 else storages[-event - 1].died
        if when is not None and when > now:
            now = when
        elif event > 0 and when == -1:
            continue
        while following < now or (following == now and event < 0):
            timed += ((following, one) for one in hidden[following])
            following = next(waiting, end)
        timed.append((now, event))
    timed += ((occurrence, one) for occurrence in (following, *waiting) for one in hidden.get(occurrence, ()))
    return timed


@dataclass(frozen=True, kw_only=True)
class ResidentModel:
    """Resident memory that training adds, from a replay of malloc: `library_bytes + factor × replayed`.

    `written` is the resident share of an LSTM's workspace: the part written of a fresh mapping, all of it in a heap
    that was written before.
    """

    malloc: MallocSettings
    library_bytes: float
    factor: float
    written: float


PARTLY_WRITTEN = 0.3
"""Share of an LSTM's workspace that is written, and so resident: gates and states, 4 to 5 of 15 parts. Measured
0.25 to 0.34 on single layers."""

MODELS: dict[Malloc, ResidentModel] = {
    "retained": ResidentModel(malloc=RETAINED, library_bytes=98e6, factor=1.18, written=1.0),
    "default": ResidentModel(malloc=DEFAULT, library_bytes=98e6, factor=1.18, written=PARTLY_WRITTEN),
    "mapped": ResidentModel(malloc=MAPPED, library_bytes=98e6, factor=1.0, written=PARTLY_WRITTEN),
}
"""By a plan's malloc setting; measured on one x86-64 machine under PyTorch 2.13 and glibc 2.36."""

_UPDATES = 3
"""Replayed updates: in the first the optimiser allocates its state, and malloc's threshold moves."""


def resident_peak(trace: Trace, malloc: Malloc, baseline_bytes: float, *, micro_batches: int | None = None) -> float:
    """Peak memory of the process on a CPU [bytes].

    Args:
        trace: one update on a CPU, with all repeated blocks.
        malloc: the plan's setting.
        baseline_bytes: memory of the process before training, with data in memory
            (`stoker.devices.malloc.resident_bytes`). If it has trained before, that includes the libraries' memory, and
            the forecast is too high by `ResidentModel.library_bytes` at most.
        micro_batches: of an update; None: as many as were traced.
    """
    model = MODELS[malloc]
    added = model.factor * replayed(trace, model, micro_batches=micro_batches)
    return baseline_bytes + model.library_bytes + added


def replayed(trace: Trace, model: ResidentModel, *, micro_batches: int | None = None) -> int:
    """Peak memory that malloc takes of the system over the first updates [bytes]."""
    timeline = timeline_of(trace, micro_batches=micro_batches)
    malloc = SystemMalloc(model.malloc)
    sizes = list(timeline.sizes)
    for index, storage in enumerate(trace.storages):  # workspaces that LSTM layers keep for their backward pass
        operation = trace.operations[trace.occurrences[storage.born].operation] if storage.born >= 0 else None
        outputs = operation.outputs if operation is not None and operation.name == "mkldnn_rnn_layer" else ()
        if any(one.dtype == "uint8" and one.numel == storage.num_bytes for one in outputs):
            sizes[index] = round(sizes[index] * model.written)
    events = [i + 1 for i in timeline.before]
    events += timeline.first
    events += timeline.later * (_UPDATES - 1)
    blocks = [0] * len(sizes)
    for event in events:
        index = abs(event) - 1
        if event > 0:
            blocks[index] = malloc.malloc(sizes[index])
        else:
            malloc.free(blocks[index])
    return malloc.peak_resident


_PRIOR_CASES = 19
"""Weight of the prior in measured cases; one less for each that was measured."""
_FEWEST_PRIOR_CASES = 3
"""Least weight of the prior: the next case may be of a kind never measured."""
_INTERVAL = (0.1, 0.9)
"""An Estimate's interval holds 8 of 10 cases."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """Prior of the ratio measured / forecast: normal, around `middle`."""

    middle: float
    deviation: float

    def ratios(self, count: int) -> list[float]:
        """`count` ratios at evenly spaced quantiles."""
        bell = NormalDist(self.middle, self.deviation)
        return [max(0.0, bell.inv_cdf((i + 0.5) / count)) for i in range(count)]


PRIORS = {
    "cuda": Prior(middle=1.015, deviation=0.04),
    "cpu": Prior(middle=1.0, deviation=0.08),
}
"""By kind of device. CUDA: the replay is exact, the memory of libraries (workspaces of cuDNN, buffers of NCCL) is
unknown and only adds; other tools err by 1.6 to 3 % at best (LLMem, IJCAI'24). CPU: the spread in
`bench/results/resident_memory_2026-11-21.json`."""

_WORSE_UNSEEN = 1.5
"""Factor on the prior's deviation for a device model that was never measured."""

_OF_COMPILED = 0.07
"""More of it for compiled plans on a GPU, whose buffers inductor orders and reuses in its own way: root mean square of
the errors of what the allocator held in 15 compiled steps on an H100 and an H200, of which allocated memory was within
5 % (`bench/results/gpu_case_peaks_2026-11-27.json`)."""


@dataclass(frozen=True, kw_only=True)
class MemoryResiduals:
    """Ratios measured / forecast of a device model; those of a compiled plan are less certain."""

    kind: str
    ratios: tuple[float, ...] = ()
    is_compiled: bool = False

    def cases(self) -> list[float]:
        """Measured ratios and those of the prior, sorted."""
        prior = PRIORS[self.kind]
        if not self.ratios:
            prior = Prior(middle=prior.middle, deviation=prior.deviation * _WORSE_UNSEEN)
        if self.is_compiled and self.kind == "cuda":
            prior = Prior(middle=prior.middle, deviation=math.hypot(prior.deviation, _OF_COMPILED))
        count = max(_FEWEST_PRIOR_CASES, _PRIOR_CASES - len(self.ratios))
        return sorted([*self.ratios, *prior.ratios(count)])


def needed(forecast_bytes: float, residuals: MemoryResiduals) -> Estimate:
    """The memory forecast [bytes] with the interval from earlier errors."""
    cases = residuals.cases()
    low, high = (_quantile(cases, share) for share in _INTERVAL)
    basis: Basis = "calibrated" if residuals.ratios else "datasheet"
    return Estimate(
        value=forecast_bytes,
        low=forecast_bytes * min(1.0, low),
        high=forecast_bytes * max(1.0, high),
        unit="bytes",
        basis=basis,
    )


def fit_probability(forecast_bytes: float, memory_bytes: float, residuals: MemoryResiduals) -> float:
    """Probability that a plan forecast to need `forecast_bytes` fits in `memory_bytes` [0 to 1].

    With n cases between 1 / (n + 1) and n / (n + 1), unless the memory is less than half or more than twice the
    forecast.
    """
    if forecast_bytes <= 0:
        return 1.0
    room = memory_bytes / forecast_bytes
    if not 0.5 <= room <= 2:
        return 0.0 if room < 0.5 else 1.0
    cases = residuals.cases()
    below = _position(cases, room)
    return min(max(below, 1.0), len(cases)) / (len(cases) + 1)


def largest_that_fits(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The largest of `sizes` that fits, by bisection; None if none does. Assumes that smaller sizes also fit."""
    ordered = sorted(sizes)
    low, high = 0, len(ordered)
    while low < high:
        middle = (low + high) // 2
        if fits(ordered[middle]):
            low = middle + 1
        else:
            high = middle
    return ordered[low - 1] if low else None


def _position(cases: Sequence[float], ratio: float) -> float:
    """Number of cases below `ratio`, interpolated linearly between two of them."""
    if ratio < cases[0]:
        return 0.0
    for number, (lower, upper) in enumerate(itertools.pairwise(cases), 1):
        if ratio < upper:
            return number + (ratio - lower) / (upper - lower)
    return float(len(cases))


def _quantile(cases: Sequence[float], share: float) -> float:
    """The ratio that a new case is below with probability `share`."""
    position = min(max(share * (len(cases) + 1), 1.0), float(len(cases))) - 1
    lower = int(position)
    upper = min(lower + 1, len(cases) - 1)
    return cases[lower] + (cases[upper] - cases[lower]) * (position - lower)
