"""Data parallel: parameters that some process, or none, had a use for."""

from __future__ import annotations

import torch
from torch import nn

from stoker.jobs import Loss
from stoker.loading.batches import Pass
from stoker.records import Layout
from stoker.stepping.layouts.replicas import Replicated
from stoker.stepping.world import World
from stoker.testing.ranks import on_ranks

TWO = Layout(replicas=2)
PASSES = (Pass(0, 1, 0), Pass(1, 2, 1))


class Three(nn.Module):
    """Three weights, of which a pass chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(2) for _ in range(3))


def chosen(world: World, places: dict[tuple[int, int], int | None]) -> list[list[float] | None]:
    """Gradients after two updates in which process and pass use one weight each, or none of them (`places`)."""
    model = Three()
    spread = Replicated(model, world)

    def loss_of(one: Pass) -> Loss:
        place = places[world.rank, one.first]
        return Loss(torch.ones(()) if place is None else model.weights[place].sum(), 1)

    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        loss = spread.accumulate(PASSES, loss_of)
    assert int(loss.count) == 4
    return [None if p.grad is None else p.grad.tolist() for p in model.parameters()]


def test_gradients_are_summed_over_whoever_has_them() -> None:
    """Of what no process used there is none, in any process; of what one used in an early pass its own."""
    places = {(0, 0): 0, (0, 1): 1, (1, 0): 1, (1, 1): 1}
    assert on_ranks(TWO, chosen, places) == [[[1.0, 1.0], [3.0, 3.0], None]] * 2


def test_a_process_whose_loss_depends_on_nothing_does_not_hold_up_the_others() -> None:
    """Its last pass has no backward pass; the sum over processes is made all the same."""
    places = {(0, 0): 0, (0, 1): None, (1, 0): 0, (1, 1): 2}
    assert on_ranks(TWO, chosen, places) == [[[2.0, 2.0], None, [1.0, 1.0]]] * 2
