from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.loading.transforms import Cutout, RandomErasing
from tests.loading.transforms.pictures import draw_for, images, one_by_one


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64])
@pytest.mark.parametrize("size", [1, 4, 5, 20])
def test_a_square_is_cut_out_of_each_image(size: int, dtype: torch.dtype) -> None:
    """Around a centre anywhere in the image, cut off at its edges; against slices of each."""
    x_BCHW, same = images((10, 2, 6, 8), dtype), draw_for(range(10))
    rows, columns = np.floor(same.numbers(0, 6)).astype(int), np.floor(same.numbers(0, 8)).astype(int)
    expected = x_BCHW.clone()
    for i in range(10):
        top, left = rows[i] - size // 2, columns[i] - size // 2
        expected[i, :, max(top, 0) : top + size, max(left, 0) : left + size] = 7
    found = Cutout(size, fill=7)(x_BCHW, draw_for(range(10)))
    assert found.dtype == dtype
    assert torch.equal(found, expected)


def test_a_rectangle_within_the_image_is_covered() -> None:
    """Of the area and the ratio that are drawn, up to rounding, in images that draw below p; the rest as it was."""
    x_BCHW, erasing = images((200, 1, 40, 30)), RandomErasing(p=0.5, scale=(0.05, 0.2), ratio=(0.5, 2.0), fill=0)
    found = erasing(x_BCHW, draw_for(range(200)))
    covered = (found == 0)[:, 0]
    assert 70 < int(covered.flatten(1).any(1).sum()) < 130
    for i in torch.nonzero(covered.flatten(1).any(1))[:, 0].tolist():
        rows, columns = (torch.nonzero(covered[i].any(dim))[:, 0] for dim in (1, 0))
        height, width = int(rows[-1] - rows[0]) + 1, int(columns[-1] - columns[0]) + 1
        assert int(covered[i].sum()) == height * width
        assert 0.05 * 1200 * 0.8 < height * width < 0.2 * 1200 * 1.2
        assert 0.5 * 0.8 < height / width < 2.0 * 1.25
    assert torch.equal(found[~covered[:, None]], x_BCHW[~covered[:, None]])


def test_rectangles_reach_every_place() -> None:
    """Corners included."""
    found = RandomErasing(p=1.0, fill=0)(torch.ones(2000, 1, 12, 12), draw_for(range(2000)))
    assert float((found == 0).float().mean(0).min()) > 0.01


@settings(max_examples=20)
@given(st.integers(1, 8))
def test_what_is_covered_does_not_depend_on_the_others_in_the_batch(size: int) -> None:
    """Bit for bit."""
    x_BCHW = images((size, 3, 7, 5))
    for transform in (Cutout(3), RandomErasing(0.7)):
        assert torch.equal(transform(x_BCHW, draw_for(range(size))), one_by_one(transform, x_BCHW))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Cutout(0), "size is the side of the square, a whole number of pixels, got 0"),
        (lambda: RandomErasing(p=2), "p is a probability, in [0, 1], got 2"),
        (lambda: RandomErasing(scale=(0.1, 1.1)), "above 0, at most 1, got (0.1, 1.1)"),
        (lambda: RandomErasing(ratio=(0.0, 1.0)), "above 0, got (0.0, 1.0)"),
        (lambda: RandomErasing(ratio=(1.0, math.nan)), "ratio is an interval"),
    ],
)
def test_a_cover_that_cannot_be_meant_is_refused(make, problem: str) -> None:
    """When it is given, with the value."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        make()
