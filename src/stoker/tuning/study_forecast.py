"""What a study will take, from the plans of a few of its configurations."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from stoker.records import Estimate
from stoker.records.study import PlannedTrial, PrunerName, StudyForecast
from stoker.tuning.search_algorithms import REDUCTION, Rungs, expected_share

START_S = 6.0
"""Until a trial's process has loaded PyTorch, made the job and planned it [s]: a judgement."""


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
    """The time and cost of `trials` trials, `parallel` at once.

    Args:
        planned: configurations at the ends of the space, in the middle and at random.
        trials: how many are tried.
        parallel: how many at once; each was planned for the share of the machine it then has.
        pruner: what gives trials up.
        rungs: where it does.
        gpus: on how many they run; one that several share is taken to do no more in a second than for one. None on a
            CPU, of which each trial has cores of its own.
        intervals: of a population, whose members start anew for each; `trials` are its members.
    """
    times = [one.total_s for one in planned if one.total_s is not None]
    energies = [one.energy_kwh for one in planned if one.energy_kwh is not None]
    costs = [one.cost_usd for one in planned if one.cost_usd is not None]
    share = expected_share(pruner, rungs, trials)
    at_once = max(1, min(parallel, trials) if gpus is None else min(parallel, trials, gpus))
    total = _total(times, trials, at_once, start=START_S * max(1, intervals)) if times else None
    pruned = None if total is None or share is None else _with_share(total, share, trials * START_S / at_once)
    assumptions = _assumptions(planned, pruner, rungs, share, shares_device=gpus is not None and gpus < parallel)
    if intervals:
        assumptions.append(f"{trials} members, each trained to its end in {intervals} intervals, with a start for each")
    return StudyForecast(
        trials=trials, parallel=parallel, planned=tuple(planned), total_s=total, pruned_s=pruned,
        energy_kwh=_total(energies, trials, 1, start=0.0) if energies and len(energies) == len(times) else None,
        cost_usd=_total(costs, trials, 1, start=0.0) if costs and len(costs) == len(times) else None,
        assumptions=tuple(assumptions),
    )  # fmt: skip


def _total(each: Sequence[Estimate], trials: int, at_once: int, *, start: float = START_S) -> Estimate:
    """The sum over trials like these; between all of them being the least and all the largest of what was planned."""
    count = math.ceil(trials / at_once)
    return Estimate(
        value=count * (statistics.fmean(one.value for one in each) + start),
        low=count * (min(one.low for one in each) + start),
        high=count * (max(one.high for one in each) + start),
        unit=each[0].unit,
        basis=each[0].basis,
    )


def _with_share(total: Estimate, share: float, start_s: float) -> Estimate:
    """What is left of a total if a share is trained; starting a trial costs what it costs."""

    def left(value: float) -> float:
        return min(value, start_s) + share * max(0.0, value - start_s)

    return Estimate(value=left(total.value), low=left(total.low), high=left(total.high), unit="s", basis=total.basis)


def _assumptions(
    planned: Sequence[PlannedTrial], pruner: PrunerName, rungs: Rungs, share: float | None, *, shares_device: bool
) -> list[str]:
    good = sum(one.total_s is not None for one in planned)
    said = [f"all trials are like the {good} configurations that were planned: the ends of the space, then its middle"]
    if good < len(planned):
        said.append(f"{len(planned) - good} could not be planned: such trials are pruned, or fail")
    if shares_device:
        said.append("trials that share a GPU take, together, as long as one after another")
    if pruner == "none":
        return said
    if share is None:
        return [*said, "how much the median prunes depends on the trials: between nothing and nearly all"]
    places = ", ".join(f"{place:,}" for place in rungs.places) or "none before the end"
    rule = f"one trial in {REDUCTION} goes on at each rung ({places} samples)"
    return [*said, f"{pruner} trains {share:.0%} of all samples if {rule}: an assumption"]
