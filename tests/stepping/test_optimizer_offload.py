"""Updates whose optimiser state is on the host: the same mathematics, on a GPU that may be simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, AdamW, Job, Muon
from stoker.jobs.optimizers import Adagrad, RMSprop
from stoker.records import Layout, Plan
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, largest_difference, train
from tests.stepping.layouts.conformance import gpt_job
from tests.stepping.models import make_job, mlp

OFFLOADS = ("state", "gradients")


def plan_on_gpu(micro_batch: int, **changed: Any) -> Plan:
    """A plan for the first GPU."""
    return Plan(device="cuda:0", micro_batch=micro_batch, **{"optimizer_implementation": "fused"} | changed)


def weights_of(step: Step) -> dict[str, torch.Tensor]:
    """The weights as a checkpoint has them, on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in step.model_state().items()}


def difference(job: Job, updates: int = 12, dtype: torch.dtype | None = torch.float64, **changed: Any) -> float:
    """The largest difference of weights trained under an offloaded plan and under a plain one."""
    weights = []
    for plan in (plan_on_gpu(16), plan_on_gpu(**{"micro_batch": 16, "optimizer_offload": "state"} | changed)):
        plain = replace(plan, optimizer_implementation=changed.get("optimizer_implementation", "fused"))
        step = Step(job, plain, SEPARABLE, dtype=dtype)
        begun = weights_of(step)
        train(job, step, updates)
        weights.append(weights_of(step))
        assert largest_difference(begun, weights[-1]) > 1e-2
    return largest_difference(*weights)


@pytest.mark.gpu
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("micro_batch", [16, 5])
def test_it_is_the_same_mathematics(offload: Any, micro_batch: int) -> None:
    """In float64 to 1e-9 over 30 updates, whole or in micro-batches, clipped, with an epoch's ragged last batch."""
    job = gpt_job()
    steps = []
    for plan in (plan_on_gpu(16), plan_on_gpu(micro_batch, optimizer_offload=offload)):
        steps.append(Step(job, plan, SEPARABLE, dtype=torch.float64))
        losses = train(job, steps[-1], 30)
    assert largest_difference(*map(weights_of, steps)) < 1e-9
    assert losses[-1] < losses[0]
    state = [value for values in steps[1].optimizer.state.values() for value in values.values()]
    assert {one.device.type for one in state} == {"cpu"}
    assert {one.device.type for one in steps[1].model.parameters()} == {"cuda"}


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adagrad(lr=0.05), RMSprop(lr=0.01)])
def test_every_optimiser_that_goes_element_by_element(optimizer: Any) -> None:
    """Also those without a fused kernel, and without clipping."""
    job = make_job(mlp, optimizer=optimizer, batch=16)
    implementation = "foreach" if isinstance(optimizer, RMSprop) else "fused"
    assert difference(job, optimizer_implementation=implementation) < 1e-9


@pytest.mark.gpu
def test_checkpointed_blocks_tied_weights_and_a_loss_in_chunks() -> None:
    """A tied weight has one gradient, final once both uses have been passed."""
    job = gpt_job()
    changed = {"checkpointed_blocks": 2, "loss_chunks": 2}
    for offload in OFFLOADS:
        assert difference(job, micro_batch=8, optimizer_offload=offload, **changed) < 1e-9
