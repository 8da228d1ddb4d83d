"""Runs that something happens to: what is said, what is kept, and how the same command goes on."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob, BadRun, RunFailed
from stoker.records import Event
from stoker.store import CheckpointStore
from stoker.store.run_files import RUN
from tests.flow.builders import PLAN, Heard, assert_equal_weights, blobs_job, stopped_run
from tests.flow.command import job_file, plan_file, stoker_here

BREAKING = "settings.update(schedule=lambda progress: 1.0 if progress < 0.6 else 1e38)"
"""A change of the job that makes its loss infinite after 160 of 240 samples."""


def test_a_loss_that_breaks_later_fails_the_run_and_keeps_its_checkpoint() -> None:
    """Exit code 4 with the update; the record says what happened, and so does the same command, which tries again."""
    job_file(BREAKING)
    first = stoker_here("train", "blobs.py", "--plan", plan_file(), "--json")
    assert first.code == 4
    assert first.err.startswith("error: ")
    assert "at update 1" in first.err
    assert "Traceback" not in first.err
    assert "learning rate" in first.err
    run = stoker.load("latest")
    assert run.status == "failed"
    assert run.record.failure is not None
    assert run.record.failure in first.err
    found = CheckpointStore(run.directory.checkpoints).newest()
    assert found is not None
    stopped = first.of("stopped")[0]
    assert (stopped["samples"], stopped["reason"]) == (found[1].position.samples, run.record.failure)
    again = stoker_here("train", "blobs.py", "--plan", "plan.json", "--json")
    assert again.code == 4
    message = again.of("warned")[0]["message"]
    assert f"{run.name} failed at {found[1].position.samples} of 240 samples" in message
    assert run.record.failure in message
    assert again.of("resumed")[0]["samples"] == found[1].position.samples


def test_a_run_that_had_failed_and_is_stopped_later_is_no_failure() -> None:
    """It went on past what it failed at, and nothing went wrong since."""
    run = stopped_run(blobs_job())
    run.directory.write(RUN, dataclasses.replace(run.record, status="failed", failure="the disk was full"))
    again = stopped_run(blobs_job())
    assert again.name == run.name
    assert (again.record.status, again.record.failure) == ("unfinished", None)


def test_a_run_that_had_failed_is_unfinished_while_it_goes_on() -> None:
    """A kill leaves the record as it is then, which must not name the earlier failure."""
    run = stopped_run(blobs_job())
    run.directory.write(RUN, dataclasses.replace(run.record, status="failed", failure="the disk was full"))
    seen = []
    stoker.train(blobs_job(), sink=lambda event: seen.append((event.kind, run.directory.read_run())))
    (record,) = [record for kind, record in seen if kind == "resumed"]
    assert (record.status, record.failure) == ("unfinished", None)


def test_a_run_that_fails_before_its_first_checkpoint_leaves_nothing() -> None:
    """There is nothing to continue, and nothing to clear away by hand."""

    def sink(event: Event) -> None:
        if event.kind == "progress":
            raise ValueError("nobody listens")

    with pytest.raises(RunFailed, match="nobody listens"):
        stoker.train(blobs_job(), plan=PLAN, sink=sink)
    assert list(Path("runs").iterdir()) == []


def test_an_error_of_the_users_code_while_training_names_its_line() -> None:
    """The run is failed, the exit code 4, and what was saved is there."""
    job_file("settings.update(schedule=lambda progress: {}['worn out'] if progress > 0.6 else 1.0)")
    outcome = stoker_here("train", "blobs.py", "--plan", plan_file())
    assert outcome.code == 4
    assert "training raised KeyError (blobs.py, line " in outcome.err
    assert "worn out" in outcome.err
    assert "Traceback" not in outcome.err
    assert stoker.load("latest").status == "failed"


class Singular(nn.Linear):
    """A model whose mistake shows deep within another package."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        np.linalg.inv(np.zeros((2, 2)))
        return super().forward(inputs)


def test_an_error_in_a_job_made_in_python_names_the_callers_own_line() -> None:
    """Not that of the package in which it was raised, nor one of ours."""
    with pytest.raises(BadJob, match=r"LinAlgError \(test_failures\.py, line \d+: `np\.linalg\.inv\("):
        stoker.train(blobs_job(model=lambda: Singular(6, 2)), plan=PLAN)


