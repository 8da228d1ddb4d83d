"""Forecasts of whole runs: from traces alone, without running the job or having the device, and from a short trial.

A breakdown's parts add up to the forecast; parts that no trace has get a name of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from stoker.planning.model.activation_offload import (
    ActivationWork,
    activation_work,
    with_activations_offloaded,
    with_copies,
)
from stoker.planning.model.caching_allocator import AllocatorSettings, rounded
from stoker.planning.model.checkpoint_cost import saving
from stoker.planning.model.compiled_graphs import compiled_storages
from stoker.planning.model.host import PROCESS_BYTES, host_problem
from stoker.planning.model.memory import (
    AllocationTimeline,
    KeptByBlocks,
    MemoryForecast,
    MemoryResiduals,
    fit_probability,
    gradients_between,
    kept_by_blocks,
    least_capacities,
    live_peak,
    memory_along,
    needed,
    replay,
    resident_peak,
    timeline_of,
)
from stoker.planning.model.objectives import energy_kwh
from stoker.planning.model.optimizer_offload import HostWork, host_work, with_host, with_offload
from stoker.planning.model.optimizer_states import full_states, with_states
from stoker.planning.model.search_space import num_micro_batches, trace_settings
from stoker.planning.model.update_time import (
    OperationTimes,
    UpdateTime,
    UpdateWork,
    as_measured_before,
    counted,
    operation_times,
    update_time,
)
from stoker.planning.model.workspaces import context_bytes
from stoker.records import (
    Breakdown,
    Calibration,
    Estimate,
    Forecast,
    Hardware,
    Layout,
    Malloc,
    Measurement,
    Plan,
    Profile,
    Share,
    Trace,
    TraceSettings,
)

Traces = Callable[[TraceSettings], Trace]
"""The trace of an update of the whole model, by settings."""

_NEAR = 1.1
"""A limit below so many times what the allocator would hold without one makes it give back what it only caches."""

_Update = tuple[TraceSettings, int, bool]
"""What the memory of an update depends on: its trace, its number of micro-batches, whether it is compiled."""

_MOST_KEPT = 2
"""Traces, and timelines of them, that are kept of a layout: what a plan is asked about is mostly asked at once."""

MOST_KEPT_OF_ONE = 16
"""The same of one process, about which each device asks."""

_COPIED_AHEAD = ("memory", "workers")
"""Loaders that copy the next batch to a GPU during an update."""

_QUEUED = 3
"""More batches for which the allocator holds memory: their updates are queued on the GPU (`loading.batches`). Measured
on an H100: 1 to 4, the more the longer an update takes."""

_SAVED = frozenset({"parameter", "buffer", "optimizer state", "average"})
"""Storages in a checkpoint."""


class Needs:
    """Memory and operations of updates, each computed once for all devices and plans.

    Args:
        traces: traces of the job's updates.
        blocks: dotted names of the model's repeated blocks, in order, for plans whose activations are offloaded.
        most_kept: traces with few bits or offload, and timelines, that are kept.
    """

    def __init__(self, traces: Traces, blocks: Sequence[str] = (), *, most_kept: int = _MOST_KEPT) -> None:

        def traced(settings: TraceSettings) -> Trace:
            with_full = with_states(traces(full_states(settings).on_device()), settings.optimizer_states)
            offloaded = with_offload(with_full, settings.optimizer_offload)
            return with_activations_offloaded(offloaded, blocks) if settings.activation_offload else offloaded

        # Those of a layout are recomputed when they are needed again: large models have too many to keep all.
        self.trace = functools.lru_cache(maxsize=most_kept)(traced)
        self._timeline = functools.lru_cache(maxsize=most_kept)(self._made_timeline)
        self._peaks: dict[_Update, MemoryForecast] = {}
        self._least: dict[_Update, tuple[list[tuple[int, int]], Iterator[tuple[int, int]]]] = {}
        self._lives: dict[_Update, int] = {}
        self._uncheckpointed: dict[tuple[_Update, KeptByBlocks], int] = {}
        self._resident: dict[tuple[TraceSettings, int, Malloc], float] = {}
        self._kept: dict[TraceSettings, int] = {}
        self._inputs: dict[TraceSettings, int] = {}
        self._host: dict[TraceSettings, HostWork] = {}
        self._blocks, self._activations = blocks, dict[TraceSettings, ActivationWork]()
        self._work: dict[tuple[TraceSettings, int], UpdateWork] = {}

    def peak(self, settings: TraceSettings, micro_batches: int, *, is_compiled: bool = False) -> MemoryForecast:
        """Memory of an update of so many micro-batches."""
        key = settings, micro_batches, is_compiled and settings.target == "cuda"
        if key not in self._peaks:
            self._peaks[key] = dataclasses.replace(self._forecast(key), split=lambda: self._forecast(key).shares)
        return self._peaks[key]

    def _forecast(self, key: _Update) -> MemoryForecast:
        settings, _, is_compiled = key
        return memory_along(self._storages(settings, is_compiled), self._timeline(key))

    def live_bytes(self, settings: TraceSettings, micro_batches: int, *, is_compiled: bool = False) -> int:
        """Memory of a GPU's live tensors at the peak [bytes]: no allocator does with less."""
        key = settings, micro_batches, is_compiled
        if key not in self._lives:
            self._lives[key] = live_peak(self._timeline(key), rounded)[0]
        return self._lives[key]

    def least_live_bytes(
        self, settings: TraceSettings, micro_batches: int, num_blocks: int, *, is_compiled: bool = False
    ) -> int:
        """What live tensors of a GPU need at least [bytes] where no block is checkpointed, or all are selectively.

        Without a trace of that: by the one in which all are checkpointed, if it is known; else 0.
        """
        kept: KeptByBlocks = "products" if settings.checkpointed_blocks else "fused" if is_compiled else "all"
        full = dataclasses.replace(settings, checkpointed_blocks=num_blocks, checkpointing="full")
        for key in list(self._lives):
            known, passes, was_compiled = key
            is_like = dataclasses.replace(known, loss_chunks=settings.loss_chunks) == full
            if is_like and passes == micro_batches and not was_compiled:
                if (key, kept) not in self._uncheckpointed:
                    timeline, trace = self._timeline(key), self.trace(known)
                    before = sum(rounded(timeline.sizes[index]) for index in timeline.persisting)
                    least = before + gradients_between(trace) + kept_by_blocks(trace, kept)
                    self._uncheckpointed[key, kept] = least
                return self._uncheckpointed[key, kept]
        return 0

    def least_reserved(
        self, settings: TraceSettings, micro_batches: int, *, is_compiled: bool = False
    ) -> Iterator[tuple[int, int]]:
        """Ever closer bounds of what a GPU's allocator can do with [bytes]: near the limit it frees what it caches."""
        key = settings, micro_batches, is_compiled
        if key not in self._least:
            peak = self.peak(settings, micro_batches, is_compiled=is_compiled)

            def is_enough(capacity: int) -> bool:
                return replay(self._timeline(key), AllocatorSettings(capacity=capacity)).failed_at is None

            self._least[key] = [], least_capacities(is_enough, peak.allocated, peak.reserved)
        known, closer = self._least[key]
        yield from known
        for bounds in closer:
            known.append(bounds)
            yield bounds

    def _made_timeline(self, key: _Update) -> AllocationTimeline:
        settings, micro_batches, is_compiled = key
        return timeline_of(self._storages(settings, is_compiled), micro_batches=micro_batches)

    def _storages(self, settings: TraceSettings, is_compiled: bool) -> Trace:  # noqa: FBT001 - a part of the key
        trace = self.trace(settings)
        return compiled_storages(trace) if is_compiled and settings.target == "cuda" else trace

    def resident(self, settings: TraceSettings, micro_batches: int, malloc: Malloc) -> float:
        """Memory that such updates add to a process on a CPU, under a setting of malloc [bytes]."""
        key = settings, micro_batches, malloc
        if key not in self._resident:
            self._resident[key] = resident_peak(self.trace(settings), malloc, 0, micro_batches=micro_batches)
        return self._resident[key]

    def kept(self, settings: TraceSettings) -> int:
        """Size of a checkpoint [bytes]."""
        if settings not in self._kept:
            storages = self.trace(settings.on_device()).storages
            self._kept[settings] = sum(s.num_bytes for s in storages if s.born < 0 and s.category in _SAVED)
        return self._kept[settings]

    def host(self, settings: TraceSettings) -> HostWork:
        """What the host does where the optimiser is offloaded to it."""
        if settings not in self._host:
            self._host[settings] = host_work(self.trace(settings.on_device()))
        return self._host[settings]

    def activations(self, settings: TraceSettings) -> ActivationWork:
        """What goes to the host and back where activations are offloaded to it."""
        if settings not in self._activations:
            self._activations[settings] = activation_work(self.trace(settings.on_device()), self._blocks)
        return self._activations[settings]

    def inputs(self, settings: TraceSettings) -> int:
        """Size of a micro-batch as it is copied to a GPU [bytes]."""
        if settings not in self._inputs:
            storages = self.trace(settings).storages
            self._inputs[settings] = sum(s.num_bytes for s in storages if s.category == "input") // settings.parts
        return self._inputs[settings]

    def work(self, settings: TraceSettings, micro_batches: int) -> UpdateWork:
        """Operations of an update of so many micro-batches."""
        key = settings, micro_batches
        if key not in self._work:
            self._work[key] = counted(self.trace(settings), micro_batches)
        return self._work[key]


