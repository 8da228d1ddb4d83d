"""Factors of the learning rate: what a schedule may give."""

from __future__ import annotations

import math

import pytest
import torch

from stoker.errors import BadJob
from stoker.stepping.torch_optimizers import factor_at
from tests.training.builders import advance, step_of, tiny_job


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


@pytest.mark.parametrize("optimizer", [cycled, lambda parameters: Decaying(parameters, lr=0.1)])
def test_an_optimizer_that_changes_its_rate_for_the_next_update_is_refused(optimizer: object) -> None:
    """The schedule set the rate again before each update, so that all were made at the first one."""
    with pytest.raises(BadJob, match=r"changes a learning rate within its step, from .* undo that"):
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
