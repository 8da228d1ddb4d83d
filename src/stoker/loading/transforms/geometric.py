"""Rotating, scaling, moving and shearing images, and cropping to a size: one grid of places, sampled bilinearly.

What: for each pixel that comes out, the place it comes from is calculated, and the four pixels around that are
averaged. Costs: some ten passes over the pixels. Downscaling is not smoothed first, so fine patterns may alias; what
is outside an image is `fill`. Source: M. Jaderberg et al., "Spatial Transformer Networks", arXiv:1506.02025, section
3.2-3.3, for the grid and its sampling; ranges are given as torchvision has them.

Windows cut from padded images, pixel for pixel.

Mirror images.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from stoker.errors import BadJob, BadSetting
from stoker.jobs.numeric_settings import Interval, require_amount, require_interval, require_probability, require_size
from stoker.loading.transforms.base import Draw, Numbers, as_numbers, require_images, stored

Matrices = npt.NDArray[np.float64]
"""For each sample [B, 2, 3]: the place in the input (x, y) of a place (x, y, 1) in the output [pixels from the upper
left corner; the middle of the first pixel is at one half]."""


@dataclass(frozen=True)
class RandomAffine:
    """Rotate, scale, move and shear an image at once; all about its middle.

    Args:
        degrees: how far it is turned at most, either way.
        scale: by which factor it grows, from lowest to highest (below 1 it shrinks).
        translate: how far it moves at most, as shares of its width and height, either way.
        shear: how far upright lines lean over at most, either way [degrees].
        fill: what comes in.
    """

    degrees: float = 0.0
    scale: Interval = (1.0, 1.0)
    translate: tuple[float, float] = (0.0, 0.0)
    shear: float = 0.0
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_amount("degrees", "how far an image is turned at most", self.degrees)
        require_interval("scale", self.scale)
        for share in self.translate:
            require_amount("translate", "how far an image moves at most, as a share of its side", share, most=1)
        require_amount("shear", "how far upright lines lean over at most, in degrees", self.shear, most=89)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, moved."""
        require_images(x_BCHW, "RandomAffine")
        _, _, H, W = x_BCHW.shape
        across, down = self.translate
        matrices = _about_the_middle(
            H, W,
            turned=_radians(draw.numbers(-self.degrees, self.degrees)),
            sheared=_radians(draw.numbers(-self.shear, self.shear)),
            scaled=draw.numbers(*self.scale),
            moved=(draw.numbers(-across * W, across * W), draw.numbers(-down * H, down * H)),
        )  # fmt: skip
        return warped(x_BCHW, matrices, (H, W), "RandomAffine", fill=self.fill)


@dataclass(frozen=True)
class RandomRotation:
    """Turn an image about its middle by up to `degrees` either way; what comes in is `fill`."""

    degrees: float
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_amount("degrees", "how far an image is turned at most", self.degrees)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, turned."""
        return RandomAffine(degrees=self.degrees, fill=self.fill)(x_BCHW, draw)


@dataclass(frozen=True)
class RandomScale:
    """Enlarge an image about its middle by a factor of `scale`; what comes in where it shrinks is `fill`."""

    scale: Interval
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_interval("scale", self.scale)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, of the same size, larger or smaller within."""
        return RandomAffine(scale=self.scale, fill=self.fill)(x_BCHW, draw)


@dataclass(frozen=True)
class RandomResizedCrop:
    """Cut a part out of an image, of a share of its area and a ratio of its sides, and bring it to `size` x `size`.

    A part that would be wider or higher than the image is cut to it. In evaluation the largest square in the middle is
    brought to that size.

    Args:
        size: side of what comes out [pixels].
        scale: share of the area, from lowest to highest.
        ratio: width over height, from lowest to highest; evenly on a logarithmic scale.

    Source: C. Szegedy et al., "Going Deeper with Convolutions", arXiv:1409.4842, section 6.
    """

    size: int
    scale: Interval = (0.08, 1.0)
    ratio: Interval = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        require_size("size", "the side of what comes out", self.size)
        require_interval("scale", self.scale, most=1)
        require_interval("ratio", self.ratio)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The parts [B, C, size, size]."""
        require_images(x_BCHW, "RandomResizedCrop")
        _, _, H, W = x_BCHW.shape
        areas = draw.numbers(*self.scale) * (H * W)
        ratios = _each(math.exp, draw.numbers(*map(math.log, self.ratio)))
        widths = np.minimum(np.sqrt(areas * ratios), W)
        heights = np.minimum(np.sqrt(areas / ratios), H)
        lefts, tops = draw.numbers() * (W - widths), draw.numbers() * (H - heights)
        return self._resized(x_BCHW, _of_boxes(lefts, tops, widths / self.size, heights / self.size))

    def in_evaluation(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The middle [B, C, size, size]."""
        require_images(x_BCHW, "RandomResizedCrop")
        _, _, H, W = x_BCHW.shape
        side = np.array([float(min(H, W))])
        return self._resized(x_BCHW, _of_boxes((W - side) / 2, (H - side) / 2, side / self.size, side / self.size))

    def _resized(self, x_BCHW: torch.Tensor, matrices: Matrices) -> torch.Tensor:
        return warped(x_BCHW, matrices, (self.size, self.size), "RandomResizedCrop", is_edge_repeated=True)


