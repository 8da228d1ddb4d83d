"""Confirming a forecast: try the plan that should be fastest, then others as long as trying them pays back.

`Search` decides what to try and what won; somebody else runs the trials:

```
search = Search(candidates, profile, device, extents)
while plan := search.next_plan():
    search.record(try_plan(plan))        # or search.reject(plan, why)
chosen = search.chosen()
```

What trials of some plans say of the others: a Bayesian linear model of the error of their forecasts.

What: the logarithm of measured over forecast pace is a sum of what each setting adds (bf16 slower than forecast,
channels-last faster, …), of what each doubling of the micro-batch adds, and of a rest of the plan's own, all normal a
priori; trials make them known.
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
    Estimate,
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
"""How far one setting's share of a forecast may be off [logarithm], by what the forecast rests on."""

_NEAR, _MOST_NEAR = 0.06, 3
"""Two trials of one plan differ by so much now and then [fraction]; so many plans are tried twice for it."""

_MOST_TOLD = 6
"""Plans whose reasons are told where none works."""

PAY_BACK = 1.0
"""A trial must be expected to save at least this many times what it costs."""


class PlanSearch:
    """Trials of forecast plans, the one expected to save the most next, until none pays back.

    A compiled plan costs its compilation besides, once: the run after a trial does not compile again.

    Args:
        candidates: legal plans that are forecast to fit, the fastest first; at least one.
        profile: the job's facts.
        device: where it is to run.
        extents: how much there is to do, at so many samples per second.

    Attributes:
        measured: trials of plans that can be used, in order.
        rejected: plans that cannot, with the reasons.
        spent_s: seconds spent on trials so far, as far as they were measured.
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
        self._beliefs = ForecastPosterior(error, settings_of(traced) if traced else None)
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
        if not self.measured:  # what others are compared with should not cost a compilation, nor a long capture
            return next((plan for plan in left if self._is_begun_soon(plan)), left[0])
        best_s, most_s = self._total_s(self._best), self._most_s()
        left = [p for p in left if p not in self._last_resorts and self.spent_s + self._compile_s(p) <= most_s]
        if not left or self.spent_s > most_s:
            return None
        gains = self._beliefs.improvements(
            [(m.plan, self._forecasts[m.plan], seconds_per_sample(m)) for m in self.measured],
            [(plan, self._forecasts[plan]) for plan in left],
        )
        saved_s = [gain * best_s - PAY_BACK * self._cost_s(plan) for gain, plan in zip(gains, left, strict=True)]
        most_saved_s, plan = max(zip(saved_s, left, strict=True), key=lambda pair: pair[0])
        return plan if most_saved_s > 0 else None

    def known_gradient_error(self, plan: Plan) -> float | None:
        """How far gradients are from fp32's in the arithmetic of `plan`, where a trial has told; None where none has.

        Of what plans may differ in, precision and compilation decide it.
        """
        alike = (m for m in self.measured if (m.plan.precision, m.plan.compile) == (plan.precision, plan.compile))
        return next((m.gradient_error for m in alike), None)

    def in_doubt(self) -> tuple[Plan, ...]:
        """Plans to be tried once more before the decision: the first, and those that noise does not tell from the best.

        On a machine that is not ours alone, a burst of other work in one trial would else decide the whole run.
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
        """Take a trial's result into account; of two trials of a plan the faster, since others only slow one down."""
        self.spent_s += measurement.took_s
        self._spent_compiling_s += measurement.compile_s
        if measurement.not_compiled is not None and any(not c.plan.compile for c in self.candidates):
            self._can_compile = False
            self.reject(measurement.plan, measurement.not_compiled)
            return
        error = measurement.gradient_error
        if error is not None and not error <= LARGEST_GRADIENT_ERROR:
            if measurement.plan.compile:  # which says nothing of the precision by itself
                self._can_compile = False
            else:
                self._inexact.add(measurement.plan.precision)
            self.reject(measurement.plan, f"its gradient is {error:.1%} from fp32's, more than "
                        f"{LARGEST_GRADIENT_ERROR:.0%}")  # fmt: skip
            return
        at = next((at for at, m in enumerate(self.measured) if m.plan == measurement.plan), None)
        if at is None and (problem := self._memory_problem(measurement)) is not None:
            self.reject(measurement.plan, problem, for_memory=True)
        elif at is None:
            self.measured.append(measurement)
        elif seconds_per_sample(measurement) < seconds_per_sample(self.measured[at]):
            self.measured[at] = measurement

    def reject(self, plan: Plan, reason: str, *, for_memory: bool = False) -> None:
        """Rule a plan out; `for_memory` also those that need as much, as far as the two can be compared."""
        self.rejected.append(Rejection(device=self.device.torch_name, plan=plan, reason=reason))
        self.measured = [m for m in self.measured if m.plan != plan]
        self._can_capture = self._can_capture and (for_memory or not plan.captured)
        if for_memory:
            needed = self._needed(plan)
            self._too_much[needed.basis] = min(self._too_much.get(needed.basis, math.inf), needed.value)

    def chosen(self) -> Candidate:
        """The fastest plan that was tried, with the forecast of its measurement.

        Raises:
            DoesNotFit: every plan was rejected.
        """
        if not self.measured:
            reasons = [f"{r.plan.in_words()}: {r.reason}" for r in self.rejected]
            more = len(reasons) - _MOST_TOLD
            told = [*reasons[:_MOST_TOLD], f"and {more} more like these"] if more > 0 else reasons
            raise DoesNotFit(f"no plan works on {self.device.model}: {'; '.join(told)}")
        best = self._best
        expected = next(c for c in self.candidates if c.plan == best.plan)
        found = forecast_from_trial(best, self.profile, self._extents(samples_per_s(best)))
        kept = {name: getattr(expected.forecast, name) for name in ("probability_it_fits", "reserved_bytes")}
        untried = None if expected.forecast.step_s.basis == "unknown" else expected.forecast
        return dataclasses.replace(
            expected, forecast=dataclasses.replace(found, **kept), untried=untried, why="measured here"
        )

    def losers(self) -> tuple[Rejection, ...]:
        """What was not chosen, and what it lost by: what was tried, the nearest first, then what was ruled out."""
        best = self._best if self.measured else None
        slower = sorted((m for m in self.measured if m is not best), key=seconds_per_sample)
        tried = [Rejection(device=self.device.torch_name, plan=m.plan, reason=self._lost_by(m)) for m in slower]
        return (*tried, *self.rejected)

    @property
    def _best(self) -> Measurement:
        """The fastest; an earlier one unless a later one is faster by more than noise."""
        best = self.measured[0]
        for found in self.measured[1:]:
            if seconds_per_sample(found) < seconds_per_sample(best) * (1 - LEAST_GAIN):
                best = found
        return best

    def _untried(self) -> list[Plan]:
        """Plans that may still be tried, the likeliest first."""
        done = {m.plan for m in self.measured} | {r.plan for r in self.rejected}
        return [
            c.plan
            for c in self.candidates
            if c.plan not in done
            and c.plan.precision not in self._inexact
            and (self._can_compile or not c.plan.compile)
            and (self._can_capture or not c.plan.captured)
            and not self._is_too_much(c.plan)
        ]

    def _needed(self, plan: Plan) -> Estimate:
        """Memory a plan is forecast to need [bytes]."""
        return next(c.forecast.peak_bytes for c in self.candidates if c.plan == plan)

    def _is_too_much(self, plan: Plan) -> bool:
        """Whether a plan needs as much memory as one that did not fit; a guess says nothing of what was traced."""
        needed = self._needed(plan)
        return needed.value >= self._too_much.get(needed.basis, math.inf)

    def _memory_problem(self, measurement: Measurement) -> str | None:
        """What a plan took beyond the memory that may be used; None where it kept to that, or nobody knows it.

        Asked of the first trial alone: a later one may begin with what others left in the heap.
        """
        taken, there = taken_bytes(measurement), self.device.memory_bytes
        if not 0 < there < taken:
            return None
        return f"it took {format_bytes(taken)} of memory when it was tried, and may take {format_bytes(there)}"

    def _cost_s(self, plan: Plan) -> float:
        """What a trial of `plan` costs [s]: as the last ones did, and compiling it; the run does not compile again."""
        return (self.spent_s - self._spent_compiling_s) / max(1, len(self.measured)) + self._compile_s(plan)

    def _most_s(self) -> float:
        """What all trials together may cost [s]."""
        return max(LEAST_PLANNING_S, PLANNING_SHARE * self._total_s(self._best))

    def _is_begun_soon(self, plan: Plan) -> bool:
        """Whether a trial of the plan begins without being compiled, or captured for long."""
        return not plan.compile and self._compile_s(plan) <= LEAST_PLANNING_S

    def _compile_s(self, plan: Plan) -> float:
        """What compiling or capturing a plan is forecast to take [s]."""
        expected = self._expected_compiling.get(plan)
        return expected.value if expected is not None else 0.0

    def _total_s(self, measurement: Measurement) -> float:
        return forecast_from_trial(measurement, self.profile, self._extents(samples_per_s(measurement))).total_s.value

    def _lost_by(self, loser: Measurement) -> str:
        ratio = seconds_per_sample(loser) / seconds_per_sample(self._best)
        shown = format_seconds(statistics.median(loser.update_s))
        if ratio < 1:
            return f"{shown} an update, faster by {1 - ratio:.1%}: within the noise of a trial"
        return f"{shown} an update, {ratio:.2f}x the time"


