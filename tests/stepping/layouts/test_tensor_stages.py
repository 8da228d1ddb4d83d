"""Stages whose matrices are divided over tensor groups learn what one process learns."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD
from stoker.loading.batches import in_order
from stoker.records import Layout
from stoker.stepping.step import Step
from stoker.stepping.world import ALONE, World
from stoker.testing.ranks import on_ranks
from stoker.zoo import GPT, Llama
from tests.stepping.driving import SEPARABLE, largest_difference, plan_of
from tests.stepping.layouts.conformance import Learned, largest_loss_difference, learned, taught
from tests.stepping.layouts.test_tensor_parallel import LIMITS, OwnPlan, text_job
from tests.stepping.models import VOCAB, samples_of
from tests.training.legs import losses_of_leg

BOTH = Layout(stages=2, tensor=2)
SEQUENCE = Layout(stages=2, tensor=2, sequence=True)
EIGHT = Layout(stages=2, shards=2, tensor=2, sequence=True)


def _learned(world: World, layout: Layout, micro_batch: int) -> list[Learned]:
    """What a process learns of a GPT in both precisions, of one with tied weights, and of a Llama, checkpointed."""
    plan = plan_of(micro_batch, layout=layout)
    llama = text_job(lambda: Llama(2, 16, 4, 2, 24, VOCAB, 8))
    return [
        *(learned(world, "gpt", plan, dtype, 6) for dtype in (torch.float64, torch.float32)),
        learned(world, "tied", plan, torch.float64, 4),
        taught(world, llama, plan_of(8, layout=layout, checkpointed_blocks=2), SEPARABLE, torch.float64, 4),
    ]


@functools.cache
def alone() -> list[Learned]:
    """As `_learned`, in one process, with each batch in one piece."""
    return _learned(ALONE, Layout(), 16)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(BOTH, marks=pytest.mark.slow),  # stopped and resumed below; all but its messages is of the next
        SEQUENCE,
        pytest.param(Layout(stages=2, tensor=2, schedule="gpipe"), marks=pytest.mark.slow),
        pytest.param(EIGHT, marks=pytest.mark.slow),
        pytest.param(Layout(stages=2, replicas=2, tensor=2), marks=pytest.mark.slow),
    ],
    ids=Layout.in_words,
)
def test_divided_stages_learn_what_one_process_does(layout: Layout) -> None:
    """Losses of all updates, and the weights after them, are one process's on every rank."""
    for found in on_ranks(layout, _learned, layout, 3):
        for one, expected in zip(found, alone(), strict=True):
            dtype = next(iter(one.weights.values())).dtype
            assert largest_loss_difference(one, expected) < LIMITS[dtype]
            if dtype == torch.float64:
                assert largest_difference(one.weights, expected.weights) < LIMITS[dtype]


def _looked_at(world: World, layout: Layout) -> dict[str, Any]:
    """What a process holds, what evaluation finds, the norm that is clipped, and seeds of draws."""
    job = text_job(lambda: GPT(2, 16, 2, 8, VOCAB, dropout=0.5), metrics=["token_accuracy"])
    step = Step(job, plan_of(8, layout=layout), SEPARABLE, dtype=torch.float64, world=world)
    samples = samples_of(job)
    pipeline = step.pipeline(samples, augmented=False)
    held = {name: getattr(p, "_local_tensor", p).numel() for name, p in step.model.named_parameters()}
    seeds: dict[str, set[int]] = {"qkv": set(), "out": set()}
    for block in step.model.blocks:
        for layer, found in seeds.items():
            block.attention.get_submodule(layer).register_forward_hook(
                lambda *_, found=found: found.add(torch.initial_seed())
            )
    with step.evaluation() as measure:
        batches = list(in_order(samples, pipeline, 23, world.split(SEPARABLE)))
        sums = [measure(batch.cut(0, batch.size), batch.size) for batch in batches]
    for found in seeds.values():
        found.clear()
    batch = next(iter(in_order(samples, pipeline, 16)))
    loss = float(step.update(batch, 0, 0.0))
    return {
        "held": held,
        "sums": {name: sum(float(one[name].sum) for one in sums) for name in sums[0]},
        "loss": loss,
        "seeds": seeds,
    }


