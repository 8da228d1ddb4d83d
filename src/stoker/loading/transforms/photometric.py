"""Transforms of pixel values: colour jitter, greyscale, normalisation, tones, noise and blur.

Images are uint8, or floating from 0 to 1; colours beyond that range are clamped. Posterize, Solarize and Autocontrast
are deterministic, for use in `OneOf` and `Sometimes`; they follow Pillow's ImageOps, as in E. D. Cubuk et al.,
"RandAugment", arXiv:1909.13719.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from stoker.data.reading.pixel_scale import REMEDY, are_of_unit_pixels
from stoker.errors import BadJob, BadSetting
from stoker.jobs.numeric_settings import Interval, require_amount, require_interval, require_probability
from stoker.loading.transforms.base import (
    Draw,
    Numbers,
    as_colors,
    as_numbers,
    by_sample,
    gray_of,
    require_colors,
    require_images,
    stored,
    stored_colors,
)

_FINE = 2**24
"""Colours are summed as multiples of 1 / _FINE: a sum of whole numbers is the same in any order."""


@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast, saturation and hue, in this order.

    Args:
        brightness, contrast, saturation: largest distance of the factor from 1; a factor is never negative.
        hue: largest rotation of the hue, either way; 0.5 is half the circle.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            require_amount(name, "how far a factor is from 1 at most", getattr(self, name))
        require_amount("hue", "how far hues are turned at most", self.hue, most=0.5)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images in other colours; grey ones have no saturation and no hue."""
        require_colors(x_BCHW, "ColorJitter")
        colors = as_colors(x_BCHW, "ColorJitter")
        by_brightness, by_contrast, by_saturation = (
            draw.numbers(max(0.0, 1 - reach), 1 + reach) for reach in (self.brightness, self.contrast, self.saturation)
        )
        turned = draw.numbers(-self.hue, self.hue)
        if self.brightness:
            colors = brightened(colors, by_brightness)
        if self.contrast:
            colors = blended(colors, mean_gray(colors), by_contrast)
        if x_BCHW.shape[1] == 3 and self.saturation:
            colors = blended(colors, gray_of(colors), by_saturation)
        if x_BCHW.shape[1] == 3 and self.hue:
            colors = with_hue_turned(colors, turned)
        return stored_colors(colors, x_BCHW.dtype)