def test_packages_installed_beside_a_job_file_are_not_the_users_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a virtual environment in the same folder, the line of the job file is named all the same."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    package = Path(".venv/lib/python3/site-packages/deep.py")
    package.parent.mkdir(parents=True)
    package.write_text("def fail():\n    raise OverflowError('too deep')\n")
    job_file(
        "sys.path.insert(0, '.venv/lib/python3/site-packages')\nimport deep\n"
        "settings.update(schedule=lambda progress: deep.fail())",
        head="import sys\n",
    )
    outcome = stoker_here("train", "blobs.py", "--plan", plan_file())
    assert outcome.code == 2
    assert "OverflowError (blobs.py, line " in outcome.err
    assert "deep.fail()" in outcome.err
    del sys.modules["deep"]


def checkpoints_of(run: stoker.Run) -> list[Path]:
    """The run's checkpoints, oldest first."""
    return [run.directory.checkpoints / name for name in CheckpointStore(run.directory.checkpoints).names()]


def truncate(path: Path) -> None:
    """Cut a file in half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_truncated_checkpoint_is_passed_over_with_a_warning() -> None:
    """Training goes on from the one before it, to the same weights."""
    run = stopped_run(blobs_job(), at_samples=160, checkpoint_every=stoker.seconds(1e-6))
    older, newest = checkpoints_of(run)[-2:]
    truncate(newest / "model.safetensors")
    heard = Heard()
    done = stoker.train(blobs_job(), sink=heard)
    (told,) = [fields["message"] for fields in heard.of("warned") if "bytes" in fields["message"]]
    assert f"checkpoint {newest.name}: model.safetensors has " in told
    assert f"using {older.name}" in told
    assert heard.of("resumed")[0]["samples"] == int(older.name)
    assert done.name == run.name
    assert_equal_weights(done, stoker.train(blobs_job(), plan=PLAN, new=True))


def test_a_flipped_bit_in_a_checkpoint_is_seen() -> None:
    """Its digest differs; size and format do not tell."""
    run = stopped_run(blobs_job(), at_samples=160)
    path = checkpoints_of(run)[-1] / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    heard = Heard()
    stoker.train(blobs_job(), sink=heard)
    assert any("SHA-256" in fields["message"] for fields in heard.of("warned"))


def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_left_as_it_is() -> None:
    """It does not silently start over: exit code 2, each one named, and the way out."""
    job_file()
    plan = plan_file()
    assert stoker_here("train", "blobs.py", "--plan", plan).code == 0
    run = stoker.load("latest")
    mark_unfinished(run)
    for path in checkpoints_of(run):
        truncate(path / "manifest.json")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    outcome = stoker_here("train", "blobs.py", "--plan", plan)
    assert outcome.code == 2
    assert "No checkpoint in" in outcome.err
    assert outcome.err.count("manifest.json cannot be used") == len(checkpoints_of(run))
    assert "--new" in outcome.err
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def mark_unfinished(run: stoker.Run) -> None:
    """As if it had been killed before it was finished."""
    path = run.path / "run.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | {"status": "unfinished"}))


def test_a_checkpoint_of_another_job_is_refused() -> None:
    """A directory put there by hand: its manifest says which job it is of."""
    run = stopped_run(blobs_job())
    other = stopped_run(blobs_job(model=lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 2))))
    shutil.rmtree(run.directory.checkpoints)
    shutil.copytree(other.directory.checkpoints, run.directory.checkpoints)
    with pytest.raises(BadRun, match=r"manifest\.json is of another job"):
        stoker.train(blobs_job())
    assert stoker.load(run.name).record == run.record


@pytest.mark.parametrize("name", ["manifest.json", "run.json", "plan.json"])
def test_records_of_another_version_are_refused(name: str) -> None:
    """Which file, its version and the one that is read; nothing is changed."""
    run = stopped_run(blobs_job())
    folder = checkpoints_of(run)[-1] if name == "manifest.json" else run.path
    path = folder / name
    path.write_text(path.read_text().replace('"schema": 1', '"schema": 2', 1))
    before = path.read_bytes()
    with pytest.raises(BadRun, match="schema version 2, this Stoker reads version 1") as caught:
        stoker.train(blobs_job())
    assert name in caught.value.message
    assert caught.value.remedy is not None
    assert path.read_bytes() == before


def test_a_run_that_lost_its_plan_is_refused() -> None:
    """Without it an exact resume is impossible."""
    run = stopped_run(blobs_job())
    (run.path / "plan.json").unlink()
    with pytest.raises(BadRun, match="has lost its plan"):
        stoker.train(blobs_job())


def test_a_report_that_cannot_be_drawn_does_not_cost_a_finished_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights and metrics are kept, the warning says how to write it later."""

    def broken(*_: object, **__: object) -> str:
        raise ZeroDivisionError("no axis")

    heard = Heard()
    with monkeypatch.context() as patched:
        patched.setattr("stoker.reporting.run_page.render_html", broken)
        run = stoker.train(blobs_job(), plan=PLAN, sink=heard)
    assert run.status == "finished"
    assert run.weights()
    assert f"`stoker report {run.path}` writes it later" in heard.of("warned")[-1]["message"]
    assert "no axis" in heard.of("warned")[-1]["message"]
    assert stoker.report(run.name).is_file()


