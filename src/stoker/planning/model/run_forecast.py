"""Forecasts of plans from traces alone: nothing of the job is run, and the device need not be here.

From a short trial to a forecast of the whole run.

Where bytes and time go, as parts that add up to what is forecast: what no trace knows is a part by its name.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.planning.model.checkpoint_cost import saving
from stoker.planning.model.memory import (
    MemoryForecast,
    MemoryResiduals,
    fit_probability,
    forecast_memory,
    needed,
    resident_peak,
)
from stoker.planning.model.objectives import energy_kwh
from stoker.planning.model.search_space import trace_settings
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
    Malloc,
    Measurement,
    Plan,
    Profile,
    Share,
    Trace,
    TraceSettings,
)

Traces = Callable[[TraceSettings], Trace]
"""Gives the trace of an update of the whole model."""

_SAVED = frozenset({"parameter", "buffer", "optimizer state", "average"})
"""What a checkpoint holds."""


class Needs:
    """What updates need of memory and of operations, each found once, whichever devices and plans ask.

    Args:
        traces: gives traces of the job's updates.
    """

    def __init__(self, traces: Traces) -> None:
        self.trace = traces
        self._peaks: dict[tuple[TraceSettings, int], MemoryForecast] = {}
        self._resident: dict[tuple[TraceSettings, int, Malloc], float] = {}
        self._kept: dict[TraceSettings, int] = {}
        self._work: dict[tuple[TraceSettings, int], UpdateWork] = {}

    def peak(self, settings: TraceSettings, micro_batches: int) -> MemoryForecast:
        """Memory of an update of so many micro-batches."""
        key = settings, micro_batches
        if key not in self._peaks:
            self._peaks[key] = forecast_memory(self.trace(settings), micro_batches=micro_batches)
        return self._peaks[key]

    def resident(self, settings: TraceSettings, micro_batches: int, malloc: Malloc) -> float:
        """What such updates add to the memory of a process on a CPU, under a setting of malloc [bytes]."""
        key = settings, micro_batches, malloc
        if key not in self._resident:
            self._resident[key] = resident_peak(self.trace(settings), malloc, 0, micro_batches=micro_batches)
        return self._resident[key]

    def kept(self, settings: TraceSettings) -> int:
        """What a checkpoint holds [bytes]."""
        if settings not in self._kept:
            storages = self.trace(settings).storages
            self._kept[settings] = sum(s.num_bytes for s in storages if s.born < 0 and s.category in _SAVED)
        return self._kept[settings]

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
        hardware: the device, by the number of threads that compute on a CPU (None: all its cores).
        needs: what the job's updates need.
        extents: how much there is to do, at so many samples per second.
        calibrations: forecasts and measurements of earlier runs on this device.
        held_bytes: what the process holds before it trains [bytes]; on a CPU that is part of the peak.
        fetch_s: what one process takes to fetch a sample that is not in memory [s].
    """

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
        self._profile, self._hardware_with, self._needs = profile, hardware, needs
        self._extents, self._held_bytes, self._fetch_s = extents, held_bytes, fetch_s
        self._hardware = hardware(None)
        self._times: dict[int, tuple[Hardware, OperationTimes]] = {}
        self._updates: dict[Plan, UpdateTime] = {}
        # A peak of 0 is none: versions of 2026-11-22 wrote down such.
        peaks = (c for c in calibrations if c.quantity == "peak_bytes" and c.forecast > 0 and c.measured > 0)
        ratios = tuple(c.measured / c.forecast for c in peaks)
        self._calibrations = calibrations
        self._residuals = MemoryResiduals(kind=self._hardware.device.kind, ratios=ratios)

    def needed_bytes(self, plan: Plan) -> float:
        """Memory of the device [bytes]: on a GPU what its allocator holds and the context, on a CPU the process."""
        if self._hardware.device.kind == "cuda":
            return self._device_bytes(plan)[1] + context_bytes().value
        return self._resident(plan)

    def probability_it_fits(self, plan: Plan) -> float:
        """That the device's memory is enough; 1 where nobody knows how much it has."""
        there = self._hardware.device.memory_bytes
        return fit_probability(self.needed_bytes(plan), there, self._residuals) if there else 1.0

    def forecast(self, plan: Plan) -> Forecast:
        """Time and memory of the whole run."""
        update, profile = self.update(plan), self._profile
        samples = profile.mean_batch or min(profile.batch, profile.num_train)
        step_s = self._with_fetching(update.step_s, plan, samples)
        rate = step_s.scaled(1 / samples)
        per_s = Estimate(
            value=1 / rate.value, low=1 / rate.high, high=1 / rate.low, unit="samples/s", basis=step_s.basis
        )
        extents = self._extents(per_s.value)
        # The last update of an epoch has fewer samples, and takes less time.
        training = step_s.scaled(extents.total_samples / samples)
        evaluated = extents.evaluations * profile.num_valid + profile.num_test
        # What is evaluated is fetched by the process that computes, whoever fetches for training.
        evaluate = step_s.scaled((update.forward_s / samples + self._fetch_s) / step_s.value)
        unsaved = training.value + evaluate.value * evaluated
        saved = saving(
            self._with_layout(plan), self._saved_bytes(plan), training_s=training.value, unsaved_s=unsaved,
            evaluations=extents.evaluations, link_bytes_per_s=self._hardware.host_link_bytes_per_s,
        )  # fmt: skip
        total = unsaved + saved.total_s
        total_s, compile_s = training.scaled(total / training.value), None
        if update.compile_s is not None:
            known = self._calibrations if plan.compile else ()  # of capturing nothing is remembered
            compile_s = as_measured_before(update.compile_s, known)
            total_s = _both(total_s, compile_s)
        cuda = self._hardware.device.kind == "cuda"
        allocated, reserved = self._device_bytes(plan) if cuda else (self._resident(plan), 0.0)
        return Forecast(
            step_s=step_s,
            samples_per_s=per_s,
            evaluate_s=evaluate.scaled(max(profile.num_valid, profile.num_test)),
            checkpoint_s=saved.one,
            total_s=total_s,
            peak_bytes=needed(allocated, self._residuals),
            reserved_bytes=needed(reserved, self._residuals) if cuda else None,
            probability_it_fits=self.probability_it_fits(plan),
            total_samples=extents.total_samples,
            total_updates=extents.total_updates,
            evaluations=extents.evaluations,
            compile_s=compile_s,
            checkpoint_every_s=saved.every_s,
            lost_s=saved.lost_s,
        )

    def energy_kwh(self, plan: Plan, forecast: Forecast, *, pue: float) -> Estimate | None:
        """Energy of the run, with its share of the building's; None where nobody knows what the device draws."""
        if self._hardware.power_w is None:
            return None
        power = self.update(plan).power_w
        return None if power is None else energy_kwh(power, forecast.total_s, pue=pue)

    def is_fallback(self, plan: Plan) -> bool:
        """Whether a CPU was traced in the device's place, because this PyTorch cannot pretend to have one."""
        return self._needs.trace(self._settings(plan)).is_fallback

    def breakdown(self, plan: Plan) -> Breakdown:
        """Where bytes and time of an update go."""
        settings = self._settings(plan)
        peak, trace = self._needs.peak(settings, self._micro_batches(plan)), self._needs.trace(settings)
        return Breakdown(peak_bytes=peak.shares, peak_at=_moment(trace, peak.peak_at), step_s=self.update(plan).shares)

    def update(self, plan: Plan) -> UpdateTime:
        """The time of one update."""
        if plan not in self._updates:
            self._updates[plan] = self._update_by(plan, self._needs, *self._times_with(plan.threads))
        return self._updates[plan]

    def _with_layout(self, plan: Plan) -> Plan:
        """The plan with the layout that these forecasts are for: one process."""
        return plan

    def _saved_bytes(self, plan: Plan) -> float:
        """What the process writes at a checkpoint that has the most to write [bytes]."""
        return self._needs.kept(self._settings(plan))

    def _update_by(self, plan: Plan, needs: Needs, hardware: Hardware, times: OperationTimes) -> UpdateTime:
        """The time of an update that does what `needs` says."""
        return update_time(
            needs.work(self._settings(plan), self._micro_batches(plan)),
            times,
            hardware,
            precision=plan.precision,
            is_compiled=plan.compile,
            is_captured=plan.captured,
            malloc=plan.malloc,
            is_data_there=plan.loader == "device",
        )

    def _device_bytes(self, plan: Plan) -> tuple[float, float]:
        """What of a GPU lives at once at the peak, and what its allocator holds then [bytes]."""
        peak, beside = self._needs.peak(self._settings(plan), self._micro_batches(plan)), self._data_bytes(plan)
        return float(peak.allocated + beside), float(peak.reserved + beside)

    def _data_bytes(self, plan: Plan) -> int:
        """What the training data take of a GPU's memory [bytes]."""
        return self._profile.data_bytes or 0 if plan.loader == "device" else 0

    def _times_with(self, threads: int) -> tuple[Hardware, OperationTimes]:
        if threads not in self._times:
            hardware = self._hardware_with(threads)
            self._times[threads] = hardware, operation_times(hardware)
        return self._times[threads]

    def _with_fetching(self, step_s: Estimate, plan: Plan, samples: float) -> Estimate:
        """An update with its samples fetched: before it, or beside it by workers, which take cores from a CPU."""
        if self._fetch_s == 0 or plan.loader in ("memory", "device"):
            return step_s
        fetch_s = self._fetch_s * samples
        if plan.loader == "inline":
            return step_s.scaled((step_s.value + fetch_s) / step_s.value)
        beside = max(step_s.value, fetch_s / plan.num_workers)
        device = self._hardware.device
        if device.kind == "cpu":
            beside = max(beside, (step_s.value * plan.threads + fetch_s) / max(device.cores, plan.threads))
        return step_s.scaled(beside / step_s.value)

    def _micro_batches(self, plan: Plan) -> int:
        """How many make an update."""
        return math.ceil(min(self._profile.batch, self._profile.num_train) / plan.micro_batch)

    def _settings(self, plan: Plan) -> TraceSettings:
        return trace_settings(plan, self._profile, self._hardware.compute_capability or "")

    def _resident(self, plan: Plan) -> float:
        """Of the process, with the copy that a checkpoint is written from while training goes on."""
        settings, needs = self._settings(plan), self._needs
        added = needs.resident(settings, self._micro_batches(plan), plan.malloc)
        return self._held_bytes + added + needs.kept(settings)


