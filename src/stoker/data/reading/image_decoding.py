"""Decoding of image files into pixels. Imports Pillow, so import it where the first image is decoded."""

from __future__ import annotations

import io
import re
import warnings
import zlib

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from stoker.data.reading.file_listing import Resize
from stoker.data.reading.table_readers import BadImage

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
_ADDRESS = re.compile(r"<_io\.BytesIO object at 0x[0-9a-f]+>")
_END_OF_JPEG = b"\xff\xd9"
_MOST_OF_8_BITS = 255
_DEEP_PIXELS = re.compile(r"(?:RGB[AaX]?|CMYK|LA?);16[BLNS]?")
"""Pillow's names for stored pixels of 16 bits a channel of which it keeps the upper 8; `BGR;16` has 16 a pixel."""


def loaded(content: bytes, *, is_strict: bool = False) -> Image.Image:
    """The image in an encoded file, as it is stored there; of an animation, its first picture.

    Args:
        content: the file.
        is_strict: check what decoding does not need as well: the checksums of a PNG, the end of a JPEG.

    Raises:
        BadImage: it is empty, cut off, damaged, of no known format, larger than any picture should be, or of more than
            8 bits a channel where Pillow would drop the rest.
    """
    if not content:
        raise BadImage("empty", "it has no bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of broken EXIF, which is not what is decoded
            image = Image.open(io.BytesIO(content))
            # An image that unpacks to hundreds of millions of pixels is an attack or a mistake. Pillow warns of it;
            # several threads that decode at once cannot make an error of that, as the filters of warnings are one for
            # all of them.
            if Image.MAX_IMAGE_PIXELS is not None and image.width * image.height > Image.MAX_IMAGE_PIXELS:
                raise Image.DecompressionBombError(
                    f"it has {image.width:,} × {image.height:,} pixels, "
                    f"and {Image.MAX_IMAGE_PIXELS:,} are taken at most"
                )
            if is_strict and image.format == "PNG":
                image.verify()  # uses the image up
                image = Image.open(io.BytesIO(content))
            if is_strict and image.format == "JPEG" and content.rfind(_END_OF_JPEG) < 0:
                raise OSError("the end of the JPEG is missing")
            if (stored := _deep_pixels(image)) is not None:
                raise BadImage("mode", f"it has more than 8 bits a channel ({stored}): make 8 of them first")
            image.load()
            return image
    except UnidentifiedImageError:
        raise BadImage("corrupt", f"it is no image: it begins with {content[:8].hex(' ')}") from None
    except Image.DecompressionBombError as error:
        raise BadImage("shape", _words(error)) from None
    except (OSError, SyntaxError, ValueError, IndexError, EOFError, zlib.error, OverflowError) as error:
        raise BadImage("corrupt", _words(error)) from None


def upright(image: Image.Image) -> Image.Image:
    """The image rotated and mirrored as its EXIF data say; broken EXIF data are ignored."""
    try:
        return ImageOps.exif_transpose(image)
    except (OSError, SyntaxError, ValueError, KeyError, TypeError, ZeroDivisionError):
        return image


def fitted(image: Image.Image, channels: int, size: tuple[int, int] | None, resize: Resize) -> npt.NDArray[np.uint8]:
    """The pixels [C, H, W] of an image.

    Args:
        image: upright, in any mode.
        channels: 1 for grey, 3 for RGB, 4 for RGB and alpha.
        size: (H, W); None leaves it as large as it is.
        resize: what becomes of an image of another shape; bilinear.

    Raises:
        BadImage: it has more than 8 bits a channel.
    """
    if image.mode.startswith(("I", "F")):
        raise BadImage("mode", f"it has more than 8 bits a channel (mode {image.mode}): make 8 of them first")
    if "transparency" in image.info and image.mode == "P":
        image = image.convert("RGBA")  # else Pillow warns that the table of transparency is lost
    mode = _MODES[channels]
    image = image if image.mode == mode else image.convert(mode)
    if size is not None and (image.height, image.width) != size:
        width_height = (size[1], size[0])
        if resize == "stretch":
            image = image.resize(width_height, Image.Resampling.BILINEAR)
        else:
            fit = ImageOps.fit if resize == "crop" else ImageOps.pad
            image = fit(image, width_height, Image.Resampling.BILINEAR)
    pixels = np.asarray(image)
    pixels = pixels.reshape(*pixels.shape[:2], channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _deep_pixels(image: Image.Image) -> str | None:
    """How an image that is not loaded yet stores more than 8 bits a channel, if Pillow reads it with 8; else None.

    Pillow keeps 1000 of 65535 as 3. Where it keeps all bits, the mode shows it, see `fitted`.
    """
    for tile in getattr(image, "tile", ()):
        arguments = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        for argument in arguments:
            if isinstance(argument, str) and _DEEP_PIXELS.fullmatch(argument):
                return argument
            if tile.codec_name.startswith("ppm") and isinstance(argument, int) and argument > _MOST_OF_8_BITS:
                return f"values up to {argument}"
    return None


def _words(error: BaseException) -> str:
    """The error's text without the memory address that Pillow puts in."""
    return _ADDRESS.sub("these bytes", str(error).strip()) or type(error).__name__