def test_what_a_finished_run_teaches_the_next_plan_is_kept() -> None:
    """Total time and peak memory, forecast and measured; of a run in several pieces nothing."""
    path = Path("cache/calibration/calibrations.jsonl")
    stopped_run(blobs_job())
    stoker.train(blobs_job())
    assert not path.exists()
    run = stoker.train(blobs_job(), plan=PLAN)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["run"], line["quantity"]) for line in lines] == [(run.name, "total_s"), (run.name, "peak_bytes")]
    assert lines[0]["measured"] == pytest.approx(run.record.wall_s)
    assert lines[1]["measured"] > 50 * 2**20  # a process with torch in it


def nan_at_first(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A metric that is NaN until the model is sure of something."""
    sure = (output.softmax(1).max(1).values > 0.9).float()
    return (output.argmax(1) == target).float() * torch.where(sure.sum() > 0, 1.0, math.nan)


def test_a_metric_that_is_nan_neither_ends_the_search_for_the_best_nor_the_run() -> None:
    """Not after a resume either: JSON has no NaN, the record of the best has."""
    job = blobs_job(metrics=[nan_at_first], until=stoker.epochs(12), test=None)
    run = stopped_run(job, at_samples=80)
    heard = Heard()
    done = stoker.train(job, sink=heard)
    assert done.name == run.name
    assert math.isfinite(done.metrics["valid/nan_at_first"])
    assert any(fields["best"] for fields in heard.of("evaluated", split="valid"))


def test_targets_that_count_nothing_in_the_test_set_fail_at_its_evaluation() -> None:
    """In words; the trained weights are in the last checkpoint."""
    inputs, target = torch.zeros(8, 6), torch.full((8,), -100)
    with pytest.raises(RunFailed, match="loss counted nothing in 8 samples"):
        stoker.train(blobs_job(test=(inputs, target)), plan=PLAN)
    found = CheckpointStore(stoker.load("latest").directory.checkpoints).newest()
    assert found is not None
    assert found[1].position.samples == 240


def test_test_data_that_do_not_fit_the_model_are_refused_before_training() -> None:
    """Hours of training must not end there."""
    with pytest.raises(BadJob, match="shapes cannot be multiplied"):
        stoker.train(blobs_job(test=(torch.zeros(8, 5), torch.zeros(8, dtype=torch.long))), plan=PLAN)
    with pytest.raises(BadJob, match="labels go from 2 to 2"):
        stoker.train(blobs_job(test=(torch.zeros(8, 6), torch.full((8,), 2))), plan=PLAN)
    assert not Path("runs").exists()


@pytest.mark.slow
def test_a_run_with_workers_that_is_stopped_leaves_nothing_among_the_temporary_files(tmp_path: Path) -> None:
    """Neither of its own nor of its workers, after SIGTERM to all of them, as a service manager sends it."""
    path = job_file(
        'settings["data"] = torch.utils.data.Subset(torch.utils.data.TensorDataset(inputs, target), range(100))'
    )
    plan = plan_file()
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"loader": "workers", "num_workers": 2}))
    place = tmp_path / "temporary"
    place.mkdir()
    with subprocess.Popen(
        [sys.executable, "-m", "stoker", "train", path, "--set", "epochs=500", "--plan", plan, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(place)},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "evaluated":
                break
        os.killpg(process.pid, signal.SIGTERM)
        process.stdout.read()
    assert process.returncode == 130
    assert [one.name for one in place.iterdir() if not one.name.startswith("torchinductor_")] == []
