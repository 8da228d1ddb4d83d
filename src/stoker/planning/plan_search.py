"""Confirm forecasts by trials: first the plan that should be fastest, then others while trying them pays back.

`PlanSearch` decides which plan to try and which won; the caller runs the trials:

```
search = PlanSearch(candidates, profile, device, extents)
while plan := search.next_plan():
    search.record(try_plan(plan))        # or search.reject(plan, why)
chosen = search.chosen()
```

`ForecastPosterior` predicts untried plans from trials of others, by a Bayesian linear model of forecast errors.

What: log(measured / forecast time) is a sum of one error per setting (bf16 slower than forecast, channels-last faster,
…), one per doubling of the micro-batch, and one of the plan's own, all normal a priori; trials condition them.
Use when: plans differ in a few settings, and a trial costs as much as it might save.
Costs: one solve with as many unknowns as trials.
Source: C. K. I. Williams and C. E. Rasmussen, Gaussian Processes for Machine Learning, 2006, section 2.2 (a linear
kernel over settings); expected improvement as in D. R. Jones, M. Schonlau and W. J. Welch, 1998, of a lognormal here.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.errors import DoesNotFit
from stoker.planning.model.run_forecast import (
    Extents,
    forecast_from_trial,
    samples_per_s,
    seconds_per_sample,
    taken_bytes,
)
from stoker.planning.plan_ranking import LEAST_GAIN, last_resorts
from stoker.records import (
    LARGEST_GRADIENT_ERROR,
    Basis,
    Candidate,
    Device,
    Measurement,
    Plan,
    Precision,
    Profile,
    Rejection,
)
from stoker.units import format_bytes, format_seconds

PLANNING_SHARE = 0.05
"""The most of a run's forecast time that is spent on trials."""

LEAST_PLANNING_S = 2.0
SETTING_ERRORS = {"measured here": 0.05, "calibrated": 0.08, "roofline": 0.25, "datasheet": 0.25, "unknown": 0.4}
"""Prior error of one setting's effect on a forecast [logarithm], by the forecast's basis."""

_NEAR, _MOST_NEAR = 0.06, 3
"""Occasional difference between two trials of one plan [fraction]; most plans this near that are tried twice."""

_MOST_REASONS = 6
"""Rejected plans whose reasons are listed if none works."""

PAY_BACK = 1.0
"""A trial must be expected to save at least this many times its cost."""


