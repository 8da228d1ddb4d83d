"""A job is planned once for a device: later starts take the plan that was confirmed, while nothing has changed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import stoker
from stoker.devices import attached_devices, resolve_place
from stoker.devices.cpu import CpuLoad
from stoker.jobs.job_file import load_job
from stoker.planning import plan_history
from stoker.planning.decision import decide
from stoker.planning.resolved_job import resolve_job
from stoker.profiling.plan_trial import try_plan

pytestmark = pytest.mark.usefixtures("place")

JOB_FILE = """
import stoker, torch
from torch import nn

class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x)

def job(lr: float = 0.1) -> stoker.Job:
    generator = torch.Generator().manual_seed(0)
    data = (torch.rand((64, 8), generator=generator), torch.randint(0, 3, (64,), generator=generator))
    return stoker.Job(model=lambda: Model(8, 3), data=data, loss="cross_entropy", optimizer=stoker.SGD(lr=lr),
                      batch=16, until=stoker.epochs(1))
"""


@pytest.fixture
def job_file(tmp_path, monkeypatch) -> Path:
    """A job in a file, and a cache of its own."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "kept.py"
    path.write_text(JOB_FILE, encoding="utf-8")
    return path


@pytest.fixture
def load(monkeypatch):
    """What others use of the machine while plans are made."""
    seen = {"others": 0.0}
    monkeypatch.setattr(plan_history, "load_between", lambda *_: CpuLoad(others=seen["others"], stolen=0.0))
    return seen


@pytest.fixture
def trials(monkeypatch):
    """The plans that were tried."""
    made: list[str] = []
    real = try_plan

    def counted(*args, **settings):
        made.append(args[1].in_words())
        return real(*args, **settings)

    monkeypatch.setattr("stoker.planning.planner.try_plan", counted)
    return made


def _decided(path: Path, memory_bytes: float | None = None, **settings: str):
    device = resolve_place("cpu", attached_devices())
    return decide(resolve_job(*load_job(path, settings)), device, memory_bytes=memory_bytes)


def test_a_second_start_makes_no_trial(job_file, load, trials) -> None:
    """It takes the same plan, and says since when."""
    first, coupling = _decided(job_file)
    made = len(trials)
    again, known = _decided(job_file)
    assert made > 0
    assert len(trials) == made
    assert (again.chosen, known) == (first.chosen, coupling)
    assert "kept since nothing has changed" in again.explanation[-1]


@pytest.mark.parametrize("change", ["setting", "code", "memory"])
def test_whatever_the_plan_rests_on_makes_it_anew(job_file, load, trials, change: str) -> None:
    """A setting; the model's code, though its first weights are the same; the memory that may be used."""
    _decided(job_file)
    made = len(trials)
    if change == "code":
        job_file.write_text(JOB_FILE.replace("super().forward(x)", "super().forward(x - x.mean(0))"), encoding="utf-8")
    settings = {"lr": "0.2"} if change == "setting" else {}
    _, coupling = _decided(job_file, memory_bytes=2**32 if change == "memory" else None, **settings)
    assert len(trials) > made
    assert (coupling.kind == "separable") is (change != "code")


def test_a_plan_is_not_kept_for_another_limit_of_memory_however_near(job_file, load, trials) -> None:
    """Limits are what somebody allows, to the byte; what a machine has differs a little from boot to boot."""
    first, _ = _decided(job_file, memory_bytes=2.8e9)
    made = len(trials)
    assert _decided(job_file, memory_bytes=2.8e9)[0].chosen == first.chosen
    assert len(trials) == made
    again, _ = _decided(job_file, memory_bytes=2.7e9)
    assert len(trials) > made
    assert (first.chosen.memory_bytes, again.chosen.memory_bytes) == (2_800_000_000, 2_700_000_000)


def test_a_job_without_a_file_is_planned_each_time(job_file, load, trials) -> None:
    """Nobody can compare its code with that of the last time."""
    job, _ = load_job(job_file, {})
    device = resolve_place("cpu", attached_devices())
    for _ in range(2):
        made = len(trials)
        decide(resolve_job(job), device)
        assert len(trials) > made


def test_a_plan_made_under_load_is_not_kept(job_file, load, trials) -> None:
    """Trials beside somebody else's work say little of the machine."""
    load["others"] = 0.5
    found, _ = _decided(job_file)
    assert any(line.startswith("others use 50% of the CPU: times may be several times") for line in found.explanation)
    assert found.chosen.forecast.total_s.high > 4 * found.chosen.forecast.total_s.low
    made = len(trials)
    _decided(job_file)
    assert len(trials) > made


def test_planning_anew_replaces_what_was_kept(job_file, load, trials) -> None:
    """`stoker plan` makes its trials in any case, and training then takes what it found."""
    _decided(job_file)
    made = len(trials)
    job, entry = load_job(job_file, {})
    planned = stoker.plan(job, on="cpu", entry=entry)
    assert len(trials) > made
    made = len(trials)
    found = _decided(job_file)[0].chosen
    assert dataclasses.replace(found, price=None) == dataclasses.replace(planned.chosen, price=None)
    assert len(trials) == made
