"""What is forecast of shards' collectives against what PyTorch makes of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import stoker
from stoker.layouts.base import DividedUpdate
from stoker.layouts.shards import AXIS
from stoker.loading.batches import BatchSource
from stoker.loading.datasets import datasets_of
from stoker.profiling.job_profile import model_parts
from stoker.records import Coupling, Layout, Plan, Position, Precision, Trace
from stoker.stepping.step import Step
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks
from stoker.zoo import GPT

SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")
MODEL = functools.partial(GPT, layers=2, width=8, heads=2, context=4, vocab=10)


def adapted() -> GPT:
    """The model with all but its feed-forward layers frozen."""
    model = MODEL()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("mlp." in name)
    return model


BATCH, PASSES = 8, 2
CALLS = {"all-gather": "all_gather_single", "reduce-scatter": "reduce_scatter_single"}


def collectives(world: World, plan: Plan, make: Callable[[], GPT]) -> list[tuple[str, int]]:
    """Each gather and scatter of an update, with the bytes of its larger tensor, in the order they come."""
    tokens = torch.randint(10, (BATCH, 5), generator=torch.Generator().manual_seed(0))
    job = stoker.Job(
        model=make,
        data=(tokens[:, :-1], tokens[:, 1:]),
        loss="token_cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=BATCH,
        until=stoker.updates(3),
    )
    data = datasets_of(job)
    step = Step(job, plan, SEPARABLE, world=world)
    source = BatchSource(
        data.train,
        step.pipeline(data.train, augmented=True),
        data.extent(job),
        job.seed,
        plan,
        split=world.split(SEPARABLE),
    )
    (batch,) = source.batches(Position(), 1)
    step.update(batch, 0, 0.0)  # the first one finds out what there is
    found: list[tuple[str, int]] = []
    for name, attribute in CALLS.items():
        setattr(dist, attribute, _noted(name, getattr(dist, attribute), found))
    step.update(batch, 1, 0.0)
    return found


def _noted(name: str, call: Callable[..., Any], found: list[tuple[str, int]]) -> Callable[..., Any]:
    def noting(*arguments: Any, **named: Any) -> Any:
        given = [one for one in (*arguments, *named.values()) if isinstance(one, torch.Tensor)]
        found.append((name, max(one.nbytes for one in given)))
        return call(*arguments, **named)

    return noting


def _untraced() -> Trace:
    raise AssertionError("shards need no trace")


@pytest.mark.parametrize(
    ("reshard", "precision", "make"),
    [
        (True, "fp32", MODEL),
        (False, "fp32", MODEL),
        (True, "bf16", MODEL),
        (True, "fp32", adapted),
        (False, "fp32", adapted),
    ],
)
def test_forecasts_name_every_gather_and_scatter_that_pytorch_makes(
    reshard: bool, precision: Precision, make: Callable[[], GPT]
) -> None:
    """As many, of as many bytes, in two passes; parameters are gathered again in each, kept gathered or not.

    In bf16 gathers are half as large, and sums of gradients are not. Of frozen parameters there are no gradients.
    """
    layout = Layout(shards=2, reshard=reshard)
    plan = Plan(device="cpu", micro_batch=BATCH // 2 // PASSES, layout=layout, precision=precision)
    made, _ = on_ranks(layout, collectives, plan, make)
    parts = model_parts(make())
    update = DividedUpdate(
        layout=layout,
        parts=parts,
        held=parts,
        passes=PASSES,
        trace=_untraced,
        gathered_share=0.5 if precision == "bf16" else 1.0,
    )
    traffic = AXIS.traffic(update)
    expected = [
        (one.collective, size)
        for one in traffic
        if one.axis == "shards"
        for size in one.sizes
        for _ in range(round(one.times))
    ]
    assert sorted(made) == sorted(expected)