def warped(
    x_BCHW: torch.Tensor,
    matrices: Matrices,
    size: tuple[int, int],
    transform: str,
    *,
    fill: float = 0.0,
    is_edge_repeated: bool = False,
) -> torch.Tensor:
    """Images of `size` (height, width) whose pixels come from where `matrices` say, in the type of `x_BCHW`.

    Beyond an image lies `fill`, or its outermost pixels again.
    """
    numbers = as_numbers(x_BCHW, transform)
    numbers = numbers if numbers.dtype == torch.float64 else numbers.to(torch.float32)
    _, _, H, W = x_BCHW.shape
    grid_BHW2 = _grid(matrices, size, (H, W), numbers).expand(x_BCHW.shape[0], -1, -1, -1)  # one matrix may do for all
    sampled = F.grid_sample(
        numbers - fill if fill else numbers, grid_BHW2, mode="bilinear", align_corners=False,
        padding_mode="border" if is_edge_repeated else "zeros",
    )  # fmt: skip
    return stored(sampled + fill if fill else sampled, x_BCHW.dtype)


def _grid(matrices: Matrices, size: tuple[int, int], of: tuple[int, int], like: torch.Tensor) -> torch.Tensor:
    """Where each pixel comes from [B, *size, 2], as (x, y) from -1 to 1 over the sides of the input."""
    # Multiplied and added one by one: a product of matrices may round otherwise in a batch of another size.
    sides = np.array([of[1], of[0]], dtype=np.float64)
    relative = torch.from_numpy(matrices * (2 / sides)[:, None]).to(like.dtype).to(like.device)
    x_W = torch.arange(size[1], device=like.device, dtype=like.dtype) + 0.5
    y_H1 = (torch.arange(size[0], device=like.device, dtype=like.dtype) + 0.5).unsqueeze(1)
    rows = [relative[:, row].view(-1, 3, 1, 1).unbind(1) for row in (0, 1)]
    return torch.stack([by_x * x_W + by_y * y_H1 + (shift - 1) for by_x, by_y, shift in rows], dim=-1)


def _about_the_middle(
    height: int, width: int, *, turned: Numbers, sheared: Numbers, scaled: Numbers, moved: tuple[Numbers, Numbers]
) -> Matrices:
    """Matrices that undo: shear along x, turn, scale, all about the middle, then move."""
    cos, sin, tan = _each(math.cos, turned), _each(math.sin, turned), _each(math.tan, sheared)
    # The inverse of scaled * [[cos, -sin], [sin, cos]] @ [[1, tan], [0, 1]].
    inverse = np.stack([np.stack([cos + tan * sin, sin - tan * cos], -1), np.stack([-sin, cos], -1)], -2)
    inverse = inverse / scaled[:, None, None]
    middle = np.array([width / 2, height / 2])
    from_middle = middle + np.stack(moved, -1)
    by_x, by_y = inverse[..., 0], inverse[..., 1]
    shift = middle - (by_x * from_middle[:, :1] + by_y * from_middle[:, 1:])
    return np.stack([by_x, by_y, shift], -1)


def _of_boxes(lefts: Numbers, tops: Numbers, by_x: Numbers, by_y: Numbers) -> Matrices:
    """Matrices that read boxes of the input, so many pixels of it for each of the output."""
    none = np.zeros_like(lefts)
    return np.stack([np.stack([by_x, none, lefts], -1), np.stack([none, by_y, tops], -1)], -2)


def _each(function: Callable[[float], float], numbers: Numbers) -> Numbers:
    """The function of each number by itself: of arrays, the last bits may depend on the place within the array."""
    return np.array([function(number) for number in numbers.tolist()], dtype=np.float64)


def _radians(degrees: Numbers) -> Numbers:
    return degrees * (math.pi / 180)


