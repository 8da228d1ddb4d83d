"""How much memory an update needs: of a GPU by exact replay of its allocator, of a machine by that of malloc.

How much memory an update needs at most, when, and for what.

In which order updates allocate and free, hidden temporaries included: the first update, and every later one.

What the whole process takes of a machine's memory while it trains on a CPU, at its peak.

The peak is what the process has before training (interpreter, libraries, data in memory: measured where the plan is
made), plus what malloc holds for the tensors (its replay over the first updates), plus what libraries take once
training begins: their code as it is first run, buffers of MKL and oneDNN, kernels compiled on the fly. Under `mapped`
the replay is all there is to malloc. Under `default` small allocations, which no trace shows, lie between tensors and
keep the heap from closing its holes; that share is fitted, and differs by a tenth between runs of the same job, since
the system places the heap at random.

Constants are fitted on the calibration set of `bench/forecast/resident_memory.py`; its held-out set tells the error.

Whether a plan fits a device: the odds, learned from how far earlier forecasts were off.

What a forecast misses by is taken as a ratio, measured over forecast. Of n earlier ratios and a new one, each order is
equally likely, so the new one is at most the k-th smallest with probability k / (n + 1): the split-conformal interval,
without a guess at the shape of the errors. A prior stands in for the cases that are not there yet: ratios at the
quantiles of a normal distribution, fewer of them the more was measured.

Source: V. Vovk, A. Gammerman and G. Shafer, "Algorithmic Learning in a Random World" (2005), section 2.3; J. Lei et
al., "Distribution-Free Predictive Inference for Regression" (2018), section 2. The pseudo-cases of the prior are ours.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from stoker.planning.model.caching_allocator import AllocatorSettings, CachingAllocator, rounded
from stoker.planning.model.system_malloc import ALIGNMENT, DEFAULT, MAPPED, RETAINED, MallocSettings, SystemMalloc
from stoker.planning.model.workspaces import cublas_workspace_bytes, hidden_bytes, is_product
from stoker.records import Estimate, Share
from stoker.records.estimate import Basis
from stoker.records.plan import Malloc
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


def replay(timeline: AllocationTimeline, settings: AllocatorSettings | None = None, *, updates: int = 2) -> Replay:
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


def least_capacity(timeline: AllocationTimeline, *, expandable: bool = False, precision: int = 16 << 20) -> int:
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


def live_peak(timeline: AllocationTimeline, size_of: Callable[[int], int]) -> tuple[int, int]:
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


def _shares(trace: Trace, timeline: AllocationTimeline, at: int, size_of: Callable[[int], int]) -> tuple[Share, ...]:
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


_Timed = tuple[int, int]
"""An occurrence's index, and an event that happens then."""


@dataclass(frozen=True, kw_only=True)
class AllocationTimeline:
    """Allocations and frees of a run's updates.

    `sizes` [bytes] are those of the trace's storages, then of hidden ones. `before` are the storages that live before
    the first update. `first` and `later` are events as in a Trace: `i + 1` for the birth of storage `i`, `-(i + 1)` for
    its death; in the first update the optimiser makes its state, and cuBLAS its workspace. Each ends with what it takes
    for the next to begin as it did. `occurrences` are those of the events of `later`.
    """

    sizes: tuple[int, ...]
    before: tuple[int, ...]
    first: tuple[int, ...]
    later: tuple[int, ...]
    occurrences: tuple[int, ...]

    @property
    def persisting(self) -> tuple[int, ...]:
        """Storages that live before a later update."""
        alive = set(self.before)
        for event in self.first:
            (alive.add if event > 0 else alive.discard)(abs(event) - 1)
        return tuple(sorted(alive))


def timeline_of(trace: Trace, *, micro_batches: int | None = None) -> AllocationTimeline:
    """The timeline of a trace in which repeated blocks are all there.

    `micro_batches` are those of an update (None: as many as were traced): the batch they are cut from is as large.
    """
    parts = trace.settings.parts
    share = max(micro_batches or parts, parts) / parts
    sizes = [
        round(storage.num_bytes * share) if storage.category == "input" and storage.born < 0 else storage.num_bytes
        for storage in trace.storages
    ]
    kept = {i for i, storage in enumerate(trace.storages) if storage.born < 0}
    made = {i for i in kept if trace.storages[i].category == "optimizer state"}
    during = list(_with_hidden(trace, _hidden(trace, sizes)))
    ends = [(len(trace.occurrences), event) for event in _back_to(kept, during)]
    later = [*during, *ends]
    workspace = _first_product(trace)
    optimizer = _first_optimizer(trace)
    additions = [(optimizer, i + 1) for i in sorted(made)]
    if workspace is not None and trace.settings.target == "cuda":
        sizes.append(cublas_workspace_bytes(trace.settings.capability))
        additions.append((workspace, len(sizes)))
    return AllocationTimeline(
        sizes=tuple(sizes),
        before=tuple(sorted(kept - made)),
        # A sort keeps the order of events of one occurrence; what is added comes before them.
        first=tuple(event for _, event in sorted([*additions, *later], key=lambda timed: timed[0])),
        later=tuple(event for _, event in later),
        occurrences=tuple(occurrence for occurrence, _ in later),
    )