class TracedForecasts:
    """Forecasts of plans on one device.

    Args:
        profile: the job's facts.
        hardware: the device, by the number of threads on a CPU (None: all its cores).
        needs: memory and operations of the job's updates.
        extents: the run's extents at a rate [samples/s].
        calibrations: forecasts and measurements of earlier runs on this device.
        held_bytes: memory of the process before it trains [bytes]; on a CPU part of the peak.
        fetch_s: time in which one process fetches a sample that is not in memory [s].
    """

    layout = Layout()

    def __init__(
        self,
        profile: Profile,
        hardware: Callable[[int | None], Hardware],
        needs: Needs,
        extents: Callable[[float], Extents],
        *,
        calibrations: Sequence[Calibration] = (),
        held_bytes: int = 0,
        fetch_s: float = 0.0,
    ) -> None:
        self._profile = self._local = profile  # `_local`: facts of the samples of one process
        self._hardware_with, self._needs = hardware, needs
        self._extents, self._held_bytes, self._fetch_s = extents, held_bytes, fetch_s
        self._hardware = hardware(None)
        self._times: dict[int, tuple[Hardware, OperationTimes]] = {}
        self._updates: dict[Plan, UpdateTime] = {}
        peaks = (c for c in calibrations if c.quantity == "peak_bytes" and c.forecast > 0 and c.measured > 0)
        ratios = tuple(c.measured / c.forecast for c in peaks)
        self._calibrations = calibrations
        kind = self._hardware.device.kind
        self._residuals = {
            is_compiled: MemoryResiduals(kind=kind, ratios=ratios, is_compiled=is_compiled)
            for is_compiled in (False, True)
        }

    def needed_bytes(self, plan: Plan) -> float:
        """Memory of the device [bytes]: on a GPU what its allocator holds and the context, on a CPU the process."""
        if self._hardware.device.kind != "cuda":
            return self._resident(plan)
        reserved, context = self._device_bytes(plan)[1], context_bytes().value
        return self._least_device_bytes(plan) + context if self._is_near(plan) else reserved + context

    def probability_it_fits(self, plan: Plan) -> float:
        """Probability that the device's memory is enough [0 to 1]; 1 if its memory is unknown.

        0 where the host's is not enough for what is offloaded.
        """
        if self.host_problem(plan) is not None:
            return 0.0
        return self._probability(self.needed_bytes(plan), plan)

    def fits(self, plan: Plan, probability: float) -> bool:
        """Whether `probability_it_fits` is at least so large; for plans far from the limit much quicker than that."""
        if self._hardware.device.kind != "cuda" or not self._hardware.device.memory_bytes:
            return self.probability_it_fits(plan) >= probability
        if self.host_problem(plan) is not None:
            return False
        context = context_bytes().value

        def is_likely(num_bytes: float) -> bool:
            return self._probability(num_bytes + context, plan) >= probability

        settings, passes, num_blocks = self._settings(plan), self._micro_batches(plan), self._profile.num_blocks
        if num_blocks and (not plan.checkpointed_blocks or plan.checkpointing == "selective"):
            least = (
                needs.least_live_bytes(settings, passes, num_blocks, is_compiled=plan.compile) for needs in self._kinds
            )
            if not is_likely(max(least)):
                return False
        processes = self._processes(plan)
        live = (needs.live_bytes(settings, passes, is_compiled=plan.compile) + more for needs, more in processes)
        if not all(map(is_likely, live)):
            return False
        if is_likely(self._device_bytes(plan)[1]) or not self._is_near(plan):
            return is_likely(self._device_bytes(plan)[1])

        def does(needs: Needs, more: int) -> bool:
            for low, high in needs.least_reserved(settings, passes, is_compiled=plan.compile):
                if not is_likely(low + more) or is_likely(high + more):
                    return is_likely(high + more)
            return False

        return all(does(needs, more) for needs, more in processes)

    def _probability(self, needed_bytes: float, plan: Plan) -> float:
        memory_bytes, residuals = self._hardware.device.memory_bytes, self._residuals[plan.compile]
        return fit_probability(needed_bytes, memory_bytes, residuals) if memory_bytes else 1.0

    def _is_near(self, plan: Plan) -> bool:
        """Whether a GPU's allocator gives back what it caches before it is out of memory."""
        allocated, reserved = self._device_bytes(plan)
        context, memory_bytes = context_bytes().value, self._hardware.device.memory_bytes
        return bool(memory_bytes) and allocated + context < memory_bytes < _NEAR * (reserved + context)

    def forecast(self, plan: Plan) -> Forecast:
        """Time and memory of the whole run."""
        update, profile = self.update(plan), self._profile
        samples = profile.mean_batch or min(profile.batch, profile.num_train)
        step_s = self._with_fetching(update.step_s, plan, samples)
        rate = step_s.scaled(1 / samples)
        per_s = Estimate(
            value=1 / rate.value, low=1 / rate.high, high=1 / rate.low, unit="samples/s", basis=step_s.basis
        )
        extents = self._extents(per_s.value / profile.relative_cost)
        # The last update of an epoch has fewer samples, and takes less time.
        training = step_s.scaled(extents.total_samples / samples * profile.relative_cost)
        evaluated = extents.evaluations * profile.num_valid + profile.num_test
        # Samples to evaluate are fetched by the process that computes, even if workers fetch for training.
        evaluate = step_s.scaled((update.forward_s / samples + self._fetch_s) / step_s.value)
        unsaved = training.value + evaluate.value * evaluated
        saved = saving(
            dataclasses.replace(plan, layout=self.layout, captured=False),
            self._saved_bytes(plan),
            training_s=training.value,
            unsaved_s=unsaved,
            evaluations=extents.evaluations,
            link_bytes_per_s=self._hardware.host_link_bytes_per_s,
            machine_devices=profile.machine_devices,
            restart_s=profile.restart_s,
        )
        total = unsaved + saved.total_s
        total_s, compile_s = training.scaled(total / training.value), None
        if update.compile_s is not None:
            known = self._calibrations if plan.compile else ()  # capture times are not recorded
            compile_s = as_measured_before(update.compile_s, known)
            total_s = dataclasses.replace(
                total_s,
                value=total_s.value + compile_s.value,
                low=total_s.low + compile_s.low,
                high=total_s.high + compile_s.high,
            )
        cuda = self._hardware.device.kind == "cuda"
        allocated, reserved = self._device_bytes(plan) if cuda else (self._resident(plan), 0.0)
        return Forecast(
            step_s=step_s,
            samples_per_s=per_s,
            evaluate_s=evaluate.scaled(max(profile.num_valid, profile.num_test)),
            checkpoint_s=saved.one,
            total_s=total_s,
            peak_bytes=needed(allocated, self._residuals[plan.compile]),
            reserved_bytes=needed(reserved, self._residuals[plan.compile]) if cuda else None,
            probability_it_fits=self.probability_it_fits(plan),
            total_samples=extents.total_samples,
            total_updates=extents.total_updates,
            evaluations=extents.evaluations,
            compile_s=compile_s,
            checkpoint_every_s=saved.every_s,
            lost_s=saved.lost_s,
        )

    def energy_kwh(self, plan: Plan, forecast: Forecast, *, pue: float) -> Estimate | None:
        """Energy of the run, with its share of the building's [kWh]; None if the device's power is unknown."""
        if self._hardware.power_w is None:
            return None
        power = self.update(plan).power_w
        return None if power is None else energy_kwh(power, forecast.total_s, pue=pue)

    def is_fallback(self, plan: Plan) -> bool:
        """True if a CPU was traced instead, because this PyTorch cannot pretend to have the device."""
        return self._needs.trace(self._settings(plan)).is_fallback

    def is_balanced(self, plan: Plan) -> bool:
        """True if the forecast rests on the assumption that a router spreads tokens evenly over its experts."""
        return self._needs.trace(self._settings(plan)).is_balanced

    def breakdown(self, plan: Plan) -> Breakdown:
        """Parts of an update's memory and time; `peak_at` is the phase and the user's line of the peak."""
        settings = self._settings(plan)
        peak = self._needs.peak(settings, self._micro_batches(plan), is_compiled=plan.compile)
        trace = self._needs.trace(settings)
        peak_at = "at the beginning of an update"
        if 0 <= peak.peak_at < len(trace.occurrences):
            one = trace.occurrences[peak.peak_at]
            phases = {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimiser"}
            line = trace.where(one)
            peak_at = f"in the {phases[one.phase]}" + (f", {line}" if line else "")
        return Breakdown(peak_bytes=peak.shares, peak_at=peak_at, step_s=self.update(plan).shares)

    def update(self, plan: Plan) -> UpdateTime:
        """The time of one update."""
        if plan not in self._updates:
            self._updates[plan] = self._update_by(plan, self._needs, *self._times_with(plan.threads))
        return self._updates[plan]

    def _saved_bytes(self, plan: Plan) -> float:
        """Largest number of bytes that one process writes at a checkpoint."""
        return self._needs.kept(self._settings(plan))

    def _update_by(self, plan: Plan, needs: Needs, hardware: Hardware, times: OperationTimes) -> UpdateTime:
        """The time of an update with the operations of `needs`."""
        settings, passes = self._settings(plan), self._micro_batches(plan)
        time = update_time(
            needs.work(settings, passes),
            times,
            hardware,
            precision=plan.precision,
            is_compiled=plan.compile,
            is_captured=plan.captured,
            malloc=plan.malloc,
            loader=plan.loader,
        )
        if plan.activation_offload:
            time = with_copies(time, needs.activations(settings), hardware, passes)
        if plan.is_offloaded:
            time = with_host(time, needs.host(settings), hardware, plan.optimizer_offload, passes)
        return time

    def host_work(self, plan: Plan) -> HostWork | None:
        """What the host keeps and does of the plan's optimiser; None where that is not offloaded."""
        return self._needs.host(self._settings(plan)) if plan.is_offloaded else None

    def activation_work(self, plan: Plan) -> ActivationWork | None:
        """What the host keeps of the plan's activations; None where those are not offloaded."""
        return self._needs.activations(self._settings(plan)) if plan.activation_offload else None

    @property
    def hardware(self) -> Hardware:
        """The device."""
        return self._hardware

    def host_bytes(self, plan: Plan) -> float:
        """The host's memory for a process that offloads [bytes]."""
        works = (self.host_work(plan), self.activation_work(plan))
        return PROCESS_BYTES + sum(work.kept_bytes for work in works if work is not None)

    def host_problem(self, plan: Plan) -> str | None:
        """Why the host's memory does not hold what the plan offloads; None if it does."""
        if not plan.uses_host_memory or self._hardware.host_memory_bytes is None:
            return None
        return host_problem(self.host_bytes(plan), plan.on_host_in_words(), self._hardware)

    @property
    def _kinds(self) -> Sequence[Needs]:
        """The needs of each kind of process."""
        return (self._needs,)

    def _processes(self, plan: Plan) -> Sequence[tuple[Needs, int]]:
        """What each kind of process needs, and its memory that no trace has [bytes]."""
        return ((self._needs, self._data_bytes(plan, self._needs)),)

    def _device_bytes(self, plan: Plan) -> tuple[float, float]:
        """Peak of live tensors on a GPU, and memory that its allocator holds then [bytes].

        Of several kinds of processes those of the one that holds the most.
        """
        settings, passes = self._settings(plan), self._micro_batches(plan)
        needed = []
        for needs, more in self._processes(plan):
            peak = needs.peak(settings, passes, is_compiled=plan.compile)
            queued = _QUEUED * passes * needs.inputs(settings) if plan.loader in _COPIED_AHEAD else 0
            needed.append((float(peak.allocated + more), float(peak.reserved + more + queued)))
        return max(needed, key=lambda allocated_reserved: allocated_reserved[1])

    def _least_device_bytes(self, plan: Plan) -> float:
        """Memory that a GPU's allocator can do with [bytes], in the process that needs the most."""
        settings, passes, found = self._settings(plan), self._micro_batches(plan), []
        for needs, more in self._processes(plan):
            *_, (_, least) = needs.least_reserved(settings, passes, is_compiled=plan.compile)
            found.append(float(least + more))
        return max(found)

    def _data_bytes(self, plan: Plan, needs: Needs) -> int:
        """Memory of the training data on a GPU besides the copy of a micro-batch [bytes]."""
        if plan.loader in _COPIED_AHEAD:  # this update's batch and the next one, of which micro-batches are views
            settings = self._settings(plan)
            # Only what autograd keeps of a traced copy lives at the peak: the input itself, if nothing converts it.
            is_kept = settings.precision == "fp32" and settings.memory_format == "contiguous"
            return (2 * self._micro_batches(plan) - is_kept) * needs.inputs(settings)
        return self._profile.data_bytes or 0 if plan.loader == "device" else 0

    def _times_with(self, threads: int) -> tuple[Hardware, OperationTimes]:
        if threads not in self._times:
            hardware = self._hardware_with(threads)
            self._times[threads] = hardware, operation_times(hardware, is_alone=self.layout.world_size == 1)
        return self._times[threads]

    def _with_fetching(self, step_s: Estimate, plan: Plan, samples: float) -> Estimate:
        """Time of an update with fetching: before it, or in parallel by workers, which take cores from a CPU."""
        if self._fetch_s == 0 or plan.loader in ("memory", "device"):
            return step_s
        fetch_s = self._fetch_s * samples
        if plan.loader == "inline":
            return step_s.scaled((step_s.value + fetch_s) / step_s.value)
        overlapped_s = max(step_s.value, fetch_s / plan.num_workers)
        device = self._hardware.device
        if device.kind == "cpu":
            overlapped_s = max(overlapped_s, (step_s.value * plan.threads + fetch_s) / max(device.cores, plan.threads))
        return step_s.scaled(overlapped_s / step_s.value)

    def _micro_batches(self, plan: Plan) -> int:
        return num_micro_batches(self._local, plan)

    def _settings(self, plan: Plan) -> TraceSettings:
        return trace_settings(plan, self._local, self._hardware.compute_capability or "", self.layout)

    def _resident(self, plan: Plan) -> float:
        """Memory of the process [bytes], with the copy that a checkpoint is written from while training goes on."""
        settings, needs = self._settings(plan), self._needs
        added = needs.resident(settings, self._micro_batches(plan), plan.malloc)
        return self._held_bytes + added + needs.kept(settings)


_DRIFT = 0.10
"""Share by which a machine's speed drifts between a trial and the run, beyond the trial's own spread (shared cores)."""


@dataclass(frozen=True)
class Extents:
    """Samples, updates and evaluations of a run (with that of the weights kept, at the end)."""

    total_samples: int
    total_updates: int
    evaluations: int


def forecast_from_trial(measured: Measurement, profile: Profile, extents: Extents) -> Forecast:
    """The forecast of a run at the speed of its trial.

    A plan that was compiled in the trial is not compiled again: `compile_s` is not part of the total.
    """
    # The median of single updates, between its quartiles widened by drift.
    times_s, middle = measured.update_s, statistics.median(measured.update_s)
    # Inclusive: the other method reaches beyond the data, of two times even below zero.
    quartiles = statistics.quantiles(times_s, n=4, method="inclusive") if len(times_s) > 1 else [middle] * 3
    update_s = Estimate(
        value=middle,
        low=min(quartiles[0], middle) * (1 - _DRIFT),
        high=max(quartiles[2], middle) * (1 + _DRIFT),
        unit="s",
        basis="measured here",
    )
    per_sample = update_s.scaled(1 / measured.samples_per_update)
    evaluated = extents.evaluations * profile.num_valid + profile.num_test
    evaluate_s = _around(measured.evaluate_s_per_sample * max(profile.num_valid, profile.num_test), _DRIFT, "s")
    training = per_sample.scaled(extents.total_samples * profile.relative_cost, "s")
    unsaved = training.value + measured.evaluate_s_per_sample * evaluated
    saved = saving(
        measured.plan,
        measured.state_bytes,
        training_s=training.value,
        unsaved_s=unsaved,
        evaluations=extents.evaluations,
    )
    total = unsaved + saved.total_s
    spread = (training.low / training.value, training.high / training.value)
    return Forecast(
        step_s=update_s,
        samples_per_s=Estimate(
            value=1 / per_sample.value,
            low=1 / per_sample.high,
            high=1 / per_sample.low,
            unit="samples/s",
            basis="measured here",
        ),
        evaluate_s=evaluate_s,
        checkpoint_s=saved.one,
        total_s=Estimate(value=total, low=total * spread[0], high=total * spread[1], unit="s", basis="measured here"),
        peak_bytes=_around(float(taken_bytes(measured)), 0.15, "bytes"),
        total_samples=extents.total_samples,
        total_updates=extents.total_updates,
        evaluations=extents.evaluations,
        gradient_error=measured.gradient_error,
        compile_s=_around(measured.compile_s, 0.5, "s") if measured.compile_s else None,
        checkpoint_every_s=saved.every_s,
        lost_s=saved.lost_s,
    )


def forecast_of_extents(known: Forecast, extents: Extents, *, num_valid: int, num_test: int) -> Forecast:
    """The forecast of the same plan in a run of other extents, in which no plans are tried.

    Args:
        known: the forecast of a run of the same updates and evaluations.
        extents: of the other run.
        num_valid: held-out samples that are evaluated on the way.
        num_test: held-out samples that are evaluated at the end.
    """
    evaluate_s = known.evaluate_s.value / max(1, num_valid, num_test)

    def unsaved_s(samples: int, evaluations: int) -> float:
        return samples / known.samples_per_s.value + evaluate_s * (evaluations * num_valid + num_test)

    share = unsaved_s(extents.total_samples, extents.evaluations) / unsaved_s(known.total_samples, known.evaluations)
    total, trials_s = known.total_s, known.trials_s or 0.0
    total_s = dataclasses.replace(
        total,
        value=share * (total.value - trials_s),
        low=share * max(0.0, total.low - trials_s),
        high=share * (total.high - trials_s),
    )
    whole = total_s.value / total.value

    def scaled(estimate: Estimate | None) -> Estimate | None:
        return None if estimate is None else estimate.scaled(whole)

    return dataclasses.replace(
        known,
        total_s=total_s,
        total_samples=extents.total_samples,
        total_updates=extents.total_updates,
        evaluations=extents.evaluations,
        energy_kwh=scaled(known.energy_kwh),
        co2_kg=scaled(known.co2_kg),
        cost_usd=scaled(known.cost_usd),
        trials_s=None,
        lost_s=None if known.lost_s is None else share * known.lost_s,
    )


def taken_bytes(measured: Measurement) -> int:
    """Peak of the device's memory in a run under a plan that was tried [bytes].

    A checkpoint is written from a copy while training goes on; on a GPU the copy is the host's.
    """
    return measured.peak_bytes + (measured.state_bytes if measured.plan.device == "cpu" else 0)


def samples_per_s(measured: Measurement) -> float:
    """Rate of training, by the median update of a trial [samples/s]."""
    return measured.samples_per_update / statistics.median(measured.update_s)


def seconds_per_sample(measured: Measurement) -> float:
    """Time per sample, from the faster half of the trial, since noise only adds time [s]."""
    times = sorted(measured.update_s)
    return statistics.mean(times[: max(1, len(times) // 2)]) / measured.samples_per_update


def _around(value: float, share: float, unit: str) -> Estimate:
    return Estimate(value=value, low=value * (1 - share), high=value * (1 + share), unit=unit, basis="measured here")


_LEAST = 0.01
"""A missing part is listed if it is at least this share of the whole; below, it is rounding."""


def complete_breakdown(breakdown: Breakdown, forecast: Forecast, *, is_cpu: bool) -> Breakdown:
    """The breakdown of a trace with the missing parts of the forecast, largest first.

    On a CPU the peak is that of the whole process, mostly PyTorch's own for a small model; and a measured time includes
    everything between operations. If a trace expects more than was measured, its parts stay as they are.

    Args:
        breakdown: parts of one traced update.
        forecast: of the same plan.
        is_cpu: it runs on a CPU.
    """
    if is_cpu:
        memory = Share(what="the process besides", value=0.0, where="PyTorch itself, code, data in memory")
    else:
        memory = Share(what="outside the update", value=0.0, where="data kept on the device")
    is_measured = forecast.step_s.basis == "measured here"
    where = "measured: Python, waiting, other processes" if is_measured else "fetching samples"
    time = Share(what="between traced operations", value=0.0, where=where)
    return dataclasses.replace(
        breakdown,
        peak_bytes=_filled(breakdown.peak_bytes, forecast.peak_bytes.value, memory),
        step_s=_filled(breakdown.step_s, forecast.step_s.value, time),
    )


def _filled(shares: tuple[Share, ...], whole: float, rest: Share) -> tuple[Share, ...]:
    """The parts of `whole`, the missing part as `rest`."""
    missing = whole - sum(share.value for share in shares)
    if missing < _LEAST * whole:
        return shares
    return tuple(sorted((*shares, dataclasses.replace(rest, value=missing)), key=lambda share: -share.value))
