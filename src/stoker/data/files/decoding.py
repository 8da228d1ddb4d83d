"""Image files as pixels. Imports Pillow, and so is imported where the first image is decoded."""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

if TYPE_CHECKING:
    from stoker.data.files.images import ImageForm

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_ADDRESS = re.compile(r"<_io\.BytesIO object at 0x[0-9a-f]+>")


def decoded(content: bytes, form: ImageForm) -> npt.NDArray[np.uint8]:
    """The pixels [C, H, W] of an encoded image, upright by its EXIF; of an animation, its first picture.

    Raises:
        ValueError: it is cut off, damaged, larger than any picture should be, or has more than 8 bits a channel.
    """
    try:
        with warnings.catch_warnings():
            # An image that unpacks to hundreds of millions of pixels is an attack or a mistake.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(content))
            image.load()
            upright = ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ValueError(_ADDRESS.sub("these bytes", str(error).strip())) from None
    return fitted(upright, form)


def fitted(image: Image.Image, form: ImageForm) -> npt.NDArray[np.uint8]:
    """The pixels [C, H, W] in the channels and size of `form`."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"it has more than 8 bits a channel (mode {image.mode}): make 8 of them first")
    if "transparency" in image.info and image.mode == "P":
        image = image.convert("RGBA")  # else Pillow warns that the table of transparency is lost
    mode = _MODES[form.channels]
    image = image if image.mode == mode else image.convert(mode)
    pixels = np.asarray(_sized(image, form))
    pixels = pixels.reshape(*pixels.shape[:2], form.channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _sized(image: Image.Image, form: ImageForm) -> Image.Image:
    if form.size is None or (image.height, image.width) == form.size:
        return image
    size = (form.size[1], form.size[0])
    if form.resize == "stretch":
        return image.resize(size, Image.Resampling.BILINEAR)
    fit = ImageOps.fit if form.resize == "crop" else ImageOps.pad
    return fit(image, size, Image.Resampling.BILINEAR)