def _events(trace: Trace) -> Iterator[_Timed]:
    """The update's own events; a death takes place no earlier than the events before it."""
    now = 0
    for event in trace.events:
        storage = trace.storages[abs(event) - 1]
        if event > 0 and storage.born < 0:
            continue
        when = storage.born if event > 0 else storage.died
        now = max(now, when if when is not None else now)
        yield now, event


def _with_hidden(trace: Trace, hidden: dict[int, list[int]]) -> Iterator[_Timed]:
    """The update's events, and the hidden ones after the births of their occurrence, before its deaths."""
    waiting = sorted(hidden, reverse=True)
    for when, event in _events(trace):
        while waiting and (waiting[-1] < when or (waiting[-1] == when and event < 0)):
            occurrence = waiting.pop()
            yield from ((occurrence, one) for one in hidden[occurrence])
        yield when, event
    while waiting:
        occurrence = waiting.pop()
        yield from ((occurrence, one) for one in hidden[occurrence])


def _hidden(trace: Trace, sizes: list[int]) -> dict[int, list[int]]:
    """Births and deaths of hidden temporaries by occurrence; their sizes are added to `sizes`."""
    target = trace.settings.target
    temporary = [hidden_bytes(operation, target=target) for operation in trace.operations]
    found: dict[int, list[int]] = {}
    for occurrence, one in enumerate(trace.occurrences):
        if temporary[one.operation] > 0:
            sizes.append(temporary[one.operation])
            found[occurrence] = [len(sizes), -len(sizes)]
    return found


def _back_to(kept: set[int], during: list[_Timed]) -> list[int]:
    """Events that leave alive what lived before the update, and nothing else."""
    alive = set(kept)
    for _, event in during:
        (alive.add if event > 0 else alive.discard)(abs(event) - 1)
    return [*(-(i + 1) for i in sorted(alive - kept)), *(i + 1 for i in sorted(kept - alive))]


def _first_product(trace: Trace) -> int | None:
    products = [is_product(operation) for operation in trace.operations]
    return next((i for i, one in enumerate(trace.occurrences) if products[one.operation]), None)


def _first_optimizer(trace: Trace) -> int:
    occurrences = trace.occurrences
    return next((i for i, one in enumerate(occurrences) if one.phase == "optimizer"), len(occurrences))


@dataclass(frozen=True, kw_only=True)
class ResidentModel:
    """From a replay of malloc to what training adds to resident memory: `library_bytes + factor × replayed`.

    `written` is the share of an LSTM's workspace that is resident: what it writes of a fresh mapping, all of it where
    it lies in a heap that others have written before.
    """

    malloc: MallocSettings
    library_bytes: float
    factor: float
    written: float


PARTLY_WRITTEN = 0.3
"""Share of an LSTM's workspace that is ever written, and so resident: gates and states, 4 to 5 of 15 parts. Measured
0.25 to 0.34 on single layers."""

MODELS: dict[Malloc, ResidentModel] = {
    "retained": ResidentModel(malloc=RETAINED, library_bytes=98e6, factor=1.18, written=1.0),
    "default": ResidentModel(malloc=DEFAULT, library_bytes=98e6, factor=1.18, written=PARTLY_WRITTEN),
    "mapped": ResidentModel(malloc=MAPPED, library_bytes=98e6, factor=1.0, written=PARTLY_WRITTEN),
}
"""By a plan's malloc setting; measured on one x86-64 machine under PyTorch 2.13 and glibc 2.36."""

_UPDATES = 3
"""Replayed updates: in the first the optimiser makes its state, and malloc learns what is large."""


def resident_peak(trace: Trace, malloc: Malloc, baseline_bytes: float, *, micro_batches: int | None = None) -> float:
    """The most the process will take of the machine's memory [bytes].

    Args:
        trace: one update on a CPU, repeated blocks all there.
        malloc: the plan's setting.
        baseline_bytes: what the process takes before training, the data in memory included
            (`stoker.devices.malloc.resident_bytes`). Where it has trained before, libraries have had theirs already,
            and the forecast is too high by `ResidentModel.library_bytes` at most.
        micro_batches: those of an update; None: as many as were traced.
    """
    model = MODELS[malloc]
    added = model.factor * replayed(trace, model, micro_batches=micro_batches)
    return baseline_bytes + model.library_bytes + added


