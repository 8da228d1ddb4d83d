"""Forecasts of plans from traces alone: nothing of the job is run, and the device need not be here."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from stoker.planning import memory
from stoker.planning.forecast import Extents
from stoker.planning.money import energy_kwh
from stoker.planning.space import trace_settings
from stoker.planning.time import OperationTimes, operation_times
from stoker.planning.time.update import UpdateTime, update_time
from stoker.records import Breakdown, Calibration, Estimate, Forecast, Hardware, Plan, Profile, Trace, TraceSettings

Traces = Callable[[TraceSettings], Trace]
"""Gives the trace of an update of the whole model."""

_CHECKPOINT_BYTES_PER_S = 2e9
"""What copying a state for a checkpoint reaches at least; a floor, for so small a share that it is not measured."""


class MemoryBook:
    """What traces need of memory, each replayed once, whichever devices ask."""

    def __init__(self, traces: Traces) -> None:
        self._traces = traces
        self._known: dict[tuple[TraceSettings, int], memory.MemoryForecast] = {}

    def __call__(self, settings: TraceSettings, micro_batches: int) -> memory.MemoryForecast:
        """Of the trace under these settings, in updates of so many micro-batches."""
        key = settings, micro_batches
        if key not in self._known:
            self._known[key] = memory.forecast_memory(self._traces(settings), micro_batches=micro_batches)
        return self._known[key]


class TracedForecasts:
    """Forecasts of plans on one device.

    Args:
        profile: the job's facts.
        hardware: the device, by the number of threads that feed it or, on a CPU, compute.
        traces: gives traces of the job's updates.
        peaks: what they need of memory.
        extents: how much there is to do, at so many samples per second.
        calibrations: forecasts and measurements of earlier runs on this device.
        held_bytes: what the process holds before it trains [bytes]; on a CPU that is part of the peak.
    """

    def __init__(
        self,
        profile: Profile,
        hardware: Callable[[int], Hardware],
        traces: Traces,
        peaks: MemoryBook,
        extents: Callable[[float], Extents],
        *,
        calibrations: Sequence[Calibration] = (),
        held_bytes: int = 0,
    ) -> None:
        self._profile, self._hardware_with, self._traces, self._peaks = profile, hardware, traces, peaks
        self._extents, self._held_bytes = extents, held_bytes
        self._hardware = hardware(1)
        self._times: dict[int, tuple[Hardware, OperationTimes]] = {}
        self._updates: dict[Plan, UpdateTime] = {}
        ratios = tuple(c.measured / c.forecast for c in calibrations if c.quantity == "peak_bytes" and c.forecast > 0)
        self._residuals = memory.Residuals(kind=self._hardware.device.kind, ratios=ratios)

    def needed_bytes(self, plan: Plan) -> float:
        """Memory of the device [bytes]: on a GPU what its allocator holds and the context, on a CPU the process."""
        peak = self._peaks(self._settings(plan), self._micro_batches(plan))
        if self._hardware.device.kind == "cuda":
            return peak.reserved + memory.context_bytes().value
        return self._resident(plan)

    def probability_it_fits(self, plan: Plan) -> float:
        """That the device's memory is enough; 1 where nobody knows how much it has."""
        there = self._hardware.device.memory_bytes
        return memory.probability_it_fits(self.needed_bytes(plan), there, self._residuals) if there else 1.0

    def forecast(self, plan: Plan) -> Forecast:
        """Time and memory of the whole run."""
        update, profile = self.update(plan), self._profile
        step_s = update.step_s
        samples = min(profile.batch, profile.num_train)
        rate = step_s.scaled(1 / samples)
        per_s = Estimate(
            value=1 / rate.value, low=1 / rate.high, high=1 / rate.low, unit="samples/s", basis=step_s.basis
        )
        extents = self._extents(per_s.value)
        training = step_s.scaled(extents.total_updates)
        evaluated = extents.evaluations * profile.num_valid + profile.num_test
        evaluate = step_s.scaled(update.forward_s / step_s.value / samples)
        checkpoint_s = 4 * profile.parameter_bytes / _CHECKPOINT_BYTES_PER_S
        saves = extents.evaluations + training.value / plan.checkpoint_every_s
        beside = evaluate.value * evaluated + saves * checkpoint_s + update.once_s
        total = training.value + beside
        cuda = self._hardware.device.kind == "cuda"
        peak = self._peaks(self._settings(plan), self._micro_batches(plan))
        needed = memory.needed(float(peak.allocated) if cuda else self._resident(plan), self._residuals)
        return Forecast(
            step_s=step_s,
            samples_per_s=per_s,
            evaluate_s=evaluate.scaled(max(profile.num_valid, profile.num_test)),
            checkpoint_s=Estimate(value=checkpoint_s, low=0.0, high=3 * checkpoint_s, unit="s", basis="roofline"),
            total_s=training.scaled(total / training.value),
            peak_bytes=needed,
            reserved_bytes=memory.needed(float(peak.reserved), self._residuals) if cuda else None,
            probability_it_fits=self.probability_it_fits(plan),
            total_samples=extents.total_samples,
            total_updates=extents.total_updates,
        )

    def energy_kwh(self, plan: Plan, forecast: Forecast, *, pue: float) -> Estimate | None:
        """Energy of the run, with its share of the building's; None where nobody knows what the device draws."""
        power = self.update(plan).power_w
        return None if power is None else energy_kwh(power, forecast.total_s, pue=pue)

    def breakdown(self, plan: Plan) -> Breakdown:
        """Where bytes and time of an update go."""
        settings = self._settings(plan)
        peak, trace = self._peaks(settings, self._micro_batches(plan)), self._traces(settings)
        return Breakdown(peak_bytes=peak.shares, peak_at=_moment(trace, peak.peak_at), step_s=self.update(plan).shares)

    def update(self, plan: Plan) -> UpdateTime:
        """The time of one update."""
        if plan not in self._updates:
            hardware, times = self._times_with(plan.threads)
            self._updates[plan] = update_time(
                self._traces(self._settings(plan)),
                times,
                hardware,
                micro_batches=self._micro_batches(plan),
                precision=plan.precision,
                is_compiled=plan.compile,
                malloc=plan.malloc,
            )
        return self._updates[plan]

    def _times_with(self, threads: int) -> tuple[Hardware, OperationTimes]:
        if threads not in self._times:
            hardware = self._hardware_with(threads)
            self._times[threads] = hardware, operation_times(hardware)
        return self._times[threads]

    def _micro_batches(self, plan: Plan) -> int:
        """How many make an update."""
        return math.ceil(min(self._profile.batch, self._profile.num_train) / plan.micro_batch)

    def _settings(self, plan: Plan) -> TraceSettings:
        return trace_settings(plan, self._profile, self._hardware.compute_capability or "")

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - lives as long as one planning
    def _resident(self, plan: Plan) -> float:
        return memory.resident_peak(
            self._traces(self._settings(plan)), plan.malloc, self._held_bytes, micro_batches=self._micro_batches(plan)
        )


def _moment(trace: Trace, occurrence: int) -> str:
    """When the peak is: the phase and the user's line."""
    if not 0 <= occurrence < len(trace.occurrences):
        return "at the beginning of an update"
    one = trace.occurrences[occurrence]
    phase = {"forward": "in the forward pass", "backward": "in the backward pass", "optimizer": "in the optimiser"}
    line = trace.sources[one.source]
    return phase[one.phase] + (f", {line}" if line else "")
