"""Compiled plans from planning to the end of a run."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from torch import nn

import stoker
from stoker.planning.planner import Planner
from stoker.planning.resolved_job import resolve_job
from stoker.records import Candidate, Measurement
from tests.flow.builders import PLAN, Heard, blobs_job

COMPILED = dataclasses.replace(PLAN, compile=True)
WHY = "the model cannot be compiled and runs as it is: Data-dependent branching"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, which inductor calls on a CPU")


class Branching(nn.Module):
    """A graph cannot hold what it does; without dropout, which PyTorch draws in a compiled plan."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The points, mirrored where most are negative."""
        return self.net(x) if x.sum() > 0 else self.net(-x)


def test_a_plan_that_cannot_be_compiled_is_run_as_it_is_and_told_once() -> None:
    """It was asked for; the weights are those of the plan that is not compiled, and the line is named."""
    plain, asked = Heard(), Heard()
    job = blobs_job(model=Branching)
    weights = [
        stoker.train(job, plan=plan, sink=heard, new=True).weights()
        for plan, heard in ((PLAN, plain), (COMPILED, asked))
    ]
    (warning,) = asked.of("warned")
    assert warning["message"].startswith(WHY)
    assert "test_compiling.py:" in warning["message"]
    assert not plain.of("warned")
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_where_nothing_is_saved_the_plan_says_why_it_is_not_compiled() -> None:
    """Among the rejected plans, with what compiling would cost."""
    decision = stoker.plan(blobs_job())
    assert not decision.chosen.plan.compile
    (compiled,) = [one for one in decision.rejected if one.plan.compile]
    assert "by forecast" in compiled.reason
    assert "compiling takes" in compiled.reason


def test_without_a_compiler_the_plan_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is compiled to find out."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    decision = stoker.plan(blobs_job())
    (compiled,) = [one for one in decision.rejected if one.plan.compile]
    assert compiled.reason == "no C++ compiler is found here (looked for no-such-compiler)"


def test_what_compiling_took_is_remembered_for_the_next_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial in which it took several times as long as forecast."""
    from stoker.devices import attached_devices, planned_devices
    from stoker.planning.planner import calibrations_of

    def trial(job, plan, coupling, data, *, budget_s, known_error, most_threads) -> Measurement:
        pace = 0.5 if plan.compile else 1.0
        return Measurement(
            plan=plan,
            samples_per_update=16,
            update_s=(pace,) * 3,
            evaluate_s_per_sample=0.0,
            peak_bytes=1,
            state_bytes=1,
            took_s=0.1,
            compile_s=100.0 * plan.compile,
        )

    monkeypatch.setattr("stoker.planning.planner.try_plan", trial)
    place = planned_devices("cpu", attached_devices())[0]
    planner = Planner(resolve_job(blobs_job(until=stoker.updates(100_000)), None))
    known = [
        Candidate(device="cpu", plan=plan, forecast=planner.forecasts(place).forecast(plan), memory_bytes=2**30)
        for plan in (PLAN, COMPILED)
    ]
    monkeypatch.setattr(planner, "_candidates", lambda place, only: (known, ""))
    search, _ = planner.confirmed(place)
    assert search.chosen().plan.compile
    (kept,) = [one for one in calibrations_of(place) if one.quantity == "compile_s"]
    assert kept.measured == 100.0
    again = Planner(planner.prepared).forecasts(place).forecast(COMPILED).compile_s
    assert again is not None
    assert (again.basis, again.value) == ("calibrated", pytest.approx(100.0))
