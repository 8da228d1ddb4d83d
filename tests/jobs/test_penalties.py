"""Penalties on weights: what they are of, and that they enter an update once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import stoker
from tests.stepping.driving import largest_difference, trained
from tests.stepping.models import make_job, mlp


def test_l2_is_of_matrices_and_leaves_biases_and_norms_out() -> None:
    """By hand, of a model with all three; what is frozen is left out too."""
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3), nn.Linear(3, 1))
    expected = 0.5 * (model[0].weight.square().sum() + model[2].weight.square().sum())
    torch.testing.assert_close(stoker.l2(0.5)(model), expected)
    model[2].requires_grad_(requires_grad=False)
    torch.testing.assert_close(stoker.l1(2.0)(model), 2 * model[0].weight.abs().sum())


def test_patterns_say_what_else_is_meant() -> None:
    """Names, as in groups of an optimiser; where nothing is meant that is said."""
    model = nn.Linear(2, 3)
    torch.testing.assert_close(stoker.l2(1.0, of=["*bias"])(model), model.bias.square().sum())
    with pytest.raises(ValueError, match="no trained weight of Linear has names like head"):
        stoker.l2(1.0, of=["head*"])(model)


def test_l2_is_sgds_weight_decay_of_twice_the_weight_where_it_is_of_all() -> None:
    """To 1e-9 over a dozen updates, and whatever the micro-batches."""
    decayed = trained(make_job(mlp, optimizer=stoker.SGD(lr=0.1, weight_decay=0.02)), 16)
    punished = make_job(mlp, loss=stoker.Objective("cross_entropy", penalty=stoker.l2(0.01, of=["*"])))
    assert largest_difference(trained(punished, 16), decayed) < 1e-9
    assert largest_difference(trained(punished, 5), decayed) < 1e-9
