"""A run's job made again: from another folder, from a job file that changed, and without its data."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import stoker
from stoker.artifacts import read
from stoker.errors import BadJob
from stoker.store.run_files import STARTED
from stoker.training.run_handle import JOB_COPY
from tests.flow.command import plan_file, stoker_here

POINTS = '''\
from pathlib import Path

from torch import nn

import stoker

TABLE = {table}


def job():
    """A line through points of a table."""
    return stoker.Job(
        model=lambda: nn.Linear(2, 1), data=stoker.data.csv(TABLE, target="y", features=["a", "b"]), batch=16,
        loss=lambda output, target: (output[:, 0] - target) ** 2, optimizer=stoker.SGD(lr=1e-3),
        until=stoker.updates(3),
    )
'''
ELSEWHERE = Path("elsewhere")


@pytest.fixture(params=['"points.csv"', 'str(Path(__file__).parent / "points.csv")'], ids=["by folder", "by file"])
def run(place: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> stoker.Run:
    """A run on a table that its job finds in its own folder; seen from another folder."""
    project = place / "project"
    project.mkdir()
    monkeypatch.chdir(project)
    rows = [f"{i},{i * i % 7},{i / 3}" for i in range(24)]
    Path("points.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    Path("points.py").write_text(POINTS.format(table=request.param))
    ended = stoker_here("train", "points.py", "--plan", plan_file(), "--run-dir", str(place / "it"))
    assert ended.code == 0, ended.err
    (place / ELSEWHERE).mkdir()
    monkeypatch.chdir(place / ELSEWHERE)
    return stoker.load(place / "it")


def test_a_run_is_loaded_and_exported_from_another_folder(run: stoker.Run, place: Path) -> None:
    """Paths in its job mean what they meant when it was started; what is written goes where the caller is."""
    assert sum(p.numel() for p in run.model().parameters()) == 3
    artifact = stoker.export(run, "models/line")
    assert read("models/line").manifest == artifact.manifest
    assert (place / ELSEWHERE / "models" / "line").is_dir()
    assert Path.cwd() == place / ELSEWHERE


def test_a_job_file_that_changed_gives_way_to_the_copy(run: stoker.Run, place: Path) -> None:
    """What was trained is what is loaded."""
    job_file = place / "project" / "points.py"
    job_file.write_text(job_file.read_text().replace("nn.Linear(2, 1)", "nn.Linear(2, 5)"))
    assert sum(p.numel() for p in run.model().parameters()) == 3


def test_data_that_are_gone_are_named_with_the_way_out(run: stoker.Run, place: Path) -> None:
    """A model is made without them; an export takes its examples from them, and says so."""
    shutil.move(place / "project" / "points.csv", place / "points.csv")
    assert sum(p.numel() for p in run.model().parameters()) == 3
    ended = stoker_here("export", str(run.path), "-o", "models/line")
    assert ended.code == 2
    said = " ".join(ended.err.split())
    assert "project/points.csv" in said
    assert "of the data of it's job" in said
    assert "stoker.export(stoker.load('it').model(), OUT, inputs=…)" in said


def test_a_job_that_reads_what_is_gone_says_whose_it_is(run: stoker.Run, place: Path) -> None:
    """With the way out: the weights can be had without."""
    copy = run.path / JOB_COPY / "points.py"
    copy.write_text(copy.read_text().replace("    return", "    open('words.txt')\n    return"))
    with pytest.raises(BadJob, match=r"the job of it cannot be made again: .*words\.txt") as caught:
        run.model()
    assert "stoker.load('it').weights()" in str(caught.value)
    assert set(run.weights()) == {"weight", "bias"}


def test_a_run_that_was_moved_from_its_machine_runs_its_copy_here(run: stoker.Run, place: Path) -> None:
    """A folder that is not there is no place to work in; neither is that of a run without a record of it."""
    shutil.copytree(place / "project", place / ELSEWHERE, dirs_exist_ok=True)
    text = (run.path / STARTED.name).read_text()
    (run.path / STARTED.name).write_text(text.replace("/project", "/gone"))
    shutil.copy(place / ELSEWHERE / "points.csv", run.path / JOB_COPY / "points.csv")
    assert len(run.job().data) == 24
    (run.path / STARTED.name).unlink()
    assert len(run.job().data) == 24
