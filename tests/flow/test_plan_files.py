"""Plans from files: pinned for a new run, checked against the job and the device, kept on a resume."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob, BadRun, DoesNotFit
from stoker.records import Plan, dumps, to_json
from tests.flow.builders import PLAN, Heard, assert_equal_weights, blobs_job, stopped_run

SMALL = Plan(device="cpu", micro_batch=4)


def file_of(document: Any, name: str = "plan.json") -> Path:
    """A file with that JSON."""
    path = Path(name)
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def plan_of(run: stoker.Run) -> Plan:
    """The plan a run trains under."""
    decision = run.directory.read_decision()
    assert decision is not None
    return decision.chosen.plan


def test_a_plan_file_pins_the_plan() -> None:
    """A Plan alone, or a Decision as `stoker plan --json` prints it and a run keeps it; the search is left out."""
    heard = Heard()
    run = stoker.train(blobs_job(), plan=file_of(dumps(SMALL)), sink=heard)
    assert plan_of(run) == SMALL
    decision = run.directory.read_decision()
    assert decision is not None
    assert decision.rejected == ()
    assert heard.of("planned")[0]["plan"] == to_json(SMALL)
    again = stoker.train(blobs_job(), plan=run.path / "plan.json")
    assert plan_of(again) == SMALL
    printed = file_of(to_json(decision))
    third = stoker.train(blobs_job(), plan=str(printed))
    assert plan_of(third) == SMALL
    assert_equal_weights(run, third)


def test_the_decision_that_planning_gives_can_be_given_back() -> None:
    """What `stoker.plan` chose is what training under it uses."""
    decision = stoker.plan(blobs_job())
    assert not Path("runs").exists()
    run = stoker.train(blobs_job(), plan=file_of(dumps(decision)))
    assert plan_of(run) == decision.chosen.plan


def test_a_forecast_of_a_pinned_plan_is_measured() -> None:
    """One trial gives the time it will take and the memory it needs."""
    run = stoker.train(blobs_job(), plan=SMALL)
    decision = run.directory.read_decision()
    assert decision is not None
    forecast = decision.chosen.forecast
    assert (forecast.total_samples, forecast.total_updates) == (240, 15)
    assert 0 < forecast.total_s.low <= forecast.total_s.value <= forecast.total_s.high < 60
    assert forecast.peak_bytes.value > 2**20


def test_the_same_call_with_its_plan_continues() -> None:
    """Given as before, or left out; another one is refused, because the run goes on under its own."""
    stopped = stopped_run(blobs_job())
    with pytest.raises(BadRun, match="began under another plan") as caught:
        stoker.train(blobs_job(), plan=SMALL)
    assert "micro-batch 16" in caught.value.message
    assert "--new" in (caught.value.remedy or "")
    hurried = dataclasses.replace(PLAN, checkpoint_every_s=5.0)
    run = stoker.train(blobs_job(), plan=file_of(dumps(hurried)))
    assert (run.name, run.status, plan_of(run)) == (stopped.name, "finished", PLAN)


def test_a_run_that_is_continued_says_that_it_heeds_no_limit_of_memory() -> None:
    """Its plan was made before; a limit is read all the same, and refused if it is none."""
    stopped_run(blobs_job())
    with pytest.raises(BadJob, match="--memory 6: wanted an amount with its unit"):
        stoker.train(blobs_job(), memory="6", sink=lambda _: None)
    heard = Heard()
    run = stoker.train(blobs_job(), memory="6GB", sink=heard)
    assert plan_of(run) == PLAN
    assert any(
        "goes on under its own plan, which --memory does not change" in one["message"] for one in heard.of("warned")
    )


def test_a_pinned_plan_that_takes_more_than_is_allowed_is_refused() -> None:
    """It is tried, and both figures are reported; nothing is left behind."""
    with pytest.raises(DoesNotFit, match=r"it took [\d.]+ [MG]iB of memory when it was tried, and may take 95\.4 MiB"):
        stoker.train(blobs_job(), plan=PLAN, memory="100MB", sink=lambda _: None)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("{", "Expecting"),
        ([1, 2], "holds no plan"),
        ({"record": "Plan", "schema": 7, "device": "cpu", "micro_batch": 4}, "schema version 7"),
        ({"record": "Plan", "schema": 1, "device": "cpu"}, "field 'micro_batch' is missing"),
        ({"record": "Plan", "schema": 1, "device": "cpu", "micro_batch": "4"}, "Plan.micro_batch: wanted"),
        ({"record": "Plan", "schema": 1, "device": "cpu", "micro_batch": 0}, "micro_batch must be at least 1, got 0"),
        ({"record": "Plan", "schema": 1, "device": "cpu", "micro_batch": 4, "thread": 2}, "unknown field 'thread'"),
        (to_json(PLAN) | {"precision": "fp4"}, "precision: wanted one of"),
        (to_json(PLAN) | {"loader": "workers"}, "does not go with num_workers=0"),
        ({"record": "Run", "schema": 1}, "'Run' record"),
        ({"record": "Decision", "schema": 1, "candidates": []}, "holds no plan"),
    ],
)
def test_a_file_that_holds_no_plan_is_refused(document: Any, problem: str) -> None:
    """The file and what is wrong in it are named, how to make one is reported, and no run is made."""
    path = file_of(document)
    with pytest.raises(BadJob, match=r"plan\.json holds no plan") as caught:
        stoker.train(blobs_job(), plan=path)
    assert problem in caught.value.message
    assert "stoker plan" in (caught.value.remedy or "")
    assert not Path("runs").exists()


def test_a_plan_file_that_is_absent_is_refused_with_the_nearest() -> None:
    """As is a folder in its place."""
    file_of(to_json(PLAN), "plan.json")
    with pytest.raises(BadJob, match=r"there is no plan file plann\.json") as caught:
        stoker.train(blobs_job(), plan="plann.json")
    assert "Did you mean 'plan.json'" in (caught.value.remedy or "")
    with pytest.raises(BadJob, match=r"holds no plan: .*directory"):
        stoker.train(blobs_job(), plan=".")


def test_a_decision_without_a_plan_is_refused() -> None:
    """All its plans were rejected: there is none to use."""
    decision = {
        "record": "Decision",
        "schema": 2,
        "device": "cpu",
        "candidates": [],
        "rejected": [],
        "explanation": [],
        "took_s": 0.1,
    }
    with pytest.raises(BadJob, match="holds no plan: it is a decision without candidates"):
        stoker.train(blobs_job(), plan=file_of(decision))


def test_a_plan_that_would_change_what_is_learned_is_refused() -> None:
    """Larger than the batch; or cutting a group of samples that batch norm couples."""
    with pytest.raises(BadJob, match=r"would change what is learned: a micro-batch has 1 to 16 samples, not 32"):
        stoker.train(blobs_job(), plan=dataclasses.replace(PLAN, micro_batch=32))
    coupled = blobs_job(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    with pytest.raises(BadJob, match=r"coupled in groups of 16: .* not 8 samples"):
        stoker.train(coupled, plan=dataclasses.replace(PLAN, micro_batch=8))
    assert not Path("runs").exists()


def test_a_plan_for_another_device_is_refused() -> None:
    """With the word that would use it."""
    with pytest.raises(BadJob, match="the plan is for cuda:0, but the job is to run on cpu") as caught:
        stoker.train(blobs_job(), plan=dataclasses.replace(PLAN, device="cuda:0"), on="cpu")
    assert "--on cuda:0" in (caught.value.remedy or "")
    assert not Path("runs").exists()


def test_workers_have_nothing_to_fetch_from_memory() -> None:
    """Such a plan was made for another job."""
    with pytest.raises(BadJob, match="2 loader workers, but the data lie in memory"):
        stoker.train(blobs_job(), plan=dataclasses.replace(PLAN, loader="workers", num_workers=2))


class OneBitShort(nn.Module):
    """Differences that hang on the ninth bit of a product: gone in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (3000.0 + 4 * self.layer(inputs)) @ torch.eye(2) - 3000.0


def test_a_pinned_precision_that_loses_the_gradient_does_not_fit() -> None:
    """How far it is from fp32 is reported, and no run is made."""
    with pytest.raises(DoesNotFit, match=r"its gradient is [\d.]+% from fp32's, more than \d+%"):
        stoker.train(blobs_job(model=OneBitShort), plan=dataclasses.replace(PLAN, precision="bf16"))
    assert not Path("runs").exists()
