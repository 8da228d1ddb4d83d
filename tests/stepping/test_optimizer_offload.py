"""Updates whose optimiser state is on the host: the same mathematics, on a GPU that may be simulated."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, AdamW, Job, Muon
from stoker.jobs.optimizers import Adagrad, RMSprop, ScheduleFreeAdamW
from stoker.records import Layout, Plan, Position
from stoker.stepping.optimizer_offload import offload_problem
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite
from stoker.training.snapshots import restore_snapshot, snapshot_of
from stoker.verifying.resume import first_difference, state_of
from tests.stepping.driving import SEPARABLE, largest_difference, source_of, train
from tests.stepping.layouts.conformance import gpt_job
from tests.stepping.models import make_job, mlp

OFFLOADS = ("state", "gradients")


def plan_on_gpu(micro_batch: int, **changed: Any) -> Plan:
    """A plan for the first GPU."""
    settings = {"device": "cuda:0", "optimizer_implementation": "fused"} | changed
    return Plan(micro_batch=micro_batch, **settings)


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
def test_groups_of_the_optimiser_know_parameters_by_what_is_written_on_them() -> None:
    """As models mark those that shall not decay: masters on the host have the marks."""

    def marked() -> nn.Module:
        model = mlp()
        for name, parameter in model.named_parameters():
            parameter.no_decay = name.endswith("bias")  # type: ignore[attr-defined]
        return model

    groups = {lambda _, parameter: getattr(parameter, "no_decay", False): {"weight_decay": 0.0}}
    job = make_job(marked, optimizer=AdamW(lr=0.05, weight_decay=0.5, groups=groups), batch=16)
    assert difference(job) < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1, momentum=0.9), Adagrad(lr=0.05), RMSprop(lr=0.01)])
def test_every_optimiser_that_goes_element_by_element(optimizer: Any) -> None:
    """Also those without a fused kernel, and without clipping."""
    job = make_job(mlp, optimizer=optimizer, batch=16)
    implementation = "fused" if isinstance(optimizer, SGD) else "foreach"  # RMSprop has none, Adagrad since 2.12
    assert difference(job, optimizer_implementation=implementation) < 1e-9


@pytest.mark.gpu
def test_checkpointed_blocks_tied_weights_and_a_loss_in_chunks() -> None:
    """A tied weight has one gradient, final once both uses have been passed."""
    job = gpt_job()
    changed = {"checkpointed_blocks": 2, "loss_chunks": 2}
    for offload in OFFLOADS:
        assert difference(job, micro_batch=8, optimizer_offload=offload, **changed) < 1e-9


@pytest.mark.gpu
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("micro_batch", [16, 8])
def test_in_bf16_the_masters_are_fp32_and_follow_the_device_s_gradients(offload: Any, micro_batch: int) -> None:
    """AdamW in fp32, clipped, by gradients that the device's bf16 weights give.

    Those of micro-batches are summed in fp32, and divided after that.
    """
    job, plan = gpt_job(), plan_on_gpu(micro_batch, precision="bf16", optimizer_offload=offload)
    step, reference = Step(job, plan, SEPARABLE), Step(job, replace(plan, optimizer_offload="state"), SEPARABLE)
    assert {p.dtype for p in step.model.parameters()} == {torch.bfloat16}
    masters = {name: nn.Parameter(p.detach().clone()) for name, p in step.named_parameters().items()}
    optimizer = torch.optim.AdamW(masters.values(), **job.optimizer.settings(), fused=True)  # type: ignore[union-attr]
    data = source_of(job, step)
    for update, batch in enumerate(data.batches(Position(), 6)):
        reference.gradients(batch, update)
        for (name, master), device in zip(masters.items(), reference.model.parameters(), strict=True):
            assert device.grad is not None, name
            master.grad = device.grad.float().cpu()
        reference.forget_gradients()
        for group in optimizer.param_groups:
            group["lr"] = step.set_rates(update / 30)
        nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.step()
        reference.load_model_state({**reference.model_state(), **{n: p.detach() for n, p in masters.items()}})
        step.update(batch, update, update / 30)
        one, other = weights_of(step), weights_of(reference)
        assert largest_difference(one, other) < 3e-4  # an H100 sums in another order: 1.3e-4
        for name, held in step.model.named_parameters():
            assert torch.equal(held.detach().cpu(), one[name].bfloat16())


@pytest.mark.gpu
def test_a_gradient_that_is_not_finite_leaves_the_weights() -> None:
    """As the contract has it: looked at before anything moves, where the job skips such updates."""
    job = replace(gpt_job(), on_non_finite="skip")
    step = Step(job, plan_on_gpu(16, optimizer_offload="state"), SEPARABLE)
    train(job, step, 1)
    before = weights_of(step)
    with torch.no_grad():
        next(step.model.parameters()).fill_(math.nan)
    with pytest.raises(NotFinite):
        train(job, step, 1, begin=1)
    after = weights_of(step)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_state_goes_on_bit_for_bit_and_to_the_device_and_back(precision: Any) -> None:
    """From offloaded to offloaded the same bits; from there to a plain plan and back what the state was."""
    job = gpt_job()
    plan, plain = plan_on_gpu(8, precision=precision, optimizer_offload="state"), plan_on_gpu(8)
    straight, stopped, resumed, without = (Step(job, each, SEPARABLE) for each in (plan, plan, plan, plain))
    train(job, straight, 8)
    train(job, stopped, 4)
    restore_snapshot(resumed, snapshot_of(stopped))
    train(job, resumed, 4, begin=4)
    assert first_difference(state_of(straight), state_of(resumed)) is None
    restore_snapshot(without, snapshot_of(stopped))
    assert {value.device.type for state in without.optimizer.state.values() for value in state.values()} == {"cuda"}
    back = Step(job, plan, SEPARABLE)
    restore_snapshot(back, snapshot_of(without))
    train(job, back, 4, begin=4)
    assert first_difference(state_of(straight), state_of(back)) is None
    if precision == "fp32":
        train(job, without, 4, begin=4)
        assert largest_difference(weights_of(without), weights_of(straight)) < 3e-4


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"device": "cpu"}, "for GPUs, and the plan's device is cpu"),
        ({"layout": Layout(shards=4)}, "one process, and the layout is 4 shards: shards divide the state"),
        ({"captured": True}, "these are captured"),
        ({"compile": True}, "these are compiled"),
        ({"precision": "fp16"}, "under fp16 an update is made again"),
        ({"optimizer_states": "8bit", "optimizer_implementation": "default"}, "full optimizer_states, not 8bit"),
        ({"memory_format": "channels_last"}, "contiguous weights, not channels_last"),
    ],
)
def test_plans_that_it_does_not_go_with(changed: dict[str, Any], why: str) -> None:
    """Each is refused with a sentence."""
    with pytest.raises(ValueError, match=why):
        plan_on_gpu(**{"micro_batch": 16, "optimizer_offload": "state"} | changed)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"optimizer": Muon(lr=0.02, rest=AdamW(lr=1e-3))}, "Muon multiplies whole matrices"),
        ({"optimizer": ScheduleFreeAdamW(lr=1e-3)}, "keeps weights of its own on the device"),
        ({"optimizer": lambda weights: torch.optim.SGD(weights, lr=0.1)}, "is its own"),
        ({"average": 0.9}, "an average of the weights follows them"),
    ],
)
def test_jobs_that_it_does_not_go_with(changed: dict[str, Any], why: str) -> None:
    """Each is refused with a sentence, before anything is built."""
    job = make_job(mlp, **{"optimizer": AdamW(lr=1e-3), "batch": 16} | changed)
    assert why in (offload_problem(job) or "")
    with pytest.raises(BadJob, match=why):
        Step(job, plan_on_gpu(16, optimizer_offload="state", optimizer_implementation="default"), SEPARABLE)
