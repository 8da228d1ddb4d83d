"""Factors of the learning rate: what a schedule may give."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from stoker.errors import BadJob
from stoker.stepping.torch_optimizers import factor_at
from tests.training.builders import advance, source_of, step_of, tiny_job


class Decaying(torch.optim.SGD):
    """SGD whose rate falls after each step, for the next one."""

    def step(self, closure=None):
        """As `torch.optim.SGD`."""
        loss = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= 0.9
        return loss


def cycled(parameters: object) -> torch.optim.Optimizer:
    """SGD with a scheduler of PyTorch that a hook steps."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100, cycle_momentum=False)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


class Warming(torch.optim.SGD):
    """SGD that sets its own rate at the beginning of each step, by a count of its own."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self, closure=None):
        """As `torch.optim.SGD`."""
        self.steps += 1
        for group in self.param_groups:
            group["lr"] = 0.1 * min(1.0, self.steps / 4)
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """An optimiser around another, as of the Annotated Transformer, which sets the other's rates."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.inner = Warming(self.param_groups)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure=None):
        """As the other, at its rate."""
        return self.inner.step(closure)


def plainly(make: object, step: object, updates: int) -> list[torch.Tensor]:
    """The weights after a loop over the batches that `step` would get."""
    model = copy.deepcopy(step.model)
    optimizer = make(list(model.parameters()))
    source = source_of(step)
    for batch in source.batches(source.extent.position(0), updates):
        inputs, target = step.loss_pass.ordinary.whole(batch, 0)
        torch.nn.functional.cross_entropy(model(inputs), target).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize("make", [Warming, Around])
def test_an_optimizer_that_sets_its_rates_before_it_uses_them_learns_as_in_a_plain_loop(make: object) -> None:
    """It never uses the schedule's rate, and the groups stay the dicts that they were."""
    step = step_of(tiny_job(model=lambda: torch.nn.Linear(6, 2), optimizer=make))
    groups, expected = list(step.optimizer.param_groups), plainly(make, step, 7)
    advance(step, 0, 7)
    assert all(map(torch.equal, step.model.parameters(), expected))
    assert all(now is then and type(now) is dict for now, then in zip(step.optimizer.param_groups, groups, strict=True))
    assert groups[0]["lr"] == 0.1


def test_a_schedule_that_an_optimizer_overrides_is_refused() -> None:
    """One of the two would have no effect."""
    step = step_of(tiny_job(optimizer=Warming, schedule=lambda progress: 1 - progress))
    with pytest.raises(BadJob, match="sets its learning rates in each step, and the job's schedule sets others"):
        advance(step, 0, 4)


@pytest.mark.parametrize("optimizer", [cycled, lambda parameters: Decaying(parameters, lr=0.1)])
def test_an_optimizer_that_changes_its_rate_for_the_next_update_is_refused(optimizer: object) -> None:
    """The schedule set the rate again before each update, so that all were made at the first one."""
    with pytest.raises(BadJob, match=r"changes a learning rate within its step, from .* undone that"):
        advance(step_of(tiny_job(optimizer=optimizer)), 0, 2)


@pytest.mark.parametrize("factor", [0, 0.0, 1e-9, 1.0, 30.0])
def test_any_factor_from_zero_on_is_one(factor: float) -> None:
    """A schedule may end at zero, and rise above one."""
    assert factor_at(lambda _progress: factor, 0.5) == factor


@pytest.mark.parametrize("factor", [-1.0, -1e-12, math.nan, math.inf])
def test_what_climbs_the_loss_is_refused_with_its_place(factor: float) -> None:
    """A negative rate trained uphill to the end of the run."""
    with pytest.raises(BadJob, match=rf"the schedule gives {factor} at 62\.5 % of the run, wanted"):
        factor_at(lambda _progress: factor, 0.625)


def test_it_is_found_at_the_update_that_would_use_it() -> None:
    """A schedule that falls below zero is reported where it does: the fifth of 15 updates."""
    step = step_of(tiny_job(schedule=lambda progress: 0.25 - progress))
    with pytest.raises(BadJob, match=r"gives -0\.016.* at 26\.67 % of the run"):
        advance(step, 0, 15)
    assert step.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * (0.25 - 3 / 15))
