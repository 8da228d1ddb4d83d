"""Whether a plan fits a device: the odds, learned from how far earlier forecasts were off.

What a forecast misses by is taken as a ratio, measured over forecast. Of n earlier ratios and a new one, each order is
equally likely, so the new one is at most the k-th smallest with probability k / (n + 1): the split-conformal interval,
without a guess at the shape of the errors. A prior stands in for the cases that are not there yet: ratios at the
quantiles of a normal distribution, fewer of them the more was measured.

Source: V. Vovk, A. Gammerman and G. Shafer, "Algorithmic Learning in a Random World" (2005), section 2.3; J. Lei et
al., "Distribution-Free Predictive Inference for Regression" (2018), section 2. The pseudo-cases of the prior are ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from stoker.records import Estimate
from stoker.records.estimate import Basis

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
class Residuals:
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


def needed(forecast_bytes: float, residuals: Residuals) -> Estimate:
    """What will be needed [bytes]: the forecast with the interval that earlier errors give it."""
    cases = residuals.cases()
    low, high = (_quantile(cases, share) for share in _INTERVAL)
    basis: Basis = "calibrated" if residuals.ratios else "datasheet"
    return Estimate(
        value=forecast_bytes, low=forecast_bytes * min(1.0, low), high=forecast_bytes * max(1.0, high),
        unit="bytes", basis=basis,
    )  # fmt: skip


def probability_it_fits(forecast_bytes: float, memory_bytes: float, residuals: Residuals) -> float:
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
