from __future__ import annotations

import re
import statistics
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.loading.transforms import AlternatingFlip, Draw, RandomFlip, RandomShift

CPU = torch.device("cpu")
DTYPES = st.sampled_from([torch.uint8, torch.float32, torch.float64, torch.int64])


def draw_for(indices: np.ndarray, epoch: int = 0, seed: int = 0) -> Draw:
    """Draws for these samples."""
    return Draw(seed, epoch, np.asarray(indices, dtype=np.int64), CPU)


def images(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Images no two pixels of which are likely alike."""
    return torch.randint(1, 250, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


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
    st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6)), DTYPES,
    st.integers(0, 4), st.sampled_from([0.0, 7.0]),
)  # fmt: skip
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


@settings(max_examples=30)
@given(st.tuples(st.integers(1, 40), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5)), DTYPES)
def test_a_flip_is_that_of_each_image_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Against one image at a time: mirrored where its own draw is below p."""
    x_BCHW, indices = images(shape, dtype), np.arange(shape[0])
    chances = draw_for(indices).uniform()
    expected = torch.stack([x.flip(-1) if chance < 0.5 else x for x, chance in zip(x_BCHW, chances, strict=True)])
    assert torch.equal(RandomFlip()(x_BCHW, draw_for(indices)), expected)


def test_a_flip_of_probability_zero_or_one_is_certain() -> None:
    """Draws lie in [0, 1): never at 1."""
    x_BCHW = images((50, 1, 2, 3), torch.uint8)
    assert torch.equal(RandomFlip(0.0)(x_BCHW, draw_for(np.arange(50))), x_BCHW)
    assert torch.equal(RandomFlip(1.0)(x_BCHW, draw_for(np.arange(50))), x_BCHW.flip(-1))


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=20, unique=True), st.integers(0, 50), st.data())
def test_draws_do_not_depend_on_how_a_batch_is_cut(indices: list[int], epoch: int, data: st.DataObject) -> None:
    """The draws of a part of the batch are that part of the draws, call after call."""
    start = data.draw(st.integers(0, len(indices) - 1))
    stop = data.draw(st.integers(start + 1, len(indices)))
    whole, part = draw_for(np.array(indices), epoch), draw_for(np.array(indices[start:stop]), epoch)
    for _ in range(3):
        assert torch.equal(part.uniform(), whole.uniform()[start:stop])
        assert torch.equal(part.integers(-2, 5), whole.integers(-2, 5)[start:stop])


def test_draws_differ_by_seed_epoch_sample_and_call() -> None:
    """Nothing is drawn twice."""
    same = draw_for(np.arange(100))
    drawn = [same.uniform(), same.uniform()]
    drawn += [draw_for(np.arange(100), epoch=1).uniform(), draw_for(np.arange(100), seed=1).uniform()]
    assert len({float(value) for values in drawn for value in values}) > 390


def test_uniform_draws_are_uniform() -> None:
    """In [0, 1), with mean and deviation within five deviations of theirs."""
    values = draw_for(np.arange(100_000)).uniform()
    assert values.dtype == torch.float32
    assert float(values.min()) >= 0
    assert float(values.max()) < 1
    assert abs(float(values.double().mean()) - 0.5) < 5 * 0.2887 / 100_000**0.5
    assert abs(float(values.double().std()) - 0.2887) < 0.003


def test_integers_are_equally_likely_and_reach_both_ends() -> None:
    """Chi-squared of the counts of -2 to 2 lies within five deviations of its mean."""
    counts = torch.bincount(draw_for(np.arange(50_000)).integers(-2, 2) + 2)
    assert len(counts) == 5
    chi_squared = float(((counts - 10_000) ** 2 / 10_000).sum())
    assert chi_squared < 4 + 5 * 8**0.5


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: RandomFlip(1.5), "p is a probability, in [0, 1], got 1.5"),
        (lambda: RandomFlip(float("nan")), "got nan"),
        (lambda: RandomShift(-1), "pixels is how far an image moves at most, 0 or more, got -1"),
    ],
)
def test_a_transform_that_cannot_be_meant_is_refused(make, problem: str) -> None:
    """When it is made, with the value."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        make()


@pytest.mark.parametrize("transform", [RandomFlip(), RandomShift(2)])
def test_what_is_no_batch_of_images_is_refused(transform) -> None:
    """The shape that came is in the error, and so is the one that is wanted."""
    with pytest.raises(BadJob, match=r"takes images \[B, C, H, W\], got a tensor of shape \[4, 784\]"):
        transform(torch.zeros(4, 784), draw_for(np.arange(4)))


def gathered(x_BCHW: torch.Tensor, top_B: torch.Tensor, left_B: torch.Tensor, reach: int) -> torch.Tensor:
    """The shift pixel by pixel, with one index for each: how it is usually written."""
    B, C, H, W = x_BCHW.shape
    padded = torch.nn.functional.pad(x_BCHW, (reach, reach, reach, reach))
    rows_BH, columns_BW = top_B[:, None] + torch.arange(H), left_B[:, None] + torch.arange(W)
    flat = (rows_BH[:, :, None] * (W + 2 * reach) + columns_BW[:, None, :]).view(B, 1, H * W)
    return padded.reshape(B, C, -1).gather(2, flat.expand(B, C, H * W)).view(B, C, H, W)


def test_a_shift_is_faster_than_gathering_pixels() -> None:
    """A batch of 512 small images, draws included: at most three quarters of the time, though it is near a third."""
    x_BCHW, indices = images((512, 1, 28, 28), torch.uint8), np.arange(512)

    def both() -> tuple[float, float]:
        marks = [time.perf_counter()]
        draw = draw_for(indices)
        slow = gathered(x_BCHW, draw.integers(0, 4), draw.integers(0, 4), 2)
        marks.append(time.perf_counter())
        fast = RandomShift(2)(x_BCHW, draw_for(indices))
        marks.append(time.perf_counter())
        assert torch.equal(fast, slow)
        return marks[2] - marks[1], marks[1] - marks[0]

    fast_s, slow_s = zip(*(both() for _ in range(40)), strict=True)
    assert statistics.median(fast_s) < 0.75 * statistics.median(slow_s)


def test_alternating_mirror_images_show_both_ways_in_any_two_epochs() -> None:
    """Each image once as it is and once mirrored; about half begin mirrored, and which is the seed's choice."""
    x_BCHW, indices = images((200, 1, 3, 4), torch.uint8), np.arange(200)
    shown = [AlternatingFlip()(x_BCHW, draw_for(indices, epoch)) for epoch in range(3)]
    is_mirrored = [(each == x_BCHW.flip(-1)).flatten(1).all(1) for each in shown]
    assert torch.equal(is_mirrored[0], ~is_mirrored[1])
    assert torch.equal(shown[0], shown[2])
    assert torch.equal(shown[1], torch.where(is_mirrored[1].view(-1, 1, 1, 1), x_BCHW.flip(-1), x_BCHW))
    assert 70 < int(is_mirrored[0].sum()) < 130
    assert not torch.equal(shown[0], AlternatingFlip()(x_BCHW, draw_for(indices, seed=1)))


def test_lasting_draws_are_a_samples_own() -> None:
    """The same in every epoch and in any batch, and apart from those of the epoch."""
    indices = np.arange(50)
    lasting = draw_for(indices).lasting().uniform()
    assert torch.equal(lasting, draw_for(indices, epoch=7).lasting().uniform())
    assert torch.equal(lasting[10:20], draw_for(indices[10:20]).lasting().uniform())
    assert not torch.equal(lasting, draw_for(indices).uniform())
