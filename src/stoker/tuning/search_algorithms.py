"""Which configuration is tried next.

What is proposed for a trial depends on the seed, the trial's number and the results so far, and on nothing else: each
trial has a sampler of its own, so that a study that is continued proposes what it would have proposed.

Sources: TPE: J. Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011, as Optuna has it, with
all parameters together. GP: Optuna's GPSampler, expected improvement under a Matérn kernel. Random search: J. Bergstra
and Y. Bengio, JMLR 13 (2012). A population begins at random; `population.py` says how it goes on.

Which trials are given up early, by their evaluations so far; counted in samples, never in steps.

Sources: ASHA: L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, as Optuna has it: a
trial that is not promoted stops, rather than being set aside. Hyperband: L. Li et al., JMLR 18 (2018). Median: D.
Golovin et al., "Google Vizier", KDD 2017, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optuna import pruners, samplers
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from stoker.records.codec import JSON
from stoker.records.study import Parameter, PrunerName, SamplerName
from stoker.tuning.optuna_import import without_experimental_warnings
from stoker.tuning.space import Space, grid, seed_of

_STARTUP = 10
"""Trials at random before TPE and GP have enough to go by, at least; Optuna's own number."""


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space in Optuna's terms."""
    return {parameter.name: _distribution(parameter) for parameter in space}


def startup_trials(space: Space) -> int:
    """Trials that are proposed at random: TPE counts those that ended, the Gaussian process those that finished."""
    return max(_STARTUP, 2 * len(space))


def sampler_for(name: SamplerName, space: Space, seed: int, number: int, *, parallel: int = 1) -> samplers.BaseSampler:
    """What proposes trial `number`.

    Args:
        name: by which rule.
        space: what is searched.
        seed: the study's.
        number: the trial's, from 0.
        parallel: trials at once; where there are several, TPE assumes the worst of those under way.
    """
    own, startup = seed_of(seed, number), startup_trials(space)
    with without_experimental_warnings():
        match name:
            case "grid":
                return GridSampler(grid(space, seed))
            case "random" | "pbt":
                return samplers.RandomSampler(seed=own)
            case "tpe":
                return samplers.TPESampler(
                    seed=own, multivariate=True, n_startup_trials=startup, constant_liar=parallel > 1
                )
            case "gp":
                return samplers.GPSampler(seed=own, n_startup_trials=startup)


def suggest(trial: Trial, name: str, distribution: BaseDistribution) -> JSON:
    """The value of a parameter in a trial: what it has, or what the sampler proposes now."""
    if isinstance(distribution, CategoricalDistribution):
        return trial.suggest_categorical(name, distribution.choices)
    if isinstance(distribution, IntDistribution):
        low, high = distribution.low, distribution.high
        return trial.suggest_int(name, low, high, step=distribution.step, log=distribution.log)
    assert isinstance(distribution, FloatDistribution)
    return trial.suggest_float(name, distribution.low, distribution.high, step=distribution.step, log=distribution.log)


class GridSampler(samplers.BaseSampler):
    """Trial n gets point n of a grid; whoever asks sees to it that there are no more trials than points.

    A grid of one point gives every trial that.
    """

    def __init__(self, points: tuple[dict[str, JSON], ...]) -> None:
        self._points = points

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """Nothing is inferred from other trials."""
        return {}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: Mapping[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Nothing is drawn together."""
        return {}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """The parameter's value at the trial's point."""
        return self._points[trial.number % len(self._points)][param_name]


def _distribution(parameter: Parameter) -> BaseDistribution:
    low, high, step = parameter.low, parameter.high, parameter.step
    if parameter.kind == "choice":
        return CategoricalDistribution(parameter.choices)
    if parameter.is_whole:
        whole = 1 if step is None else int(step)
        return IntDistribution(int(low), int(high), log=parameter.is_logarithmic, step=whole)
    return FloatDistribution(low, high, log=parameter.is_logarithmic, step=step)


REDUCTION = 3
"""Of so many trials that reach a rung, one goes on to the next, which is so many times further."""

_RUNGS = 3
_WARM_UP = 4
"""Trials that are finished before the median of them counts."""


@dataclass(frozen=True)
class Rungs:
    """Where ASHA and Hyperband compare trials: at `first` samples, and each time `REDUCTION` times further."""

    first: int
    total: int

    @property
    def places(self) -> tuple[int, ...]:
        """The rungs [samples], all before the end."""
        found, place = [], self.first
        while place < self.total:
            found.append(place)
            place *= REDUCTION
        return tuple(found)


def rungs_of(first_samples: int, total_samples: int) -> Rungs:
    """The rungs of trials that are first evaluated at `first_samples` and end at `total_samples`.

    The first is at 1/27 of a trial, but not before its first evaluation.
    """
    return Rungs(max(1, first_samples, total_samples // REDUCTION**_RUNGS), total_samples)


def pruner_for(name: PrunerName, rungs: Rungs) -> pruners.BasePruner:
    """What gives trials up."""
    with without_experimental_warnings():
        match name:
            case "none":
                return pruners.NopPruner()
            case "asha":
                return pruners.SuccessiveHalvingPruner(min_resource=rungs.first, reduction_factor=REDUCTION)
            case "hyperband":
                return pruners.HyperbandPruner(
                    min_resource=rungs.first, max_resource=max(rungs.first, rungs.total), reduction_factor=REDUCTION
                )
            case "median":
                return pruners.MedianPruner(n_startup_trials=_WARM_UP, n_warmup_steps=rungs.first - 1)


def expected_share(name: PrunerName, rungs: Rungs, trials: int) -> float | None:
    """The share of all samples that is trained if trials are as good as they are in the sources' analysis [fraction].

    One in `REDUCTION` goes on at each rung, and at least one reaches the end. Each of Hyperband's brackets begins at
    another rung, and most trials are in the first. None where a rule gives nothing to go by.
    """
    places = rungs.places
    if name == "none" or not places:
        return 1.0
    if name == "asha":
        return _share(places, rungs.total, trials)
    if name == "hyperband":
        parts = _parts_of_brackets(len(places) + (rungs.first * REDUCTION ** len(places) == rungs.total))
        return sum(part * _share(places[start:], rungs.total, part * trials) for start, part in enumerate(parts))
    return None


def _parts_of_brackets(count: int) -> list[float]:
    """The fraction of trials in each bracket, as Optuna deals them out; the last prunes least, or none."""
    budgets = [math.ceil(count * REDUCTION**left / (left + 1)) for left in reversed(range(count))]
    return [budget / sum(budgets) for budget in budgets]


def _share(places: tuple[int, ...], total: int, trials: float) -> float:
    if not places:
        return 1.0
    ends = (*places[1:], total)
    done = float(places[0])
    for rung, (begin, end) in enumerate(zip(places, ends, strict=True), start=1):
        done += max(REDUCTION**-rung, 1 / max(1, trials)) * (end - begin)
    return done / total
