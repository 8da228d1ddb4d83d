from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.loading.transforms import RandomCrop, RandomShift
from tests.loading.transforms.pictures import draw_for, images

DTYPES = st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.int64])


def shifted(image_CHW: torch.Tensor, top: int, left: int, fill: float) -> torch.Tensor:
    """One image, moved pixel by pixel."""
    out = torch.full_like(image_CHW, fill)
    _, height, width = image_CHW.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row + top < height and 0 <= column + left < width:
                out[:, row, column] = image_CHW[:, row + top, column + left]
    return out


@settings(max_examples=60)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)),
    DTYPES,
    st.integers(0, 4),
    st.sampled_from([0.0, 7.0]),
)
def test_a_shift_is_that_of_each_image_alone(
    shape: tuple[int, ...], dtype: torch.dtype, pixels: int, fill: float
) -> None:
    """Against a loop over pixels: any shape and dtype, several channels, shifts larger than the image."""
    x_BCHW, indices = images(shape, dtype), np.arange(shape[0]) * 3
    same = draw_for(indices)
    tops, lefts = (same.integers(0, 2 * pixels) - pixels for _ in range(2))
    moved = RandomShift(pixels, fill)(x_BCHW, draw_for(indices))
    expected = torch.stack([shifted(x_BCHW[i], int(tops[i]), int(lefts[i]), fill) for i in range(shape[0])])
    assert moved.dtype == dtype
    assert moved.shape == x_BCHW.shape
    assert torch.equal(moved, expected)


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(3, 7), st.integers(3, 7)),
    DTYPES,
    st.integers(1, 5),
    st.integers(0, 2),
)
def test_a_crop_is_that_of_each_image_alone(
    shape: tuple[int, ...], dtype: torch.dtype, size: int, padding: int
) -> None:
    """Against slices of padded images, at the places that are drawn; wherever a window fits."""
    if min(shape[2:]) + 2 * padding < size:
        return
    x_BCHW, same = images(shape, dtype), draw_for(range(shape[0]))
    tops, lefts = (same.integers(0, side + 2 * padding - size) for side in shape[2:])
    padded = F.pad(x_BCHW, [padding] * 4, value=3)
    expected = [padded[i, :, tops[i] : tops[i] + size, lefts[i] : lefts[i] + size] for i in range(shape[0])]
    cropped = RandomCrop(size, padding, fill=3)(x_BCHW, draw_for(range(shape[0])))
    assert cropped.dtype == dtype
    assert torch.equal(cropped, torch.stack(expected))


def test_a_crop_of_a_padded_image_to_its_size_is_a_shift() -> None:
    """What torchvision calls one is what is called the other here."""
    x_BCHW, indices = images((20, 3, 8, 8)), range(20)
    assert torch.equal(RandomCrop(8, padding=2)(x_BCHW, draw_for(indices)), RandomShift(2)(x_BCHW, draw_for(indices)))


def test_in_evaluation_a_crop_is_the_middle() -> None:
    """The image itself where only its padding is cut off."""
    x_BCHW = images((2, 1, 8, 9))
    assert torch.equal(RandomCrop(4).in_evaluation(x_BCHW), x_BCHW[:, :, 2:6, 2:6])
    square = images((2, 1, 8, 8))
    assert torch.equal(RandomCrop(8, padding=4).in_evaluation(square), square)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: RandomShift(-1), "pixels is how far an image moves at most, 0 or more, got -1"),
        (lambda: RandomCrop(0), "size is the side of the window, a whole number of pixels, got 0"),
        (lambda: RandomCrop(4, padding=-1), "padding is how many pixels come around an image, 0 or more, got -1"),
    ],
)
def test_a_window_that_cannot_be_meant_is_refused(make, problem: str) -> None:
    """When it is made, with the value."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        make()


def test_a_window_larger_than_the_image_is_refused() -> None:
    """With both sizes."""
    with pytest.raises(BadJob, match="cuts 9 x 9 pixels, and images of 6 x 8 with 1 around them are smaller"):
        RandomCrop(9, padding=1)(images((1, 1, 6, 8)), draw_for([0]))


def gathered(x_BCHW: torch.Tensor, top_B: torch.Tensor, left_B: torch.Tensor, reach: int) -> torch.Tensor:
    """The shift pixel by pixel, with one index for each: how it is usually written."""
    B, C, H, W = x_BCHW.shape
    padded = F.pad(x_BCHW, (reach, reach, reach, reach))
    rows_BH, columns_BW = top_B[:, None] + torch.arange(H), left_B[:, None] + torch.arange(W)
    flat = (rows_BH[:, :, None] * (W + 2 * reach) + columns_BW[:, None, :]).view(B, 1, H * W)
    return padded.reshape(B, C, -1).gather(2, flat.expand(B, C, H * W)).view(B, C, H, W)


def test_a_shift_is_what_gathering_its_pixels_gives() -> None:
    """Of a batch of 512 small images, by the same draws."""
    x_BCHW, indices = images((512, 1, 28, 28)), np.arange(512)
    draw = draw_for(indices)
    expected = gathered(x_BCHW, draw.integers(0, 4), draw.integers(0, 4), 2)
    assert torch.equal(RandomShift(2)(x_BCHW, draw_for(indices)), expected)
