"""From what is stored to pixels, every byte of it decoded; and what is wrong where that fails."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.reading.faults import BadImage
from stoker.data.reading.images import loaded, upright
from stoker.records.cleaning import Fault

_SAME_FORMAT = {"MPO": "JPEG", "DIB": "BMP"}


class Unreadable(ValueError):
    """A sample without pixels; `fault` is what it counts as."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault: Fault = fault


@dataclass(frozen=True)
class Picture:
    """A decoded image: upright, in the mode it is stored in; `misnamed` says of what format it really is.

    `values` are what is stored where the image shows less than that: of 16 bits eight, of fractions 256 levels.
    """

    image: Image.Image
    misnamed: str = ""
    values: NDArray[Any] | None = None

    @property
    def content(self) -> bytes:
        """SHA-256 of the pixels: equal for equal ones alone."""
        return digest(self.image) if self.values is None else _digest_of_values(self.values)


def decode(content: bytes | NDArray[Any], suffix: str = "") -> Picture:
    """The whole image.

    Raises:
        Unreadable: it is empty, damaged, cut off, of no known format, larger than Pillow's limit, or not finite.
    """
    if isinstance(content, bytes):
        return _of_bytes(content, suffix)
    return Picture(_of_array(content), values=None if _are_levels(content) else content)


def digest(image: Image.Image) -> bytes:
    """SHA-256 of what is seen: equal for equal pixels, whatever format and mode they are stored in.

    Grey, palette and RGB images of 8 bits are compared as RGB, those with transparency as RGBA, deeper ones as stored.
    """
    if image.mode in {"I", "F", "I;16", "I;16B", "I;16L"}:
        shown = image
    else:
        shown = image.convert("RGBA" if image.has_transparency_data else "RGB")
    head = f"{shown.mode} {shown.width} {shown.height} ".encode()
    return hashlib.sha256(head + shown.tobytes()).digest()


def as_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB of 8 bits; transparent pixels are white, deeper values are scaled by the largest they can be."""
    if image.mode == "RGB":
        return image
    if image.mode in {"I", "F", "I;16", "I;16B", "I;16L"}:
        values = np.asarray(image, np.float64)
        largest = float(values.max(initial=0.0))
        top = largest if image.mode == "F" else 255.0 if largest <= 255 else max(largest, 65535.0)
        return Image.fromarray(np.clip(values * (255 / (top or 1.0)), 0, 255).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        upper = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", upper.size, "white"), upper).convert("RGB")
    return image.convert("RGB")


def _of_bytes(content: bytes, suffix: str) -> Picture:
    try:
        image = loaded(content, is_strict=True)
    except BadImage as error:
        raise Unreadable(error.fault, f"cannot be decoded: {error}") from None
    found = _SAME_FORMAT.get(image.format or "", image.format or "")
    promised = _formats().get(suffix, "")
    return Picture(upright(image), found if promised and found != promised else "")


def _of_array(pixels: NDArray[Any]) -> Image.Image:
    if pixels.dtype.kind == "f":
        if not np.isfinite(pixels).all():
            raise Unreadable("not-finite", f"has {int((~np.isfinite(pixels)).sum()):,} values that are not finite")
        low, high = float(pixels.min(initial=0.0)), float(pixels.max(initial=0.0))
        if low < 0 or high > 255:
            pixels = (pixels - low) * (255 / max(high - low, 1e-12))
        elif high <= 1:
            pixels = pixels * 255
    elif pixels.dtype != np.uint8 and int(pixels.max(initial=0)) > 255:
        pixels = np.asarray(pixels, np.int64) // 257
    pixels = np.ascontiguousarray(np.clip(pixels, 0, 255).astype(np.uint8))
    return Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels)


def _are_levels(pixels: NDArray[Any]) -> bool:
    """Whether values are whole and between 0 and 255, so that an image of 8 bits shows all of them."""
    if pixels.dtype.kind == "f":
        return False
    return pixels.dtype == np.uint8 or (int(pixels.min(initial=0)) >= 0 and int(pixels.max(initial=0)) <= 255)


def _digest_of_values(pixels: NDArray[Any]) -> bytes:
    """SHA-256 of values as numbers, whatever type stores them; 0 and -0 are one number."""
    kind = "<f8" if pixels.dtype.kind == "f" else "<i8"
    numbers = np.ascontiguousarray(pixels.astype(kind)) + 0
    return hashlib.sha256(f"values {kind} {pixels.shape} ".encode() + numbers.tobytes()).digest()


@functools.cache
def _formats() -> dict[str, str]:
    """What format an ending promises."""
    return {suffix: _SAME_FORMAT.get(name, name) for suffix, name in Image.registered_extensions().items()}
