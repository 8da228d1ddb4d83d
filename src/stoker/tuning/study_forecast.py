"""Time and cost of a study, from the plans of a few of its configurations; and where its trials are compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.records import Estimate
from stoker.records.study import PlannedTrial, PrunerName, StudyForecast

REDUCTION = 3
"""One of so many trials that reach a rung goes on to the next, which is so many times further."""

_RUNGS = 3

START_S = 6.0
"""Until a trial's process has loaded PyTorch, made the job and planned it [s]: a judgement."""


@dataclass(frozen=True)
class Rungs:
    """Where ASHA and Hyperband compare trials: at `first` samples, and each time `REDUCTION` times further."""

    first: int
    total: int

    @property
    def places(self) -> tuple[int, ...]:
        """The rungs [samples], all before the end."""
        places, place = [], self.first
        while place < self.total:
            places.append(place)
            place *= REDUCTION
        return tuple(places)


def rungs_of(first_samples: int, total_samples: int) -> Rungs:
    """The rungs of trials that are first evaluated at `first_samples` and end at `total_samples`.

    The first is at 1/27 of a trial, but not before its first evaluation.
    """
    return Rungs(max(1, first_samples, total_samples // REDUCTION**_RUNGS), total_samples)


def forecast_study(
    planned: Sequence[PlannedTrial],
    *,
    trials: int,
    parallel: int,
    pruner: PrunerName,
    rungs: Rungs,
    gpus: int | None = None,
    intervals: int = 0,
) -> StudyForecast:
    """Time and cost of `trials` trials, `parallel` at once.

    Args:
        planned: configurations at the ends of the space, in the middle and at random.
        trials: how many are tried.
        parallel: how many at once; each was planned for the share of the machine it then has.
        pruner: what gives trials up.
        rungs: where it does.
        gpus: on how many they run; one that several share is taken to do no more in a second than for one. None on a
            CPU, of which each trial has cores of its own.
        intervals: of a population, whose members start again for each; `trials` are its members.
    """
    times = [forecast.total_s for forecast in planned if forecast.total_s is not None]
    energies = [forecast.energy_kwh for forecast in planned if forecast.energy_kwh is not None]
    costs = [forecast.cost_usd for forecast in planned if forecast.cost_usd is not None]
    share = expected_share(pruner, rungs, trials)
    at_once = max(1, min(parallel, trials) if gpus is None else min(parallel, trials, gpus))
    total = _total(times, trials, at_once, start=START_S * max(1, intervals)) if times else None
    pruned = None
    if total is not None and share is not None:
        start_s = trials * START_S / at_once  # starting a trial costs what it costs
        value, low, high = (
            min(seconds, start_s) + share * max(0.0, seconds - start_s)
            for seconds in (total.value, total.low, total.high)
        )
        pruned = Estimate(value=value, low=low, high=high, unit="s", basis=total.basis)
    assumptions = _assumptions(planned, pruner, rungs, share, shares_device=gpus is not None and gpus < parallel)
    if intervals:
        assumptions.append(f"{trials} members, each trained to its end in {intervals} intervals, with a start for each")
    return StudyForecast(
        trials=trials,
        parallel=parallel,
        planned=tuple(planned),
        total_s=total,
        pruned_s=pruned,
        energy_kwh=_total(energies, trials, 1, start=0.0) if energies and len(energies) == len(times) else None,
        cost_usd=_total(costs, trials, 1, start=0.0) if costs and len(costs) == len(times) else None,
        assumptions=tuple(assumptions),
    )


def _total(each: Sequence[Estimate], trials: int, at_once: int, *, start: float = START_S) -> Estimate:
    """The sum over trials like these; between all of them being the least and all the largest of what was planned."""
    count = math.ceil(trials / at_once)
    return Estimate(
        value=count * (statistics.fmean(estimate.value for estimate in each) + start),
        low=count * (min(estimate.low for estimate in each) + start),
        high=count * (max(estimate.high for estimate in each) + start),
        unit=each[0].unit,
        basis=each[0].basis,
    )


def _assumptions(
    planned: Sequence[PlannedTrial], pruner: PrunerName, rungs: Rungs, share: float | None, *, shares_device: bool
) -> list[str]:
    good = sum(forecast.total_s is not None for forecast in planned)
    lines = [f"all trials are like the {good} configurations that were planned: the ends of the space, then its middle"]
    if good < len(planned):
        lines.append(f"{len(planned) - good} could not be planned: such trials are pruned, or fail")
    if shares_device:
        lines.append("trials that share a GPU take, together, as long as one after another")
    if pruner == "none":
        return lines
    if share is None:
        return [*lines, "how much the median prunes depends on the trials: between nothing and nearly all"]
    places = ", ".join(f"{place:,}" for place in rungs.places) or "none before the end"
    rule = f"one trial in {REDUCTION} goes on at each rung ({places} samples)"
    return [*lines, f"{pruner} trains {share:.0%} of all samples if {rule}: an assumption"]


def expected_share(name: PrunerName, rungs: Rungs, trials: int) -> float | None:
    """Expected share of all samples that is trained [0 to 1], if trials are as in the analysis of the pruner's source.

    One in `REDUCTION` goes on at each rung, and at least one reaches the end. Each of Hyperband's brackets begins at
    another rung, and most trials are in the first. None for a rule without such an analysis.
    """
    places = rungs.places
    if name == "none" or not places:
        return 1.0
    if name == "asha":
        return _share(places, rungs.total, trials)
    if name == "hyperband":
        # As Optuna deals trials out to brackets; the last prunes least, or none.
        count = len(places) + (rungs.first * REDUCTION ** len(places) == rungs.total)
        budgets: list[int] = [math.ceil(count * REDUCTION**left / (left + 1)) for left in reversed(range(count))]
        parts = [budget / sum(budgets) for budget in budgets]
        return sum(part * _share(places[start:], rungs.total, part * trials) for start, part in enumerate(parts))
    return None


def _share(places: tuple[int, ...], total: int, trials: float) -> float:
    if not places:
        return 1.0
    ends = (*places[1:], total)
    done = float(places[0])
    for rung, (begin, end) in enumerate(zip(places, ends, strict=True), start=1):
        done += max(REDUCTION**-rung, 1 / max(1, trials)) * (end - begin)
    return done / total
