"""Which files are taken for images, and how one is brought to a size. Without Pillow, which decodes them."""

from __future__ import annotations

from typing import Literal

Resize = Literal["stretch", "crop", "pad"]
"""An image of another shape is distorted, cut at its longer sides, or put on black."""

SUFFIXES = frozenset({
    ".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".pnm",
    ".jp2", ".tga", ".ico", ".avif",
})  # fmt: skip
"""Files that are taken for images, in lower case."""
