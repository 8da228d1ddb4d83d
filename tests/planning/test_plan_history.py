"""A job is planned once for a device: later starts take the plan that was confirmed, while nothing has changed."""

from __future__ import annotations

import dataclasses
import linecache
import sys
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.devices import attached_devices, planned_devices, resolve_place
from stoker.devices.cpu import CpuLoad
from stoker.jobs.job_file import load_job
from stoker.planning import plan_history, plan_ranking
from stoker.planning.decision import decide, most_threads
from stoker.planning.plan_history import keep_decision
from stoker.planning.resolved_job import resolve_job
from stoker.profiling.plan_trial import try_plan
from stoker.records import Estimate

pytestmark = pytest.mark.usefixtures("place")

JOB_FILE = """
import stoker, torch
from torch import nn

class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x)

def job(lr: float = 0.1, batch: int = 16, epochs: float = 1, hidden: int = 0) -> stoker.Job:
    generator = torch.Generator().manual_seed(0)
    data = (torch.rand((64, 8), generator=generator), torch.randint(0, 3, (64,), generator=generator))
    def made():
        model = Model(8, 3)
        model.hidden = hidden  # neither printed nor a weight
        return model

    return stoker.Job(model=made, data=data, loss="cross_entropy", optimizer=stoker.SGD(lr=lr),
                      batch=batch, until=stoker.epochs(epochs))
"""


@pytest.fixture
def job_file(tmp_path, monkeypatch) -> Path:
    """A job in a file, and a cache of its own."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "kept.py"
    path.write_text(JOB_FILE, encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def _few_plans(monkeypatch) -> None:
    """Of each precision one plan is traced and ranked: what is kept does not depend on how many there were."""
    monkeypatch.setattr(plan_ranking, "LEAST_RANKING_S", 0.0)


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


def test_another_learning_rate_or_length_is_not_planned_again(job_file, load, trials) -> None:
    """The plan is the same, and the forecast is this run's."""
    first, _ = _decided(job_file)
    made = len(trials)
    for settings, ratio in (({"lr": "0.2"}, 1), ({"epochs": "3"}, 3)):
        again, _ = _decided(job_file, **settings)
        assert len(trials) == made
        assert again.chosen.plan == first.chosen.plan
        before, now = first.chosen.forecast, again.chosen.forecast
        assert (now.total_updates, now.total_samples) == (ratio * before.total_updates, ratio * before.total_samples)
        assert now.total_s.value == pytest.approx(ratio * before.total_s.value)
        assert sum(f"in {now.total_updates} updates" in line for line in again.explanation) == 1


def test_a_much_longer_run_is_planned_anew(job_file, load, trials) -> None:
    """There more plans pay back their trials."""
    _decided(job_file)
    made = len(trials)
    _decided(job_file, epochs="5")
    assert len(trials) > made


def test_a_compiled_plan_is_kept_for_a_run_that_pays_for_it_again(job_file, load, trials) -> None:
    """Compiling is a part of its forecast; a run of less than half the updates is planned again."""
    first, coupling = _decided(job_file)
    prepared = resolve_job(*load_job(job_file, {}))
    compile_s = Estimate(value=20.0, low=10.0, high=30.0, unit="s", basis="measured here")
    forecast = dataclasses.replace(first.chosen.forecast, compile_s=compile_s)
    compiled = dataclasses.replace(
        first.chosen, plan=dataclasses.replace(first.chosen.plan, compile=True), forecast=forecast
    )
    device = resolve_place("cpu", attached_devices())
    place = planned_devices(device.torch_name, (device,))[0].limited_to(None, most_threads(None))
    keep_decision(prepared, place, dataclasses.replace(first, candidates=(compiled,)), coupling)
    made = len(trials)
    again, _ = _decided(job_file)
    assert (len(trials), again.chosen.plan) == (made, compiled.plan)
    assert again.chosen.forecast.total_s.value == pytest.approx(forecast.total_s.value + 20.0)
    assert any("compiling 20.0 s" in line for line in again.explanation)
    assert not _decided(job_file, epochs="0.25")[0].chosen.plan.compile
    assert len(trials) > made


