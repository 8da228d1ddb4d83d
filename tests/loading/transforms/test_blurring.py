from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.loading.transforms import GaussianBlur, GaussianNoise
from tests.loading.transforms.pictures import draw_for, images, one_by_one


def blurred(image_CHW: np.ndarray, sigma: float, radius: int) -> np.ndarray:
    """An image averaged with its neighbours over the whole square around each pixel at once."""
    reach = np.arange(-radius, radius + 1)
    weights = np.exp(-0.5 * (reach[:, None] ** 2 + reach**2) / sigma**2)
    padded = np.pad(image_CHW, ((0, 0), (radius, radius), (radius, radius)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (2 * radius + 1,) * 2, (1, 2))
    return (windows * weights / weights.sum()).sum((-1, -2))


@pytest.mark.parametrize("radius", [1, 3, 6])
def test_a_blur_is_that_of_each_image_alone(radius: int) -> None:
    """Against one two-dimensional window for each image, in float64; radii beyond the image too."""
    x_BCHW = images((5, 2, 7, 5), torch.float64)
    sigmas = draw_for(range(5)).numbers(0.3, 2.0)
    found = GaussianBlur((0.3, 2.0), radius)(x_BCHW, draw_for(range(5)))
    for i in range(5):
        assert np.allclose(found[i].numpy(), blurred(x_BCHW[i].numpy(), sigmas[i], radius), atol=1e-12)


def test_noise_is_what_is_drawn() -> None:
    """Added to floats; of bytes rounded, and cut off at 0 and 255."""
    x_BCHW = images((6, 3, 8, 8))
    noise = draw_for(range(6)).noise((3, 8, 8))
    expected = (x_BCHW + 40 * noise + 0.5).floor().clamp(0, 255).to(torch.uint8)
    assert torch.equal(GaussianNoise(40.0)(x_BCHW, draw_for(range(6))), expected)
    floating = x_BCHW.float()
    assert torch.allclose(GaussianNoise(0.1)(floating, draw_for(range(6))), floating + 0.1 * noise, atol=1e-4)


@settings(max_examples=15)
@given(st.integers(1, 7), st.sampled_from([torch.uint8, torch.float32]))
def test_noise_and_blur_do_not_depend_on_the_others_in_the_batch(size: int, dtype: torch.dtype) -> None:
    """Bit for bit."""
    x_BCHW = images((size, 3, 7, 5), dtype)
    for transform in (GaussianNoise(10.0), GaussianBlur()):
        assert torch.equal(transform(x_BCHW, draw_for(range(size))), one_by_one(transform, x_BCHW))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: GaussianNoise(-1.0), "std is the deviation of the noise, in units of the pixels, 0 or more, got -1.0"),
        (lambda: GaussianBlur((0.0, 1.0)), "sigma is an interval (low, high) of numbers above 0, got (0.0, 1.0)"),
        (lambda: GaussianBlur(radius=0), "radius is how far neighbours count, 1 or more pixels, got 0"),
    ],
)
def test_noise_and_blur_that_cannot_be_meant_are_refused(make, problem: str) -> None:
    """When they are given, with the value."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        make()
