"""Whether a mean and a deviation are of pixels from 0 to 1, as they are applied, or of pixels up to 255."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_STD_OF_BYTES = 10.0
"""A deviation from here on is one of pixels up to 255: that of pixels from 0 to 1 is at most one half."""

REMEDY = "Divide mean and std of pixels from 0 to 255 by 255."


def are_of_unit_pixels(means: Sequence[float], stds: Sequence[float]) -> bool:
    """Whether these can be of pixels from 0 to 1.

    Those of pixels up to 255 would leave nearly the same number for every pixel.

    >>> are_of_unit_pixels([0.485], [0.229]), are_of_unit_pixels([123.7], [58.4])
    (True, False)
    """
    return all(0 <= mean <= 1 for mean in means) and max(stds) < _LEAST_STD_OF_BYTES