SHARED_ERROR = 0.5
"""Prior spread of the error all forecasts on a device share (a machine is faster or slower than its model)."""

OWN_ERROR = 0.04
"""Prior spread of the error that is a plan's own."""

COMPILED_ERROR = 0.2
"""Prior spread of the error that compiling brings in, at least: nobody sees the kernels before they are compiled."""

GUESSED_ERROR = 0.15
"""Prior spread of the error that a setting brings in of which no plan was traced."""

TRIAL_NOISE = 0.03
"""Spread of a trial's pace on a machine that is not ours alone."""


Setting = tuple[str, Hashable]
"""A setting of plans and one of its values."""


@dataclass(frozen=True)
class ForecastPosterior:
    """Forecasts of pace, and how they err.

    `setting_error` is the prior spread of the error that one setting brings in: small where the forecast rests on
    measured operations, large where it rests on a datasheet. What settings bring in that no plan was `traced` with is
    known as a rule only; None: all were traced.
    """

    setting_error: float
    traced: frozenset[Setting] | None = None

    def improvements(
        self, tried: Sequence[tuple[Plan, float, float]], untried: Sequence[tuple[Plan, float]]
    ) -> list[float]:
        """How much faster than the fastest tried plan each untried one will be, in expectation [fraction of time].

        Slower counts as nothing: one would stay with the faster.

        Args:
            tried: plans, their forecast and their measured pace [s per sample]; at least one.
            untried: plans and their forecast pace [s per sample].
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
        """How the errors of two plans' forecasts go together: by the settings they share."""
        return np.array([[self._shared(one, other) for other in others] for one in ones], dtype=np.float64)

    def _shared(self, one: Plan, other: Plan) -> float:
        settings, theirs = _settings(one), _settings(other)
        common = sum(self._variance(name, value) for name, value in settings.items() if value == theirs[name])
        own = OWN_ERROR**2 if one == other else 0.0
        trend = self.setting_error**2 * math.log2(one.micro_batch) * math.log2(other.micro_batch)
        return SHARED_ERROR**2 + own + common + trend

    def _variance(self, setting: str, value: Hashable) -> float:
        """Of the error that one setting brings in."""
        if setting == "compile" and value is True:
            return max(self.setting_error, COMPILED_ERROR) ** 2
        if self.traced is not None and (setting, value) not in self.traced:
            return max(self.setting_error, GUESSED_ERROR) ** 2
        return self.setting_error**2


def expected_gain(mean: float, spread: float) -> float:
    """E[max(0, 1 - exp(x))] of a normal x: the share of time saved if a plan takes exp(x) times as long.

    >>> expected_gain(0.0, 0.1) > expected_gain(0.1, 0.1) > 0
    True
    >>> round(expected_gain(-0.7, 1e-6), 3)  # surely half the time
    0.503
    """
    return max(0.0, _normal(-mean / spread) - math.exp(mean + spread**2 / 2) * _normal(-mean / spread - spread))


_SETTINGS = ("precision", "memory_format", "optimizer_implementation", "threads", "checkpointed_blocks", "compile",
             "captured", "loss_chunks", "malloc", "micro_batch")  # fmt: skip


def _normal(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def settings_of(plans: Iterable[Plan]) -> frozenset[Setting]:
    """All settings that any of the plans has."""
    return frozenset(item for plan in plans for item in _settings(plan).items())


def _settings(plan: Plan) -> dict[str, Hashable]:
    """The values by which plans differ, by setting; what fetches samples is one."""
    return {"loader": (plan.loader, plan.num_workers), **{name: getattr(plan, name) for name in _SETTINGS}}