@dataclass(frozen=True)
class RandomShift:
    """Move an image by up to `pixels` in each direction; what comes in is `fill`."""

    pixels: int
    fill: float = 0.0

    def __post_init__(self) -> None:
        if self.pixels < 0:
            raise BadSetting(f"pixels is how far an image moves at most, 0 or more, got {self.pixels}")

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, moved."""
        require_images(x_BCHW, "RandomShift")
        reach = self.pixels
        top_B, left_B = draw.integers(0, 2 * reach), draw.integers(0, 2 * reach)
        return _windows(_padded(x_BCHW, reach, self.fill), top_B, left_B, x_BCHW.shape[2], x_BCHW.shape[3])


@dataclass(frozen=True)
class RandomCrop:
    """Cut a window of `size` x `size` pixels from anywhere in an image that got `padding` pixels of `fill` around it.

    In evaluation the window is cut from the middle.
    """

    size: int
    padding: int = 0
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_size("size", "the side of the window", self.size)
        if self.padding < 0:
            raise BadSetting(f"padding is how many pixels come around an image, 0 or more, got {self.padding}")

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The windows [B, C, size, size]."""
        room = self._room(x_BCHW)
        top_B, left_B = draw.integers(0, room[0]), draw.integers(0, room[1])
        return _windows(_padded(x_BCHW, self.padding, self.fill), top_B, left_B, self.size, self.size)

    def in_evaluation(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The middle [B, C, size, size]; of an odd rest more is left below and on the right."""
        top, left = (rest // 2 for rest in self._room(x_BCHW))
        padded = _padded(x_BCHW, self.padding, self.fill)
        return padded[:, :, top : top + self.size, left : left + self.size].contiguous()

    def _room(self, x_BCHW: torch.Tensor) -> tuple[int, int]:
        """How far the window can move down and to the right [pixels]."""
        require_images(x_BCHW, "RandomCrop")
        height, width = (side + 2 * self.padding - self.size for side in x_BCHW.shape[2:])
        if min(height, width) < 0:
            raise BadJob(
                f"RandomCrop cuts {self.size} x {self.size} pixels, and images of {x_BCHW.shape[2]} x "
                f"{x_BCHW.shape[3]} with {self.padding} around them are smaller",
                remedy="Give a smaller size, more padding, or larger images.",
            )
        return height, width


def _padded(x_BCHW: torch.Tensor, padding: int, fill: float) -> torch.Tensor:
    return F.pad(x_BCHW, (padding, padding, padding, padding), value=fill).contiguous()


def _windows(
    padded_BCHW: torch.Tensor, top_B: torch.Tensor, left_B: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Windows [B, C, height, width] with their upper left corners at these places."""
    # Every row that comes out is `width` neighbours in the padded memory, so rows are copied whole: picking the pixels
    # one by one took 3.5 times as long.
    B, C, in_column, in_row = padded_BCHW.shape
    images_BC = torch.arange(B * C, device=padded_BCHW.device).view(B, C, 1) * (in_column * in_row)
    rows_H = torch.arange(height, device=padded_BCHW.device) * in_row
    starts_BCH = images_BC + (top_B * in_row + left_B).view(B, 1, 1) + rows_H
    windows = padded_BCHW.as_strided((max(0, padded_BCHW.numel() - width + 1), width), (1, 1))
    return windows.index_select(0, starts_BCH.view(-1)).view(B, C, height, width)


@dataclass(frozen=True)
class RandomFlip:
    """Mirror an image left to right with probability `p`."""

    p: float = 0.5

    def __post_init__(self) -> None:
        require_probability(self.p)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, some mirrored."""
        require_images(x_BCHW, "RandomFlip")
        mirrored_B = draw.uniform() < self.p
        return torch.where(mirrored_B.view(-1, 1, 1, 1), x_BCHW.flip(-1), x_BCHW)


@dataclass(frozen=True)
class RandomVerticalFlip:
    """Turn an image upside down, as in a pond, with probability `p`."""

    p: float = 0.5

    def __post_init__(self) -> None:
        require_probability(self.p)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, some mirrored top to bottom."""
        require_images(x_BCHW, "RandomVerticalFlip")
        mirrored_B = draw.uniform() < self.p
        return torch.where(mirrored_B.view(-1, 1, 1, 1), x_BCHW.flip(-2), x_BCHW)


@dataclass(frozen=True)
class AlternatingFlip:
    """Mirror an image left to right in every other epoch; which half begins is drawn once.

    In any two epochs that follow each other the model sees every image both ways, where RandomFlip shows a quarter of
    them the same way twice.

    Source: K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024), https://arxiv.org/abs/2404.00498,
    section 3.6, where a hash of the index decides.
    """

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, half of them mirrored."""
        require_images(x_BCHW, "AlternatingFlip")
        is_odd = draw.epoch % 2 == 1
        mirrored_B = (draw.lasting().uniform() < 0.5) ^ is_odd
        return torch.where(mirrored_B.view(-1, 1, 1, 1), x_BCHW.flip(-1), x_BCHW)
