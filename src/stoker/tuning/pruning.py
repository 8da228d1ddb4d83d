"""Which trials are given up early, by their evaluations so far; counted in samples, never in steps.

Sources: ASHA: L. Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, as Optuna has it: a
trial that is not promoted stops, rather than being set aside. Hyperband: L. Li et al., JMLR 18 (2018). Median: D.
Golovin et al., "Google Vizier", KDD 2017, section 3.2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from optuna import pruners

from stoker.records.study import PrunerName
from stoker.tuning.library import without_experimental_warnings

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
