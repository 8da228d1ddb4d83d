"""Runs on a real Slurm of two nodes, which these tests start on this machine; `make test-places`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import PlaceFailed, PlaceUnreachable
from stoker.launching import launcher_of, parse_target, slurm
from stoker.launching.at_place import LIMIT_OVER
from stoker.launching.bundle import Bundle, TreeFile, stoker_bundle
from stoker.launching.launch import LaunchedRun, launch
from stoker.launching.launch_options import LaunchOptions
from stoker.launching.launcher import Request, Submission
from stoker.records import Layout, Plan, dumps
from stoker.records.launch import ENDED, LaunchState
from stoker.store import RunDirectory
from stoker.testing import LiveLauncherConformance
from tests.places.slurm_cluster import NODES, SlurmCluster, missing

pytestmark = [pytest.mark.places, pytest.mark.skipif(bool(missing()), reason=missing())]

JOB = '''
from torch import nn

import stoker


def job(epochs: float = 4) -> stoker.Job:
    """A small network on digits."""
    train, test = stoker.data.digits()
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10)),
        data=train, valid=stoker.holdout(0.1), test=test, loss="cross_entropy", metrics=["accuracy"],
        optimizer=stoker.AdamW(lr=1e-3), batch=64, until=stoker.epochs(epochs),
    )
'''
LAUNCHER = launcher_of("slurm")
_LONGEST_S = 300.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    """The cluster, in a directory with a path that sockets can have."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        started = SlurmCluster(Path(folder) / "c")
        started.start()
        try:
            yield started
        finally:
            started.stop()