def test_each_process_holds_its_part_of_its_stage_and_all_know_the_same() -> None:
    """Half of the matrices of one block; equal measures; heads draw for themselves, and what follows them alike."""
    expected = _looked_at(ALONE, Layout())
    found = on_ranks(BOTH, _looked_at, BOTH)
    for one in found:
        assert one["sums"] == pytest.approx(expected["sums"], rel=1e-12)
        assert one["loss"] == found[0]["loss"]
    for stage, names in enumerate((("tokens", "blocks.0"), ("blocks.1", "head"))):
        for rank in (2 * stage, 2 * stage + 1):
            held = found[rank]["held"]
            assert {name.removesuffix(".weight") for name in held} >= {names[0], names[1]} - {"blocks.0", "blocks.1"}
            for name, numel in held.items():
                assert any(name.startswith(prefix) for prefix in (*names, "positions", "norm"))
                is_divided = name.endswith(("qkv.weight", "into.weight", "into.bias", "out.weight"))
                is_divided = is_divided or name in ("tokens.weight", "head.weight")
                assert numel == expected["held"][name] // (2 if is_divided else 1), name
    among, after = ([one["seeds"][layer] for one in found] for layer in ("qkv", "out"))
    assert all(not one & other for place, one in enumerate(among) for other in among[:place])
    assert after[0] == after[1]
    assert after[2] == after[3]
    assert not after[0] & after[2]


def _unsaid(world: World) -> str:
    """What is said of a model whose second block has a norm of divided heads that its plan does not mention."""
    model = OwnPlan()
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())  # stages cannot share the embedding's
    model.layers[0].query_norm = nn.Identity()
    del model.tensor_plan["layers.*.query_norm"]
    job = text_job(lambda: model, optimizer=SGD(lr=1e-2))
    try:
        taught(world, job, plan_of(8, layout=BOTH), SEPARABLE, torch.float64, 2)
    except BadJob as problem:
        return problem.message
    return "nothing"


def test_a_gradient_that_differs_in_one_stage_is_refused_in_all_of_them() -> None:
    """By its name, also in the stage that has no such parameter, which would wait for the others otherwise."""
    for said in on_ranks(BOTH, _unsaid):
        assert "different gradients of 'layers.1.query_norm.weight' (update 1" in said


def _goes_on(world: World, folder: Path, layout: Layout, stop: int) -> list[float]:
    return losses_of_leg(world, folder, "gpt", plan_of(16, layout=layout), torch.float64, stop)


def test_a_run_goes_on_in_divided_stages_and_out_of_them(tmp_path: Path) -> None:
    """One process, stages with tensor groups, one process again: losses are those of one run."""
    expected = _goes_on(ALONE, tmp_path / "whole", Layout(), 9)
    losses = _goes_on(ALONE, tmp_path / "parts", Layout(), 3)
    losses += on_ranks(BOTH, _goes_on, tmp_path / "parts", BOTH, 6)[0]
    losses += _goes_on(ALONE, tmp_path / "parts", Layout(), 9)
    assert losses == pytest.approx(expected, rel=1e-9)


def test_a_tensor_group_that_does_not_divide_the_heads_is_refused_with_stages() -> None:
    """Before the model is cut, with the numbers."""
    layout = Layout(stages=2, tensor=3)
    job = text_job(lambda: GPT(2, 16, 2, 8, VOCAB))
    with pytest.raises(BadJob, match="3 tensor-parallel processes do not divide"):
        Step(job, plan_of(8, layout=layout), SEPARABLE, world=World(layout, 0))
