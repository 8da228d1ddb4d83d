"""Parts of images covered up."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from stoker.jobs.numeric_settings import Interval, require_interval, require_probability, require_size
from stoker.loading.transforms.base import Draw, Numbers, require_images


@dataclass(frozen=True)
class Cutout:
    """Cover a square of `size` pixels, centred anywhere in the image and cut off at its edges, with `fill`.

    Source: T. DeVries, G. W. Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout",
    arXiv:1708.04552.
    """

    size: int
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_size("size", "the side of the square", self.size)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, a square of each covered."""
        require_images(x_BCHW, "Cutout")
        _, _, H, W = x_BCHW.shape
        tops = np.floor(draw.numbers(0, H)) - self.size // 2
        lefts = np.floor(draw.numbers(0, W)) - self.size // 2
        return _covered(x_BCHW, tops, lefts, tops + self.size, lefts + self.size, self.fill)


@dataclass(frozen=True)
class RandomErasing:
    """Cover a rectangle within the image with `fill`, with probability `p`.

    Args:
        p: how likely an image is covered.
        scale: share of the image's area, from lowest to highest.
        ratio: height over width, from lowest to highest; evenly on a logarithmic scale.
        fill: what covers it.

    Source: Z. Zhong et al., "Random Erasing Data Augmentation", arXiv:1708.04896; a rectangle that would be larger than
    the image is cut to it here, where it is drawn again there.
    """

    p: float = 0.5
    scale: Interval = (0.02, 0.33)
    ratio: Interval = (0.3, 3.3)
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_probability(self.p)
        require_interval("scale", self.scale, most=1)
        require_interval("ratio", self.ratio)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, some with a part covered."""
        require_images(x_BCHW, "RandomErasing")
        _, _, H, W = x_BCHW.shape
        areas = draw.numbers(*self.scale) * (H * W)
        logarithms = draw.numbers(*map(math.log, self.ratio))
        ratios = np.array([math.exp(one) for one in logarithms.tolist()])
        heights = np.minimum(np.floor(np.sqrt(areas * ratios) + 0.5), H)
        widths = np.minimum(np.floor(np.sqrt(areas / ratios) + 0.5), W)
        tops, lefts = (np.floor(draw.numbers() * (whole - part + 1)) for whole, part in ((H, heights), (W, widths)))
        is_covered = draw.numbers() < self.p
        return _covered(x_BCHW, tops, lefts, tops + heights * is_covered, lefts + widths, self.fill)


def _covered(
    x_BCHW: torch.Tensor, tops: Numbers, lefts: Numbers, bottoms: Numbers, rights: Numbers, fill: float
) -> torch.Tensor:
    """The images with `fill` from top to bottom and from left to right, ends excluded [pixels]."""
    covered_B1HW = boxes(x_BCHW, tops, lefts, bottoms, rights)
    return torch.where(covered_B1HW, torch.full((), fill, dtype=x_BCHW.dtype, device=x_BCHW.device), x_BCHW)


def boxes(x_BCHW: torch.Tensor, tops: Numbers, lefts: Numbers, bottoms: Numbers, rights: Numbers) -> torch.Tensor:
    """Which pixels [B, 1, H, W] lie in a box for each sample, ends excluded [pixels]."""
    ends = np.stack([tops, bottoms, lefts, rights]).astype(np.int64)
    top, bottom, left, right = torch.from_numpy(ends).to(x_BCHW.device).view(4, -1, 1, 1, 1).unbind(0)
    rows_H1 = torch.arange(x_BCHW.shape[2], device=x_BCHW.device).unsqueeze(1)
    columns_W = torch.arange(x_BCHW.shape[3], device=x_BCHW.device)
    return (rows_H1 >= top) & (rows_H1 < bottom) & (columns_W >= left) & (columns_W < right)
