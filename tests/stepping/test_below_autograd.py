"""Operations past autograd: nothing is noted for a backward pass, and writes are counted as ever."""

from __future__ import annotations

import torch

from stoker.stepping.graph_interpreter import below_autograd


def test_nothing_is_noted_and_writes_are_counted() -> None:
    """Whether in a product or in place on a weight; outside of the block autograd is what it was."""
    weight = torch.randn(3, 3, requires_grad=True)
    version = weight._version
    with below_autograd():
        product = weight @ weight
        weight.mul_(0.5)
    assert not product.requires_grad
    assert weight._version == version + 1
    assert (weight @ weight).requires_grad