class PlanSearch:
    """Trials of forecast plans: next the one expected to save the most, until none pays back.

    The cost of a compiled plan includes compiling it once: the run after the trial does not compile again.

    Args:
        candidates: legal plans that are forecast to fit, fastest first; at least one.
        profile: the job's facts.
        device: where it is to run.
        extents: the run's extents at a rate [samples/s].

    Attributes:
        measured: trials of usable plans, in order.
        rejected: unusable plans, with the reasons.
        spent_s: measured time of trials so far [s].
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        profile: Profile,
        device: Device,
        extents: Callable[[float], Extents],
    ) -> None:
        self.candidates, self.profile, self.device, self._extents = candidates, profile, device, extents
        self.measured: list[Measurement] = []
        self.rejected: list[Rejection] = []
        self.spent_s = 0.0
        self._forecasts = {c.plan: 1 / c.forecast.samples_per_s.value for c in candidates}
        self._expected_compiling = {c.plan: c.forecast.compile_s for c in candidates}
        traced = [c.plan for c in candidates if c.forecast.step_s.basis != "unknown"]
        error = SETTING_ERRORS[candidates[0].forecast.step_s.basis]
        self._posterior = ForecastPosterior(error, settings_of(traced) if traced else None)
        self._last_resorts = last_resorts([c.plan for c in candidates], traced, profile)
        self._inexact: set[Precision] = set()
        self._can_capture = True
        self._can_compile, self._spent_compiling_s = True, 0.0
        self._too_much: dict[Basis, float] = {}

    def next_plan(self) -> Plan | None:
        """The next plan to try; None when it is time to decide."""
        left = self._untried()
        if not left:
            return None
        if not self.measured:  # the reference for all others should not cost a compilation, nor a long capture
            quick = (p for p in left if not p.compile and self._compile_s(p) <= LEAST_PLANNING_S)
            return next(quick, left[0])
        best_s, most_s = self._total_s(self._best), self._most_s()
        left = [p for p in left if p not in self._last_resorts and self.spent_s + self._compile_s(p) <= most_s]
        if not left or self.spent_s > most_s:
            return None
        gains = self._posterior.improvements(
            [(m.plan, self._forecasts[m.plan], seconds_per_sample(m)) for m in self.measured],
            [(plan, self._forecasts[plan]) for plan in left],
        )
        # A trial costs as much as the last ones, and compiling.
        trial_s = (self.spent_s - self._spent_compiling_s) / max(1, len(self.measured))
        costs_s = [trial_s + self._compile_s(plan) for plan in left]
        saved_s = [gain * best_s - PAY_BACK * cost_s for gain, cost_s in zip(gains, costs_s, strict=True)]
        most_saved_s, plan = max(zip(saved_s, left, strict=True), key=lambda pair: pair[0])
        return plan if most_saved_s > 0 else None

    def known_gradient_error(self, plan: Plan) -> float | None:
        """Relative error of gradients in the arithmetic of `plan`, from an earlier trial; None without one.

        It depends on precision and compilation alone.
        """
        same = (m for m in self.measured if (m.plan.precision, m.plan.compile) == (plan.precision, plan.compile))
        return next((m.gradient_error for m in same), None)

    def in_doubt(self) -> tuple[Plan, ...]:
        """Plans to try once more before the decision: the first, and those within noise of the best.

        On a shared machine a burst of other work in one trial would otherwise decide the whole run.
        """
        if not self.measured or self.spent_s > self._most_s():
            return ()
        near = [
            m
            for m in sorted(self.measured, key=seconds_per_sample)
            if seconds_per_sample(m) < seconds_per_sample(self._best) * (1 + _NEAR)
        ][:_MOST_NEAR]
        doubtful = dict.fromkeys([self.measured[0].plan, self._best.plan, *(m.plan for m in near)])
        return tuple(doubtful) if len(doubtful) > 1 else ()

    def record(self, measurement: Measurement) -> None:
        """Add a trial's result; of two trials of a plan the faster counts, since other processes only slow one down."""
        self.spent_s += measurement.took_s
        self._spent_compiling_s += measurement.compile_s
        if measurement.not_compiled is not None and any(not c.plan.compile for c in self.candidates):
            self._can_compile = False
            self.reject(measurement.plan, measurement.not_compiled)
            return
        error = measurement.gradient_error
        if error is not None and not error <= LARGEST_GRADIENT_ERROR:
            if measurement.plan.compile:  # the precision alone may be exact
                self._can_compile = False
            else:
                self._inexact.add(measurement.plan.precision)
            self.reject(
                measurement.plan, f"its gradient is {error:.1%} from fp32's, more than {LARGEST_GRADIENT_ERROR:.0%}"
            )
            return
        index = next((i for i, m in enumerate(self.measured) if m.plan == measurement.plan), None)
        if index is not None:
            if seconds_per_sample(measurement) < seconds_per_sample(self.measured[index]):
                self.measured[index] = measurement
            return
        # Only the first trial of a plan is held to the limit: a later one may begin with other trials' heap.
        taken, allowed = taken_bytes(measurement), self.device.memory_bytes
        if 0 < allowed < taken:
            why = f"it took {format_bytes(taken)} of memory when it was tried, and may take {format_bytes(allowed)}"
            self.reject(measurement.plan, why, for_memory=True)
        else:
            self.measured.append(measurement)

    def reject(self, plan: Plan, reason: str, *, for_memory: bool = False) -> None:
        """Rule a plan out; with `for_memory` also plans that need as much, by a forecast of the same basis."""
        self.rejected.append(Rejection(device=self.device.torch_name, plan=plan, reason=reason))
        self.measured = [m for m in self.measured if m.plan != plan]
        self._can_capture = self._can_capture and (for_memory or not plan.captured)
        if for_memory:
            needed = next(c.forecast.peak_bytes for c in self.candidates if c.plan == plan)
            self._too_much[needed.basis] = min(self._too_much.get(needed.basis, math.inf), needed.value)

    def chosen(self) -> Candidate:
        """The fastest plan that was tried, with a forecast from its trial.

        Raises:
            DoesNotFit: every plan was rejected.
        """
        if not self.measured:
            reasons = [f"{r.plan.in_words()}: {r.reason}" for r in self.rejected]
            if (more := len(reasons) - _MOST_REASONS) > 0:
                reasons = [*reasons[:_MOST_REASONS], f"and {more} more like these"]
            raise DoesNotFit(f"no plan works on {self.device.model}: {'; '.join(reasons)}")
        best = self._best
        expected = next(c for c in self.candidates if c.plan == best.plan)
        forecast = forecast_from_trial(best, self.profile, self._extents(samples_per_s(best)))
        kept = {name: getattr(expected.forecast, name) for name in ("probability_it_fits", "reserved_bytes")}
        untried = None if expected.forecast.step_s.basis == "unknown" else expected.forecast
        return dataclasses.replace(
            expected, forecast=dataclasses.replace(forecast, **kept), untried=untried, why="measured here"
        )

    def losers(self) -> tuple[Rejection, ...]:
        """The plans that were not chosen, and why: those tried, the nearest first, then those ruled out."""
        tried = []
        for trial in sorted(self.measured, key=seconds_per_sample):
            if trial is not self._best:
                ratio = seconds_per_sample(trial) / seconds_per_sample(self._best)
                lost_by = f"{ratio:.2f}x the time"
                if ratio < 1:
                    lost_by = f"faster by {1 - ratio:.1%}: within the noise of a trial"
                reason = f"{format_seconds(statistics.median(trial.update_s))} an update, {lost_by}"
                tried.append(Rejection(device=self.device.torch_name, plan=trial.plan, reason=reason))
        return (*tried, *self.rejected)

    @property
    def _best(self) -> Measurement:
        """The fastest trial; a later one must be faster by more than noise."""
        best = self.measured[0]
        for trial in self.measured[1:]:
            if seconds_per_sample(trial) < seconds_per_sample(best) * (1 - LEAST_GAIN):
                best = trial
        return best

    def _untried(self) -> list[Plan]:
        """Plans that may still be tried, likeliest first."""
        done = {m.plan for m in self.measured} | {r.plan for r in self.rejected}
        return [
            c.plan
            for c in self.candidates
            if c.plan not in done
            and c.plan.precision not in self._inexact
            and (self._can_compile or not c.plan.compile)
            and (self._can_capture or not c.plan.captured)
            # as much memory as a plan that did not fit, by a forecast of the same basis
            and c.forecast.peak_bytes.value < self._too_much.get(c.forecast.peak_bytes.basis, math.inf)
        ]

    def _most_s(self) -> float:
        """Limit of the time of all trials together [s]."""
        return max(LEAST_PLANNING_S, PLANNING_SHARE * self._total_s(self._best))

    def _compile_s(self, plan: Plan) -> float:
        """Forecast time of compiling or capturing a plan [s]."""
        expected = self._expected_compiling.get(plan)
        return expected.value if expected is not None else 0.0

    def _total_s(self, measurement: Measurement) -> float:
        return forecast_from_trial(measurement, self.profile, self._extents(samples_per_s(measurement))).total_s.value


