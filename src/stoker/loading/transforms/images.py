"""What batches of images are: their shape, their types, and the numbers in them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from stoker.errors import BadJob


def require_images(x: torch.Tensor, transform: str) -> None:
    """Refuse what is no batch of images.

    Raises:
        BadJob: it has not four dimensions.
    """
    if x.dim() != 4:
        raise BadJob(
            f"{transform} takes images [B, C, H, W], got a tensor of shape {list(x.shape)}",
            remedy="Give the images a dimension of channels, as in images[:, None], or leave the transform out.",
        )


def require_colors(x: torch.Tensor, transform: str) -> None:
    """Refuse images that are neither grey nor red, green and blue.

    Raises:
        BadJob: they have another number of channels.
    """
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
    """As `as_numbers`, uint8 brought to 0 to 1, in which floating images are taken to be.

    Raises:
        BadJob: another type.
    """
    return as_numbers(x, transform) / 255 if x.dtype == torch.uint8 else as_numbers(x, transform)


def stored(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers (for uint8 those of 0 to 255) in the type that images were stored in; halves are rounded up."""
    return (numbers + 0.5).floor().clamp(0, 255).to(torch.uint8) if dtype == torch.uint8 else numbers.to(dtype)


def stored_colors(colors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Colours, cut to 0 to 1, in the type that images were stored in."""
    cut = colors.clamp(0, 1)
    return stored(cut * 255, dtype) if dtype == torch.uint8 else cut.to(dtype)


def by_sample(numbers_B: npt.NDArray[np.float64], like: torch.Tensor) -> torch.Tensor:
    """One number for each sample as [B, 1, 1, 1], in the type of `like` and on its device."""
    return torch.from_numpy(numbers_B).to(like.dtype).to(like.device).view(-1, 1, 1, 1)


def gray_of(colors_BCHW: torch.Tensor) -> torch.Tensor:
    """The luma [B, 1, H, W] of colours of 1 or 3 channels.

    Source: ITU-R BT.601, as Pillow and torchvision weigh the channels.
    """
    if colors_BCHW.shape[1] == 1:
        return colors_BCHW
    red, green, blue = colors_BCHW.unbind(1)
    return (0.299 * red + 0.587 * green + 0.114 * blue).unsqueeze(1)
