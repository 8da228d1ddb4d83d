"""Tones: fewer of them, turned round, or spread out; not random by themselves, for `OneOf` and `Sometimes`.

Images are uint8, or floating from 0 to 1. Source: Pillow's ImageOps (posterize, solarize, autocontrast), as in
E. D. Cubuk et al., "RandAugment", arXiv:1909.13719.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stoker.errors import BadSetting
from stoker.loading.transforms.checks import require_amount
from stoker.loading.transforms.draw import Draw
from stoker.loading.transforms.images import as_colors, require_images, stored_colors


@dataclass(frozen=True)
class Posterize:
    """Keep the highest `bits` of the eight of each colour."""

    bits: int

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise BadSetting(f"bits is how many of the eight are kept, from 1 to 8, got {self.bits}")

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images in steps of colour."""
        require_images(x_BCHW, "Posterize")
        bytes_BCHW = stored_colors(as_colors(x_BCHW, "Posterize"), torch.uint8)
        kept = bytes_BCHW & (0xFF << (8 - self.bits) & 0xFF)
        return kept if x_BCHW.dtype == torch.uint8 else (kept.to(x_BCHW.dtype) / 255)


@dataclass(frozen=True)
class Solarize:
    """Turn colours from `threshold` on (0 to 1) into their negative."""

    threshold: float = 0.5

    def __post_init__(self) -> None:
        require_amount("threshold", "the least colour that is turned", self.threshold, most=1)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, their bright parts turned."""
        require_images(x_BCHW, "Solarize")
        colors = as_colors(x_BCHW, "Solarize")
        return torch.where(colors >= self.threshold, stored_colors(1 - colors, x_BCHW.dtype), x_BCHW)


@dataclass(frozen=True)
class Autocontrast:
    """Spread the colours of each channel of each image from its darkest to its brightest; of one colour it stays."""

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images with black and white in them."""
        require_images(x_BCHW, "Autocontrast")
        colors = as_colors(x_BCHW, "Autocontrast")
        low, high = colors.amin((2, 3), keepdim=True), colors.amax((2, 3), keepdim=True)
        is_flat = high <= low
        spread = (colors - low) / torch.where(is_flat, torch.ones_like(high), high - low)
        return torch.where(is_flat, x_BCHW, stored_colors(spread, x_BCHW.dtype))
