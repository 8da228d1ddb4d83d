from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.loading.transforms import RandomAffine, RandomResizedCrop, RandomRotation, RandomScale
from tests.loading.transforms.pictures import draw_for, images


def bilinear(image_CHW: torch.Tensor, x: float, y: float, fill: float) -> torch.Tensor:
    """The pixels around a place (the middle of the first pixel is at one half), averaged; one by one."""
    _, height, width = image_CHW.shape
    left, top = math.floor(x - 0.5), math.floor(y - 0.5)
    total = torch.zeros(len(image_CHW), dtype=torch.float64)
    for column in (left, left + 1):
        for row in (top, top + 1):
            weight = (1 - abs(x - 0.5 - column)) * (1 - abs(y - 0.5 - row))
            is_inside = 0 <= row < height and 0 <= column < width
            total += weight * (image_CHW[:, row, column].double() if is_inside else fill)
    return total


def moved(image_CHW: torch.Tensor, forward: np.ndarray, fill: float) -> torch.Tensor:
    """An image whose places go where the 3 x 3 matrix says: its inverse is looked up for every pixel."""
    backward, out = np.linalg.inv(forward), torch.zeros(image_CHW.shape, dtype=torch.float64)
    for row in range(image_CHW.shape[1]):
        for column in range(image_CHW.shape[2]):
            x, y, _ = backward @ [column + 0.5, row + 0.5, 1]
            out[:, row, column] = bilinear(image_CHW, x, y, fill)
    return out


def translation(x: float, y: float) -> np.ndarray:
    """A 3 x 3 matrix."""
    return np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]])


def linear(a: float, b: float, c: float, d: float) -> np.ndarray:
    """A 3 x 3 matrix."""
    return np.array([[a, b, 0], [c, d, 0], [0, 0, 1.0]])


