"""Moments that have become too small to be normal numbers: gone from the state, and no weight hears of it."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch

from stoker.jobs import AdamW
from stoker.stepping import step
from stoker.stepping.step import Step
from stoker.stepping.torch_optimizers import FLUSH_EVERY, flush_denormals
from tests.stepping.driving import SEPARABLE, plan_of, train
from tests.stepping.models import make_job, mlp, vectors

SMALLEST = torch.finfo(torch.float32).tiny


def _moments(of: Step) -> torch.Tensor:
    return torch.cat([state["exp_avg"].flatten() for state in of.optimizer.state.values()])


def _num_denormal(values: torch.Tensor) -> int:
    return int(((values != 0) & (values.abs() < SMALLEST)).sum())


def _a_step(optimizer: object, begin: int) -> Step:
    """One that has made update `begin`, some of whose moments have not got a gradient for long."""
    made = Step(make_job(mlp, data=vectors(64), optimizer=optimizer), plan_of(16), SEPARABLE)
    train(made.job, made, 1, begin=begin, of=2 * FLUSH_EVERY)
    first = next(iter(made.optimizer.state.values()))
    first["exp_avg"][:, 0] = 3e-39
    first["exp_avg"][:, 1] = -3e-39
    return made


def _without_gradient(made: Step) -> None:
    """Let the weights whose moments were set get no gradient."""
    weight = next(made.model.parameters())
    keep = torch.ones_like(weight)
    keep[:, :2] = 0
    weight.register_hook(lambda gradient: gradient * keep)


@pytest.mark.parametrize("begin", [0, 100])
def test_moments_without_a_gradient_do_not_stay_denormal_and_weights_are_the_same_bits(begin: int) -> None:
    """After the 128th update of a run none is left, wherever training went on from; unswept, rounding keeps them."""
    swept, unswept = (_a_step(AdamW(lr=1e-2), begin) for _ in range(2))
    for made in (swept, unswept):
        _without_gradient(made)
    to_the_sweep = FLUSH_EVERY - 1 - begin
    train(swept.job, swept, to_the_sweep, begin=begin + 1, of=2 * FLUSH_EVERY)
    with mock.patch.object(step, "flush_denormals"):
        train(unswept.job, unswept, to_the_sweep, begin=begin + 1, of=2 * FLUSH_EVERY)
    assert _num_denormal(_moments(swept)) == 0
    assert _num_denormal(_moments(unswept)) > 0
    pairs = zip(swept.model.parameters(), unswept.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_before_the_hundred_and_twenty_eighth_update_nothing_is_swept() -> None:
    """Sweeps come with the update's number, so that all processes and all continuations make the same ones."""
    made = _a_step(AdamW(lr=1e-2), 0)
    with mock.patch.object(step, "flush_denormals") as sweep:
        train(made.job, made, FLUSH_EVERY - 2, begin=1, of=2 * FLUSH_EVERY)
        assert not sweep.called
        train(made.job, made, 1, begin=FLUSH_EVERY - 1, of=2 * FLUSH_EVERY)
        assert sweep.call_count == 1


def test_a_users_own_optimiser_keeps_what_it_has() -> None:
    """What it means by its state is unknown here."""
    made = _a_step(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, betas=(0.99, 0.99)), FLUSH_EVERY - 2)
    _without_gradient(made)
    train(made.job, made, 1, begin=FLUSH_EVERY - 1, of=2 * FLUSH_EVERY)
    assert _num_denormal(_moments(made)) > 0


@pytest.mark.parametrize("name", ["momentum_buffer", "exp_avg"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_normal_stays_and_what_is_no_number_too(dtype: torch.dtype, name: str) -> None:
    """In place, in every dtype of a state; not a number and infinity are others' to find."""
    tiny = torch.finfo(dtype).tiny
    weight = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    kept = torch.tensor([tiny / 4, -tiny / 4, 2 * tiny, -2 * tiny, 1.0, math.inf, math.nan, 0.0], dtype=dtype)
    optimizer.state[weight] = {name: kept, "step": torch.tensor(3.0)}
    flush_denormals(optimizer)
    expected = torch.tensor([0.0, 0.0, 2 * tiny, -2 * tiny, 1.0, math.inf, math.nan, 0.0], dtype=dtype)
    assert optimizer.state[weight][name] is kept
    assert torch.equal(kept.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert optimizer.state[weight]["step"] == 3


def test_second_moments_stay_for_a_tiny_epsilon() -> None:
    """Gradients of 1e-20 have denormal squares; with a root of 0 below them, one update would go to infinity."""
    made = _a_step(AdamW(lr=1e-2, eps=1e-30), FLUSH_EVERY - 2)
    for state in made.optimizer.state.values():
        state["exp_avg"].fill_(1e-20)
        state["exp_avg_sq"].fill_(1e-40)
    flush_denormals(made.optimizer)
    for weight in made.model.parameters():
        weight.grad = torch.zeros_like(weight)
    made.optimizer.step()
    assert max(float(weight.detach().abs().max()) for weight in made.model.parameters()) < 10
