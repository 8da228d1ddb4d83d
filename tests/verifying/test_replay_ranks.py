"""A stretch of a run of several processes is made again in as many, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.store import CheckpointStore, RunDirectory
from stoker.verifying.replay_ranks import _answer_of

pytestmark = pytest.mark.slow

JOB = """
import stoker
import torch
from torch import nn

def blobs(count):
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(0))
    return inputs, (inputs.sum(1) > 0).long()

def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))

def job():
    return stoker.Job(model=net, data=blobs(74), valid=blobs(20), loss="cross_entropy",
        optimizer=stoker.AdamW(lr=0.01), batch=16, until=stoker.epochs(3), clip_norm=1.0, average=stoker.EMA(0.9))
"""
RANK = """
import shutil, sys
from pathlib import Path
import stoker
from stoker.jobs import load_job
from stoker.store import CheckpointStore

folder = Path(sys.argv[1])
run = folder / "run"

def keep(event):
    if event.kind == "checkpointed":
        name = Path(event.fields["path"]).name
        there = folder / str(CheckpointStore(run / "checkpoints").named(name)[1].position.updates)
        others = shutil.ignore_patterns("checkpoints")
        shutil.copytree(run, there, dirs_exist_ok=True, ignore=others)
        shutil.copytree(run / "checkpoints" / name, there / "checkpoints" / name, dirs_exist_ok=True)

job, entry = load_job(folder / "job.py", {})
stoker.train(job, entry=entry, on="cpu", run_dir=run, sink=keep, checkpoint_every=stoker.seconds(1e-9))
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> Path:
    """A run of two processes, with a copy of its directory after some of its updates."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "job.py").write_text(JOB)
    (folder / "rank.py").write_text(RANK)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "2"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(folder / "rank.py"), str(folder)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(240) for process in ranks] == [0, 0]
    return folder


def saved(recorded: Path) -> list[int]:
    """Updates after which a copy was kept."""
    return sorted(int(path.name) for path in recorded.iterdir() if path.name.isdigit())


def replayed(recorded: Path, begin: int, end: int, into: Path, *more: str) -> dict[str, Any]:
    """What a replay of a copy of the run as it was after `begin` updates answers."""
    shutil.copytree(recorded / str(end), into)
    shutil.rmtree(into / "checkpoints")
    if begin:
        shutil.copytree(recorded / str(begin) / "checkpoints", into / "checkpoints")
    words = [str(into), str(recorded / "job.py"), "--until", str(end), *more]
    done = subprocess.run(
        [sys.executable, "-m", "stoker.verifying.replay_ranks", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert (done.returncode == 0) == ("manifest" in answer), done.stderr
    return answer


def state_at(recorded: Path, update: int) -> str:
    """The state that the run saved after an update."""
    found = CheckpointStore(recorded / str(update) / "checkpoints").newest()
    assert found is not None
    return found[1].state_digest()


def test_a_stretch_of_two_processes_is_equal_bit_for_bit(recorded, tmp_path) -> None:
    """From the beginning and from a checkpoint; the states between that are asked for, and no others."""
    plan = RunDirectory(recorded / "run").read_decision().chosen.plan  # type: ignore[union-attr]
    assert plan.layout.world_size == 2
    updates = saved(recorded)
    assert len(updates) >= 3
    first, last = updates[0], updates[-1]
    answer = replayed(recorded, 0, first, tmp_path / "a", "--ranks", "2")
    assert answer["states"][-1] == state_at(recorded, first)
    asked = updates[1:-1]
    answer = replayed(recorded, first, last, tmp_path / "b", "--ranks", "2", "--at", ",".join(map(str, asked)))
    assert answer["states"] == [state_at(recorded, update) for update in (*asked, last)]


def test_a_run_of_another_number_of_processes_is_not_the_run(recorded, tmp_path) -> None:
    """What was ordered for three, and made by two, is no claim that could be right; nor is one that ends before it."""
    last = saved(recorded)[-1]
    answer = replayed(recorded, 0, last, tmp_path / "a", "--ranks", "3")
    assert answer["kind"] == "NotTheRun"
    assert "a plan for 2 processes, not 3" in answer["problem"]
    answer = replayed(recorded, last, last, tmp_path / "b", "--ranks", "2")
    assert answer["kind"] == "NotTheRun"


TALKS = """
import json, os, sys, time
from pathlib import Path

has_printed = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    print("x" * (1 << 20), flush=True)
    has_printed.touch()
else:
    ends_s = time.monotonic() + 60
    while not has_printed.exists():
        if time.monotonic() > ends_s:
            print(json.dumps({"problem": "rank 1 does not come"}))
            sys.exit(1)
        time.sleep(0.01)
    print(json.dumps({"manifest": {}}))
"""


def test_a_rank_that_prints_much_does_not_stop_those_before_it(tmp_path) -> None:
    """More than a pipe holds, while rank 0 waits for it."""
    assert _answer_of([sys.executable, "-c", TALKS, str(tmp_path / "printed")], 2) == {"manifest": {}}
