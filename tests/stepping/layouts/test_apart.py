from __future__ import annotations

import torch
from torch import nn

from stoker.jobs import Loss
from stoker.loading.batches import Pass
from stoker.stepping.layouts.replicas import IndependentReplicas


def test_only_what_counts_is_accumulated() -> None:
    """A pass that counts nothing leaves no gradient and is not even made; the count is this process's own."""
    model, made = nn.Linear(3, 1), []

    def loss_of(one: Pass) -> Loss:
        made.append(one)
        return Loss(model(torch.ones(one.size, 3)).sum(), one.size)

    loss = IndependentReplicas(model).accumulate([Pass(0, 2, 4), Pass(0, 1, 0, counts=False), Pass(2, 3, 6)], loss_of)
    assert loss.count == 3
    assert [one.first for one in made] == [4, 6]
    assert model.weight.grad.tolist() == [[3.0, 3.0, 3.0]]
