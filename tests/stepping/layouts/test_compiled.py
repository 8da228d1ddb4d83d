"""Compiled plans over several processes: each region by itself, messages between them, and what one process learns."""

from __future__ import annotations

import functools
import shutil
from typing import Any

import pytest
import torch

from stoker.jobs import AdamW, Job
from stoker.records import Layout, Plan
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from stoker.zoo import GPT
from tests.stepping.driving import SEPARABLE
from tests.stepping.layouts.conformance import Learned, largest_loss_difference, trained_with
from tests.stepping.models import make_job, texts

UPDATES = 3

PLANS: dict[str, dict[str, Any]] = {
    "replicas": {"layout": Layout(replicas=2)},
    "shards": {"layout": Layout(shards=2)},
    "shards, kept gathered": {"layout": Layout(shards=2, reshard=False)},
    "shards in bf16, checkpointed": {"layout": Layout(shards=2), "precision": "bf16", "checkpointed_blocks": 3},
    "shards in bf16, loss in chunks": {"layout": Layout(shards=2), "precision": "bf16", "loss_chunks": 2},
}

_SLOW = ("shards", "shards, kept gathered", "shards in bf16, loss in chunks")
"""Sharded in bf16, checkpointed, all of their code is run; a loss in chunks is none of the regions."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="compiled plans need g++ on a CPU")


def job() -> Job:
    """A GPT of three equal blocks, the fewest that are compiled each by itself."""
    return make_job(
        lambda: GPT(layers=3, width=32, heads=4, context=8, vocab=12),
        data=texts(64),
        loss="token_cross_entropy",
        optimizer=AdamW(lr=1e-3),
        clip_norm=1.0,
        batch=16,
    )


def learned(world: World, settings: dict[str, Any], micro_batch: int, *, is_compiled: bool) -> tuple[Learned, int]:
    """What is learned in this process, and of how many regions the compiled code was run."""
    if is_compiled:  # in a process of its own: captured and differentiated as always
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
    plan = Plan(device="cpu", micro_batch=micro_batch, compile=is_compiled, **settings)
    step = Step(job(), plan, SEPARABLE, world=world)
    taught = trained_with(step, UPDATES)
    if step.compilation is None:
        return taught, 0
    assert step.compilation.problem is None, step.compilation.problem
    return taught, sum(holder_of(region)._is_compiled for region in step.compilation.regions)


def holder_of(region: Any) -> Any:
    """The compiled pass of a region, which checkpointing may be around."""
    return getattr(region.forward, "forward", region.forward)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in PLANS]
)
def test_compiled_processes_learn_what_one_does(name: str) -> None:
    """All three blocks run compiled, and losses are those of one process that is not."""
    settings = PLANS[name]
    alone, _ = learned(ALONE, {**settings, "layout": Layout()}, 16, is_compiled=False)
    for one, num_compiled in on_ranks(settings["layout"], functools.partial(learned, is_compiled=True), settings, 8):
        assert num_compiled == 3
        assert largest_loss_difference(one, alone) < (1e-3 if "precision" in settings else 1e-5)
