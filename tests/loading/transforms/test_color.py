from __future__ import annotations

import colorsys
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.loading.transforms import ColorJitter, Normalize, RandomGrayscale
from stoker.loading.transforms.photometric import with_hue_turned
from tests.loading.transforms.pictures import draw_for, images, one_by_one


def luma(image_CHW: np.ndarray) -> np.ndarray:
    """The grey of an image."""
    return np.tensordot([0.299, 0.587, 0.114], image_CHW, 1)


def jittered(image_CHW: np.ndarray, brightness: float, contrast: float, saturation: float, turn: float) -> np.ndarray:
    """An image of 0 to 1 in other colours: step by step, hues pixel by pixel."""
    image = np.clip(image_CHW * brightness, 0, 1)
    image = np.clip(contrast * image + (1 - contrast) * luma(image).mean(), 0, 1)
    image = np.clip(saturation * image + (1 - saturation) * luma(image), 0, 1)
    for row in range(image.shape[1]):
        for column in range(image.shape[2]):
            hue, amount, value = colorsys.rgb_to_hsv(*image[:, row, column])
            image[:, row, column] = colorsys.hsv_to_rgb((hue + turn) % 1, amount, value)
    return image


def test_colours_are_those_of_each_image_alone() -> None:
    """Against Python's own conversion of hues, in float64; brightness first, then contrast, saturation and hue."""
    x_BCHW, same = images((5, 3, 4, 6), torch.float64), draw_for(range(5))
    factors = [same.numbers(0.6, 1.4), same.numbers(0.5, 1.5), same.numbers(0.0, 2.5)]
    turns = same.numbers(-0.3, 0.3)
    found = ColorJitter(0.4, 0.5, 1.5, 0.3)(x_BCHW, draw_for(range(5)))
    for i in range(5):
        expected = jittered(x_BCHW[i].numpy(), *(float(factor[i]) for factor in factors), float(turns[i]))
        assert np.allclose(found[i].numpy(), expected, atol=1e-6)


def test_bytes_are_rounded_to_the_nearest() -> None:
    """uint8 in, uint8 out: within half a step of the same of floating images."""
    x_BCHW, jitter = images((6, 3, 5, 5)), ColorJitter(0.4, 0.4, 0.4, 0.1)
    found = jitter(x_BCHW, draw_for(range(6)))
    exact = jitter(x_BCHW.double() / 255, draw_for(range(6))) * 255
    assert found.dtype == torch.uint8
    assert float((found.double() - exact).abs().max()) < 0.51


def test_a_whole_turn_of_the_hue_is_none_and_thirds_swap_channels() -> None:
    """Red becomes green, green blue, blue red; grey pixels have no hue."""
    x_BCHW = torch.cat([images((1, 3, 4, 4), torch.float64), torch.full((1, 3, 4, 4), 0.5, dtype=torch.float64)])
    assert torch.allclose(with_hue_turned(x_BCHW, np.array([1.0, 1.0])), x_BCHW, atol=1e-12)
    assert torch.allclose(with_hue_turned(x_BCHW, np.array([1 / 3, 0.2])), x_BCHW.roll(1, dims=1), atol=1e-12)


def test_grey_images_keep_their_one_channel() -> None:
    """Saturation and hue leave them alone, contrast does not."""
    x_BCHW = images((4, 1, 3, 3))
    assert torch.equal(ColorJitter(saturation=1, hue=0.5)(x_BCHW, draw_for(range(4))), x_BCHW)
    assert not torch.equal(ColorJitter(contrast=0.9)(x_BCHW, draw_for(range(4))), x_BCHW)


def test_colours_are_taken_out_of_some_images() -> None:
    """All three channels are then the luma, rounded; the others are left as they were."""
    x_BCHW = images((60, 3, 4, 4))
    is_gray = draw_for(range(60)).uniform() < 0.3
    found = RandomGrayscale(0.3)(x_BCHW, draw_for(range(60)))
    for i in range(60):
        expected = np.floor(luma(x_BCHW[i].numpy().astype(float)) + 0.5) if is_gray[i] else x_BCHW[i].numpy()
        assert np.abs(found[i].numpy().astype(float) - expected).max() <= (1e-3 if not is_gray[i] else 1)
    assert torch.equal(found[is_gray][:, 0], found[is_gray][:, 2])


@pytest.mark.parametrize("mean", [0.5, (0.1, 0.2, 0.3)])
def test_standardised_images_are_what_they_should_be(mean) -> None:
    """Bytes as 0 to 1 first; in training as in evaluation."""
    x_BCHW = images((3, 3, 4, 4))
    normalize = Normalize(mean, (0.5, 0.25, 2.0))
    expected = (x_BCHW / 255 - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor([0.5, 0.25, 2.0]).view(-1, 1, 1)
    found = normalize(x_BCHW, draw_for(range(3)))
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(found, normalize.in_evaluation(x_BCHW))


@settings(max_examples=20)
@given(st.integers(1, 8), st.sampled_from([torch.uint8, torch.float32]))
def test_colours_do_not_depend_on_the_others_in_the_batch(size: int, dtype: torch.dtype) -> None:
    """Bit for bit, the mean of the contrast included."""
    x_BCHW = images((size, 3, 7, 5), dtype)
    for transform in (ColorJitter(0.4, 0.4, 0.4, 0.1), RandomGrayscale(0.5), Normalize(0.5, 0.2)):
        assert torch.equal(transform(x_BCHW, draw_for(range(size))), one_by_one(transform, x_BCHW))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: ColorJitter(brightness=-0.1), "how far a factor is from 1 at most, 0 or more, got -0.1"),
        (lambda: ColorJitter(hue=0.6), "hue is how far hues are turned at most, from 0 to 0.5, got 0.6"),
        (lambda: Normalize(0.5, 0.0), "std has positive deviations, got 0.0"),
    ],
)
def test_colours_that_cannot_be_meant_are_refused(make, problem: str) -> None:
    """When they are given, with the value."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        make()


def test_a_mean_of_bytes_up_to_255_is_refused() -> None:
    """They are scaled to 0 to 1 first: every image would be nearly the same. Floats are taken as they are."""
    with pytest.raises(BadJob, match="is not of bytes scaled to 0 to 1"):
        Normalize(123.7, 0.2)(images((1, 3, 3, 3)), draw_for([0]))
    with pytest.raises(BadJob, match="is not of bytes scaled to 0 to 1"):
        Normalize(0.0, 255.0)(images((1, 3, 3, 3)), draw_for([0]))
    floats = torch.full((1, 3, 2, 2), 123.7)
    assert Normalize(123.7, 58.4)(floats, draw_for([0])).abs().max() == 0


def test_other_channels_are_refused() -> None:
    """Which channel would be red, of two? And a mean for each channel needs as many."""
    with pytest.raises(BadJob, match="ColorJitter takes images of 1 or 3 channels, got 2"):
        ColorJitter(0.1)(images((1, 2, 3, 3)), draw_for([0]))
    with pytest.raises(BadJob, match="Normalize has 2 numbers for mean, images have 3 channels"):
        Normalize((0.1, 0.2), 1.0)(images((1, 3, 3, 3)), draw_for([0]))
