"""The most threads of a plan: `--threads`, OMP_NUM_THREADS, and what other processes leave."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stoker
from stoker.devices.cpu import CpuSample
from stoker.errors import BadJob
from stoker.planning import plan_ranking, planner
from stoker.planning.decision import decide, most_threads
from stoker.planning.resolved_job import resolve_job
from tests.cli.machines import CPU

pytestmark = pytest.mark.usefixtures("place")


@pytest.fixture(autouse=True)
def _few_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each precision one plan is traced and ranked for what is here: no test depends on how many there are."""
    monkeypatch.setattr(plan_ranking, "LEAST_RANKING_S", 0.0)


def _job() -> stoker.Job:
    data = torch.randn(64, 8), torch.randn(64, 1)
    return stoker.Job(
        model=lambda: nn.Linear(8, 1),
        data=data,
        loss="mse",
        optimizer=stoker.SGD(lr=0.1),
        batch=16,
        until=stoker.epochs(1),
    )


@pytest.mark.parametrize(("said", "most"), [("1", 1), ("3,2", 3), ("", None), ("abc", None), ("0", None)])
def test_omp_num_threads_is_the_limit_where_nothing_else_is_said(monkeypatch, said, most) -> None:
    """A positive number limits plans; anything else does not."""
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert most_threads(None) == most


def test_more_threads_than_cores_are_refused_with_both_numbers(monkeypatch) -> None:
    """Below 1 and above the cores: the sentence says what may be given."""
    monkeypatch.setattr("stoker.planning.decision.attached_cpu", lambda: CPU)
    assert most_threads(CPU.cores) == CPU.cores
    for threads in (0, CPU.cores + 1):
        with pytest.raises(BadJob, match=f"--threads {threads}: this process may use {CPU.cores} cores"):
            most_threads(threads)


def test_a_plan_has_no_more_threads_than_allowed(monkeypatch) -> None:
    """On a machine of two cores: all plans tried have one thread under a limit of one, and two without a limit."""
    monkeypatch.setattr("stoker.planning.decision.attached_cpu", lambda: CPU)
    seen = []
    real = planner.try_plan
    monkeypatch.setattr(
        planner,
        "try_plan",
        lambda job, plan, *rest, **more: seen.append(plan) or real(job, plan, *rest, **more),
    )
    for threads in (1, 2):
        seen.clear()
        decision, _ = decide(resolve_job(_job()), CPU, threads=threads)
        assert seen
        assert all(plan.threads <= threads for plan in seen)
        assert decision.chosen.plan.threads <= threads
    assert any(plan.threads == 2 for plan in seen)


def test_trials_compute_with_the_threads_that_other_processes_leave(monkeypatch) -> None:
    """Where others use 90 % of two CPUs, a plan of two threads is tried with one, and the decision says so."""
    now = iter(float(second) for second in range(10_000))

    def sample() -> CpuSample:
        second = next(now)
        return CpuSample(busy_s=1.8 * second, stolen_s=0.0, total_s=2.0 * second, own_s=0.0)

    monkeypatch.setattr("stoker.planning.planner.sample_cpu", sample)
    monkeypatch.setattr("stoker.planning.plan_history.sample_cpu", sample)
    for module in ("decision", "planner"):
        monkeypatch.setattr(f"stoker.planning.{module}.attached_cpu", lambda: CPU)
    seen = []
    real = planner.try_plan

    def noted(job, plan, *rest, **more):
        seen.append((plan.threads, more["most_threads"]))
        return real(job, plan, *rest, **more)

    monkeypatch.setattr(planner, "try_plan", noted)
    decision, _ = decide(resolve_job(_job()), CPU, threads=2)
    assert {most for _, most in seen} == {1}
    assert decision.others_share == pytest.approx(0.9)
    if decision.chosen.plan.threads == 2:
        assert any("tried with 1 of 2 threads" in line for line in decision.explanation)
