"""A step that changes its plan in mid-run goes on as a new step under that plan into which the state was loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.devices import attached_cpu
from stoker.loading.datasets import datasets_of
from stoker.records import Coupling, Layout, Plan
from stoker.stepping.coupling import find_coupling
from stoker.stepping.step import Step
from stoker.stepping.torch_optimizers import use_implementation
from stoker.training.checkpoints import restore
from tests.training.builders import assert_bit_equal, everything_of, saved, source_of

BATCH, BEFORE, AFTER = 16, 3, 7
PLAN = Plan(device="cpu", micro_batch=BATCH)
SEPARABLE = Coupling(kind="separable", group=None, causes=(), evidence="known")

CHANGES: dict[str, dict[str, Any]] = {
    "micro-batch": {"micro_batch": 4},
    "channels-last": {"memory_format": "channels_last"},
    "fused": {"optimizer_implementation": "fused"},
    "foreach": {"optimizer_implementation": "foreach"},
    "captured": {"captured": True},
    "bf16": {"precision": "bf16"},
    "all": {"memory_format": "channels_last", "optimizer_implementation": "fused", "captured": True},
}
OPTIMIZERS = {
    "sgd": stoker.SGD(lr=0.05, momentum=0.9),
    "adamw": stoker.AdamW(lr=1e-2),
    "muon": stoker.Muon(lr=1e-2, rest=stoker.AdamW(lr=1e-3)),
}


def conv_net(norm: type[nn.Module] | None = None) -> nn.Module:
    """Images [B, 3, 8, 8] to logits [B, 4], with 1 x 1, depthwise and transposed convolutions, whose strides differ."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8) if norm else nn.GroupNorm(2, 8),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 16, 1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 4, 2, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16, 4),
    )


def job_of(**settings: Any) -> stoker.Job:
    """A classifier of 64 images of noise."""
    draws = torch.Generator().manual_seed(0)
    data = torch.randn(64, 3, 8, 8, generator=draws), torch.randint(0, 4, (64,), generator=draws)
    known = {
        "model": conv_net,
        "data": data,
        "loss": "cross_entropy",
        "optimizer": OPTIMIZERS["adamw"],
        "batch": BATCH,
        "until": stoker.updates(20),
        "clip_norm": 1.0,
        "average": 0.9,
    }
    return stoker.Job(**(known | settings))


def advanced(step: Step, start: int, stop: int) -> list[torch.Tensor]:
    """Losses of updates number `start` up to `stop`."""
    source, losses = source_of(step), []
    for update, batch in enumerate(source.batches(source.extent.position(start), stop), start=start):
        losses.append(step.update(batch, update, update / 20))
    return losses


def require_bf16(plan: Plan) -> None:
    """Skip where the CPU does not compute in bf16."""
    if plan.precision == "bf16" and "bf16" not in attached_cpu().fast_dtypes:
        pytest.skip("this CPU does not compute in bf16")


def assert_as_if_loaded(job: stoker.Job, plans: list[Plan], coupling: Coupling, folder: Path) -> None:
    """One step changed from plan to plan, against a new step for each, which the state is saved and loaded for."""
    for plan in plans:
        require_bf16(plan)
    changed, at = Step(job, plans[0], coupling), 0
    anew = Step(job, plans[0], coupling)
    for number, plan in enumerate(plans):
        if number:
            found = saved(anew, folder / str(number), at)
            anew = Step(job, plan, coupling)
            restore(anew, *found)
            changed.change_to(plan)
        stop = at + (BEFORE if not number else AFTER - BEFORE)
        losses, theirs = advanced(changed, at, stop), advanced(anew, at, stop)
        assert torch.equal(torch.stack(losses), torch.stack(theirs)), plan
        at = stop
        assert_bit_equal(everything_of(changed), everything_of(anew))


@pytest.mark.parametrize(
    ("change", "optimizer"),
    [
        pytest.param(change, name, marks=() if name == "adamw" or change in ("fused", "all") else pytest.mark.slow)
        for change in CHANGES
        for name in OPTIMIZERS
    ],
)
def test_a_change_there_and_back_is_bit_equal_to_loading_into_new_steps(
    change: str, optimizer: str, tmp_path: Path
) -> None:
    """Weights, averages, moments and losses, with clipping and dropout, under the other plan and again under the first.

    So the present layout in memory is the new plan's alone, and no setting of the old one stays.
    """
    other = dataclasses.replace(PLAN, **CHANGES[change])
    assert_as_if_loaded(job_of(optimizer=OPTIMIZERS[optimizer]), [PLAN, other, PLAN], SEPARABLE, tmp_path)


@pytest.mark.parametrize("change", ["channels-last", "captured", "bf16", "fused"])
def test_batch_norm_goes_on_likewise(change: str, tmp_path: Path) -> None:
    """Running statistics are those of a new step too; the whole batch is one group."""
    job = job_of(model=lambda: conv_net(nn.BatchNorm2d), optimizer=OPTIMIZERS["sgd"])
    coupling = find_coupling(job, datasets_of(job).train)
    other = dataclasses.replace(PLAN, **CHANGES[change])
    assert_as_if_loaded(job, [PLAN, other, PLAN], coupling, tmp_path)


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "bf16"])
def test_another_plan_is_the_same_mathematics(change: str) -> None:
    """In float64, without draws, weights after a change in mid-run are within 1e-9 of those under one plan."""
    job = job_of(optimizer=OPTIMIZERS["sgd"])
    steps = [Step(job, PLAN, SEPARABLE, dtype=torch.float64, dropout=False) for _ in range(2)]
    for number, step in enumerate(steps):
        advanced(step, 0, 5)
        if number:
            step.change_to(dataclasses.replace(PLAN, **CHANGES[change]))
        advanced(step, 5, 20)
    for one, other in zip(*(step.model.parameters() for step in steps), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_state_keeps_its_dtype() -> None:
    """What a user's optimiser keeps for bf16 weights, in fp32 or in integers, is not rounded to bf16."""
    weights = nn.Parameter(torch.ones(4, 3, 2, 2, dtype=torch.bfloat16).to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    kept = {"master": torch.randn(weights.shape), "codes": torch.full((4,), 255, dtype=torch.uint8)}
    optimizer.state[weights] = dict(kept)
    use_implementation(optimizer, "default")
    assert all(torch.equal(optimizer.state[weights][name], value) for name, value in kept.items())
    assert optimizer.state[weights]["codes"].dtype == torch.uint8
    assert optimizer.state[weights]["master"].dtype == torch.float32
    assert optimizer.state[weights]["master"].stride() == weights.stride()


@pytest.mark.parametrize(
    ("name", "setting"),
    [("device", "meta"), ("checkpointed_blocks", 1), ("loss_chunks", 2), ("layout", Layout(replicas=2))],
)
def test_what_is_built_once_is_refused(name: str, setting: Any) -> None:
    """The device, checkpointed blocks, pieces of the loss and the layout; the step stays as it was."""
    step = Step(job_of(), PLAN, SEPARABLE)
    with pytest.raises(ValueError, match=name):
        step.change_to(dataclasses.replace(PLAN, **{name: setting}))
    assert step.plan == PLAN


def test_a_plan_that_would_change_what_is_learned_is_refused() -> None:
    """Coupled samples are not cut; the step stays under its plan."""
    job = job_of(model=lambda: conv_net(nn.BatchNorm2d))
    step = Step(job, PLAN, find_coupling(job, datasets_of(job).train))
    with pytest.raises(stoker.errors.BadJob):
        step.change_to(dataclasses.replace(PLAN, micro_batch=4))
    assert step.plan == PLAN
