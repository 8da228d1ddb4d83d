from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stoker.errors import BadJob
from stoker.zoo import Airbench


def usable(*args: object) -> Airbench:
    """A model whose first layer holds what it was born with."""
    model = Airbench(*args)  # type: ignore[arg-type]
    model.whitening.is_filled = True
    return model


@pytest.mark.parametrize(("widths", "C", "K", "size"), [((32, 96, 192), 1, 10, 28), ((4, 8, 6), 3, 7, 32)])
def test_parameters_and_flops_are_as_stated(widths: tuple[int, ...], C: int, K: int, size: int) -> None:
    """The closed forms of the module's docstring equal what is built and what PyTorch counts in a training step."""
    model = usable(widths, C, K)
    w = (8 * C, *widths)
    pairs = list(pairwise(w))
    stated = 4 * C * w[0] + sum(9 * i * o + 9 * o**2 + 4 * o for i, o in pairs) + K * w[3]
    assert sum(parameter.numel() for parameter in model.parameters()) == stated
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, C, size, size)).sum().backward()
    A = [((size - 1) >> done) ** 2 for done in range(4)]
    convolutions = sum(i * o * A[at] + o**2 * A[at + 1] for at, (i, o) in enumerate(pairs))
    flops = 2 * 4 * C * w[0] * A[0] + 6 * (9 * convolutions + K * w[3]) - 18 * w[0] * w[1] * A[0]
    assert counter.get_total_flops() == 2 * flops


@pytest.mark.parametrize("size", [9, 28])
def test_images_of_these_sizes_are_classified(size: int) -> None:
    """From nine pixels on there are logits for each image."""
    assert usable((4, 8, 6)).eval()(torch.randn(3, 1, size, size)).shape == (3, 10)


def test_the_frozen_parts_stay() -> None:
    """No gradient for the whitening filters and the scales of batch norms."""
    model = usable((4, 8, 6))
    model(torch.randn(4, 1, 12, 12)).sum().backward()
    frozen = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    norms = {f"groups.{group}.{place}_norm.weight" for group in range(3) for place in ("first", "second")}
    assert frozen == {"whitening.weight", *norms}


def test_convolutions_begin_as_the_identity() -> None:
    """Of the channels they take, in their centre; further ones begin as PyTorch's."""
    first = usable((12, 12, 6)).groups[0].first
    x_BCHW = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(first(x_BCHW)[:, :8], x_BCHW)


@pytest.mark.parametrize("sizes", [{"widths": (1, 2)}, {"widths": (1, 0, 2)}, {"classes": 0}, {"in_channels": 0}])
def test_sizes_that_make_no_model_are_refused(sizes: dict[str, object]) -> None:
    """Each is reported with its numbers."""
    with pytest.raises(BadJob, match="Airbench takes three widths"):
        Airbench(**sizes)  # type: ignore[arg-type]
