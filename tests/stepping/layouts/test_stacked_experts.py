"""Stacked experts in shards: of fewer rows than there are shards, another dimension is divided."""

from __future__ import annotations

import functools
from typing import Any

import torch

from stoker.jobs import AdamW, Job
from stoker.records import Layout, Plan
from stoker.stepping.distributed_tensors import local
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import SEPARABLE, largest_difference
from tests.stepping.experts import mixture
from tests.stepping.layouts.conformance import Learned, largest_loss_difference, trained_with
from tests.stepping.models import make_job, texts

FOUR = Layout(shards=4)


def experts_job() -> Job:
    """Two experts [2, 8, 16] in each of two layers."""
    data = texts(55, masked=0.3)
    optimizer = AdamW(lr=1e-3)
    make = functools.partial(mixture, num=2)
    return make_job(make, data=data, loss="token_cross_entropy", optimizer=optimizer, clip_norm=1.0, batch=16)


def held_and_learned(world: World) -> tuple[tuple[int, ...], Learned]:
    """The part of the first layer's experts that a process holds, and what it learns in three updates."""
    layout = Layout() if world is ALONE else FOUR
    plan = Plan(device="cpu", micro_batch=16 // layout.world_size, layout=layout)
    step = Step(experts_job(), plan, SEPARABLE, dtype=torch.float64, world=world)
    layer: Any = step.model[1]
    return tuple(local(layer.experts.up_EDF).shape), trained_with(step, 3)


def test_four_shards_of_two_experts_learn_what_one_process_does() -> None:
    """Each holds a quarter of the features of both, where a half of the processes would hold one expert each."""
    _, expected = held_and_learned(ALONE)
    for held, learned in on_ranks(FOUR, held_and_learned):
        assert held == (2, 2, 16)
        assert largest_loss_difference(learned, expected) < 1e-9
        assert largest_difference(learned.weights, expected.weights) < 1e-9
