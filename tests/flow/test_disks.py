"""Disks that are full, read-only or out of bounds: what is said, what is kept, and how the same command goes on."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stoker
from stoker.errors import BadRun
from stoker.records import Event
from stoker.store import CheckpointStore
from stoker.testing import FaultyDisk
from tests.flow.builders import Heard, assert_equal_weights, blobs_job, stopped_run
from tests.flow.command import job_file, plan_file, stoker_here


@pytest.mark.slow
def test_a_disk_that_fills_up_while_training_keeps_the_checkpoint_before() -> None:
    """Exit code 4 with how much is free and needed; with space again the same command ends at the same weights."""
    job_file()
    plan = plan_file()
    with FaultyDisk.full(Path.cwd(), after_bytes=60_000):
        outcome = stoker_here("train", "blobs.py", "--plan", plan, "--checkpoint-every", "0.001", "--json")
    assert outcome.code == 4
    assert "the disk is full (free: " in outcome.err
    assert "needed: " in outcome.err
    assert "run the same command again" in outcome.err
    assert "Traceback" not in outcome.err
    run = stoker.load("latest")
    found = CheckpointStore(run.directory.checkpoints).newest()
    assert found is not None
    again = stoker_here("train", "blobs.py", "--plan", plan, "--json")
    assert again.code == 0
    assert again.of("resumed")[0]["samples"] == found[1].position.samples
    whole = stoker_here("train", "blobs.py", "--plan", plan, "--new", "--json")
    assert_equal_weights(stoker.load(run.name), stoker.load(whole.of("finished")[0]["run"]))


@pytest.mark.parametrize("room", [0, 2_000, 8_000, 20_000])
def test_a_disk_that_is_full_from_the_start_leaves_no_run_or_one_that_goes_on(room: int) -> None:
    """However little fits: in words, with an exit code, and what is there is nothing or a run that can be continued."""
    job_file()
    plan = plan_file()
    with FaultyDisk.full(Path.cwd(), after_bytes=room):
        outcome = stoker_here("train", "blobs.py", "--plan", plan)
    assert outcome.code in {2, 4}
    assert "the disk is full" in outcome.err
    assert "Traceback" not in outcome.err
    left = list(Path("runs").iterdir()) if Path("runs").exists() else []
    assert all(CheckpointStore(path / "checkpoints").newest() is not None for path in left)
    assert stoker_here("train", "blobs.py", "--plan", plan).code == 0
    assert [path.name for path in Path("runs").iterdir()] == [stoker.load("latest").name]


def test_a_read_only_disk_is_refused_before_anything_is_made() -> None:
    """Exit code 2 and where else to go; likewise for a run that is to be continued."""
    job_file()
    plan = plan_file()
    with FaultyDisk.read_only(Path.cwd()):
        outcome = stoker_here("train", "blobs.py", "--plan", plan)
    assert outcome.code == 2
    assert "the file system is read-only" in outcome.err
    assert "--run-dir" in outcome.err
    assert not Path("runs").exists()
    run = stopped_run(blobs_job())
    with FaultyDisk.read_only(Path.cwd()), pytest.raises(BadRun, match="the file system is read-only"):
        stoker.train(blobs_job())
    assert stoker.train(blobs_job()).name == run.name


def test_a_cache_that_cannot_be_written_does_not_cost_a_finished_run() -> None:
    """What the next plan would have learned is not worth it: a warning, and exit code 0."""
    job_file()
    Path("cache").write_text("a file where a directory should be")
    outcome = stoker_here("train", "blobs.py", "--plan", plan_file(), "--json")
    assert outcome.code == 0
    assert "the next plan" in outcome.of("warned")[-1]["message"]
    run = stoker.load("latest")
    assert run.status == "finished"
    assert run.report_path.is_file()
    assert outcome.of("finished")[0]["run"] == run.name


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB, where mounting one is allowed."""
    if shutil.which("mount") is None:
        pytest.skip("there is no `mount` here")
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_real_disk_that_is_full(small_disk: Path) -> None:
    """As with the fake one: exit code 4, and after making room the same command ends; its report alone is too large."""
    job_file()
    plan, ballast = plan_file(), small_disk / "ballast"
    ballast.write_bytes(bytes(46 * 4096))
    arguments = ["train", "blobs.py", "--plan", plan, "--run-dir", small_disk / "run", "--checkpoint-every", "0.001"]
    outcome = stoker_here(*arguments)
    assert (outcome.code, "error: Cannot write" in outcome.err, "the disk is full" in outcome.err) == (4, True, True)
    ballast.unlink()
    again = stoker_here(*arguments)
    assert (again.code, "the report (`stoker report" in again.err) == (0, True)


def test_a_real_disk_that_is_read_only(small_disk: Path) -> None:
    """Root is refused there too."""
    job_file()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    outcome = stoker_here("train", "blobs.py", "--plan", plan_file(), "--run-dir", small_disk / "run")
    assert (outcome.code, "the file system is read-only" in outcome.err) == (2, True)
    assert list(small_disk.iterdir()) == []


def test_a_library_that_cannot_write_fails_in_words_as_well() -> None:
    """Weights are written by safetensors, which knows nothing of our errors: here of a limit on the size of files."""
    job_file()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64_000, before[1]))
    try:
        outcome = stoker_here("train", "blobs.py", "--set", "width=4000", "--plan", plan_file())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome.code == 4
    assert "Cannot write checkpoint 000000000080" in outcome.err
    assert "larger than allowed here" in outcome.err
    assert "Traceback" not in outcome.err
    assert list(Path("runs").iterdir()) == []


def _stop_at_once(event: Event) -> None:
    if event.kind == "resumed":
        signal.raise_signal(signal.SIGTERM)


def test_a_damaged_best_checkpoint_is_named_before_training_goes_on() -> None:
    """Not after hours, when the run cannot end without it; restored until then, it does no harm."""

    def same(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(output))

    vars(same)["lower_is_better"] = True
    job, heard = blobs_job(metrics=[same], until=stoker.epochs(6)), Heard()
    first = stopped_run(job, at_samples=240, run_dir="run")
    store = CheckpointStore(first.directory.checkpoints)
    weights = store.directory / store.names()[0] / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])

    def restore(event: Event) -> None:
        heard(event)
        if event.kind == "evaluated":
            weights.write_bytes(content)

    assert stoker.train(job, run_dir="run", sink=restore).status == "finished"
    before = heard.kinds.index("resumed")
    messages = [event.fields["message"] for event in heard[:before] if event.kind == "warned"]
    assert any(f"The best checkpoint, {weights.parent}: model.safetensors has" in text for text in messages)


def test_a_damaged_best_checkpoint_that_is_passed_over_is_the_best_no_more() -> None:
    """The best before it is marked again, and so kept: else the run would end without any best weights."""
    job = blobs_job(metrics=[], until=stoker.epochs(6))
    first = stopped_run(job, at_samples=80, run_dir="run")
    store = CheckpointStore(first.directory.checkpoints)
    shutil.copytree(store.directory, "before")
    stopped_run(job, at_samples=160, run_dir="run")
    for name in store.names():
        weights = store.directory / name / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    for name in CheckpointStore(Path("before")).names():
        shutil.copytree(f"before/{name}", store.directory / name)
    with pytest.raises(BadRun, match=r"000000000160: model\.safetensors has SHA-256"):
        store.best()
    stoker.train(job, run_dir="run", sink=_stop_at_once)
    best = store.best()
    assert best is not None
    assert best[1].position.samples == 80