def _both(one: Estimate, other: Estimate) -> Estimate:
    """The sum of two times; it rests on what the first does, which is most of it."""
    low, high = one.low + other.low, one.high + other.high
    return Estimate(value=one.value + other.value, low=low, high=high, unit=one.unit, basis=one.basis)


def _moment(trace: Trace, occurrence: int) -> str:
    """When the peak is: the phase and the user's line."""
    if not 0 <= occurrence < len(trace.occurrences):
        return "at the beginning of an update"
    one = trace.occurrences[occurrence]
    phase = {"forward": "in the forward pass", "backward": "in the backward pass", "optimizer": "in the optimiser"}
    line = trace.where(one)
    return phase[one.phase] + (f", {line}" if line else "")


_DRIFT = 0.10
"""Share by which a machine's speed drifts between a trial and the run, beyond the trial's own spread (shared cores)."""


@dataclass(frozen=True)
class Extents:
    """How much there is to do: samples, updates, evaluations (that of the weights kept, at the end, included)."""

    total_samples: int
    total_updates: int
    evaluations: int


def forecast_from_trial(measured: Measurement, profile: Profile, extents: Extents) -> Forecast:
    """What the run will need if the device goes on as in the trial.

    A plan that was compiled in the trial is not compiled again: what that took is told, and no part of the total.
    """
    update_s = _from_samples(measured.update_s)
    per_sample = update_s.scaled(1 / measured.samples_per_update)
    evaluated = extents.evaluations * profile.num_valid + profile.num_test
    evaluate_s = _around(measured.evaluate_s_per_sample * max(profile.num_valid, profile.num_test), _DRIFT, "s")
    training = per_sample.scaled(extents.total_samples, "s")
    unsaved = training.value + measured.evaluate_s_per_sample * evaluated
    saved = saving(
        measured.plan, measured.state_bytes, training_s=training.value, unsaved_s=unsaved,
        evaluations=extents.evaluations,
    )  # fmt: skip
    total = unsaved + saved.total_s
    spread = (training.low / training.value, training.high / training.value)
    return Forecast(
        step_s=update_s,
        samples_per_s=Estimate(
            value=1 / per_sample.value, low=1 / per_sample.high, high=1 / per_sample.low, unit="samples/s",
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
    )  # fmt: skip


def taken_bytes(measured: Measurement) -> int:
    """What a run under a plan that was tried takes of the device's memory at its peak [bytes].

    A checkpoint is written from a copy while training goes on; on a GPU the copy is the host's.
    """
    return measured.peak_bytes + (measured.state_bytes if measured.plan.device == "cpu" else 0)


def samples_per_s(measured: Measurement) -> float:
    """Samples trained on in a second, by the median update of a trial."""
    return measured.samples_per_update / statistics.median(measured.update_s)


def seconds_per_sample(measured: Measurement) -> float:
    """Seconds a sample, from the faster half of the trial: noise only ever adds time."""
    times = sorted(measured.update_s)
    return statistics.mean(times[: max(1, len(times) // 2)]) / measured.samples_per_update


def _from_samples(times_s: tuple[float, ...]) -> Estimate:
    """The median of single updates, between its quartiles widened by drift."""
    middle = statistics.median(times_s)
    # Inclusive: the other method reaches beyond the data, of two times even below zero.
    quartiles = statistics.quantiles(times_s, n=4, method="inclusive") if len(times_s) > 1 else [middle] * 3
    low, high = min(quartiles[0], middle) * (1 - _DRIFT), max(quartiles[2], middle) * (1 + _DRIFT)
    return Estimate(value=middle, low=low, high=high, unit="s", basis="measured here")


def _around(value: float, share: float, unit: str) -> Estimate:
    return Estimate(value=value, low=value * (1 - share), high=value * (1 + share), unit=unit, basis="measured here")


_LEAST = 0.01
"""What is missing is told where it is at least this share of the whole; below, it is rounding."""


def complete_breakdown(breakdown: Breakdown, forecast: Forecast, *, is_cpu: bool) -> Breakdown:
    """The breakdown of a trace with what the forecast has beside it, largest parts first.

    On a CPU the peak is that of the whole process, most of which is PyTorch's own where the model is small; and a time
    that was measured has all that happens between operations. Where a trace expects more than was measured, its parts
    stay as they are.

    Args:
        breakdown: what one traced update takes.
        forecast: of the same plan.
        is_cpu: whether it runs on a CPU.
    """
    if is_cpu:
        memory = Share(what="the process besides", value=0.0, where="PyTorch itself, code, data in memory")
    else:
        memory = Share(what="beside the update", value=0.0, where="data kept on the device")
    is_measured = forecast.step_s.basis == "measured here"
    where = "measured: Python, waiting, other processes" if is_measured else "fetching samples"
    time = Share(what="between traced operations", value=0.0, where=where)
    return dataclasses.replace(
        breakdown,
        peak_bytes=_filled(breakdown.peak_bytes, forecast.peak_bytes.value, memory),
        step_s=_filled(breakdown.step_s, forecast.step_s.value, time),
    )


def _filled(shares: tuple[Share, ...], whole: float, rest: Share) -> tuple[Share, ...]:
    """The parts of `whole`, with what is missing as `rest`."""
    missing = whole - sum(share.value for share in shares)
    if missing < _LEAST * whole:
        return shares
    return tuple(sorted((*shares, dataclasses.replace(rest, value=missing)), key=lambda share: -share.value))
