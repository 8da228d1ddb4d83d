from __future__ import annotations

import random

import numpy as np
import pytest
from PIL import Image

from bench.data.planted import CHANGES, CLASSES, picture_of
from stoker.inspecting.findings import CheckOptions
from stoker.inspecting.near_duplicates import correlation

PICTURES = [picture_of(CLASSES[number % 4], random.Random(number)) for number in range(24)]
LEAST = CheckOptions().least_correlation


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_copy_that_went_through_something_is_alike(change: str) -> None:
    """Storing again, scaling, brightening, less contrast and noise leave pictures similar."""
    assert min(correlation(picture, CHANGES[change](picture)) for picture in PICTURES) >= LEAST


def test_other_pictures_are_not_alike() -> None:
    """Of all pairs of different pictures, even of one class, none comes near the limit."""
    pairs = [correlation(a, b) for place, a in enumerate(PICTURES) for b in PICTURES[:place]]
    assert max(pairs) < LEAST - 0.2


def test_colours_count_and_blank_pictures_are_like_nothing() -> None:
    """The same shape in another colour is another picture; one shade is not compared."""
    grey = np.zeros((20, 20, 3), np.uint8)
    red, blue = grey.copy(), grey.copy()
    red[5:12, 5:12, 0] = 200
    blue[5:12, 5:12, 2] = 200
    assert correlation(Image.fromarray(red), Image.fromarray(blue)) < 0.5
    assert correlation(Image.fromarray(grey), Image.fromarray(grey)) == 0.0


def test_size_does_not_count() -> None:
    """A picture and its copy at three times the size are similar."""
    picture = PICTURES[0]
    assert correlation(picture, picture.resize((192, 192), Image.Resampling.LANCZOS)) > LEAST
