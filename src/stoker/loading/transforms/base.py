"""Shared parts of transforms: `Draw`, their keyed random numbers, and conversions between stored images and numbers.

Also transforms of some samples only, and the transforms that remain in evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stoker.errors import BadJob, BadSetting
from stoker.jobs.numeric_settings import require_probability
from stoker.loading.order import Indices, Keys, RandomStream, key_of, keys_of_samples, mix_keys

Numbers = npt.NDArray[np.float64]
"""One number for each sample [B], on the host."""


class Draw:
    """Random numbers for each sample of a batch, the same however the batch is cut; each call draws new ones.

    `epoch` counts from 0; `progress` is the share of the run's samples done before the update, and 1 outside of one.
    """

    def __init__(self, seed: int, epoch: int, indices: Indices, device: torch.device, progress: float = 1.0) -> None:
        self.epoch, self.progress = epoch, progress
        self.device = device
        self._keys = keys_of_samples(key_of(RandomStream.AUGMENT, seed, epoch), indices)
        self._seed, self._indices = seed, indices

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._indices)

    def lasting(self) -> Draw:
        """Draws that are the same for a sample in every epoch."""
        same = Draw(self._seed, self.epoch, self._indices, self.device, self.progress)
        same._keys = keys_of_samples(key_of(RandomStream.AUGMENT, self._seed), self._indices)
        return same

    def of(self, rows: Indices, branch: int) -> Draw:
        """Draws for the samples at `rows` of the batch, different for each `branch`. Does not itself draw."""
        part = Draw(self._seed, self.epoch, self._indices[rows], self.device, self.progress)
        part._keys = mix_keys(self._keys[rows] ^ np.uint64(key_of(RandomStream.AUGMENT, branch)))
        return part

    def _bits(self) -> Keys:
        self._keys = mix_keys(self._keys + np.uint64(1))
        return self._keys

    def uniform(self) -> torch.Tensor:
        """A float32 [B] in [0, 1), a multiple of 2^-24."""
        return torch.from_numpy((self._bits() >> np.uint64(40)).astype(np.float32) / np.float32(2**24)).to(
            self.device, non_blocking=True
        )

    def integers(self, low: int, high: int) -> torch.Tensor:
        """An int64 [B] with low <= value <= high, all equally likely (to within 2^-32)."""
        scaled = ((self._bits() >> np.uint64(32)) * np.uint64(high - low + 1)) >> np.uint64(32)
        return torch.from_numpy(scaled.astype(np.int64) + low).to(self.device, non_blocking=True)

    def numbers(self, low: float = 0.0, high: float = 1.0) -> Numbers:
        """A float64 [B] in [low, high) on the host, to calculate with before anything goes to the device."""
        return low + (high - low) * ((self._bits() >> np.uint64(11)).astype(np.float64) / 2**53)

    def noise(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A float32 [B, *shape], nearly normal with mean 0 and deviation 1, drawn on the device.

        Each is the sum of the four quarters of a 64-bit draw, as numbers in [0, 1), standardised: it ends at 3.46
        deviations, and its excess kurtosis is -0.3. Whole-number arithmetic is the same bit for bit everywhere, which
        logarithms and cosines are not.
        """
        count = math.prod(shape)
        keys_B1 = torch.from_numpy(self._bits().view(np.int64)).to(self.device, non_blocking=True).unsqueeze(1)
        bits_BN = _mixed(keys_B1 + torch.arange(1, count + 1, device=self.device) * _GOLDEN)
        total_BN = sum(((bits_BN >> shift) & 0xFFFF for shift in (0, 16, 32, 48)), torch.zeros_like(bits_BN))
        return ((total_BN - 2 * 0xFFFF).to(torch.float32) / _NOISE_DEVIATION).view(len(self), *shape)


_GOLDEN, _FIRST, _SECOND = (
    value - 2**64 for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)  # as int64, which PyTorch multiplies modulo 2^64
_NOISE_DEVIATION = math.sqrt(4 * (2**32 - 1) / 12)


def _mixed(keys: torch.Tensor) -> torch.Tensor:
    """`mix_keys` of int64 bit patterns, on their device."""
    keys = (keys ^ _shifted(keys, 30)) * _FIRST
    keys = (keys ^ _shifted(keys, 27)) * _SECOND
    return keys ^ _shifted(keys, 31)


