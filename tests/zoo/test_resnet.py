from __future__ import annotations

import pytest
import torch

from stoker.errors import BadJob
from stoker.zoo import ResNet

PUBLISHED = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}


@pytest.mark.parametrize("depth", PUBLISHED)
def test_there_are_as_many_parameters_as_published(depth):
    """Those of torchvision's models of the same name; made without memory for them."""
    with torch.device("meta"):
        assert sum(p.numel() for p in ResNet(depth).parameters()) == PUBLISHED[depth]


@pytest.mark.parametrize("depth", [18, 50])
def test_it_computes_what_timm_computes_from_the_same_weights(depth):
    """Names and shapes of weights are torchvision's and timm's, and so are the logits, in training and evaluation."""
    timm = pytest.importorskip("timm", reason="timm is not installed")
    theirs = timm.create_model(f"resnet{depth}", num_classes=7).double()
    mine = ResNet(depth, classes=7).double()
    mine.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    assert torch.allclose(mine(images), theirs(images), rtol=1e-10)
    assert torch.allclose(mine.eval()(images), theirs.eval()(images), rtol=1e-10)


def test_the_small_stem_keeps_the_map():
    """Images of 32 pixels come into the first stage as they are, those of the large stem at a quarter of the side."""
    for stem, side in (("small", 32), ("large", 8)):
        model = ResNet(18, width=4, classes=3, in_channels=1, stem=stem)
        seen = []
        model.layer1.register_forward_pre_hook(lambda _, inputs, seen=seen: seen.append(inputs[0].shape))
        assert model(torch.randn(2, 1, 32, 32)).shape == (2, 3)
        assert seen == [(2, 4, side, side)]


def test_what_is_no_resnet_is_refused():
    """An unknown depth or stem, or a size that is not positive, is said with what there is."""
    with pytest.raises(BadJob, match=r"depths 18, 34, 50, 101, 152 .* got 20"):
        ResNet(20)
    with pytest.raises(BadJob, match="got 18 and 'tiny'"):
        ResNet(18, stem="tiny")
    with pytest.raises(BadJob, match="width 0"):
        ResNet(18, width=0)
