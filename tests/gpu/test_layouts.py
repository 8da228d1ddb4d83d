"""Layouts over GPUs, real or simulated: over NCCL they learn what one process does on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker.records import Layout, Plan
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from tests.stepping.layouts.conformance import Learned, largest_loss_difference, learned

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
    return learned(world, job, plan, None, updates=6)


@pytest.mark.parametrize("name", CASES)
def test_two_gpus_learn_what_one_cpu_does(name: str) -> None:
    """Losses of six updates, and every process the same."""
    job, _, limit = CASES[name]
    alone = learned(ALONE, job, Plan(device="cpu", micro_batch=16), None, updates=6)
    for one in on_ranks(CASES[name][1]["layout"], learned_there, name, kind="cuda"):
        assert largest_loss_difference(one, alone) < limit
