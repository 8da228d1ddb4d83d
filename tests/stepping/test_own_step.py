"""A job's own step: run whole, under the plan's precision, with keyed draws; what it forgets is reported."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.loading.datasets import datasets_of
from stoker.stepping.coupling import find_coupling
from stoker.stepping.own_step import CombinedOptimizer, OwnStep
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite
from tests.stepping.driving import plan_of, source_of, train

DATA = (torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24.0).unsqueeze(1) / 24)


class Pair(nn.Module):
    """Two networks with a parameter of the same name each."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 1), nn.Linear(4, 1)


def _optimizers(model: Pair) -> dict[str, torch.optim.Optimizer]:
    return {
        "actor": torch.optim.Adam(model.actor.parameters(), lr=0.01),
        "critic": _critic(model, 0.1),
    }


def _critic(model: Pair, rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.critic.parameters(), lr=rate, momentum=0.9)


def _both(model: Pair, optimizers: Any, batch: Any) -> dict[str, torch.Tensor]:
    """The critic's update, then the actor's, which sees the critic as it is by then."""
    inputs, target = batch
    inputs = inputs + 0.1 * torch.randn_like(inputs)
    of_critic = (model.critic(inputs) - target).square().mean()
    of_critic.backward()
    optimizers["critic"].step()
    of_actor = (model.actor(inputs) - model.critic(inputs).detach()).square().mean()
    of_actor.backward()
    optimizers["actor"].step()
    return {"critic": of_critic, "actor": of_actor}


def _job(**changes: Any) -> stoker.Job:
    settings: dict[str, Any] = {
        "model": Pair,
        "data": DATA,
        "step": _both,
        "optimizer": _optimizers,
        "batch": 8,
        "until": stoker.updates(6),
    }
    return stoker.Job(**(settings | changes))


def _step(job: stoker.Job, micro_batch: int = 8, **plan: Any) -> Step:
    coupling = find_coupling(job, datasets_of(job).train)
    return Step(job, plan_of(micro_batch, **plan), coupling)


def _weights(step: Step) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in step.model.parameters()])


def test_an_update_is_the_users_step_and_nothing_else() -> None:
    """The same weights come out of a loop written by hand, with Stoker's draws put in."""
    job = _job(schedule=lambda progress: 1 - progress / 2)
    ours = _step(job)
    by_hand = _step(job)
    model, optimizers = by_hand.model, by_hand.optimizer.given  # type: ignore[attr-defined]
    for update, batch in enumerate(source_of(job, by_hand).batches(datasets_of(job).extent(job).position(0), 4)):
        by_hand.set_rates(update / 30)
        _both(model, optimizers, by_hand.loss_pass.ordinary.whole(batch, update))  # type: ignore[arg-type]
        model.zero_grad()
    losses = train(job, ours, 4)
    assert torch.equal(_weights(ours), _weights(by_hand))
    assert losses[-1] < losses[0]
    assert isinstance(ours.rule, OwnStep)
    assert set(ours.rule.values) == {"critic", "actor"}


def _halving(model: Pair, optimizers: Any, batch: Any) -> dict[str, torch.Tensor]:
    losses = _both(model, optimizers, batch)
    optimizers["critic"].param_groups[0]["lr"] *= 0.5
    return losses


def _with_scheduler(model: Pair, optimizers: Any, batch: Any) -> dict[str, torch.Tensor]:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers["critic"], 0.5)
    losses = _both(model, optimizers, batch)
    scheduler.step()
    return losses


def _setting(model: Pair, optimizers: Any, batch: Any) -> dict[str, torch.Tensor]:
    optimizers["critic"].param_groups[0]["lr"] = 0.05
    return _both(model, optimizers, batch)


@pytest.mark.parametrize("own_step", [_halving, _with_scheduler])
def test_a_rate_that_the_step_changes_is_refused(own_step: Any) -> None:
    """The schedule would set it back before the next update, without a word."""
    job = _job(step=own_step)
    with pytest.raises(
        BadJob, match=r"changes a learning rate for the next update, from 0.1 to 0.05, and the schedule"
    ):
        train(job, _step(job), 2)


def test_a_step_may_set_its_rates_before_they_are_used() -> None:
    """Every update uses the rate that it sets, whatever the schedule says."""
    stated = _job(optimizer=lambda model: {**_optimizers(model), "critic": _critic(model, 0.05)})
    itself, by_optimizer = _step(_job(step=_setting)), _step(stated)
    train(_job(step=_setting), itself, 3)
    train(stated, by_optimizer, 3)
    assert torch.equal(_weights(itself), _weights(by_optimizer))


