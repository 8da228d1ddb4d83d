"""Parameters that thaw while training goes on, over several processes."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

import stoker
from stoker.records import Layout, Plan
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import largest_difference
from tests.stepping.layouts.conformance import JOBS, Learned, largest_loss_difference, taught

FREEZES = {
    "momentum": {"tokens.*": None, "blocks.0.*": stoker.updates(7), "blocks.*": stoker.updates(3)},
    "cnn": {"0.*": stoker.updates(4), "1.*": stoker.updates(4)},
}
"""What of the jobs is frozen for how long: of the network a convolution with its batch norm."""


def all_learned(world: World, layout: Layout) -> dict[str, Learned]:
    """What a process learns of each job."""
    return {name: _learned(world, name, Plan(device="cpu", layout=layout, micro_batch=8)) for name in FREEZES}


def _learned(world: World, name: str, plan: Plan) -> Learned:
    make, coupling = JOBS[name]
    job = dataclasses.replace(make(), freeze=FREEZES[name], clip_norm=0.5)
    return taught(world, job, plan, coupling, torch.float64, updates=12)


@functools.cache
def alone(name: str) -> Learned:
    """What one process learns, with each batch in one piece."""
    return _learned(ALONE, name, Plan(device="cpu", micro_batch=16))


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(shards=2)], ids=["replicated", "sharded"])
def test_two_processes_learn_what_one_does(layout: Layout) -> None:
    """Gradients that were computed for what is frozen are dropped before they are clipped; batch norms wait as well."""
    for each in on_ranks(layout, all_learned, layout):
        for name, one in each.items():
            assert largest_loss_difference(one, alone(name)) < 1e-9
            assert largest_difference(one.weights, alone(name).weights) < 1e-9
