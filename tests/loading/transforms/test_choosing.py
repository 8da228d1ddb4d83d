from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadJob
from stoker.loading.transforms import (
    ColorJitter,
    Normalize,
    OneOf,
    RandomCrop,
    RandomErasing,
    RandomFlip,
    RandomRotation,
    RandomVerticalFlip,
    Solarize,
    Sometimes,
    for_evaluation,
)
from tests.loading.transforms.pictures import draw_for, images, one_by_one

MIRROR, POND = RandomFlip(1.0), RandomVerticalFlip(1.0)


def test_each_image_gets_one_of_the_transforms() -> None:
    """All about equally often; an empty list leaves it alone, and a longer one is applied in order."""
    x_BCHW = images((300, 1, 3, 4))
    found = OneOf([MIRROR, [], [MIRROR, POND]])(x_BCHW, draw_for(range(300)))
    chosen = np.floor(draw_for(range(300)).numbers(0, 3))
    ways = [x_BCHW.flip(-1), x_BCHW, x_BCHW.flip(-1).flip(-2)]
    expected = torch.stack([ways[int(way)][i] for i, way in enumerate(chosen)])
    assert torch.equal(found, expected)
    assert all(70 < int((chosen == way).sum()) < 130 for way in range(3))


def test_some_images_are_transformed() -> None:
    """Those that draw below p; none or all of them at the ends."""
    x_BCHW = images((100, 1, 3, 4))
    is_chosen = torch.from_numpy(draw_for(range(100)).numbers() < 0.25).view(-1, 1, 1, 1)
    expected = torch.where(is_chosen, x_BCHW.flip(-1), x_BCHW)
    assert torch.equal(Sometimes(MIRROR, 0.25)(x_BCHW, draw_for(range(100))), expected)
    assert torch.equal(Sometimes(MIRROR, 0.0)(x_BCHW, draw_for(range(100))), x_BCHW)
    assert torch.equal(Sometimes(MIRROR, 1.0)(x_BCHW, draw_for(range(100))), x_BCHW.flip(-1))


@settings(max_examples=20)
@given(st.integers(1, 8), st.integers(0, 5))
def test_who_gets_what_does_not_depend_on_the_others_in_the_batch(size: int, epoch: int) -> None:
    """Bit for bit, transforms that draw for themselves within."""
    x_BCHW = images((size, 3, 6, 5))
    chosen = OneOf([RandomRotation(30), Sometimes(ColorJitter(0.4), 0.5), [Solarize(), RandomErasing(0.5)]])
    assert torch.equal(chosen(x_BCHW, draw_for(range(size), epoch)), one_by_one(chosen, x_BCHW, epoch=epoch))


def test_branches_draw_apart() -> None:
    """The same transform in two branches is drawn for each by itself: an image's flip does not tell its branch."""
    x_BCHW = images((400, 1, 1, 2))
    found = OneOf([RandomFlip(), [RandomFlip()]])(x_BCHW, draw_for(range(400)))
    is_first = torch.from_numpy(np.floor(draw_for(range(400)).numbers(0, 2)) == 0)
    is_flipped = (found == x_BCHW.flip(-1)).flatten(1).all(1)
    assert all(60 < int(is_flipped[rows].sum()) < 140 for rows in (is_first, ~is_first))


def test_what_changes_the_form_of_some_images_is_refused() -> None:
    """A batch has one shape and one type."""
    with pytest.raises(BadJob, match=r"RandomCrop makes torch.uint8 \[\d+, 1, 2, 2\] of torch.uint8 \[\d+, 1, 4, 4\]"):
        Sometimes(RandomCrop(2))(images((20, 1, 4, 4)), draw_for(range(20)))
    with pytest.raises(BadJob, match=r"Normalize makes torch.float32"):
        OneOf([Normalize(0.5, 0.5), MIRROR])(images((20, 1, 4, 4)), draw_for(range(20)))


@pytest.mark.parametrize(
    ("make", "problem"),
    [(lambda: OneOf([]), "got an empty one"), (lambda: Sometimes(MIRROR, 1.1), "in [0, 1], got 1.1")],
)
def test_choices_that_cannot_be_meant_are_refused(make, problem: str) -> None:
    """When they are given."""
    with pytest.raises(ValueError, match=re.escape(problem)):
        make()


def test_in_evaluation_only_what_has_a_stand_in_is_left() -> None:
    """Random changes are left out; crops take the middle, and standardising stays, in their order."""
    x_BCHW, draw = images((3, 1, 6, 6)), draw_for(range(3))
    kept = for_evaluation([RandomFlip(), RandomCrop(4), ColorJitter(0.3), Normalize(0.5, 0.5), lambda x, draw: x])
    assert len(kept) == 2
    for change in kept:
        x_BCHW = change(x_BCHW, draw)
    assert torch.equal(x_BCHW, (images((3, 1, 6, 6))[:, :, 1:5, 1:5] / 255 - 0.5) / 0.5)
