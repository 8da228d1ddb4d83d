"""What commit 9013599 wrote (2026-11-22: runs, a plan, an artifact, a study) can still be opened and continued."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker import api
from stoker.artifacts import read
from stoker.engines import load
from stoker.jobs import load_job
from tests.flow.builders import Stopping

WRITTEN = Path(__file__).with_name("written_by_9013599")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy that may be changed, as the working directory."""
    shutil.copytree(WRITTEN, tmp_path / "written")
    monkeypatch.chdir(tmp_path / "written")
    return tmp_path / "written"


def test_a_finished_run_can_be_loaded_and_reported(written: Path) -> None:
    """Its metrics, its weights and its events are read, and a report is made of them."""
    run = stoker.load(written / "finished")
    assert run.status == "finished"
    assert run.metrics["test/accuracy"] == pytest.approx(0.8306, abs=1e-4)
    assert {name: tuple(tensor.shape) for name, tensor in run.weights().items()} == {
        "1.weight": (8, 64),
        "1.bias": (8,),
        "3.weight": (10, 8),
        "3.bias": (10,),
    }
    assert stoker.report(written / "finished").stat().st_size > 100_000


def test_an_unfinished_run_is_continued(written: Path) -> None:
    """The run that was stopped after 256 samples goes on from there, under its own plan."""
    job, entry = load_job(written / "job.py", {"epochs": "6000"})
    heard = Stopping(1)
    run = stoker.train(job, run_dir=written / "unfinished", entry=entry, sink=heard)
    assert heard.of("resumed")[0]["samples"] == 256
    assert run.status == "unfinished"
    assert heard.of("stopped")[0]["samples"] > 256


def test_a_plan_can_be_pinned(written: Path) -> None:
    """`--plan` takes the plan document of that version."""
    job, entry = load_job(written / "job.py", {"epochs": "0.1"})
    run = stoker.train(job, plan=written / "plan.json", run_dir=written / "new", entry=entry, sink=lambda _: None)
    assert run.status == "finished"


def test_an_artifact_answers(written: Path) -> None:
    """The exported model is opened, its files checked, and run."""
    artifact = read(written / "models" / "digits")
    artifact.verify()
    engine = load(artifact)[0]
    answers = engine.run({spec.name: np.zeros((2, 1, 8, 8), np.uint8) for spec in artifact.manifest.inputs})
    assert next(iter(answers.values())).shape == (2, 10)


def test_a_study_is_shown(written: Path) -> None:
    """Its two trials are read from its database."""
    study = api.study(written / "study")
    assert len(study.result.trials) == 2