SHARED_ERROR = 0.5
"""Prior deviation of the error that all forecasts on a device share (a machine is faster or slower than its model)."""

OWN_ERROR = 0.04
"""Prior deviation of the error of one plan."""

COMPILED_ERROR = 0.2
"""Least prior deviation of the error of compiling, whose kernels are unknown before."""

GUESSED_ERROR = 0.15
"""Least prior deviation of the error of a setting that no traced plan has."""

TRIAL_NOISE = 0.03
"""Deviation of a trial's time on a shared machine."""


Setting = tuple[str, Hashable]
"""A setting of plans and one of its values."""


@dataclass(frozen=True)
class ForecastPosterior:
    """Errors of forecast times, given trials.

    `setting_error` is the prior deviation of one setting's error: small if the forecast rests on measured operations,
    large if it rests on a datasheet. `traced` are the settings of traced plans (None: of all plans).
    """

    setting_error: float
    traced: frozenset[Setting] | None = None

    def improvements(
        self, tried: Sequence[tuple[Plan, float, float]], untried: Sequence[tuple[Plan, float]]
    ) -> list[float]:
        """Expected share of time saved by each untried plan over the fastest tried one [0 to 1]; slower counts as 0.

        Args:
            tried: plans, their forecast and their measured time [s per sample]; at least one.
            untried: plans and their forecast time [s per sample].
        """
        if not untried:
            return []
        plans = [plan for plan, *_ in tried]
        errors = np.array([math.log(measured / expected) for _, expected, measured in tried])
        among = self._covariance(plans, plans) + np.eye(len(plans)) * TRIAL_NOISE**2
        across = self._covariance([plan for plan, _ in untried], plans)
        gain = np.linalg.solve(among, across.T).T
        means = gain @ errors
        best = min(range(len(tried)), key=lambda i: tried[i][2])
        priors = np.array([self._shared(plan, plan) for plan, _ in untried])
        variances = np.maximum(priors - np.einsum("ij,ij->i", gain, across), OWN_ERROR**2)
        floor = math.log(tried[best][2])
        return [
            expected_gain(math.log(expected) + float(mean) - floor, math.sqrt(float(variance)))
            for (_, expected), mean, variance in zip(untried, means, variances, strict=True)
        ]

    def _covariance(self, ones: Sequence[Plan], others: Sequence[Plan]) -> npt.NDArray[np.float64]:
        """Covariance of the errors of the plans' forecasts [len(ones), len(others)]."""
        return np.array([[self._shared(one, other) for other in others] for one in ones], dtype=np.float64)

    def _shared(self, one: Plan, other: Plan) -> float:
        settings, others = _settings(one), _settings(other)
        common = sum(self._variance(name, value) for name, value in settings.items() if value == others[name])
        own = OWN_ERROR**2 if one == other else 0.0
        trend = self.setting_error**2 * math.log2(one.micro_batch) * math.log2(other.micro_batch)
        return SHARED_ERROR**2 + own + common + trend

    def _variance(self, setting: str, value: Hashable) -> float:
        """Prior variance of one setting's error."""
        if setting == "compile" and value is True:
            return max(self.setting_error, COMPILED_ERROR) ** 2
        if self.traced is not None and (setting, value) not in self.traced:
            return max(self.setting_error, GUESSED_ERROR) ** 2
        return self.setting_error**2


