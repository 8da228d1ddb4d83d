"""Transforms of pixel positions: flips, shifts, crops, affine maps, and covered parts.

Flips, shifts, crops and erasing keep pixels as they are. Affine maps and resized crops sample bilinearly: the source
position of each output pixel is calculated, and the four pixels around it are averaged, in some ten passes over the
pixels. Downscaling is not smoothed first, so fine patterns may alias. Source: M. Jaderberg et al., "Spatial Transformer
Networks", arXiv:1506.02025, section 3.2-3.3; ranges are given as in torchvision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from stoker.errors import BadJob
from stoker.jobs.numeric_settings import Interval, require_amount, require_interval, require_probability, require_size
from stoker.loading.transforms.base import Draw, Numbers, as_numbers, require_images, stored

Matrices = npt.NDArray[np.float64]
"""For each sample [B, 2, 3]: maps a position (x, y, 1) in the output to (x, y) in the input [pixels from the upper left
corner; the middle of the first pixel is at one half]."""


@dataclass(frozen=True)
class RandomAffine:
    """Rotate, scale, translate and shear an image about its centre.

    Args:
        degrees: largest rotation, either way.
        scale: factor of its size, from lowest to highest (below 1 it shrinks).
        translate: largest translation, either way, as shares of its width and height.
        shear: largest angle of vertical lines, either way [degrees].
        fill: value of new pixels.
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
        turned = _radians(draw.numbers(-self.degrees, self.degrees))
        sheared = _radians(draw.numbers(-self.shear, self.shear))
        scaled = draw.numbers(*self.scale)
        moved = np.stack([draw.numbers(-across * W, across * W), draw.numbers(-down * H, down * H)], -1)
        cos, sin, tan = _each(math.cos, turned), _each(math.sin, turned), _each(math.tan, sheared)
        # The inverse of scaled * [[cos, -sin], [sin, cos]] @ [[1, tan], [0, 1]], about the middle, then moved.
        inverse = np.stack([np.stack([cos + tan * sin, sin - tan * cos], -1), np.stack([-sin, cos], -1)], -2)
        inverse = inverse / scaled[:, None, None]
        middle = np.array([W / 2, H / 2])
        from_middle = middle + moved
        by_x, by_y = inverse[..., 0], inverse[..., 1]
        shift = middle - (by_x * from_middle[:, :1] + by_y * from_middle[:, 1:])
        return warped(x_BCHW, np.stack([by_x, by_y, shift], -1), (H, W), "RandomAffine", fill=self.fill)


@dataclass(frozen=True)
class RandomRotation:
    """Rotate an image about its centre by up to `degrees` either way; new pixels are `fill`.

    Args:
        degrees: the largest angle either way [degrees].
        fill: value of new pixels, in the stored unit.

    Raises:
        BadSetting: `degrees` is out of its range.
    """

    degrees: float
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_amount("degrees", "how far an image is turned at most", self.degrees)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, turned."""
        return RandomAffine(degrees=self.degrees, fill=self.fill)(x_BCHW, draw)


@dataclass(frozen=True)
class RandomScale:
    """Scale an image about its centre by a factor within `scale`; new pixels are `fill`."""

    scale: Interval
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_interval("scale", self.scale)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, of the same size, larger or smaller within."""
        return RandomAffine(scale=self.scale, fill=self.fill)(x_BCHW, draw)


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crop a part of an image, of random area and aspect ratio, and resize it to `size` x `size`.

    A part that would be wider or higher than the image is clipped. In evaluation the largest square in the middle is
    resized.

    Args:
        size: side of the output [pixels].
        scale: share of the area, from lowest to highest.
        ratio: width over height, from lowest to highest; uniform on a logarithmic scale.

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
    """Images of `size` (height, width) sampled where `matrices` point, in the type of `x_BCHW`.

    Pixels outside the input are `fill`, or its nearest pixel.
    """
    numbers = as_numbers(x_BCHW, transform)
    numbers = numbers if numbers.dtype == torch.float64 else numbers.to(torch.float32)
    B, _, H, W = x_BCHW.shape
    # The source of each pixel, as (x, y) from -1 to 1 over the sides of the input. Multiplied and added one by one: a
    # product of matrices may round otherwise in a batch of another size.
    sides = np.array([W, H], dtype=np.float64)
    relative = torch.from_numpy(matrices * (2 / sides)[:, None]).to(numbers.dtype).to(numbers.device, non_blocking=True)
    x_W = torch.arange(size[1], device=numbers.device, dtype=numbers.dtype) + 0.5
    y_H1 = (torch.arange(size[0], device=numbers.device, dtype=numbers.dtype) + 0.5).unsqueeze(1)
    rows = [relative[:, row].view(-1, 3, 1, 1).unbind(1) for row in (0, 1)]
    grid_BHW2 = torch.stack([by_x * x_W + by_y * y_H1 + (shift - 1) for by_x, by_y, shift in rows], dim=-1)
    sampled = F.grid_sample(
        numbers - fill if fill else numbers,
        grid_BHW2.expand(B, -1, -1, -1),  # one matrix may serve all samples
        mode="bilinear",
        align_corners=False,
        padding_mode="border" if is_edge_repeated else "zeros",
    )
    return stored(sampled + fill if fill else sampled, x_BCHW.dtype)


def _of_boxes(lefts: Numbers, tops: Numbers, by_x: Numbers, by_y: Numbers) -> Matrices:
    """Matrices that read boxes of the input, `by_x` and `by_y` of its pixels for each of the output."""
    none = np.zeros_like(lefts)
    return np.stack([np.stack([by_x, none, lefts], -1), np.stack([none, by_y, tops], -1)], -2)