AFFINE = RandomAffine(degrees=30, scale=(0.7, 1.4), translate=(0.2, 0.1), shear=15, fill=0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_affine_map_is_that_of_each_image_alone(dtype: torch.dtype) -> None:
    """Against matrices multiplied one after the other, inverted, and looked up pixel by pixel."""
    x_BCHW, same = images((4, 2, 7, 9), dtype), draw_for(range(4))
    turned, sheared = same.numbers(-30, 30), same.numbers(-15, 15)
    scaled, right, down = same.numbers(0.7, 1.4), same.numbers(-1.8, 1.8), same.numbers(-0.7, 0.7)
    found = AFFINE(x_BCHW, draw_for(range(4)))
    assert found.dtype == dtype
    for i in range(4):
        angle, lean = math.radians(turned[i]), math.radians(sheared[i])
        turn = linear(math.cos(angle), -math.sin(angle), math.sin(angle), math.cos(angle))
        forward = (
            translation(right[i], down[i])
            @ translation(4.5, 3.5)
            @ linear(scaled[i], 0, 0, scaled[i])
            @ turn
            @ linear(1, math.tan(lean), 0, 1)
            @ translation(-4.5, -3.5)
        )
        assert torch.allclose(found[i].double(), moved(x_BCHW[i], forward, 0.25), atol=2e-5)


def test_bytes_are_rounded_to_the_nearest() -> None:
    """uint8 in, uint8 out: within half a step of the same map of floating images."""
    x_BCHW, affine = images((5, 3, 8, 8)), RandomAffine(degrees=45, fill=17)
    found, exact = affine(x_BCHW, draw_for(range(5))), affine(x_BCHW.double(), draw_for(range(5)))
    assert found.dtype == torch.uint8
    assert float((found.double() - exact).abs().max()) < 0.501


def test_what_moves_nothing_changes_nothing() -> None:
    """Bytes come out as they were."""
    x_BCHW = images((3, 1, 9, 6))
    assert torch.equal(RandomAffine()(x_BCHW, draw_for(range(3))), x_BCHW)


def test_a_quarter_turn_is_exact() -> None:
    """Turned by up to 90 degrees, an image that draws the end is the one that `rot90` makes, up to rounding."""
    x_BCHW = images((1, 2, 6, 6), torch.float64)
    draws = draw_for([0]).numbers(-1, 1)[0]
    found = RandomRotation(abs(90 / draws))(x_BCHW, draw_for([0]))
    expected = torch.rot90(x_BCHW, 1 if draws < 0 else -1, (2, 3))  # y points down: positive angles turn clockwise
    assert torch.allclose(found, expected, atol=1e-9)


def test_scaling_keeps_the_middle() -> None:
    """Half the size: the image is in the middle, with the fill around it."""
    x_BCHW = torch.ones(1, 1, 8, 8)
    found = RandomScale((0.5, 0.5), fill=0.0)(x_BCHW, draw_for([0]))[0, 0]
    expected = torch.zeros(8, 8)
    expected[2:6, 2:6] = 1
    assert torch.allclose(found, expected, atol=1e-6)


def test_a_resized_crop_is_that_of_each_image_alone() -> None:
    """Against PyTorch's sampling of the drawn box, image by image, in float64."""
    x_BCHW, same, crop = images((6, 3, 11, 8), torch.float64), draw_for(range(6)), RandomResizedCrop(5)
    areas = same.numbers(0.08, 1) * 88
    ratios = np.exp(same.numbers(math.log(3 / 4), math.log(4 / 3)))
    widths, heights = np.minimum(np.sqrt(areas * ratios), 8), np.minimum(np.sqrt(areas / ratios), 11)
    lefts, tops = same.numbers() * (8 - widths), same.numbers() * (11 - heights)
    found = crop(x_BCHW, draw_for(range(6)))
    assert found.shape == (6, 3, 5, 5)
    for i in range(6):
        theta = torch.tensor(
            [
                [
                    [widths[i] / 8, 0, 2 * (lefts[i] + widths[i] / 2) / 8 - 1],
                    [0, heights[i] / 11, 2 * (tops[i] + heights[i] / 2) / 11 - 1],
                ]
            ]
        )
        grid = F.affine_grid(theta, [1, 3, 5, 5], align_corners=False)
        expected = F.grid_sample(x_BCHW[i : i + 1], grid, padding_mode="border", align_corners=False)
        assert torch.allclose(found[i : i + 1], expected, atol=1e-9)


def test_in_evaluation_a_resized_crop_is_the_middle_square() -> None:
    """All of a square image; brought to the size."""
    x_BCHW = images((2, 1, 6, 10), torch.float64)
    assert torch.allclose(RandomResizedCrop(6).in_evaluation(x_BCHW), x_BCHW[:, :, :, 2:8], atol=1e-12)
    halved = RandomResizedCrop(3).in_evaluation(x_BCHW)
    assert torch.allclose(halved, F.avg_pool2d(x_BCHW[:, :, :, 2:8], 2), atol=1e-12)


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 8), st.sampled_from([torch.uint8, torch.float32]))
def test_an_image_is_moved_alike_however_the_batch_is_cut(
    size: int, micro_batch: int, epoch: int, dtype: torch.dtype
) -> None:
    """Bit for bit, for maps and resized crops."""
    x_BCHW = images((size, 3, 9, 7), dtype)
    for transform in (AFFINE, RandomResizedCrop(6)):
        whole = transform(x_BCHW, draw_for(range(size), epoch))
        parts = [
            transform(x_BCHW[at : at + micro_batch], draw_for(range(at, min(at + micro_batch, size)), epoch))
            for at in range(0, size, micro_batch)
        ]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: RandomRotation(-1), "degrees is how far an image is turned at most, 0 or more, got -1"),
        (lambda: RandomScale((0.0, 1.0)), "scale is an interval (low, high) of numbers above 0, got (0.0, 1.0)"),
        (lambda: RandomAffine(scale=(2, 1)), "scale is an interval"),
        (lambda: RandomAffine(translate=(0.1, 2)), "as a share of its side, from 0 to 1, got 2"),
        (lambda: RandomAffine(shear=90), "from 0 to 89, got 90"),
        (lambda: RandomResizedCrop(8, scale=(0.5, 1.5)), "above 0, at most 1, got (0.5, 1.5)"),
        (lambda: RandomResizedCrop(0), "a whole number of pixels, got 0"),
    ],
)
def test_a_map_that_cannot_be_meant_is_refused(make, problem: str) -> None:
    """When it is made, with the value."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        make()


def test_pixels_of_other_types_are_refused() -> None:
    """Means of labels and the like are none."""
    with pytest.raises(BadJob, match=r"RandomAffine calculates with the pixels .* got torch\.int64"):
        AFFINE(torch.zeros(1, 1, 4, 4, dtype=torch.int64), draw_for([0]))
