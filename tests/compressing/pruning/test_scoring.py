"""Channels are ranked by what the loss loses, for what they cost."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from stoker.compressing.channel_cuts import CannotPrune, prunable
from stoker.compressing.channel_importance import scores_of
from tests.compressing.pruning.networks import IMAGES, Depthwise, Residual, ask, made

TARGET = torch.tensor([0, 1, 2, 3])


def gradients(model: nn.Module) -> Iterator[None]:
    """Of the loss on two batches of two."""
    for start in (0, 2):
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(IMAGES[start : start + 2]), TARGET[start : start + 2]).backward()
        yield


def test_a_channel_that_does_nothing_comes_first() -> None:
    """Whether asked by the loss or by weights alone."""
    model = made(Residual)
    with torch.no_grad():
        for tensor in (model.inner.weight[7], model.norm.weight[7], model.norm.bias[7], model.outer.weight[:, 7]):
            tensor.zero_()
    groups = prunable(model, ask)
    for found in (
        scores_of(model, ask, groups, importance="taylor", gradients=gradients),
        scores_of(model, ask, groups, importance="magnitude"),
    ):
        assert {name: len(one) for name, one in found.items()} == {"inner": 24, "outer": 16}
        assert found["inner"][7] == 0 < found["inner"].max()


def test_of_two_that_matter_alike_the_dearer_scores_less() -> None:
    """Scores are for each multiplication that goes with a channel, counted by hand here."""
    model = made(Depthwise)
    groups = prunable(model, ask)
    found = scores_of(model, ask, groups, importance="magnitude")
    places, rows = 64, 4
    products = {
        # 16 channels: a kernel of nine from one channel, one of nine each, and a share of 32 rows of weights
        "depthwise": places * rows * (16 * 9 + 16 * 9 + 16 * 32),
        "point": places * rows * 16 * 32 + rows * 32 * 4 * 5,
    }
    weights = {  # the library leaves depthwise kernels out of the ranking
        "depthwise": [model.first.weight, model.norm.weight, model.point.weight.transpose(0, 1)],
        "point": [model.point.weight, model.head.weight.view(5, 32, 4).transpose(0, 1)],
    }
    for root, parts in weights.items():
        channels = len(parts[0])
        squares = torch.stack([part.detach().double().reshape(channels, -1).square().sum(1) for part in parts]).sum(0)
        np.testing.assert_allclose(found[root], squares.numpy() * channels / products[root], rtol=1e-5)


def test_the_model_keeps_its_weights_and_gets_no_gradient() -> None:
    """Ranking is done on a copy."""
    model = made(Residual)
    scores_of(model, ask, prunable(model, ask), importance="taylor", gradients=gradients)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_left_no_gradient_is_refused() -> None:
    """Instead of ranking by nothing."""
    model = made(Residual)

    def none(_model: nn.Module) -> Iterator[None]:
        yield

    with pytest.raises(CannotPrune, match="no gradient"):
        scores_of(model, ask, prunable(model, ask), importance="taylor", gradients=none)