def expected_gain(mean: float, spread: float) -> float:
    """E[max(0, 1 - exp(x))] of a normal x: the share of time saved [0 to 1] by a plan that takes exp(x) times as long.

    >>> expected_gain(0.0, 0.1) > expected_gain(0.1, 0.1) > 0
    True
    >>> round(expected_gain(-0.7, 1e-6), 3)  # surely half the time
    0.503
    """

    def normal_cdf(x: float) -> float:
        return (1 + math.erf(x / math.sqrt(2))) / 2

    below, raised = normal_cdf(-mean / spread), normal_cdf(-mean / spread - spread)
    return max(0.0, below - math.exp(mean + spread**2 / 2) * raised)


_SETTINGS = (
    "precision",
    "memory_format",
    "optimizer_implementation",
    "optimizer_states",
    "optimizer_offload",
    "activation_offload",
    "threads",
    "checkpointed_blocks",
    "checkpointing",
    "compile",
    "captured",
    "loss_chunks",
    "malloc",
    "micro_batch",
)


def settings_of(plans: Iterable[Plan]) -> frozenset[Setting]:
    """All settings of the plans, with their values."""
    return frozenset(item for plan in plans for item in _settings(plan).items())


def _settings(plan: Plan) -> dict[str, Hashable]:
    """Values by setting; loader and workers count as one setting."""
    return {"loader": (plan.loader, plan.num_workers), **{name: getattr(plan, name) for name in _SETTINGS}}
