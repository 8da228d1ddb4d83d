"""A job is planned once for a device: later starts take the plan that was confirmed, while nothing has changed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stoker
from stoker import profiling
from stoker.devices import attached_devices, resolve_place
from stoker.devices.load import CpuLoad
from stoker.flow import kept_plans
from stoker.flow.decision import decide
from stoker.flow.preparation import prepare


def _job(lr: float = 0.1) -> stoker.Job:
    generator = torch.Generator().manual_seed(0)
    data = (torch.rand((64, 8), generator=generator), torch.randint(0, 3, (64,), generator=generator))
    return stoker.Job(model=lambda: nn.Linear(8, 3), data=data, loss="cross_entropy", optimizer=stoker.SGD(lr=lr),
                      batch=16, until=stoker.epochs(1))  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path))


@pytest.fixture
def load(monkeypatch):
    """What others use of the machine while plans are made."""
    seen = {"others": 0.0}
    monkeypatch.setattr(kept_plans, "load_between", lambda *_: CpuLoad(others=seen["others"], stolen=0.0))
    return seen


@pytest.fixture
def trials(monkeypatch):
    """How many trials were made."""
    made: list[str] = []
    real = profiling.try_plan

    def counted(*args, **settings):
        made.append(args[1].in_words())
        return real(*args, **settings)

    monkeypatch.setattr(profiling, "try_plan", counted)
    return made


def _decided(job: stoker.Job):
    return decide(prepare(job), resolve_place("cpu", attached_devices()))


def test_a_second_start_makes_no_trial(load, trials) -> None:
    """It takes the same plan, and says since when."""
    first, coupling = _decided(_job())
    made = len(trials)
    again, known = _decided(_job())
    assert made > 0
    assert len(trials) == made
    assert (again.chosen, known) == (first.chosen, coupling)
    assert "kept since nothing has changed" in again.explanation[-1]


def test_another_job_is_planned_for_itself(load, trials) -> None:
    """Anything that changes the job's identity."""
    _decided(_job())
    made = len(trials)
    _decided(_job(lr=0.2))
    assert len(trials) > made


def test_a_plan_made_under_load_is_not_kept(load, trials) -> None:
    """Trials beside somebody else's work say little of the machine."""
    load["others"] = 0.5
    _decided(_job())
    made = len(trials)
    _decided(_job())
    assert len(trials) > made


def test_planning_anew_replaces_what_was_kept(load, trials) -> None:
    """`stoker plan` makes its trials in any case, and training then takes what it found."""
    _decided(_job())
    made = len(trials)
    planned = stoker.plan(_job(), on="cpu")
    assert len(trials) > made
    made = len(trials)
    assert _decided(_job())[0].chosen.plan == planned.chosen.plan
    assert len(trials) == made
