"""Noise and blur."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from stoker.errors import BadSetting
from stoker.loading.transforms.checks import Interval, require_amount, require_interval
from stoker.loading.transforms.draw import Draw
from stoker.loading.transforms.images import as_numbers, by_sample, require_images, stored


@dataclass(frozen=True)
class GaussianNoise:
    """Add noise of deviation `std`, in units of the pixels, to every pixel; see `Draw.noise` for its law.

    Costs: some thirty passes over the pixels in 64-bit whole numbers, so that it is the same on every device.
    """

    std: float

    def __post_init__(self) -> None:
        require_amount("std", "the deviation of the noise, in units of the pixels", self.std)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images with noise; uint8 stays from 0 to 255."""
        require_images(x_BCHW, "GaussianNoise")
        numbers = as_numbers(x_BCHW, "GaussianNoise")
        return stored(numbers + draw.noise(tuple(x_BCHW.shape[1:])).to(numbers.dtype) * self.std, x_BCHW.dtype)


@dataclass(frozen=True)
class GaussianBlur:
    """Average every pixel with its neighbours, weighted by a bell curve of deviation `sigma` [pixels].

    Args:
        sigma: the deviation, from lowest to highest.
        radius: how far neighbours count; the edge is repeated beyond it. Default: twice the highest sigma, rounded up.
    """

    sigma: Interval = (0.1, 2.0)
    radius: int | None = None

    def __post_init__(self) -> None:
        require_interval("sigma", self.sigma)
        if self.radius is not None and self.radius < 1:
            raise BadSetting(f"radius is how far neighbours count, 1 or more pixels, got {self.radius}")

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, blurred."""
        require_images(x_BCHW, "GaussianBlur")
        reach = self.radius or math.ceil(2 * self.sigma[1])
        sigmas = draw.numbers(*self.sigma)
        weights = [_weights(sigma, reach) for sigma in sigmas.tolist()]
        numbers = as_numbers(x_BCHW, "GaussianBlur")
        # Neighbours are added one by one: a convolution may round otherwise in a batch of another size.
        for dim, padding in ((-1, (reach, reach, 0, 0)), (-2, (0, 0, reach, reach))):
            padded = F.pad(numbers, padding, mode="replicate")
            size, total = numbers.shape[dim], torch.zeros_like(numbers)
            for at in range(2 * reach + 1):
                weight = by_sample(np.array([one[abs(at - reach)] for one in weights]), numbers)
                total = total + padded.narrow(dim, at, size) * weight
            numbers = total
        return stored(numbers, x_BCHW.dtype)


def _weights(sigma: float, reach: int) -> list[float]:
    """What a neighbour 0, 1, … `reach` pixels off weighs; of both sides together 1."""
    heights = [math.exp(-0.5 * (distance / sigma) ** 2) for distance in range(reach + 1)]
    total = heights[0] + 2 * sum(heights[1:])
    return [height / total for height in heights]
