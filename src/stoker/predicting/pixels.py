"""Images as the numbers a model takes. What the signature does not tell has to be said; nothing is guessed."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from stoker.artifacts.elements import dtype_of
from stoker.errors import BadJob
from stoker.predicting.inputs import ImageShape, Input
from stoker.records.prediction import PixelSettings

_RANGE = re.compile(r"0\.\.(1|255)")


@dataclass(frozen=True)
class Pixels:
    """Pixels of 0 to 255 become (pixel / `divisor` − `mean`) / `std`, with one mean and std a channel or for all."""

    divisor: float
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


def parse_pixels(text: str, one: Input) -> Pixels:
    """What `--pixels` says: `0..255`, `0..1`, or `MEAN/STD` of pixels from 0 to 1, with commas between channels.

    An input of UINT8 takes pixels as they are and needs none.

    Raises:
        BadJob: it says something else, or nothing for an input of another type.
    """
    remedy = "Say what the model was trained on: --pixels 0..255, --pixels 0..1, or --pixels MEAN/STD of 0 to 1."
    if not text:
        if one.datatype == "UINT8":
            return Pixels(1.0)
        raise BadJob(f"The input {one} does not tell what values pixels have", remedy=remedy)
    if found := _RANGE.fullmatch(text):
        return Pixels(1.0 if found[1] == "255" else 255.0)
    mean, slash, std = text.partition("/")
    try:
        pixels = Pixels(255.0, tuple(map(float, mean.split(","))), tuple(map(float, std.split(","))))
    except ValueError:
        raise BadJob(f"--pixels {text} is not understood", remedy=remedy) from None
    channels = (1, one.image.channels if one.image else 1)
    if not slash or 0 in pixels.std or not {len(pixels.mean), len(pixels.std)} <= set(channels):
        raise BadJob(f"--pixels {text} does not fit the input {one}", remedy=remedy)
    return pixels


def image_of(value: Any, one: Input, shape: ImageShape, settings: PixelSettings, folder: Path) -> NDArray[Any]:
    """An image's numbers; `value` is its bytes, its path (from `folder`), or both in a mapping.

    Raises:
        ValueError: there is none, it cannot be decoded, or its size does not fit.
    """
    image = _fitted(_opened(value, folder), shape, settings)
    pixels = np.asarray(image.convert("RGB" if shape.channels == 3 else "L"))
    scale = parse_pixels(settings.values, one)
    if (scale.divisor, scale.mean, scale.std) != (1.0, (0.0,), (1.0,)):
        scaled = (pixels.reshape(*pixels.shape[:2], shape.channels) / scale.divisor - scale.mean) / scale.std
        pixels = scaled.reshape(pixels.shape)
    values = pixels.astype(dtype_of(one.datatype))
    if not shape.has_channel_dim:
        return values
    values = values.reshape(*values.shape[:2], shape.channels)
    return values if shape.channels_last else np.ascontiguousarray(values.transpose(2, 0, 1))


def _opened(value: Any, folder: Path) -> Image.Image:
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if value is None or value in {"", b""}:
        raise ValueError("is null")
    place = io.BytesIO(value) if isinstance(value, bytes) else folder / str(value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(place)
            image.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(f"cannot be decoded as an image: {_without_address(error)}") from None
    return ImageOps.exif_transpose(image)


def _fitted(image: Image.Image, shape: ImageShape, settings: PixelSettings) -> Image.Image:
    width, height = shape.width or image.width, shape.height or image.height
    if (image.width, image.height) == (width, height):
        return image
    if settings.resize == "stretch":
        return image.convert("RGB" if shape.channels == 3 else "L").resize((width, height), Image.Resampling.BILINEAR)
    if settings.resize == "crop":
        return ImageOps.fit(
            image.convert("RGB" if shape.channels == 3 else "L"), (width, height), Image.Resampling.BILINEAR
        )
    raise ValueError(f"has {image.width} × {image.height} pixels, wanted {width} × {height} (--resize stretch or crop)")


def _without_address(error: BaseException) -> str:
    """The error's words, without the memory address that Pillow puts in: the same every time."""
    return re.sub(r"<_io\.BytesIO object at 0x[0-9a-f]+>", "these bytes", str(error).strip())