def test_code_of_a_package_that_is_edited_makes_it_anew(job_file, load, trials, tmp_path, monkeypatch) -> None:
    """It is next to the job's folder, as after `pip install -e`: neither installed nor one of the job's files."""
    library = tmp_path / "elsewhere" / "layers_being_edited.py"
    library.parent.mkdir()
    before, start, rest = JOB_FILE.partition("class Model")
    model, made, after = rest.partition("def job")
    folder = tmp_path / "jobs"
    folder.mkdir()
    path = folder / "job.py"
    path.write_text(before + "from layers_being_edited import Model\n\n" + made + after, encoding="utf-8")
    monkeypatch.syspath_prepend(str(library.parent))
    for line, is_kept in (("", False), ("# a comment\n", True), ("        x = x * 1\n", False)):
        edited = model.replace("        return", f"{line}        return")
        library.write_text(before + start + edited, encoding="utf-8")
        linecache.clearcache()
        monkeypatch.delitem(sys.modules, "layers_being_edited", raising=False)
        made = len(trials)
        _decided(path)
        assert (len(trials) == made) is is_kept, line


def test_whatever_the_plan_rests_on_makes_it_anew(job_file, load, trials) -> None:
    """A setting; the model's code, though its first weights are the same; the memory that may be used."""
    _decided(job_file)
    for changed in ({"batch": "8"}, {"hidden": "1"}, {"memory_bytes": 2**32}):
        made = len(trials)
        _, coupling = _decided(job_file, **changed)
        assert len(trials) > made, changed
        assert coupling.kind == "separable"
    job_file.write_text(JOB_FILE.replace("super().forward(x)", "super().forward(x - x.mean(0))"), encoding="utf-8")
    made = len(trials)
    _, coupling = _decided(job_file)
    assert len(trials) > made
    assert coupling.kind != "separable"


def test_a_plan_is_not_kept_for_another_limit_of_memory_however_near(job_file, load, trials) -> None:
    """Limits are what somebody allows, to the byte; what a machine has differs a little from boot to boot."""
    first, _ = _decided(job_file, memory_bytes=2.8e9)
    made = len(trials)
    assert _decided(job_file, memory_bytes=2.8e9)[0].chosen == first.chosen
    assert len(trials) == made
    again, _ = _decided(job_file, memory_bytes=2.7e9)
    assert len(trials) > made
    assert (first.chosen.memory_bytes, again.chosen.memory_bytes) == (2_800_000_000, 2_700_000_000)


def _notebook(cell: str, **settings: float) -> stoker.Job:
    """The job of a cell whose functions are Python's alone, as in a notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(cell, names)  # noqa: S102 - as IPython does
    job: stoker.Job = names["job"](**settings)
    return job


def test_a_job_of_a_notebook_is_planned_again_where_its_code_changed(load, trials, tmp_path, monkeypatch) -> None:
    """The code is followed by name, so that a function that a model calls counts; the learning rate does not."""
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "cache"))
    cell = JOB_FILE.replace("super().forward(x)", "centred(super().forward(x))")
    cell += "\ndef centred(x):\n    return x - x.mean(1, keepdim=True)\n"
    device = resolve_place("cpu", attached_devices())
    decide(resolve_job(_notebook(cell)), device)
    made = len(trials)
    for settings in ({"lr": 0.3}, {"epochs": 2.0}):
        decide(resolve_job(_notebook(cell, **settings)), device)
        assert len(trials) == made
    for old, new in (("centred(super().forward(x))", "centred(super().forward(2 * x))"), ("mean(1", "mean(0")):
        made = len(trials)
        decide(resolve_job(_notebook(cell.replace(old, new))), device)
        assert len(trials) > made, new


def test_a_plan_made_under_load_is_kept_for_a_day(job_file, load, trials, monkeypatch) -> None:
    """With an interval that is wider; the next start says so, and does not give up threads for it."""
    load["others"] = 0.5
    found, _ = _decided(job_file)
    assert any(line.startswith("others use 50% of the CPU: times may be several times") for line in found.explanation)
    assert found.chosen.forecast.total_s.high > 4 * found.chosen.forecast.total_s.low
    made = len(trials)
    again, _ = _decided(job_file)
    assert len(trials) == made
    assert again.chosen == found.chosen
    assert again.others_share == 0
    assert "Others used 50% of the CPU then" in again.explanation[-1]
    assert not any(line.startswith("others use") for line in again.explanation)
    monkeypatch.setattr(plan_history, "_UNDER_LOAD_S", -1.0)
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
