from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stoker.errors import BadJob
from stoker.zoo import ViT

SMALL = {"image": 16, "patch": 4, "layers": 2, "width": 12, "heads": 3, "classes": 5, "in_channels": 2, "mlp": 20}


def test_there_are_as_many_parameters_as_published():
    """86,567,656 for ViT-B/16; made without memory for them."""
    with torch.device("meta"):
        assert sum(p.numel() for p in ViT().parameters()) == 86_567_656


def test_parameters_and_flops_are_as_stated():
    """The closed forms of the module's docstring, at sizes of one's own."""
    s, p, num, d, _, k, c, m = SMALL.values()
    n, t = (s // p) ** 2, (s // p) ** 2 + 1
    model = ViT(**SMALL)
    layers = num * (4 * d**2 + 2 * d * m + 9 * d + m)
    assert sum(w.numel() for w in model.parameters()) == (c * p**2 + 1) * d + d + t * d + layers + 2 * d + (d + 1) * k
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(torch.randn(3, c, s, s)).sum().backward()
    once = 6 * (t * num * (4 * d**2 + 2 * d * m) + n * c * p**2 * d + d * k) + 12 * num * d * t**2
    assert counter.get_total_flops() == 3 * (once - 2 * n * c * p**2 * d)


def test_it_computes_what_timm_computes_from_the_same_weights():
    """Names and shapes of weights are timm's, and so are the logits."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    theirs = timm.models.VisionTransformer(
        img_size=16, patch_size=4, depth=2, embed_dim=12, num_heads=3, num_classes=5, in_chans=2, mlp_ratio=20 / 12
    ).double()
    mine = ViT(**SMALL).double()
    mine.load_state_dict(theirs.state_dict())
    images = torch.randn(3, 2, 16, 16, dtype=torch.float64)
    assert torch.allclose(mine(images), theirs(images), rtol=1e-10)


def test_other_images_and_sizes_are_refused():
    """Images of another size, patches that do not fit, sizes that are not positive."""
    with pytest.raises(BadJob, match=r"ViT\(image=16\) got images of \[8, 16\] pixels"):
        ViT(**SMALL)(torch.zeros(1, 2, 8, 16))
    with pytest.raises(BadJob, match="16 pixels into patches of 5"):
        ViT(**{**SMALL, "patch": 5})
    with pytest.raises(BadJob, match="sizes >= 1"):
        ViT(**{**SMALL, "layers": 0})
