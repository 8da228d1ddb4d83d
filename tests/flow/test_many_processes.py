"""A run on several processes: the same job file, the same result, whichever process is lost on the way."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import stoker
from stoker.devices import attached_devices, planned_devices
from stoker.errors import BadJob, NoDevice
from stoker.records import Layout, dumps
from stoker.training import train
from tests.flow.builders import PLAN, blobs_job
from tests.flow.command import Outcome, Running, job_file, stoker_process
from tests.forked import Forked

TWO = Layout(replicas=2)

LONG = "settings['evaluation'] = stoker.Evaluation(every=stoker.epochs(50))"
"""For runs that are cut into: few evaluations, so that most of the time is updates."""


def plan_over(layout: Layout, name: str = "plan.json") -> Path:
    """A file with PLAN in this layout."""
    path = Path(name)
    path.write_text(dumps(dataclasses.replace(PLAN, layout=layout, loader="memory")))
    return path


def workers_of(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("forks_workers", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_processes_end_where_one_does(*, forks_workers: bool) -> None:
    """The same metrics to rounding; every event once, in order; no process left over."""
    path = job_file()
    one = stoker_process("train", path, "--plan", plan_over(Layout()), "--run-dir", "one", "--json")
    two = stoker_process(
        "train",
        path,
        "--on",
        "2xhere",
        "--plan",
        plan_over(TWO),
        "--run-dir",
        "two",
        "--json",
        forks_workers=forks_workers,
    )
    assert (one.code, two.code) == (0, 0), two.err
    alone, together = stoker.load("one"), stoker.load("two")
    for name, value in alone.metrics.items():
        assert together.metrics[name] == pytest.approx(value, abs=1e-5)
    assert together.record.samples == alone.record.samples
    kinds = [event["event"] for event in two.events]
    assert (kinds[0], kinds[-1], kinds.count("started")) == ("planned", "finished", 1)
    logged = [event.kind for event in together.directory.read_events()]
    assert logged == kinds
    assert together.weights().keys() == alone.weights().keys()


def test_a_run_goes_on_when_a_process_is_killed() -> None:
    """SIGKILL of the second process, or of the first: the run says so, and ends by itself with every sample once."""
    path = job_file(LONG)
    plan = plan_over(TWO)
    for number in (0, 1):
        name = f"killed{number}"
        settings = ("--set", "epochs=40", "--on", "2xhere", "--plan", plan, "--run-dir", name)
        with Running("train", path, *settings) as run:
            run.until("progress")  # of the first update
            os.kill(workers_of(run.process.pid)[number], signal.SIGKILL)
            ended = run.end()
        assert ended.code == 0, ended.err
        assert any(
            f"process {number} (rank" in one["message"] and "SIGKILL" in one["message"] for one in ended.of("warned")
        )
        assert ended.of("recovered")
        record = stoker.load(name).record
        assert (record.status, record.samples) == ("finished", 40 * 80)
        progress = [event["samples"] for event in ended.of("progress")]
        assert progress == sorted(progress)


@pytest.mark.slow  # half a minute of standing still
def test_a_stall_is_not_a_death() -> None:
    """A process of two shards stands still for half a minute: it is named, and all go on from where they were."""
    path, plan = job_file(LONG), plan_over(Layout(shards=2))
    settings = ("--set", "epochs=1e5", "--on", "2xhere", "--plan", plan, "--run-dir", "run")
    with Running("train", path, *settings) as run:
        run.until("progress", 2)
        stalled = workers_of(run.process.pid)[1]
        os.kill(stalled, signal.SIGSTOP)
        assert "the others wait for it" in run.until("warned")["message"]
        time.sleep(25)
        os.kill(stalled, signal.SIGCONT)
        assert "is back after" in run.until("warned")["message"]
        run.until("progress", 2)
        assert stalled in workers_of(run.process.pid)
        ended = run.end(signal.SIGINT)
    assert ended.code == 130, ended.err
    assert not ended.of("recovered")
    assert not ended.of("resumed")
    progress = [event["samples"] for event in ended.of("progress")]
    assert progress == sorted(progress)


SITES = f"{LONG}\nsettings['sync'] = stoker.DiLoCo(every=stoker.updates(10), outer=stoker.SGD(lr=0.7))"


@pytest.mark.slow
def test_a_lost_site_does_not_send_the_others_back() -> None:
    """SIGKILL of the first of three sites: the others go on from what they hold, and it joins them again."""
    path, plan = job_file(SITES), plan_over(Layout(replicas=3))
    settings = ("--set", "epochs=1e5", "--on", "3xhere", "--plan", plan, "--run-dir", "run")
    with Running("train", path, *settings) as run:
        reached = run.until("progress", 2)["samples"]
        os.kill(workers_of(run.process.pid)[0], signal.SIGKILL)
        assert run.until("recovered", 2)["samples"] >= reached  # two go on, and then three again
        run.until("progress", 2)
        ended = run.end(signal.SIGINT)
    assert ended.code == 130, ended.err
    assert not ended.of("resumed")
    assert len(ended.of("started")) == 1
    progress = [event["samples"] for event in ended.of("progress")]
    assert progress == sorted(progress)
    assert [change["new"]["layout"]["replicas"] for change in ended.of("replanned")] == [2, 3]
    assert stoker.load("run").record.samples >= progress[-1]


@pytest.mark.slow
def test_an_interrupt_stops_all_and_the_same_command_goes_on() -> None:
    """One interrupt: all processes save and leave; then one process alone may go on from the checkpoint of two."""
    path, plan = job_file(LONG), plan_over(TWO)
    settings = ("train", path, "--set", "epochs=100", "--on", "2xhere", "--plan", plan, "--run-dir", "run")
    with Running(*settings) as run:
        run.until("progress")  # of the first update
        ended = run.end(signal.SIGINT)
    assert ended.code == 130, ended.err
    stopped = stoker.load("run").record
    assert stopped.status == "unfinished"
    assert 0 < stopped.samples < 100 * 80
    again = stoker_process(*settings, "--json")
    assert again.code == 0, again.err
    assert again.of("resumed")[0]["samples"] == stopped.samples
    assert stoker.load("run").record.samples == 100 * 80


NORMS = "settings['model'] = lambda: nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 2))"


@pytest.mark.slow
def test_coupled_samples_of_two_processes_go_on_in_one() -> None:
    """Each took half of a group that batch norm couples; the one that goes on takes all of it in one pass."""
    path = job_file(f"{LONG}\n{NORMS}")
    plan = Path("halves.json")
    plan.write_text(dumps(dataclasses.replace(PLAN, micro_batch=8, layout=TWO)))
    settings = ("train", path, "--set", "epochs=300", "--run-dir", "run")
    with Running(*settings, "--on", "2xhere", "--plan", plan) as run:
        run.until("progress", 2)
        ended = run.end(signal.SIGINT)
    assert ended.code == 130, ended.err
    alone = stoker_process(*settings, "--json")
    assert alone.code == 0, alone.err
    change = alone.of("replanned")[0]  # neighbours may ask for others later, of threads
    assert (change["old"]["micro_batch"], change["new"]["micro_batch"]) == (8, 16)
    assert stoker.load("run").record.samples == 300 * 80


@pytest.mark.slow  # three runs of two processes
def test_batch_norm_in_two_stages_goes_on_after_a_signal() -> None:
    """SIGTERM in the middle, and the same command again: weights and statistics are those of a run not stopped."""
    path, plan = job_file(f"{LONG}\n{NORMS}"), plan_over(Layout(stages=2))
    settings = ("train", path, "--set", "epochs=300", "--on", "2xhere", "--plan", plan, "--run-dir")
    unbroken = stoker_process(*settings, "unbroken", "--json")
    assert unbroken.code == 0, unbroken.err
    with Running(*settings, "stopped") as run:
        run.until("progress", 2)
        ended = run.end(signal.SIGTERM)
    assert ended.code == 130, ended.err
    reached = stoker.load("stopped").record
    assert reached.status == "unfinished"
    assert 0 < reached.samples < 300 * 80
    again = stoker_process(*settings, "stopped", "--json")
    assert again.code == 0, again.err
    assert again.of("resumed")[0]["samples"] == reached.samples
    expected, weights = stoker.load("unbroken").weights(), stoker.load("stopped").weights()
    assert "1.num_batches_tracked" in expected
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def test_a_job_without_a_file_is_refused_before_it_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process makes the job from its file: where there is none, no layout is looked at."""

    def refuse(*_: object) -> None:
        raise AssertionError("it was planned")

    monkeypatch.setattr(train, "decide", refuse)
    with pytest.raises(BadJob, match="2 processes need the job in a file"):
        stoker.train(blobs_job(), on="2xCPU", sink=lambda _: None)
    assert not Path("runs").exists()