def _shifted(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Logical right shift; `>>` alone repeats the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def require_images(x: torch.Tensor, transform: str) -> None:
    """Raise BadJob unless `x` has four dimensions."""
    if x.dim() != 4:
        raise BadJob(
            f"{transform} takes images [B, C, H, W], got a tensor of shape {list(x.shape)}",
            remedy="Give the images a dimension of channels, as in images[:, None], or leave the transform out.",
        )


def require_colors(x: torch.Tensor, transform: str) -> None:
    """Raise BadJob unless images are grey or RGB."""
    require_images(x, transform)
    if x.shape[1] not in (1, 3):
        raise BadJob(f"{transform} takes images of 1 or 3 channels, got {x.shape[1]} (shape {list(x.shape)})")


def as_numbers(x: torch.Tensor, transform: str) -> torch.Tensor:
    """Images to calculate with: uint8 as float32 from 0 to 255, floating ones as they are.

    Raises:
        BadJob: another type.
    """
    if x.dtype == torch.uint8:
        return x.to(torch.float32)
    if x.is_floating_point():
        return x
    raise BadJob(
        f"{transform} calculates with the pixels of uint8 and floating images, got {x.dtype}",
        remedy="Store the images as uint8, or leave the transform out.",
    )


def as_colors(x: torch.Tensor, transform: str) -> torch.Tensor:
    """As `as_numbers`, with uint8 scaled to 0 to 1; floating images are assumed to be in that range.

    Raises:
        BadJob: another type.
    """
    return as_numbers(x, transform) / 255 if x.dtype == torch.uint8 else as_numbers(x, transform)


def stored(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers (for uint8 from 0 to 255) in the stored type of the images; halves are rounded up."""
    return (numbers + 0.5).floor().clamp(0, 255).to(torch.uint8) if dtype == torch.uint8 else numbers.to(dtype)


def stored_colors(colors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Colours, clamped to 0 to 1, in the stored type of the images."""
    cut = colors.clamp(0, 1)
    return stored(cut * 255, dtype) if dtype == torch.uint8 else cut.to(dtype)


def by_sample(numbers_B: npt.NDArray[np.float64], like: torch.Tensor) -> torch.Tensor:
    """One number for each sample as [B, 1, 1, 1], in the type of `like` and on its device."""
    return torch.from_numpy(numbers_B).to(like.dtype).to(like.device, non_blocking=True).view(-1, 1, 1, 1)


def gray_of(colors_BCHW: torch.Tensor) -> torch.Tensor:
    """The luma [B, 1, H, W] of colours of 1 or 3 channels.

    Source: ITU-R BT.601, as Pillow and torchvision weigh the channels.
    """
    if colors_BCHW.shape[1] == 1:
        return colors_BCHW
    red, green, blue = colors_BCHW.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)


Transform = Callable[..., Any]


@dataclass(frozen=True)
class Sometimes:
    """Apply a transform with probability `p`; it must keep the shape and the type of its inputs."""

    transform: Transform
    p: float = 0.5

    def __post_init__(self) -> None:
        require_probability(self.p)

    def __call__(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The inputs, some transformed."""
        chosen = np.flatnonzero(draw.numbers() < self.p)
        return _applied(self.transform, x, chosen, draw.of(chosen, 0))


@dataclass(frozen=True)
class OneOf:
    """Apply one of several transforms to each sample, all equally likely.

    Each must keep the shape and the type of its inputs. A list is applied in order; an empty one changes nothing.

    >>> from stoker.loading.transforms import AlternatingFlip, Draw
    >>> some = OneOf([AlternatingFlip(), []])
    >>> images = torch.arange(8.0).view(4, 1, 1, 2)
    >>> some(images, Draw(0, 0, np.arange(4), torch.device("cpu"))).flatten(1).tolist()
    [[1.0, 0.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]
    """

    transforms: Sequence[Transform | Sequence[Transform]]

    def __post_init__(self) -> None:
        if len(self.transforms) == 0:
            raise BadSetting("OneOf takes a list of transforms, got an empty one")

    def __call__(self, x: torch.Tensor, draw: Draw) -> torch.Tensor:
        """The inputs, each transformed in one way."""
        choices = np.floor(draw.numbers(0, len(self.transforms)))
        for branch, branch_transforms in enumerate(self.transforms):
            chosen = np.flatnonzero(choices == branch)
            part = draw.of(chosen, branch)
            for transform in branch_transforms if isinstance(branch_transforms, Sequence) else (branch_transforms,):
                x = _applied(transform, x, chosen, part)
        return x


def _applied(transform: Transform, x: torch.Tensor, chosen: Indices, draw: Draw) -> torch.Tensor:
    """`x` with the samples `chosen` transformed; raises BadJob if that changes their shape or type."""
    if len(chosen) == 0:
        return x
    rows = torch.from_numpy(chosen).to(x.device, non_blocking=True)
    part = x.index_select(0, rows)
    changed = transform(part, draw)
    if changed.shape != part.shape or changed.dtype != part.dtype:
        raise BadJob(
            f"{type(transform).__name__} makes {changed.dtype} {list(changed.shape)} of {part.dtype} "
            f"{list(part.shape)}, and only some samples of a batch would get it",
            remedy="Put it into the list of transforms by itself.",
        )
    return x.index_copy(0, rows, changed)


@dataclass(frozen=True)
class _InEvaluation:
    """A deterministic replacement, called like the transform."""

    change: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor, draw: Draw | None = None) -> torch.Tensor:
        """The inputs; nothing is drawn."""
        return self.change(x)


def for_evaluation(transforms: Sequence[Callable[..., Any]]) -> tuple[Callable[..., Any], ...]:
    """The transforms used in evaluation: `in_evaluation` of those that have it; all others are left out."""
    return tuple(_InEvaluation(each.in_evaluation) for each in transforms if hasattr(each, "in_evaluation"))