def test_it_is_never_cut() -> None:
    """Any micro-batch but the whole batch is refused."""
    assert find_coupling(_job(), datasets_of(_job()).train).causes == ("the job's own step",)
    with pytest.raises(BadJob, match="change what is learned"):
        _step(_job(), micro_batch=4)


def test_gradients_change_nothing() -> None:
    """Asked for its gradients, the step leaves weights, optimiser state and draws as if it had not been run."""
    job = _job()
    asked, plain = _step(job), _step(job)
    train(job, plain, 2)
    train(job, asked, 2)
    batch = next(iter(source_of(job, asked).batches(datasets_of(job).extent(job).position(2), 3)))
    loss = asked.gradients(batch, 2)
    assert torch.isfinite(loss)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in asked.model.parameters())
    assert torch.equal(_weights(asked), _weights(plain))
    asked.forget_gradients()
    train(job, asked, 2, begin=2)
    train(job, plain, 2, begin=2)
    assert torch.equal(_weights(asked), _weights(plain))


def test_under_bf16_a_network_is_seen_as_its_optimiser_left_it() -> None:
    """Autocast keeps no copy of weights across a step within the update: the second pass sees the new ones."""
    seen: list[torch.Tensor] = []

    def step(model: Pair, optimizers: Any, batch: Any) -> torch.Tensor:
        loss = model.critic(batch[0]).float().square().mean()
        loss.backward()
        optimizers["critic"].param_groups[0]["lr"] = 10.0
        optimizers["critic"].step()
        seen.append(model.critic(batch[0]).detach().clone())
        with torch.autocast("cpu", enabled=False):
            half = nn.functional.linear(
                batch[0].bfloat16(), model.critic.weight.detach().bfloat16(), model.critic.bias.detach().bfloat16()
            )
        seen.append(half)
        return loss

    job = _job(step=step)
    train(job, _step(job, precision="bf16"), 1)
    assert seen[0].dtype == torch.bfloat16
    assert torch.allclose(seen[0].float(), seen[1].float(), rtol=0.02, atol=0.02)


def test_an_optimiser_without_gradients_is_told_with_its_parameters() -> None:
    """A step that forgets a backward pass is refused at its first update, not trained for hours."""

    def forgets(model: Pair, optimizers: Any, batch: Any) -> torch.Tensor:
        loss = model.critic(batch[0]).square().mean()
        loss.backward()
        optimizers["critic"].step()
        optimizers["actor"].step()
        return loss

    job = _job(step=forgets)
    with pytest.raises(BadJob, match=r"Adam makes a step, and none .*: actor\.weight, actor\.bias") as told:
        train(job, _step(job), 1)
    assert "backward()" in str(told.value.remedy)


def test_a_step_that_changes_nothing_is_told() -> None:
    """No optimiser was stepped: the parameters are named."""

    def idle(model: Pair, _optimizers: Any, batch: Any) -> torch.Tensor:
        loss = model.critic(batch[0]).square().mean()
        loss.backward()
        return loss

    job = _job(step=idle)
    with pytest.raises(BadJob, match=r"stepped no optimiser .*none of the 4 trainable parameters \(actor\.weight"):
        train(job, _step(job), 1)


def test_a_rate_of_zero_is_no_mistake() -> None:
    """While the schedule keeps the rate at 0 nothing can change; the first update that can is the one looked at."""
    job = _job(schedule=lambda progress: 0.0 if progress == 0 else 1.0)
    step = _step(job)
    before = _weights(step)
    train(job, step, 1)
    assert torch.equal(_weights(step), before)
    train(job, step, 1, begin=1)
    assert not torch.equal(_weights(step), before)


def test_a_loss_that_is_not_finite_stops() -> None:
    """As for any job; the message says that the update has been made."""

    def explodes(model: Pair, optimizers: Any, batch: Any) -> dict[str, torch.Tensor]:
        return {**_both(model, optimizers, batch), "loss": torch.tensor(float("inf"))}

    job = _job(step=explodes)
    with pytest.raises(NotFinite, match="inf at update 1") as told:
        train(job, _step(job), 1)
    assert "has been made" in str(told.value.remedy)


