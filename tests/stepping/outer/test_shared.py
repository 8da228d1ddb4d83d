from __future__ import annotations

import pytest
import torch

from stoker.jobs import SGD
from stoker.stepping.diloco import SharedWeights


@pytest.mark.parametrize("settings", [SGD(lr=1.0), SGD(lr=0.7, momentum=0.9, nesterov=True), SGD(lr=0.5, momentum=0.8)])
def test_the_outer_step_is_pytorchs(settings: SGD) -> None:
    """Five steps move the shared weights as `torch.optim.SGD` does, bit for bit but for the order of products."""
    random = torch.Generator().manual_seed(0)
    begun = torch.randn(20, generator=random, dtype=torch.float64)
    theirs = torch.nn.Parameter(begun.clone())
    optimizer = torch.optim.SGD([theirs], lr=settings.lr, momentum=settings.momentum, nesterov=settings.nesterov)
    mine = SharedWeights(settings, [begun.clone()], torch.empty(0))
    for _ in range(5):
        gradient = torch.randn(20, generator=random, dtype=torch.float64)
        theirs.grad = gradient.clone()
        optimizer.step()
        mine.step(0, gradient)
        assert torch.allclose(mine.start[0], theirs.detach(), rtol=1e-14, atol=1e-14)


def test_a_state_is_a_copy_and_comes_back_whole() -> None:
    """What is saved does not move with what goes on, and loading restores weights, momentum and dates."""
    shared = SharedWeights(SGD(lr=0.5, momentum=0.5), [torch.ones(4), torch.ones(3)], torch.ones(2))
    shared.step(1, torch.full((3,), 2.0))
    shared.update, shared.applied, shared.sent, shared.due = 7, 3, [5, 7], [-1, 9]
    state = shared.state()
    shared.step(1, torch.full((3,), 2.0))
    other = SharedWeights(SGD(lr=0.5, momentum=0.5), [torch.zeros(4), torch.zeros(3)], torch.zeros(2))
    other.load(state)
    assert other.calendar() == [7, 3, 5, 7, -1, 9]
    assert torch.equal(other.start[1], torch.zeros(3))
    assert torch.equal(other.momentum[1], torch.full((3,), 2.0))
    assert torch.equal(other.statistics, torch.ones(2))
