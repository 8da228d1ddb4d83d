from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stoker.errors import BadJob
from stoker.zoo import VGG16

W, HIDDEN, C, K = 4, 8, 1, 5


def test_there_are_as_many_parameters_as_published():
    """138,357,544 at the sizes of the paper; made without memory for them."""
    with torch.device("meta"):
        assert sum(p.numel() for p in VGG16().parameters()) == 138_357_544


def test_parameters_and_flops_are_as_stated():
    """The closed forms of the module's docstring, at sizes of one's own."""
    model = VGG16(classes=K, in_channels=C, width=W, hidden=HIDDEN)
    linear = (392 * W + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN + (HIDDEN + 1) * K
    assert sum(p.numel() for p in model.parameters()) == 9 * C * W + 3591 * W**2 + 66 * W + linear
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, C, 32, 32)).sum().backward()
    a0, a1, a2, a3, a4 = (32**2 // 4**i for i in range(5))
    maps = (C * W + W**2) * a0 + 6 * W**2 * a1 + 40 * W**2 * a2 + 160 * W**2 * a3 + 192 * W**2 * a4
    once = 6 * (9 * maps + 392 * W * HIDDEN + HIDDEN**2 + HIDDEN * K) - 18 * C * W * a0
    assert counter.get_total_flops() == 2 * once


def test_small_images_and_sizes_are_refused():
    """With the size it got, before anything is computed."""
    with pytest.raises(BadJob, match=r"32 pixels and more, got \[16, 40\]"):
        VGG16(width=W, hidden=HIDDEN)(torch.zeros(1, 3, 16, 40))
    with pytest.raises(BadJob, match="got classes 0"):
        VGG16(classes=0)