@pytest.mark.parametrize(
    ("returned", "words"),
    [(None, "type NoneType"), (torch.zeros(3), r"shape \[3\]"), ({}, "empty dict"), ({"a": "b"}, "type str as 'a'")],
    ids=["None", "tensor", "empty", "word"],
)
def test_what_is_no_loss_is_refused(returned: Any, words: str) -> None:
    """A step returns scalars."""
    job = _job(step=lambda model, optimizers, batch: (_both(model, optimizers, batch), returned)[1])
    with pytest.raises(BadJob, match=words):
        train(job, _step(job), 1)


def test_a_loss_as_sum_and_count_is_a_mean() -> None:
    """`stoker.Loss` from a step is divided, as anywhere."""
    job = _job(
        step=lambda model, optimizers, batch: (_both(model, optimizers, batch), stoker.Loss(torch.tensor(6.0), 4))[1]
    )
    assert train(job, _step(job), 1) == [1.5]


@pytest.mark.parametrize(
    "made",
    [lambda model: torch.optim.Adam(model.parameters()), lambda model: list(_optimizers(model).values()), _optimizers],
    ids=["one", "list", "dict"],
)
def test_optimisers_state_goes_out_and_comes_back(made: Any) -> None:
    """One, a list or a dict of optimisers: the joint state is a single optimiser's in form, and restores each part."""

    def all_of(model: Pair, optimizers: Any, batch: Any) -> torch.Tensor:
        loss = (model.actor(batch[0]) - model.critic(batch[0])).square().mean()
        loss.backward()
        several = list(optimizers.values()) if isinstance(optimizers, dict) else optimizers
        for part in several if isinstance(several, list) else [several]:
            part.step()
        return loss

    job = _job(step=all_of, optimizer=made)
    trained, fresh = _step(job), _step(job)
    train(job, trained, 3)
    saved = trained.optimizer.state_dict()
    assert sorted(saved["state"]) == [0, 1, 2, 3]
    fresh.model.load_state_dict(trained.model.state_dict())
    fresh.optimizer.load_state_dict(copy.deepcopy(saved))
    for step in (trained, fresh):
        train(job, step, 3, begin=3)
    assert torch.equal(_weights(trained), _weights(fresh))


def test_a_state_of_other_optimisers_is_refused() -> None:
    """Groups that are not as many as here are another job's."""
    model = Pair()
    two, one = (
        CombinedOptimizer(part, part) for part in (list(_optimizers(model).values()), [_optimizers(model)["actor"]])
    )
    with pytest.raises(ValueError, match="1 parameter groups, the job's optimisers 2"):
        two.load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (lambda _model: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "not the model's"),
        (lambda _model: {}, "made no optimiser"),
        (lambda _model: {"actor": "adam"}, "made a str"),
    ],
    ids=["another model's", "none", "a word"],
)
def test_optimisers_that_are_none_are_refused(optimizer: Any, words: str) -> None:
    """What no checkpoint would hold is reported when the step is made."""
    with pytest.raises(BadJob, match=words):
        _step(_job(optimizer=optimizer))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_norm": 1.0}, r"clip_norm=…\): a step of the job's own does that itself"),
        ({"loss": stoker.Objective("cross_entropy", penalty=lambda _model: 0)}, "penalty"),
        ({"coupling_group": 4}, "coupling_group"),
        ({"on_non_finite": "skip"}, "on_non_finite"),
        ({"recipe": "fast"}, "recipe"),
        ({"valid": stoker.holdout(0.5)}, "give loss=…, or metrics"),
        ({"step": 3}, "wanted a function of"),
        ({"step": None}, "None is no loss"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(*value),
)
def test_settings_that_do_not_go_with_it_are_refused(changes: dict[str, Any], words: str) -> None:
    """What Stoker does between loss and update is the step's own business."""
    with pytest.raises(BadJob, match=words):
        _job(**changes)


def test_stokers_own_optimiser_is_handed_to_the_step() -> None:
    """One optimiser over all parameters, in the plan's implementation."""

    def step(model: Pair, optimizer: torch.optim.Optimizer, batch: Any) -> torch.Tensor:
        assert isinstance(optimizer, torch.optim.SGD)
        assert optimizer.param_groups[0]["fused"]
        loss = (model.actor(batch[0]) + model.critic(batch[0])).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    job = _job(step=step, optimizer=stoker.SGD(lr=0.1))
    losses = train(job, _step(job, optimizer_implementation="fused"), 3)
    assert losses[-1] < losses[0]
