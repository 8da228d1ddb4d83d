"""Layouts over GPUs, real or simulated: over NCCL they learn what one process does on a CPU."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.records import Layout, Plan, dumps
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from stoker.testing.simulated_gpu import is_simulated
from tests.flow.command import command, job_file
from tests.stepping.layouts.conformance import JOBS, Learned, largest_loss_difference, learned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "replicas": ("gpt", {"layout": Layout(replicas=2)}, 1e-5),
    "replicas of a network with batch norm": ("cnn", {"layout": Layout(replicas=2), "micro_batch": 8}, 1e-5),
    "shards": ("gpt", {"layout": Layout(shards=2)}, 1e-5),
    "shards of odd parameters": ("odd", {"layout": Layout(shards=2)}, 1e-5),
    "shards in bf16": ("gpt", {"layout": Layout(shards=2), "precision": "bf16", "checkpointed_blocks": 2}, 2e-3),
    "tensor": ("gpt", {"layout": Layout(tensor=2)}, 1e-5),
    "stages": ("gpt", {"layout": Layout(stages=2)}, 1e-5),
}
"""Job, plan, and how far losses may be from one process's, relative to them."""


def learned_there(world: World, name: str) -> Learned:
    """What a process learns of a case on its GPU."""
    job, settings, _ = CASES[name]
    plan = Plan(device=f"cuda:{world.rank}", **{"micro_batch": 4, **settings})
    # Weights stay on the GPU, which the process that compares may not have.
    return dataclasses.replace(learned(world, job, plan, None, updates=6), weights={}, averages={})


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_learn_what_one_cpu_does(name: str) -> None:
    """Losses of six updates, and every process the same."""
    if is_simulated() and name == "tensor":
        pytest.skip("needs an optimiser over single tensors: not simulated")
    job, _, limit = CASES[name]
    alone = learned(ALONE, job, Plan(device="cpu", micro_batch=JOBS[job][0]().batch), None, updates=6)
    for one in on_ranks(CASES[name][1]["layout"], learned_there, name, kind="cuda"):
        assert largest_loss_difference(one, alone) < limit


NOTING = """
from pathlib import Path
from torch import nn

class Noting(nn.Linear):
    def forward(self, inputs):
        Path(__file__).with_name(f"computed on {self.weight.device}").touch()
        return super().forward(inputs)
"""
"""A layer for a job file that leaves a file for each device it computes on."""


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(shards=2)], ids=["replicas", "shards"])
def test_a_command_trains_on_two_gpus_what_it_does_on_a_cpu(layout: Layout, place: Path) -> None:
    """It starts a process for each GPU, which takes the one of its number; the test metrics are one CPU process's."""
    model = "settings['model'] = lambda: nn.Sequential(Noting(6, 8), nn.ReLU(), nn.Linear(8, 2))"
    job, alone = job_file(model, head=NOTING), Plan(device="cpu", micro_batch=16)
    together = Plan(device="cuda:0", micro_batch=16, loader="memory", layout=layout)
    runs = []
    for name, on, plan in (("one", "cpu", alone), ("two", "2xhere", together)):
        Path(f"{name}.json").write_text(dumps(plan))
        words = command("train", job, "--on", on, "--plan", f"{name}.json", "--run-dir", name)
        # A fresh interpreter, not a fork of this one, which has a context of CUDA.
        ended = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr
        runs.append(stoker.load(place / name))
    assert {path.name.split()[-1] for path in place.glob("computed on *")} == {"cpu", "cuda:0", "cuda:1"}
    one, two = runs
    assert two.record.samples == one.record.samples
    assert two.metrics.keys() == one.metrics.keys()
    for name, value in one.metrics.items():
        assert two.metrics[name] == pytest.approx(value, abs=1e-4)
