"""Optuna's samplers and pruners: which configuration is tried next, and which trials are given up early.

What is proposed for a trial depends on the seed, the trial's number and the results so far, and on nothing else: each
trial has a sampler of its own, so that a study that is continued proposes what it would have proposed. Pruners compare
evaluations by the samples trained, never by steps.

Sources: TPE: J. Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011, as Optuna has it, with
all parameters together. GP: Optuna's GPSampler, expected improvement under a Matérn kernel. Random search: J. Bergstra
and Y. Bengio, JMLR 13 (2012). A population begins at random; `population.py` says how it goes on.

ASHA: L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, as Optuna has it: a
trial that is not promoted stops, rather than being set aside. Hyperband: L. Li et al., JMLR 18 (2018). Median: D.
Golovin et al., "Google Vizier", KDD 2017, section 3.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from optuna import pruners, samplers
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from stoker.records.codec import JSON
from stoker.records.study import Parameter, PrunerName, SamplerName
from stoker.tuning.space import Space, grid, seed_of, startup_trials
from stoker.tuning.study_forecast import REDUCTION, Rungs


@contextmanager
def without_experimental_warnings() -> Iterator[None]:
    """Within the block, Optuna does not warn of what it calls experimental: its version is in the record."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """The space in Optuna's terms."""
    return {parameter.name: _distribution(parameter) for parameter in space}


def sampler_for(name: SamplerName, space: Space, seed: int, number: int, *, parallel: int = 1) -> samplers.BaseSampler:
    """The sampler of trial `number`.

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
    """Trial n gets point n of a grid, modulo its length; the caller asks for no more trials than points."""

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


_WARM_UP = 4
"""Trials that are finished before the median of them counts."""


def pruner_for(name: PrunerName, rungs: Rungs) -> pruners.BasePruner:
    """The rule that stops trials early."""
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


def lacks_equals(finished: Sequence[FrozenTrial], samples: int) -> str | None:
    """Why the median pruner can hardly judge an evaluation at `samples`, in words; None if it can, or may not yet.

    It compares with finished trials that were evaluated at the same number of samples: with intervals in samples or
    updates, trials of other batches seldom were. Those that ended before are not missed.
    """
    further = [trial.intermediate_values for trial in finished if (trial.last_step or 0) >= samples]
    num_equal = sum(samples in values for values in further)
    if len(further) < _WARM_UP or 2 * num_equal >= len(further):
        return None
    return (
        f"--pruner median compares at equal numbers of samples, and {num_equal} of {len(further)} finished trials were "
        f"evaluated at {samples:,}: it prunes little. Evaluate by whole epochs, or use --pruner asha"
    )