def test_more_devices_of_a_name_than_are_attached_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be planned for, but nothing can be trained on what is elsewhere; a name may mean several models."""
    [card] = [place.device for place in planned_devices("a100-80", ())]
    attached = (dataclasses.replace(card, name="cuda:0", index=0), *attached_devices())
    monkeypatch.setattr(train, "attached_devices", lambda: attached)
    for words in ("2xa100-80", "2xa100"):
        with pytest.raises(NoDevice, match=f"'{words}' asks for 2 devices, and fewer of them are attached"):
            stoker.train(blobs_job(), on=words, sink=lambda _: None)


def test_what_cannot_be_is_said_once_before_anything_is_spent() -> None:
    """More processes than samples in a batch."""
    outcome = stoker_process("train", job_file("settings['batch'] = 1"), "--on", "2xhere", "--json")
    assert outcome.code == 2
    assert outcome.err.count("error:") == 1
    assert "batch of 1" in outcome.err
    assert not Path("runs").exists()


CRAMPED = """\
import torch


class Cramped(torch.nn.Linear):
    def forward(self, inputs):
        is_second = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
        if is_second and self.training and torch.is_grad_enabled() and len(inputs) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().forward(inputs)


"""
"""A layer for which more than four samples at once are too many, in one of two processes."""


@pytest.mark.slow
def test_out_of_memory_in_one_process_makes_all_take_smaller_parts() -> None:
    """The processes agree on a smaller micro-batch, say so once, and end where one process does."""
    path = job_file(
        "settings['model'] = lambda: nn.Sequential(Cramped(6, width), nn.ReLU(), nn.Linear(width, 2))", head=CRAMPED
    )
    one = stoker_process("train", path, "--plan", plan_over(Layout()), "--run-dir", "one", "--json")
    two = stoker_process("train", path, "--on", "2xhere", "--plan", plan_over(TWO), "--run-dir", "two", "--json")
    assert (one.code, two.code) == (0, 0), two.err
    (change,) = two.of("replanned")
    assert change["new"]["micro_batch"] <= 4 < change["old"]["micro_batch"]
    assert "memory" in change["why"]
    alone, together = stoker.load("one"), stoker.load("two")
    assert together.record.samples == alone.record.samples
    for name, value in alone.metrics.items():
        assert together.metrics[name] == pytest.approx(value, abs=1e-5)


@pytest.mark.slow  # the start of three interpreters
def test_torchruns_processes_find_each_other() -> None:
    """Started by it, they train one run, logged by one of them, and all leave with exit code 0."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "stoker", "train"]
    done = subprocess.run(
        [sys.executable, *words, str(job_file()), "--plan", str(plan_over(TWO)), "--run-dir", "run", "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    kinds = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert (kinds[0], kinds[-1], kinds.count("finished")) == ("planned", "finished", 1)
    assert stoker.load("run").status == "finished"


LOOPBACK = {"0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"}
"""127.0.0.1, ::1 and ::ffff:127.0.0.1 as Linux writes them on a little-endian machine."""


def listening_on(pid: int) -> list[str]:
    """The addresses on which a process and those that it has started listen, as /proc/net has them."""
    mine = {str(path.readlink()) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    own = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    return own + [address for child in workers_of(pid) for address in listening_on(child)]


@pytest.mark.slow
def test_processes_of_one_machine_listen_on_loopback_alone() -> None:
    """Neither the store where they meet nor the sockets of gloo can be reached from another machine."""
    settings = ("--set", "epochs=1e5", "--on", "2xhere", "--plan", plan_over(TWO), "--run-dir", "run")
    with Running("train", job_file(LONG), *settings) as run:
        run.until("progress", 2)
        addresses = listening_on(run.process.pid)
    assert len(addresses) >= 2  # of each process one at least
    assert set(addresses) <= LOOPBACK


def launched(*paths: Path) -> list[Outcome]:
    """How processes end that a launcher starts, one for each job file."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = {
        "WORLD_SIZE": f"{len(paths)}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": f"{port}",
        "STOKER_SECRET": "s" * 32,
    }
    plan, processes = plan_over(TWO), []
    for rank, path in enumerate(paths):
        words = ["train", str(path), "--plan", str(plan), "--run-dir", "run", "--json"]
        with Path(f"errors{rank}.txt").open("w", encoding="utf-8") as told:
            env = os.environ | where | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
            processes.append(Forked("stoker", words, stderr=told, env=env, leaves_memory=True))
    return [
        Outcome(out=process.communicate(), code=process.wait(), err=Path(f"errors{rank}.txt").read_text("utf-8"))
        for rank, process in enumerate(processes)
    ]


def test_a_launchers_processes_find_each_other() -> None:
    """They train one run, logged by one of them, and all leave with exit code 0."""
    first, other = launched(job_file(), job_file())
    assert (first.code, other.code, other.out) == (0, 0, ""), first.err + other.err
    kinds = [event["event"] for event in first.events]
    assert (kinds[0], kinds[-1], kinds.count("finished")) == ("planned", "finished", 1)
    assert stoker.load("run").status == "finished"


def test_different_job_files_under_a_launcher_are_refused_by_all() -> None:
    """Each process exits with 2; the first says what differs."""
    outcomes = launched(*(job_file(f"settings['seed'] = {rank}", name=f"blobs{rank}.py") for rank in (0, 1)))
    errors = [outcome.err for outcome in outcomes]
    assert [outcome.code for outcome in outcomes] == [2, 2], errors
    assert sum("error:" in error for error in errors) == 1, errors
    assert "seed" in "".join(errors) or "job" in "".join(errors), errors
