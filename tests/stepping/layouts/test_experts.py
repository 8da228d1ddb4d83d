"""Expert parallel: processes that hold different experts learn what one process does."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stoker.records import Layout, Plan
from stoker.stepping.distributed_tensors import local
from stoker.stepping.layouts import model_problem
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from tests.stepping.driving import SEPARABLE, largest_difference
from tests.stepping.experts import mixture
from tests.stepping.layouts.conformance import (
    Learned,
    experts_job,
    largest_loss_difference,
    taught,
)
from tests.training.legs import leg

LIMITS = {torch.float64: 1e-9, torch.float32: 1e-6, None: 1e-3}
UPDATES = 5  # the fourth is of the 7 samples that end an epoch


CASES: dict[str, tuple[str, torch.dtype | None, dict[str, Any]]] = {
    "grouped": ("grouped", torch.float64, {"micro_batch": 3}),
    "batched, checkpointed": ("batched", torch.float64, {"micro_batch": 8, "checkpointed_blocks": 2}),
    "none chosen": ("looped", torch.float64, {"micro_batch": 8}),
    "fused": ("grouped", torch.float64, {"micro_batch": 8, "optimizer_implementation": "fused"}),
    "fp32": ("grouped", torch.float32, {"micro_batch": 8}),
    "bf16": ("batched", None, {"micro_batch": 8, "precision": "bf16"}),
}
_SLOW = ("4 experts", "2 shards kept x 2 experts")  # the code of the others, but for messages
LAYOUTS = {
    "2 experts": Layout(experts=2),
    "4 experts": Layout(experts=4),
    "2 shards x 2 experts": Layout(experts=2, shards=2),
    "2 shards kept x 2 experts": Layout(experts=2, shards=2, reshard=False),
}


def all_learned(world: World, layout: Layout) -> dict[str, Learned]:
    """What is learned of each case in this process."""
    return {case: _learned(world, layout, case) for case in CASES}


def _learned(world: World, layout: Layout, case: str) -> Learned:
    kind, dtype, settings = CASES[case]
    return taught(world, experts_job(kind), Plan(device="cpu", layout=layout, **settings), SEPARABLE, dtype, UPDATES)


@functools.cache
def alone(case: str) -> Learned:
    """What one process learns."""
    return _learned(ALONE, Layout(), case)


@functools.cache
def together(layout: str) -> list[dict[str, Learned]]:
    """What each process of a layout learns of all cases."""
    return on_ranks(LAYOUTS[layout], all_learned, LAYOUTS[layout])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=pytest.mark.slow if name in _SLOW else ()) for name in LAYOUTS]
)
def test_processes_with_different_experts_learn_what_one_does(layout: str, case: str) -> None:
    """Losses of all updates and, in float64, the weights after them are one process's."""
    dtype, expected = CASES[case][1], alone(case)
    for each in together(layout):
        assert largest_loss_difference(each[case], expected) < LIMITS[dtype]
        if dtype == torch.float64:
            assert largest_difference(each[case].weights, expected.weights) < LIMITS[dtype]


def sizes_held(world: World, layout: Layout) -> tuple[int, int]:
    """Elements of the first layer's experts, and of its router, that a process holds."""
    step = Step(experts_job(), Plan(device="cpu", micro_batch=8, layout=layout), SEPARABLE, world=world)
    layer: Any = step.model[1]
    return local(layer.experts.up_EDF).numel(), local(layer.router.weight).numel()


def test_each_process_holds_its_experts_and_a_shard_of_all_else() -> None:
    """Of 4 experts of 8 x 16 two in half, of a router of 4 x 8 one row."""
    layout = LAYOUTS["2 shards x 2 experts"]
    assert on_ranks(layout, sizes_held, layout) == [(4 * 8 * 16 // 4, 8)] * 4


@pytest.mark.slow
def test_a_run_goes_on_under_other_layouts(tmp_path: Path) -> None:
    """Four processes, two shards, two processes with different experts: as one that was never stopped."""
    whole = leg(ALONE, tmp_path / "whole", "experts", Plan(device="cpu", micro_batch=16), torch.float64, 8)
    losses: list[float] = []
    for layout, stop in ((Layout(experts=2, shards=2), 3), (Layout(shards=2), 5), (Layout(experts=2), 8)):
        plan = Plan(device="cpu", micro_batch=16, layout=layout)
        last = on_ranks(layout, leg, tmp_path / "run", "experts", plan, torch.float64, stop)[0]
        losses += last.losses
    assert max(abs(mine - theirs) / abs(theirs) for mine, theirs in zip(losses, whole.losses, strict=True)) < 1e-9
    for key, weight in whole.weights.items():
        torch.testing.assert_close(last.weights[key], weight, rtol=0, atol=1e-9)
        torch.testing.assert_close(last.averages[key], whole.averages[key], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "size", "says"),
    [
        (lambda: mixture("list"), 2, "no stacked experts"),
        (mixture, 3, "1.experts has 4 experts, which 3 processes do not divide"),
        (lambda: nn.Linear(2, 2), 2, "Linear has no stacked experts"),
    ],
)
def test_experts_that_cannot_be_divided_are_refused(model: Any, size: int, says: str) -> None:
    """With the reason: a list that the model's own code calls, or a number that does not divide."""
    assert says in (model_problem(model(), Layout(experts=size)) or "")
    assert model_problem(mixture(), Layout(experts=2)) is None
