from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stoker.errors import BadJob
from stoker.zoo import ResNet9


def stated_parameters(w: int, C: int, K: int) -> int:
    """The closed form of the module's docstring."""
    return 1602 * w**2 + (9 * C + 70 + 8 * K) * w + K


def stated_flops(w: int, C: int, K: int, A: list[int]) -> int:
    """The closed form of the module's docstring; A: pixels of the maps."""
    convolutions = (C * w + 2 * w**2) * A[0] + 16 * w**2 * A[1] + 32 * w**2 * A[2] + 128 * w**2 * A[3]
    return 6 * (9 * convolutions + 8 * w * K) - 18 * C * w * A[0]


@pytest.mark.parametrize(
    ("w", "C", "K", "size", "pools"), [(16, 1, 10, 28, 3), (4, 3, 7, 32, 3), (8, 1, 10, 8, 2), (4, 1, 5, 8, 0)]
)
def test_parameters_and_flops_are_as_stated(w, C, K, size, pools):
    """The closed forms equal what is built and what PyTorch counts in a training step, for odd maps too."""
    model = ResNet9(w, C, K, pools)
    assert sum(p.numel() for p in model.parameters()) == stated_parameters(w, C, K)
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, C, size, size)).sum().backward()
    pixels = [(size >> min(done, pools)) ** 2 for done in range(4)]
    assert counter.get_total_flops() == 2 * stated_flops(w, C, K, pixels)


@pytest.mark.parametrize(("size", "pools"), [(28, 3), (8, 3), (8, 2), (1, 0)])
def test_images_of_these_sizes_are_classified(size, pools):
    """From 2**pools pixels on there are logits for each image."""
    assert ResNet9(4, pools=pools)(torch.randn(3, 1, size, size)).shape == (3, 10)


def test_memory_format_changes_nothing_but_rounding():
    """Channels last, the model gives the same logits."""
    torch.manual_seed(0)
    model = ResNet9(4).double().eval()
    x_BCHW = torch.randn(2, 1, 28, 28, dtype=torch.float64)
    expected = model(x_BCHW)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x_BCHW.to(memory_format=torch.channels_last)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sizes", [{"width": 0}, {"classes": 0}, {"pools": 4}, {"pools": -1}])
def test_sizes_that_make_no_model_are_refused(sizes):
    """Each is reported with its numbers."""
    with pytest.raises(BadJob, match=r"ResNet9 takes .* got"):
        ResNet9(**sizes)