def replayed(trace: Trace, model: ResidentModel, *, micro_batches: int | None = None) -> int:
    """The most malloc takes of the system over the first updates [bytes]."""
    timeline = timeline_of(trace, micro_batches=micro_batches)
    malloc = SystemMalloc(model.malloc)
    sizes = list(timeline.sizes)
    for index in _workspaces(trace):
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


def _workspaces(trace: Trace) -> list[int]:
    """Storages that LSTM layers keep for their backward pass, beside their outputs."""
    found = []
    for index, storage in enumerate(trace.storages):
        operation = trace.operations[trace.occurrences[storage.born].operation] if storage.born >= 0 else None
        if operation is not None and operation.name == "mkldnn_rnn_layer":
            outputs = operation.outputs
            if any(one.dtype == "uint8" and one.numel == storage.num_bytes for one in outputs):
                found.append(index)
    return found


_PRIOR_CASES = 19
"""The prior counts as much as so many measured cases, and one less for each that was measured."""
_FEWEST_PRIOR_CASES = 3
"""Some of it always remains: the next case may be of a kind never measured."""
_INTERVAL = (0.1, 0.9)
"""An Estimate's interval holds 8 of 10 cases."""


@dataclass(frozen=True, kw_only=True)
class Prior:
    """What is believed of measured over forecast before anything was measured: normal, around `middle`."""

    middle: float
    deviation: float

    def ratios(self, count: int) -> list[float]:
        """`count` ratios at evenly spaced quantiles."""
        bell = NormalDist(self.middle, self.deviation)
        return [max(0.0, bell.inv_cdf((i + 0.5) / count)) for i in range(count)]


PRIORS = {
    "cuda": Prior(middle=1.0, deviation=0.04),
    "cpu": Prior(middle=1.0, deviation=0.08),
}
"""By kind of device. CUDA: the replay is exact, what libraries take is not known; other tools err by 1.6
to 3 % at best (LLMem, IJCAI'24). CPU: the spread in `bench/results/resident_memory_2026-11-21.json`."""

_WORSE_UNSEEN = 1.5
"""On a device model never measured errors may spread so much wider than the prior says."""


@dataclass(frozen=True, kw_only=True)
class MemoryResiduals:
    """Ratios measured / forecast: those of this device model, and whether there were any."""

    kind: str
    ratios: tuple[float, ...] = ()

    def cases(self) -> list[float]:
        """All ratios that count, those of the prior included, in order."""
        prior = PRIORS[self.kind]
        if not self.ratios:
            prior = Prior(middle=prior.middle, deviation=prior.deviation * _WORSE_UNSEEN)
        count = max(_FEWEST_PRIOR_CASES, _PRIOR_CASES - len(self.ratios))
        return sorted([*self.ratios, *prior.ratios(count)])


def needed(forecast_bytes: float, residuals: MemoryResiduals) -> Estimate:
    """What will be needed [bytes]: the forecast with the interval that earlier errors give it."""
    cases = residuals.cases()
    low, high = (_quantile(cases, share) for share in _INTERVAL)
    basis: Basis = "calibrated" if residuals.ratios else "datasheet"
    return Estimate(
        value=forecast_bytes, low=forecast_bytes * min(1.0, low), high=forecast_bytes * max(1.0, high),
        unit="bytes", basis=basis,
    )  # fmt: skip


def fit_probability(forecast_bytes: float, memory_bytes: float, residuals: MemoryResiduals) -> float:
    """The chance [0 to 1] that what is forecast to need `forecast_bytes` fits in `memory_bytes`.

    Never 0 or 1: with n cases it lies between 1 / (n + 1) and n / (n + 1), unless the memory is less than half or more
    than twice the forecast.
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
    """The largest of `sizes` that fits, by bisection: what fits must also do so with fewer samples.

    Returns None where not even the smallest does.
    """
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
    """How many of the cases lie below `ratio`, counting linearly between two of them."""
    if ratio < cases[0]:
        return 0.0
    for number, (lower, upper) in enumerate(itertools.pairwise(cases), 1):
        if ratio < upper:
            return number + (ratio - lower) / (upper - lower)
    return float(len(cases))


def _quantile(cases: Sequence[float], share: float) -> float:
    """The ratio that a new case stays below with probability `share`."""
    position = min(max(share * (len(cases) + 1), 1.0), float(len(cases))) - 1
    lower = int(position)
    upper = min(lower + 1, len(cases) - 1)
    return cases[lower] + (cases[upper] - cases[lower]) * (position - lower)