@dataclass(frozen=True)
class RandomGrayscale:
    """Take the colours out of an image with probability `p`; it keeps its three channels.

    Args:
        p: probability of each image [0 to 1].

    Raises:
        BadSetting: `p` is out of its range.
    """

    p: float = 0.1

    def __post_init__(self) -> None:
        require_probability(self.p)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, some of them grey."""
        require_colors(x_BCHW, "RandomGrayscale")
        gray = stored_colors(gray_of(as_colors(x_BCHW, "RandomGrayscale")), x_BCHW.dtype)
        return torch.where((draw.uniform() < self.p).view(-1, 1, 1, 1), gray, x_BCHW)


@dataclass(frozen=True)
class Normalize:
    """Subtract a mean from each channel and divide by a standard deviation; the output is floating.

    Deterministic, and applied in evaluation too. It belongs at the end of the list.

    Args:
        mean, std: one number for each channel, or one for all, of images from 0 to 1 (uint8 is scaled to that first).
    """

    mean: tuple[float, ...] | float
    std: tuple[float, ...] | float

    def __post_init__(self) -> None:
        if not all(deviation > 0 for deviation in _listed(self.std)):
            raise BadSetting(f"std has positive deviations, got {self.std}")

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, standardised."""
        return self.in_evaluation(x_BCHW)

    def in_evaluation(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The images, standardised."""
        require_images(x_BCHW, "Normalize")
        colors = as_colors(x_BCHW, "Normalize")
        means, stds = _listed(self.mean), _listed(self.std)
        if x_BCHW.dtype == torch.uint8 and not are_of_unit_pixels(means, stds):
            raise BadJob(
                f"Normalize(mean={self.mean}, std={self.std}) is not of bytes scaled to 0 to 1, to which it is applied",
                remedy=REMEDY,
            )
        for name, values in (("mean", means), ("std", stds)):
            if len(values) not in (1, x_BCHW.shape[1]):
                raise BadJob(f"Normalize has {len(values)} numbers for {name}, images have {x_BCHW.shape[1]} channels")
        return (colors - _by_channel(self.mean, colors)) / _by_channel(self.std, colors)


def brightened(colors: torch.Tensor, factors: Numbers) -> torch.Tensor:
    """Colours times a factor for each sample."""
    return (colors * by_sample(factors, colors)).clamp(0, 1)


def blended(colors: torch.Tensor, others: torch.Tensor, factors: Numbers) -> torch.Tensor:
    """`factors` * colours + (1 - `factors`) * others; a factor above 1 moves away from the others."""
    share = by_sample(factors, colors)
    return (colors * share + others * (1 - share)).clamp(0, 1)


def mean_gray(colors: torch.Tensor) -> torch.Tensor:
    """The mean luma of each image [B, 1, 1, 1]."""
    gray = gray_of(colors)
    total_B = (gray * _FINE).round().to(torch.int64).flatten(1).sum(1)
    return (total_B.to(torch.float64) / (gray[0].numel() * _FINE)).to(colors.dtype).view(-1, 1, 1, 1)


def with_hue_turned(colors_BCHW: torch.Tensor, turns: Numbers) -> torch.Tensor:
    """RGB with the hue rotated by `turns` of its circle; value and saturation stay.

    Source: A. R. Smith, "Color Gamut Transform Pairs", SIGGRAPH 1978 (HSV); the inverse as one formula for all three
    channels, value - chroma * max(0, min(k, 4 - k, 1)) with k = (n + 6 hue) mod 6 and n = 5, 3, 1.
    """
    red, green, blue = colors_BCHW.unbind(1)
    value = colors_BCHW.amax(1)
    chroma = value - colors_BCHW.amin(1)
    safe = torch.where(chroma > 0, chroma, torch.ones_like(chroma))
    sixths = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    ) + by_sample(turns * 6, colors_BCHW).squeeze(1)
    channels = []
    for n in (5.0, 3.0, 1.0):
        k = sixths + n
        k = k - 6 * (k / 6).floor()
        channels.append(value - chroma * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(channels, dim=1)


def _listed(values: tuple[float, ...] | float) -> tuple[float, ...]:
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _by_channel(values: tuple[float, ...] | float, like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(_listed(values), dtype=like.dtype, device=like.device).view(-1, 1, 1)


@dataclass(frozen=True)
class Posterize:
    """Keep the highest `bits` of the eight of each colour."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise BadSetting(f"bits is how many of the eight are kept, from 1 to 8, got {self.bits}")

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images in steps of colour."""
        return self.in_evaluation(x_BCHW)

    def in_evaluation(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The same: nothing is drawn."""
        require_images(x_BCHW, "Posterize")
        bytes_BCHW = stored_colors(as_colors(x_BCHW, "Posterize"), torch.uint8)
        kept = bytes_BCHW & (0xFF << (8 - self.bits) & 0xFF)
        return kept if x_BCHW.dtype == torch.uint8 else (kept.to(x_BCHW.dtype) / 255)


@dataclass(frozen=True)
class Solarize:
    """Invert colours from `threshold` on (0 to 1)."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        require_amount("threshold", "the least colour that is turned", self.threshold, most=1)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, their bright parts turned."""
        return self.in_evaluation(x_BCHW)

    def in_evaluation(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The same: nothing is drawn."""
        require_images(x_BCHW, "Solarize")
        colors = as_colors(x_BCHW, "Solarize")
        return torch.where(colors >= self.threshold, stored_colors(1 - colors, x_BCHW.dtype), x_BCHW)


@dataclass(frozen=True)
class Autocontrast:
    """Stretch each channel of each image to the full range; a channel of one colour stays."""

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images with black and white in them."""
        return self.in_evaluation(x_BCHW)

    def in_evaluation(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The same: nothing is drawn."""
        require_images(x_BCHW, "Autocontrast")
        colors = as_colors(x_BCHW, "Autocontrast")
        low, high = colors.amin((2, 3), keepdim=True), colors.amax((2, 3), keepdim=True)
        is_flat = high <= low
        spread = (colors - low) / torch.where(is_flat, torch.ones_like(high), high - low)
        return torch.where(is_flat, x_BCHW, stored_colors(spread, x_BCHW.dtype))


@dataclass(frozen=True)
class GaussianNoise:
    """Add noise of standard deviation `std`, in units of the pixels; see `Draw.noise` for its distribution.

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
    """Average every pixel with its neighbours, weighted by a Gaussian of standard deviation `sigma` [pixels].

    Args:
        sigma: the standard deviation, from lowest to highest.
        radius: radius of the kernel [pixels]; the edge is repeated. Default: twice the highest sigma, rounded up.
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
        weights: list[list[float]] = []  # for each sample, of a neighbour 0, 1, … `reach` pixels away
        for sigma in draw.numbers(*self.sigma).tolist():
            heights = [math.exp(-0.5 * (distance / sigma) ** 2) for distance in range(reach + 1)]
            area = heights[0] + 2 * sum(heights[1:])
            weights.append([height / area for height in heights])
        numbers = as_numbers(x_BCHW, "GaussianBlur")
        # Neighbours are added one by one: a convolution may round otherwise in a batch of another size.
        for dim, padding in ((-1, (reach, reach, 0, 0)), (-2, (0, 0, reach, reach))):
            padded = F.pad(numbers, padding, mode="replicate")
            size, total = numbers.shape[dim], torch.zeros_like(numbers)
            for offset in range(2 * reach + 1):
                weight = by_sample(np.array([sample[abs(offset - reach)] for sample in weights]), numbers)
                total = total + padded.narrow(dim, offset, size) * weight
            numbers = total
        return stored(numbers, x_BCHW.dtype)