def _each(function: Callable[[float], float], numbers: Numbers) -> Numbers:
    """The function of each number by itself: NumPy's last bits may depend on the position within the array."""
    return np.array([function(number) for number in numbers.tolist()], dtype=np.float64)


def _radians(degrees: Numbers) -> Numbers:
    return degrees * (math.pi / 180)


@dataclass(frozen=True)
class RandomShift:
    """Move an image by up to `pixels` in each direction; new pixels are `fill`.

    Args:
        pixels: the farthest that an image moves [pixels].
        fill: value of new pixels, in the stored unit.

    Raises:
        BadSetting: `pixels` is below 0.
    """

    pixels: int
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_amount("pixels", "how far an image moves at most", self.pixels)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, moved."""
        require_images(x_BCHW, "RandomShift")
        reach = self.pixels
        top_B, left_B = draw.integers(0, 2 * reach), draw.integers(0, 2 * reach)
        return _windows(_padded(x_BCHW, reach, self.fill), top_B, left_B, x_BCHW.shape[2], x_BCHW.shape[3])


@dataclass(frozen=True)
class RandomCrop:
    """Crop a window of `size` x `size` pixels from an image padded by `padding` pixels of `fill`.

    In evaluation the window is cropped from the middle.
    """

    size: int
    padding: int = 0
    fill: float = 0.0

    def __post_init__(self) -> None:
        require_size("size", "the side of the window", self.size)
        require_amount("padding", "how many pixels come around an image", self.padding)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The windows [B, C, size, size]."""
        room = self._room(x_BCHW)
        top_B, left_B = draw.integers(0, room[0]), draw.integers(0, room[1])
        return _windows(_padded(x_BCHW, self.padding, self.fill), top_B, left_B, self.size, self.size)

    def in_evaluation(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        """The middle [B, C, size, size]; an odd pixel is left below or on the right."""
        top, left = (rest // 2 for rest in self._room(x_BCHW))
        padded = _padded(x_BCHW, self.padding, self.fill)
        return padded[:, :, top : top + self.size, left : left + self.size].contiguous()

    def _room(self, x_BCHW: torch.Tensor) -> tuple[int, int]:
        """Room of the window to move down and to the right [pixels]."""
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
    """Mirror an image left to right with probability `p`.

    Args:
        p: probability of each image [0 to 1].

    Raises:
        BadSetting: `p` is out of its range.
    """

    p: float = 0.5
    _dim: ClassVar[int] = -1

    def __post_init__(self) -> None:
        require_probability(self.p)

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, some mirrored."""
        require_images(x_BCHW, type(self).__name__)
        return _mirrored(x_BCHW, draw.uniform() < self.p, self._dim)


@dataclass(frozen=True)
class RandomVerticalFlip(RandomFlip):
    """Mirror an image top to bottom with probability `p`."""

    _dim: ClassVar[int] = -2


def _mirrored(x_BCHW: torch.Tensor, mirrored_B: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.where(mirrored_B.view(-1, 1, 1, 1), x_BCHW.flip(dim), x_BCHW)


@dataclass(frozen=True)
class AlternatingFlip:
    """Mirror an image left to right in every other epoch; the half that begins is drawn once.

    In any two consecutive epochs the model sees every image both ways; RandomFlip shows half of them the same way
    twice.

    Source: K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024), https://arxiv.org/abs/2404.00498,
    section 3.6, where a hash of the index decides.
    """

    def __call__(self, x_BCHW: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The images, half of them mirrored."""
        require_images(x_BCHW, "AlternatingFlip")
        is_odd = draw.epoch % 2 == 1
        return _mirrored(x_BCHW, (draw.lasting().uniform() < 0.5) ^ is_odd, -1)


@dataclass(frozen=True)
class Cutout:
    """Cover a square of `size` pixels, centred anywhere in the image and clipped at its edges, with `fill`.

    Source: T. DeVries, G. W. Taylor, "Improved Regularization of Convolutional Neural Networks with Cutout",
    arXiv:1708.04552.

    Args:
        size: side of the square [pixels].
        fill: value of the covered pixels, in the stored unit.

    Raises:
        BadSetting: `size` is out of its range.
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
        p: probability that an image is covered.
        scale: share of the image's area, from lowest to highest.
        ratio: height over width, from lowest to highest; uniform on a logarithmic scale.
        fill: value of covered pixels.

    Source: Z. Zhong et al., "Random Erasing Data Augmentation", arXiv:1708.04896; a rectangle larger than the image is
    clipped here, and drawn again there.
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
        ratios = _each(math.exp, draw.numbers(*map(math.log, self.ratio)))
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
    """Pixels [B, 1, H, W] within a box of each sample, ends excluded [pixels]."""
    ends = np.stack([tops, bottoms, lefts, rights]).astype(np.int64)
    top, bottom, left, right = (
        torch.from_numpy(ends).to(x_BCHW.device, non_blocking=True).view(4, -1, 1, 1, 1).unbind(0)
    )
    rows_H1 = torch.arange(x_BCHW.shape[2], device=x_BCHW.device).unsqueeze(1)
    columns_W = torch.arange(x_BCHW.shape[3], device=x_BCHW.device)
    return (rows_H1 >= top) & (rows_H1 < bottom) & (columns_W >= left) & (columns_W < right)
