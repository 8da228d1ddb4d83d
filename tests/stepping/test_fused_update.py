"""The shorter way to the fused optimisers' kernels: the same bits, the same state."""

from __future__ import annotations

import copy

import pytest
import torch

from stoker.stepping.fused_update import fused_update

OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3}),
    (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 1e-2}),
    (torch.optim.AdamW, {"lr": 1e-2}),
]


def _parameters() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in ((8, 5), (8,), (3, 4, 2))]


def _pair(kind, settings):
    """Two equal sets of parameters with their optimisers, each parameter of the last shape in a group of its own."""
    for _ in range(2):
        parameters = _parameters()
        yield (
            parameters,
            kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.05}], fused=True, **settings),
        )


def _give_gradients(*sets: list[torch.Tensor], seed: int) -> None:
    for parameters in sets:
        generator = torch.Generator().manual_seed(seed)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
def test_weights_and_state_are_those_of_the_optimizers_own_step(kind, settings) -> None:
    """Over updates, a changed rate, and a state that was saved and loaded in between: equal bit for bit."""
    (plain, plain_optimizer), (ours, our_optimizer) = _pair(kind, settings)
    update = fused_update(our_optimizer)
    for number in range(6):
        _give_gradients(plain, ours, seed=number)
        for optimizer in (plain_optimizer, our_optimizer):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + number)
        plain_optimizer.step()
        update()
        if number == 3:
            our_optimizer.load_state_dict(copy.deepcopy(our_optimizer.state_dict()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))
    mine, theirs = our_optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    for at in mine:
        for name, value in mine[at].items():
            assert value is None or torch.equal(value, theirs[at][name]), name


def test_a_parameter_without_gradient_is_left_as_it_is() -> None:
    """As by the optimiser's own step: neither the weight nor its count of steps moves."""
    (ours, optimizer), _ = _pair(torch.optim.AdamW, {"lr": 1e-2})
    update = fused_update(optimizer)
    for number in range(2):
        _give_gradients(ours, seed=number)
        update()
    before = ours[1].detach().clone()
    _give_gradients(ours, seed=2)
    ours[1].grad = None
    update()
    assert torch.equal(ours[1], before)
    assert [float(optimizer.state[one]["step"]) for one in ours] == [3, 2, 3]


@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
def test_parameters_may_get_gradients_in_turn(kind, settings) -> None:
    """As of heads that take turns: fused SGD of PyTorch fails where one parameter has a momentum and another none."""
    (plain, _), (ours, optimizer) = _pair(kind, settings)
    by_itself = kind([{"params": plain[:2]}, {"params": plain[2:], "lr": 0.05}], foreach=False, **settings)
    update = fused_update(optimizer)
    for number in range(6):
        _give_gradients(plain, ours, seed=number)
        for parameters in (plain, ours):
            if number % 2 == 0:  # the first one has no momentum yet where the second one has
                parameters[number // 2 % 2].grad = None
        by_itself.step()
        update()
    for mine, theirs in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert optimizer.state_dict()["state"].keys() == by_itself.state_dict()["state"].keys()  # without momentum none


def test_other_optimizers_make_their_own_step() -> None:
    """What is not fused, or has kernels we do not know, is called as it is."""
    for optimizer in (torch.optim.SGD(_parameters(), lr=0.1), torch.optim.RMSprop(_parameters())):
        assert fused_update(optimizer) == optimizer.step
    decoupled = torch.optim.Adam(_parameters(), decoupled_weight_decay=True, fused=True)
    assert fused_update(decoupled) == decoupled.step
    amsgrad = torch.optim.Adam(_parameters(), amsgrad=True, fused=True)
    assert fused_update(amsgrad) == amsgrad.step
