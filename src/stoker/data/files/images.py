"""What images shall be like: their size, their channels, and the numbers a model takes. Decoding is in `reading`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from stoker.data.files.extras import needs
from stoker.data.files.source import require_choice
from stoker.data.reading.image_kinds import Resize
from stoker.errors import BadJob

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ImageForm:
    """How image files become pixels, uint8 [C, H, W], and those what a model takes.

    Attributes:
        size: (H, W); None leaves every image as large as it is.
        channels: 1 for grey, 3 for RGB, 4 for RGB and alpha.
        resize: what becomes of an image of another shape; bilinear, as `stoker predict` does it.
        mean: taken off each channel of pixels from 0 to 1.
        std: what they are divided by then.
    """

    size: tuple[int, int] | None
    channels: int
    resize: Resize
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def decoded(self, content: bytes) -> npt.NDArray[np.uint8]:
        """The pixels [C, H, W] of an encoded image.

        Raises:
            BadImage: it is damaged, or of a kind that is not understood; the text says what, not which.
            BadJob: Pillow is missing.
        """
        with needs("pillow"):
            from stoker.data.reading.images import loaded, upright
        return self.fitted(upright(loaded(content)))

    def fitted(self, image: Any) -> npt.NDArray[np.uint8]:
        """The pixels [C, H, W] of an image of Pillow, its own to write to; raises BadImage as `decoded` does."""
        from stoker.data.reading.images import fitted

        pixels = fitted(image, self.channels, self.size, self.resize)
        return np.require(pixels, requirements=["C", "W"])  # grey ones are a view of Pillow's own

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels uint8 [B, C, H, W] as float32 from 0 to 1, less `mean`, divided by `std`; a new tensor."""
        import torch

        values = pixels.to(torch.float32, copy=True)
        if self.mean == (0.0,) and self.std == (1.0,):
            return values.mul_(1 / 255)
        mean = torch.tensor(self.mean, device=values.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=values.device).view(-1, 1, 1)
        return values.mul_(1 / (255 * std)).sub_(mean / std)


def image_form(
    size: int | tuple[int, int] | None,
    channels: int,
    resize: str,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> ImageForm:
    """The form that a user's words mean.

    Raises:
        BadJob: one of them cannot be meant.
    """
    require_choice("resize=…", resize, ("stretch", "crop", "pad"))
    if channels not in (1, 3, 4):
        raise BadJob(f"channels={channels!r} is not known", remedy="Give 1 (grey), 3 (RGB) or 4 (RGB and alpha).")
    sides = _sides(size)
    means, stds = _by_channel("mean", mean, 0.0, channels), _by_channel("std", std, 1.0, channels)
    if not all(one > 0 for one in stds):
        raise BadJob(f"std={std!r} has values that are not positive")
    return ImageForm(sides, channels, cast("Resize", resize), means, stds)


def _sides(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or min(sides) < 1 or any(side != int(side) for side in sides):
        raise BadJob(f"size={size!r} is no size", remedy="Give (height, width) in pixels, or one number for both.")
    return int(sides[0]), int(sides[1])


def _by_channel(what: str, given: float | Sequence[float] | None, default: float, channels: int) -> tuple[float, ...]:
    if given is None:
        return (default,)
    values = (float(given),) if isinstance(given, int | float) else tuple(map(float, given))
    if len(values) not in (1, channels) or not all(map(math.isfinite, values)):
        raise BadJob(
            f"{what}={given!r} does not go with {channels} channels",
            remedy="Give one number, or one for each channel, of pixels from 0 to 1.",
        )
    return values
