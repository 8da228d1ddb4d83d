"""The cost of trials, separated from the drift of a machine that becomes slower."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from bench.start.regret import trials
from stoker.records import Plan
from stoker.records.plan_schedule import PlanSchedule, PlanSwitch

BEST = Plan(device="cpu", micro_batch=8)
OTHER = dataclasses.replace(BEST, threads=2)


def switch(update: int, plan: Plan, kind: str = "trial") -> PlanSwitch:
    """A switch to a plan."""
    return PlanSwitch(update=update, samples=8 * update, plan=plan, kind=kind, why="")  # type: ignore[arg-type]


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_what_trials_cost_is_told_by_the_updates_around_them(drift: float) -> None:
    """Ten updates of twice the time in a run of 100; with a drift to twice the time by its end, too."""
    schedule = PlanSchedule(BEST, (switch(20, OTHER), switch(30, BEST, "settled")))
    times_s = [(1 + drift * at) * (2 if schedule.at(at) == OTHER else 1) for at in range(100)]
    run = {"updates_s": list(itertools.accumulate(times_s))}
    assert trials(run, schedule) == pytest.approx(1 + 10 / 99, abs=0.02)


def test_a_run_without_trials_lost_nothing() -> None:
    """Its first updates, which warm up, count."""
    run = {"updates_s": [1.0, 3.0, *map(float, range(4, 20))]}
    assert trials(run, PlanSchedule(BEST)) == pytest.approx(18 / 17)
