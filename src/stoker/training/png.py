"""An image tensor as a PNG file, by the standard library alone.

Source: W3C, "Portable Network Graphics (PNG) Specification (Third Edition)", sections 5 (chunks) and 11.2 (IHDR, IDAT).
"""

from __future__ import annotations

import struct
import zlib

import torch

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _RGB = 0, 2

Scale = tuple[float, float]
"""The value that is black, and the one that is white."""


def thinned(image: torch.Tensor, largest_side: int) -> torch.Tensor:
    """Every n-th pixel of an image [C, H, W], so that no side is longer; a float32 copy on the CPU."""
    stride = max(1, -(-max(image.shape[1:]) // largest_side))
    return image[:, ::stride, ::stride].detach().to("cpu", torch.float32, copy=True)


def png_of(image: torch.Tensor, scale: Scale) -> bytes:
    """A PNG of an image [1 or 3, H, W]; what lies beyond the scale, or is no number, is cut to it."""
    low, high = scale
    share = ((image.float() - low) / max(high - low, 1e-12)).nan_to_num(0.0).clamp(0, 1)
    rows_HWC = (share * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    height, width, channels = rows_HWC.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _RGB if channels == 3 else _GREY, 0, 0, 0)
    unfiltered = b"".join(b"\0" + row.tobytes() for row in rows_HWC)
    data = zlib.compress(unfiltered, 9)
    return _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
