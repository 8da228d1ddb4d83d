from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stoker.errors import BadJob
from stoker.zoo import MLP

WIDTHS = [(784, (256, 128), 10), (64, (), 10), (5, (7,), 3)]


@pytest.mark.parametrize(("inputs", "hidden", "classes"), WIDTHS)
def test_parameters_and_flops_are_as_stated(inputs, hidden, classes):
    """The closed forms of the module's docstring equal what is built and what PyTorch counts in a training step."""
    model = MLP(inputs, hidden, classes)
    widths = (inputs, *hidden, classes)
    pairs = list(pairwise(widths))
    assert sum(p.numel() for p in model.parameters()) == sum((a + 1) * b for a, b in pairs)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(4, inputs)).sum().backward()
    assert counter.get_total_flops() == 4 * (6 * sum(a * b for a, b in pairs) - 2 * widths[0] * widths[1])


def test_images_are_flattened():
    """Samples of any shape with F features in all give K logits."""
    assert MLP(64, (8,), 3)(torch.randn(5, 1, 8, 8)).shape == (5, 3)


def test_dropout_acts_in_training_only():
    """In evaluation the output is a function of the input alone."""
    model = MLP(16, dropout=0.5)
    x_BF = torch.randn(4, 16)
    assert not torch.equal(model(x_BF), model(x_BF))
    model.eval()
    assert torch.equal(model(x_BF), model(x_BF))


@pytest.mark.parametrize("sizes", [{"inputs": 0}, {"inputs": 4, "hidden": (3, 0)}, {"inputs": 4, "dropout": 1.0}])
def test_sizes_that_make_no_model_are_refused(sizes):
    """Each is reported with its numbers."""
    with pytest.raises(BadJob, match=r"MLP takes .* got"):
        MLP(**sizes)