@pytest.fixture
def folder(cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a job file, in which commands find the cluster; nothing is left in the queue behind a test."""
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    yield tmp_path
    cluster.run("scancel", "--full", "--user", str(os.getuid()))
    cluster.wait_for(lambda: not cluster.run("squeue", "-h"), "empty queue")


def started(
    folder: Path, on: str, *, epochs: float = 4, name: str = "run", limit_s: float = 600.0, **place: str
) -> LaunchedRun:
    """A run that was started."""
    plan = folder / "plan.json"  # pinned: no time goes into trials, and runs can be compared bit for bit
    nodes, each = parse_target(on).num_nodes, parse_target(on).devices_each
    layout = Layout(replicas=nodes * each)
    plan.write_text(dumps(Plan(device="cpu", micro_batch=64 // layout.replicas, threads=1, layout=layout)))
    options = LaunchOptions(
        run_dir=folder / "runs" / name,
        env=sys.executable,
        time_limit_s=limit_s,
        secrets=("STOKER_TEST_VALUE",),
        plan=plan,
        place={"root": str(folder / "root"), **place},
    )
    os.environ["STOKER_TEST_VALUE"] = "secret-value"
    return launch(folder / "job.py", on=on, settings={"epochs": str(epochs)}, options=options)


def wait(run: LaunchedRun, holds: Callable[[LaunchState], bool], what: str) -> LaunchState:
    """Wait for a state of the run."""
    deadline = time.monotonic() + _LONGEST_S
    while True:
        state = LAUNCHER.state(run.launch.handle)
        if holds(state):
            return state
        if state.phase in ENDED or time.monotonic() > deadline:
            logs = [path.read_text()[-2000:] for path in Path(run.launch.handle["directory"]).glob("launch/*.log")]
            raise AssertionError(f"no {what}: {state}\n{logs}")
        time.sleep(0.2)


def trains(run: LaunchedRun, samples: int = 0, restarts: int = 0) -> Callable[[LaunchState], bool]:
    """Whether the run has passed a number of samples, in that start."""

    def holds(state: LaunchState) -> bool:
        reached = [event["fields"]["samples"] for event in events(run) if event["kind"] == "progress"]
        return state.phase == "running" and state.restarts == restarts and bool(reached) and max(reached) > samples

    return holds


def events(run: LaunchedRun) -> list[dict[str, Any]]:
    """The run's events as the launcher brings them."""
    return [json.loads(line) for line in LAUNCHER.events(run.launch.handle, 0).split(b"\n")[:-1]]


def weights(run: LaunchedRun) -> bytes:
    """The final weights there."""
    return Path(run.launch.handle["directory"], "model.safetensors").read_bytes()


def secrets_of(folder: Path) -> list[Path]:
    """Files of secrets that are left."""
    return list((folder / "root" / "secrets").glob("*"))


class TestLive(LiveLauncherConformance):
    """What every launcher has to do at a place that answers."""

    launcher = LAUNCHER

    @contextmanager
    def place(self, folder: Path) -> Iterator[Submission]:
        """A cluster of its own, and a job of minutes."""
        with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as short, pytest.MonkeyPatch.context() as patch:
            own = SlurmCluster(Path(short) / "c")
            try:
                own.start()
                patch.setenv("SLURM_CONF", own.environ["SLURM_CONF"])
                yield Submission(
                    run="job-1a2b3c",
                    target=LAUNCHER.parse("low/cpu"),
                    stoker=stoker_bundle(),
                    job_file="job.py",
                    code=Bundle(kind="code", name="job.py", files=(TreeFile.of_bytes("job.py", JOB.encode()),)),
                    arguments=("--set", "epochs=20000", "--threads", "1"),
                    environment=sys.executable,
                    options={"root": str(folder / "root"), "cpus": "1"},
                )
            finally:
                own.stop()

    def until(self, handle: dict[str, Any], *phases: str) -> Iterator[LaunchState]:
        """States, some times a second."""
        end = time.monotonic() + _LONGEST_S
        while time.monotonic() < end:
            state = LAUNCHER.state(handle)
            yield state
            if state.phase in phases:
                return
            time.sleep(0.3)
        raise AssertionError(f"no phase of {phases} in {_LONGEST_S:g} s")


def test_a_run_of_two_nodes_trains_and_comes_home(folder: Path) -> None:
    """Ranks of two nodes meet, the log comes by offset, the directory comes home whole and without the secret."""
    run = started(folder, "slurm:low/2x1xcpu", cpus="1")
    state = wait(run, lambda state: state.phase == "finished", "end")
    assert (state.exit_code, state.restarts) == (0, 0)
    log = LAUNCHER.events(run.launch.handle, 0)
    assert LAUNCHER.events(run.launch.handle, len(log) - 10) == log[-10:]
    assert [event["kind"] for event in events(run)][-1] == "finished"
    home = folder / "home"
    LAUNCHER.fetch(run.launch.handle, home)
    assert RunDirectory(home).read_run().status == "finished"
    assert not [path for path in home.rglob("*") if path.is_file() and b"secret-value" in path.read_bytes()]
    assert not secrets_of(folder)


def test_a_preempted_run_is_requeued_and_ends_with_the_same_weights(cluster: SlurmCluster, folder: Path) -> None:
    """A job of a higher partition takes the nodes: saved, requeued, resumed, bit-equal to a run that was left alone."""
    whole = started(folder, "slurm:high/cpu", epochs=100, name="whole", cpus="1")
    wait(whole, lambda state: state.phase == "finished", "end")
    run = started(folder, "slurm:low/cpu", epochs=100, name="broken", cpus="1")
    wait(run, trains(run, 2000), "training")
    cluster.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    requeued = wait(run, lambda state: state.phase == "requeued", "requeue")
    assert requeued.restarts == 1
    assert "Restarts=1" in requeued.evidence
    wait(run, lambda state: state.phase == "finished" and state.restarts == 1, "end")
    assert any(event["kind"] == "resumed" and event["fields"]["samples"] > 0 for event in events(run))
    assert weights(run) == weights(whole)


def test_a_run_whose_rank_is_killed_is_requeued(folder: Path) -> None:
    """As where the host has no memory left: Slurm starts the run again, which it would not do by itself."""
    run = started(folder, "slurm:low/cpu", epochs=100, cpus="1")
    wait(run, trains(run, 2000), "training")
    directory = run.launch.handle["directory"]
    found = subprocess.run(["pgrep", "-f", f"stoker train .*{directory}"], capture_output=True, text=True, check=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    wait(run, lambda state: state.phase == "requeued", "requeue")
    host = json.loads(Path(directory, "launch", "host-0.json").read_text())
    assert (host["phase"], host["why"]) == ("requeued", "a rank was ended by SIGKILL")
    state = wait(run, lambda state: state.phase == "finished", "end")
    assert (state.exit_code, state.restarts) == (0, 1)


def test_a_stopped_run_saves_leaves_nothing_and_goes_on_by_the_same_command(folder: Path) -> None:
    """It is not requeued; started again it continues where it had saved."""
    run = started(folder, "slurm:low/cpu", epochs=3000, cpus="1")
    wait(run, trains(run, 2000), "training")
    LAUNCHER.stop(run.launch.handle)
    state = wait(run, lambda state: state.phase == "stopped", "stop")
    assert (state.exit_code, state.restarts, state.why) == (130, 0, "saved and left, as asked")
    assert not secrets_of(folder)
    again = started(folder, "slurm:low/cpu", epochs=3000, cpus="1")
    assert again.launch.handle["job"] != run.launch.handle["job"]
    wait(again, lambda state: any(event["kind"] == "resumed" for event in events(again)), "resume")


def test_a_run_that_waits_is_stopped_at_once_and_its_name_is_taken(cluster: SlurmCluster, folder: Path) -> None:
    """The same command finds it there; a job of that name from elsewhere is refused; stopping empties the queue."""
    cluster.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 60")
    cluster.wait_for(lambda: cluster.run("squeue", "-h", "-t", "R"), "blocking job")
    run = started(folder, "slurm:low/cpu", cpus="1")
    state = wait(run, lambda state: state.phase == "queued", "queue")
    assert state.why
    assert not started(folder, "slurm:low/cpu", cpus="1").is_new
    other = folder / "other"
    other.mkdir()
    (other / "job.py").write_text(JOB)
    with pytest.raises(PlaceFailed, match="a job named run is in the queue of this machine already"):
        started(other, "slurm:low/cpu", cpus="1")
    LAUNCHER.stop(run.launch.handle)
    assert wait(run, lambda state: state.phase == "stopped", "stop").restarts == 0
    assert not secrets_of(folder)


def test_a_limit_ends_the_run_over_all_its_starts(cluster: SlurmCluster, folder: Path) -> None:
    """A preempted start counts too: the next one saves before the limit, and is not requeued; the command goes on."""
    run = started(folder, "slurm:low/cpu", epochs=20000, limit_s=240.0, cpus="1")
    wait(run, trains(run), "training")
    cluster.run("sbatch", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true")
    wait(run, lambda state: state.phase == "requeued", "requeue")
    state = wait(run, lambda state: state.phase == "stopped", "end")
    assert (state.restarts, state.exit_code) == (1, LIMIT_OVER)
    assert "of 4 min, the limit: saved and left" in state.why
    host = json.loads(Path(run.launch.handle["directory"], "launch", "host-0.json").read_text())
    assert 0 < host["held_s"] < 240
    log = Path(run.launch.handle["directory"], "events.jsonl").read_bytes()  # more than one answer of the launcher
    assert json.loads(log.splitlines()[-1])["kind"] == "stopped"
    assert not secrets_of(folder)
    again = started(folder, "slurm:low/cpu", epochs=20000, cpus="1")
    wait(again, lambda state: any(event["kind"] == "resumed" for event in events(again)), "resume")


def test_scancel_by_hand_is_not_requeued(cluster: SlurmCluster, folder: Path) -> None:
    """A cancelled job ends, and its secrets with it."""
    run = started(folder, "slurm:low/cpu", epochs=3000, cpus="1")
    wait(run, trains(run), "training")
    cluster.run("scancel", run.launch.handle["job"])
    state = wait(run, lambda state: state.phase == "stopped", "end")
    assert (state.restarts, state.why) == (0, "cancelled by scancel")
    assert not secrets_of(folder)


def test_a_job_that_fails_keeps_its_exit_code_and_says_why(folder: Path) -> None:
    """An error of the user's code ends the run: exit code, the error's line, no requeue."""
    (folder / "job.py").write_text(
        JOB.replace("nn.Flatten()", "nn.Flatten() if __import__('os').environ.get('SLURM_JOB_ID') is None else 1 / 0")
    )
    run = started(folder, "slurm:low/cpu", cpus="1")
    state = wait(run, lambda state: state.phase == "failed", "failure")
    assert (state.exit_code, state.restarts) == (2, 0)
    assert "division by zero" in state.evidence


def test_25_time_outs_of_the_controller_leave_a_healthy_run_alone(
    cluster: SlurmCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that hangs is unknown, 25 times; the run goes on training, and is the same one afterwards."""
    run = started(folder, "slurm:low/cpu", epochs=20000, cpus="1")
    wait(run, trains(run), "training")
    monkeypatch.setattr(slurm, "QUESTION_TIMEOUT_S", 0.2)
    cluster.send_signal("slurmctld", signal.SIGSTOP)
    try:
        phases = {LAUNCHER.state(run.launch.handle).phase for _ in range(25)}
    finally:
        cluster.send_signal("slurmctld", signal.SIGCONT)
    monkeypatch.undo()
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    assert phases == {"unknown"}
    reached = max(event["fields"].get("samples", 0) for event in events(run))
    wait(run, trains(run, reached), "training")


def test_offers_have_the_start_that_the_scheduler_estimates(folder: Path) -> None:
    """Partitions that have the GPUs, each with its estimated start; `short` allows a minute, which is too little."""
    assert folder
    offers = LAUNCHER.offers(Request(target=parse_target("slurm:/2x4xa100"), time_limit_s=3600.0))
    assert offers[0].text == "slurm:low/2x4xa100"
    assert {offer.text for offer in offers} == {f"slurm:{name}/2x4xa100" for name in ("low", "high", "short")}
    assert all(offer.starts_in_s is not None and offer.starts_in_s < 60 for offer in offers)
    assert LAUNCHER.offers(Request(target=parse_target("slurm:/5xa100"))) == ()


@pytest.mark.parametrize(
    ("on", "words"),
    [
        ("slurm:lwo/cpu", "there is no partition 'lwo'"),
        ("slurm:low/8xa100", "2 nodes with at most 4 × a100 each; 1 with 8 each are asked for"),
        ("slurm:low/h100", "Partition low has no h100; it has a100"),
        ("slurm:low/3x1xcpu", "has 2 usable nodes; 3 are asked for"),
        ("slurm:low/cpu:constraint=avx1024", "no node has the feature avx1024"),
        ("slurm:me@127.0.0.1:1:low/cpu", "cannot be reached"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(folder: Path, on: str, words: str) -> None:
    """No run here, none there, nothing in the queue."""
    with pytest.raises(PlaceFailed) as refused:
        started(folder, on)
    assert words in refused.value.message
    assert "\n" not in refused.value.message
    assert not list((folder / "root").glob("runs/*"))
    assert not (folder / "runs" / "run").exists()
    assert not secrets_of(folder)


def test_a_cluster_that_is_down_is_named(cluster: SlurmCluster, folder: Path) -> None:
    """Without munge, and without the controller: one sentence each, and nothing is left."""
    cluster.end("munged")
    with pytest.raises(PlaceUnreachable, match="munge, which authenticates, does not answer"):
        started(folder, "slurm:low/cpu")
    cluster.start_munge()
    cluster.end("slurmctld")
    with pytest.raises(PlaceUnreachable, match="slurmctld does not answer"):
        started(folder, "slurm:low/cpu")
    cluster.start_controller()
    cluster.wait_for(cluster.is_idle, "idle nodes")
    assert not (folder / "runs" / "run").exists()
    assert not list((folder / "root").glob("runs/*"))


@pytest.mark.skipif(os.getuid() != 0, reason="a node that sees other folders needs a mount of its own, and so root")
def test_a_folder_that_the_nodes_do_not_see_is_named(cluster: SlurmCluster, folder: Path) -> None:
    """The nodes are asked before anything is sent; and if they could not be, the end of the job says it."""
    hidden = folder / "root"
    hidden.mkdir()
    for node in NODES:
        cluster.end(node)
        cluster.start_node(node, hidden=hidden)
    try:
        cluster.wait_for(cluster.is_idle, "idle nodes")
        with pytest.raises(PlaceFailed, match=r"does not see .*/root: give a folder that the login node and the nodes"):
            started(folder, "slurm:low/cpu", cpus="1")
        assert list(hidden.rglob("*")) == []
    finally:
        for node in NODES:
            cluster.end(node)
            cluster.start_node(node)
        cluster.wait_for(cluster.is_idle, "idle nodes")


@pytest.mark.skipif(bool(missing(accounting=True)), reason=missing(accounting=True))
def test_accounts_are_checked_and_forgotten_jobs_are_looked_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slurmdbd: an account that is not the user's is refused; sacct knows a job after the controller forgot it."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as short:
        accounted = SlurmCluster(Path(short) / "c", min_job_age_s=2, accounting=True)
        try:
            accounted.start()
            monkeypatch.setenv("SLURM_CONF", accounted.environ["SLURM_CONF"])
            with pytest.raises(PlaceFailed, match="the account nosuch may not use partition low on this machine"):
                started(folder, "slurm:low/cpu", account="nosuch")
            assert not list((folder / "root").glob("runs/*"))
            job = accounted.run("sbatch", "--parsable", "-A", "ml", "-o", "/dev/null", "--wrap", "exit 4")
            accounted.wait_for(
                lambda: "JobId" not in accounted.output("scontrol", "show", "job", job), "forgotten job", 120
            )
            handle = {
                "host": "",
                "job": job,
                "directory": str(folder),
                "root": str(folder),
                "run": "x",
                "submitted_at": "",
            }
            state = LAUNCHER.state(handle)
            assert (state.phase, state.exit_code) == ("failed", 4)
            assert "sacct: State=FAILED ExitCode=4:0" in state.evidence
        finally:
            accounted.stop()


def test_the_cluster_leaves_no_process(tmp_path: Path) -> None:
    """What these tests start they end: by their own processes' numbers, and none is left."""
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder:
        other = SlurmCluster(Path(folder) / "c")
        other.start()
        other.stop()
        shown = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        assert str(Path(folder)) not in shown
    assert tmp_path.exists()


def test_the_command_line_follows_the_run_to_its_end_and_brings_it_home(folder: Path) -> None:
    """`stoker train JOB --on slurm:…` as people type it: events on standard output, the run comes home, exit 0."""
    command = [
        sys.executable,
        "-m",
        "stoker",
        "train",
        "job.py",
        "--on",
        "slurm:low/cpu",
        "--set",
        "epochs=4",
        "--env",
        sys.executable,
        "--place-option",
        f"root={folder / 'root'}",
        "--place-option",
        "cpus=1",
        "--time-limit",
        "5min",
        "--run-dir",
        str(folder / "runs" / "typed"),
        "--json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LONGEST_S, check=False)
    assert done.returncode == 0, done.stderr
    kinds = [json.loads(line).get("event") for line in done.stdout.splitlines()]
    assert "finished" in kinds
    assert RunDirectory(folder / "runs" / "typed").read_run().status == "finished"
