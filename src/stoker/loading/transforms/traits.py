"""What transforms do: which move pixels, and which take colours from 0 to 1 and cut others off."""

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
from stoker.loading.transforms.photometric import Autocontrast, ColorJitter, Posterize, RandomGrayscale, Solarize

_MOVING = (
    AlternatingFlip,
    RandomAffine,
    RandomCrop,
    RandomFlip,
    RandomResizedCrop,
    RandomRotation,
    RandomScale,
    RandomShift,
)


_OF_COLORS = (ColorJitter, Posterize, RandomGrayscale, Solarize)


def moves_pixels(transforms: Sequence[Any]) -> str | None:
    """Name of the first transform that moves pixels; None if none does.

    An image that is the target, such as a mask, does not move with the input. Functions of the user's are not known to
    move any.

    >>> from stoker.loading.transforms import GaussianNoise, RandomVerticalFlip
    >>> noise = GaussianNoise(0.1)
    >>> moves_pixels([OneOf([noise, [Sometimes(RandomVerticalFlip())]])]), moves_pixels([noise])
    ('RandomVerticalFlip', None)
    """
    return _first_of(_MOVING, transforms)


def takes_colors(transforms: Sequence[Any]) -> str | None:
    """Name of the first transform that takes floating images to go from 0 to 1, and cuts them off there; or None.

    What comes after `Autocontrast` has colours from 0 to 1, and after a function of the user's may have.

    >>> from stoker.loading.transforms import ColorJitter
    >>> takes_colors([ColorJitter(0.1)]), takes_colors([Autocontrast(), ColorJitter(0.1)])
    ('ColorJitter', None)
    """
    for transform in transforms:
        if isinstance(transform, Autocontrast) or not type(transform).__module__.startswith("stoker."):
            return None
        if (name := _first_of(_OF_COLORS, [transform])) is not None:
            return name
    return None


def _first_of(kinds: tuple[type, ...], transforms: Sequence[Any]) -> str | None:
    """Name of the first transform of these kinds, also within others."""
    for transform in transforms:
        if isinstance(transform, kinds):
            return type(transform).__name__
        inner: Sequence[Any] = transform if isinstance(transform, Sequence) else ()
        if isinstance(transform, OneOf | Sometimes):
            inner = transform.transforms if isinstance(transform, OneOf) else (transform.transform,)
        if (name := _first_of(kinds, inner)) is not None:
            return name
    return None
