"""Layouts over GPUs, real or simulated: over NCCL they learn what one process does on a CPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from stoker.records import Layout, Plan
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from stoker.testing.simulated_gpu import is_simulated
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
    if is_simulated() and ("replicas" in name or name == "tensor"):
        pytest.skip("needs a timer of CUDA's, or an optimiser over single tensors: not simulated")
    job, _, limit = CASES[name]
    alone = learned(ALONE, job, Plan(device="cpu", micro_batch=JOBS[job][0]().batch), None, updates=6)
    for one in on_ranks(CASES[name][1]["layout"], learned_there, name, kind="cuda"):
        assert largest_loss_difference(one, alone) < limit
