from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stoker.errors import BadJob
from stoker.zoo.airbench import Whitening, whitening_filters


def smooth_images(count: int = 40, channels: int = 2, size: int = 12) -> np.ndarray:
    """Images [B, C, H, W] whose neighbouring pixels are equal."""
    noise = torch.randn(count, channels, size + 2, size + 2, generator=torch.Generator().manual_seed(0))
    return F.avg_pool2d(noise, 3, stride=1).numpy()


def test_what_comes_out_is_white() -> None:
    """With nothing added to the variances, the outputs over the images themselves have the identity as covariance."""
    images = smooth_images()
    layer = Whitening(2, kernel_size=2, eps=1e-9)
    layer.fill(whitening_filters(images, layer))
    out = layer(torch.from_numpy(images)).transpose(0, 1).flatten(1).double()
    half = out[: layer.components]
    torch.testing.assert_close(out[layer.components :], -half)
    torch.testing.assert_close(half @ half.T / half.shape[1], torch.eye(8).double(), atol=2e-2, rtol=0)


def test_the_strongest_components_come_first() -> None:
    """Fewer components are the first of all of them, and weaker ones have larger filters."""
    images = smooth_images()
    every = whitening_filters(images, Whitening(2, 3))
    few = whitening_filters(images, Whitening(2, 3, components=5))
    assert np.array_equal(few, every[:5])
    sizes = np.linalg.norm(every.reshape(len(every), -1), axis=1)
    assert (np.diff(sizes) >= -1e-4).all()


def test_filters_do_not_hang_on_rounding() -> None:
    """Images that differ in their last digits give the same bits, signs included: runs go on elsewhere."""
    images = smooth_images(channels=1)
    layer = Whitening(1, 2)
    filters = whitening_filters(images, layer)
    assert np.array_equal(filters, whitening_filters(images * (1 + 1e-9), layer))
    assert (filters.reshape(4, -1).max(1) == np.abs(filters.reshape(4, -1)).max(1)).all()


def test_an_empty_layer_is_not_used_by_mistake() -> None:
    """Before it is filled it refuses; saved weights fill it as well."""
    layer, filled = Whitening(1), Whitening(1)
    with pytest.raises(BadJob, match="no filters"):
        layer(torch.zeros(1, 1, 4, 4))
    filled.fill(whitening_filters(smooth_images(channels=1), filled))
    layer.load_state_dict(filled.state_dict())
    x_BCHW = torch.randn(3, 1, 5, 5)
    assert torch.equal(layer(x_BCHW), filled(x_BCHW))
    assert not any(parameter.requires_grad for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        (
            np.zeros((4, 3, 8, 8)),
            r"takes 1 channels of at least 2 x 2 pixels, the training images are 4 of \[3, 8, 8\]",
        ),
        (np.zeros((4, 1, 1, 8)), r"of \[1, 1, 8\]"),
        (np.zeros((0, 1, 8, 8)), "are 0 of"),
    ],
)
def test_images_that_do_not_fit_are_refused(images: np.ndarray, problem: str) -> None:
    """Reported with the sizes of both."""
    with pytest.raises(BadJob, match=problem):
        whitening_filters(images, Whitening(1))


@pytest.mark.parametrize("components", [0, 5])
def test_more_components_than_there_are_is_refused(components: int) -> None:
    """Patches of 2 x 2 grey pixels have four."""
    with pytest.raises(BadJob, match=f"1 to 4 principal components, got {components}"):
        Whitening(1, 2, components)
