"""What trials of some plans say of the others: a Bayesian linear model of the error of their forecasts.

What: the logarithm of measured over forecast pace is a sum of what each setting adds (bf16 slower than forecast,
channels-last faster, …), of what each doubling of the micro-batch adds, and of a rest of the plan's own, all normal a
priori; trials make them known.
Use when: plans differ in a few settings, and a trial costs as much as it might save.
Costs: one solve with as many unknowns as trials.
Source: C. K. I. Williams and C. E. Rasmussen, Gaussian Processes for Machine Learning, 2006, section 2.2 (a linear
kernel over settings); expected improvement as in D. R. Jones, M. Schonlau and W. J. Welch, 1998, of a lognormal here.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker.records import Plan

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
class Beliefs:
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
