"""Which transforms move pixels: an image that is the target, such as a mask, does not move with the input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.loading.transforms.base import OneOf, Sometimes
from stoker.loading.transforms.geometric import (
    AlternatingFlip,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
    RandomShift,
)
from stoker.loading.transforms.resizing import ProgressiveResizing

_MOVING = (
    AlternatingFlip,
    ProgressiveResizing,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
    RandomShift,
)


def moves_pixels(transform: Any) -> str | None:
    """Name of a transform of Stoker's that moves pixels, in `transform` or what it consists of; None if there is none.

    A function of the user's is not known to move any.

    >>> from stoker.loading.transforms import GaussianNoise, RandomVerticalFlip
    >>> moves_pixels(OneOf([GaussianNoise(0.1), [Sometimes(RandomVerticalFlip())]])), moves_pixels(GaussianNoise(0.1))
    ('RandomVerticalFlip', None)
    """
    if isinstance(transform, _MOVING):
        return type(transform).__name__
    inner: Sequence[Any] = ()
    if isinstance(transform, OneOf):
        inner = transform.transforms
    elif isinstance(transform, Sometimes):
        inner = (transform.transform,)
    elif isinstance(transform, Sequence):
        inner = transform
    return next((name for each in inner if (name := moves_pixels(each)) is not None), None)
