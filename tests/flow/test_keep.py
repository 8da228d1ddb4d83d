"""Runs that go on at another machine from where they are kept: other folders stand for other machines."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import stoker
from stoker.records import Layout
from tests.flow.builders import PLAN, Heard, Stopping, assert_equal_weights, blobs_job
from tests.flow.command import Running, job_file, stoker_here, stoker_process
from tests.flow.test_many_processes import LONG, TWO, plan_over


def url(place: Path) -> str:
    """Where runs are kept."""
    return f"file://{place}/bucket"


def test_a_fresh_machine_goes_on_from_the_mirror_to_the_same_bits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same job with `keep`, other folders: found by its name, resumed where it was saved, finished, and kept."""
    job = blobs_job(until=stoker.epochs(8))
    whole = stoker.train(job, plan=PLAN, run_dir="whole", sink=Heard())
    monkeypatch.setenv("STOKER_RUNS", "first")
    stopped = stoker.train(job, plan=PLAN, sink=Stopping(160), keep=url(place))
    monkeypatch.setenv("STOKER_RUNS", "second")
    heard = Heard()
    run = stoker.train(job, plan=PLAN, sink=heard, keep=url(place))
    assert run.path.parent.name == "second"
    assert run.name == stopped.name
    assert heard.of("resumed")[0]["samples"] == stopped.record.samples
    assert_equal_weights(run, whole)
    assert run.metrics == whole.metrics
    monkeypatch.setenv("STOKER_RUNS", "third")
    again = stoker.train(job, plan=PLAN, sink=Heard(), keep=url(place))
    assert again.name == f"{run.name}-2", "the first is finished, and known to be"
    assert_equal_weights(stoker.load(run.name), whole)


def test_a_fork_of_a_finished_run_begins_where_that_ended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that has nothing of it: its last checkpoint is fetched; without the URL the way there is named."""
    monkeypatch.setenv("STOKER_RUNS", "first")
    parent = stoker.train(blobs_job(), plan=PLAN, sink=Heard(), keep=url(place))
    monkeypatch.setenv("STOKER_RUNS", "second")
    longer, heard = blobs_job(until=stoker.epochs(5)), Heard()
    fork = stoker.train(longer, plan=PLAN, sink=heard, keep=url(place), fork=parent.name)
    assert heard.of("resumed")[0]["samples"] == parent.record.samples == 240
    assert (fork.record.forked_from, fork.record.samples) == (parent.name, 400)
    monkeypatch.setenv("STOKER_RUNS", "third")
    stoker.train(blobs_job(), plan=PLAN, sink=Stopping(10**6), keep=url(place))  # finished there: its records come
    with pytest.raises(stoker.BadRun, match="no checkpoint to start from") as caught:
        stoker.train(longer, plan=PLAN, sink=Heard(), fork=parent.name)
    assert f"--fork {parent.name} --keep URL" in str(caught.value.remedy)


@pytest.mark.slow
def test_another_layout_goes_on_from_the_mirror() -> None:
    """Two processes on the first machine, killed without warning; one on the second, equal to rounding."""
    path, keep = job_file(LONG), f"file://{Path.cwd()}/bucket"
    arguments: list[str | Path] = ["train", path, "--set", "epochs=200", "--keep", keep, "--run-dir"]
    with Running(*arguments, "a/run", "--on", "2xhere", "--plan", plan_over(TWO), "--checkpoint-every", "0.05") as run:
        run.until("checkpointed", 3)
        while not any(Path("bucket/run/checkpoints").glob("*/manifest.json")):
            assert run.process.poll() is None
        os.killpg(run.process.pid, signal.SIGKILL)
    done = stoker_process(*arguments, "b/run", "--json")
    assert done.code == 0, done.err
    assert done.of("resumed")[0]["samples"] > 0
    assert done.of("replanned")[0]["new"]["layout"]["replicas"] == 1
    assert stoker_here("train", path, "--set", "epochs=200", "--plan", plan_over(Layout()), "--run-dir", "c").code == 0
    weights, expected = stoker.load("b/run").weights(), stoker.load("c").weights()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-3)


def test_a_job_that_changed_is_told_so_at_another_machine(place: Path) -> None:
    """A run directory given by name: what is kept there is of another job, and is not replaced."""
    first = stoker.train(blobs_job(), plan=PLAN, run_dir="a/mine", sink=Stopping(16), keep=url(place))
    assert first.status == "unfinished"
    with pytest.raises(stoker.BadRun, match="another job"):
        stoker.train(blobs_job(seed=5), plan=PLAN, run_dir="b/mine", sink=Heard(), keep=url(place))


def test_a_bucket_that_cannot_be_written_is_said_before_anything_is_spent() -> None:
    """Exit code 2, one sentence, no run."""
    done = stoker_here("train", job_file(), "--keep", "nowhere://bucket")
    assert done.code == 2
    assert "--keep nowhere://bucket" in done.err
    assert not Path("runs").exists()
