from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.loading.transforms import AlternatingFlip, RandomFlip, RandomVerticalFlip
from tests.loading.transforms.pictures import draw_for, images

DTYPES = st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.int64])
WAYS = [(RandomFlip, -1), (RandomVerticalFlip, -2)]


@pytest.mark.parametrize(("flip", "dim"), WAYS)
@settings(max_examples=30)
@given(shape=st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)), dtype=DTYPES)
def test_a_flip_is_that_of_each_image_alone(flip, dim: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Against one image at a time: mirrored where its own draw is below p."""
    x_BCHW, indices = images(shape, dtype), np.arange(shape[0])
    chances = draw_for(indices).uniform()
    expected = torch.stack([x.flip(dim) if chance < 0.5 else x for x, chance in zip(x_BCHW, chances, strict=True)])
    assert torch.equal(flip()(x_BCHW, draw_for(indices)), expected)


@pytest.mark.parametrize(("flip", "dim"), WAYS)
def test_a_flip_of_probability_zero_or_one_is_certain(flip, dim: int) -> None:
    """Draws lie in [0, 1): never at 1."""
    x_BCHW = images((50, 1, 2, 3))
    assert torch.equal(flip(0.0)(x_BCHW, draw_for(range(50))), x_BCHW)
    assert torch.equal(flip(1.0)(x_BCHW, draw_for(range(50))), x_BCHW.flip(dim))


@pytest.mark.parametrize("p", [1.5, -0.1, float("nan")])
def test_a_probability_lies_from_0_to_1(p: float) -> None:
    """Else it is refused when it is given, with the value."""
    with pytest.raises(ValueError, match=rf"p is a probability, in \[0, 1\], got {p}"):
        RandomFlip(p)


@pytest.mark.parametrize("flip", [RandomFlip(), RandomVerticalFlip(), AlternatingFlip()])
def test_what_is_no_batch_of_images_is_refused(flip) -> None:
    """The shape that came is in the error, and so is the one that is wanted."""
    with pytest.raises(BadJob, match=r"takes images \[B, C, H, W\], got a tensor of shape \[4, 784\]"):
        flip(torch.zeros(4, 784), draw_for(range(4)))


def test_alternating_mirror_images_show_both_ways_in_any_two_epochs() -> None:
    """Each image once as it is and once mirrored; about half begin mirrored, and which is the seed's choice."""
    x_BCHW, indices = images((200, 1, 3, 4)), np.arange(200)
    shown = [AlternatingFlip()(x_BCHW, draw_for(indices, epoch)) for epoch in range(3)]
    is_mirrored = [(each == x_BCHW.flip(-1)).flatten(1).all(1) for each in shown]
    assert torch.equal(is_mirrored[0], ~is_mirrored[1])
    assert torch.equal(shown[0], shown[2])
    assert torch.equal(shown[1], torch.where(is_mirrored[1].view(-1, 1, 1, 1), x_BCHW.flip(-1), x_BCHW))
    assert 70 < int(is_mirrored[0].sum()) < 130
    assert not torch.equal(shown[0], AlternatingFlip()(x_BCHW, draw_for(indices, seed=1)))
