"""What is kept of each picture: 354 bytes, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.inspecting.pictures.hashing import SIDE, perceptual_hashes
from stoker.inspecting.pictures.pixels import Picture, Unreadable, as_rgb, decode
from stoker.inspecting.sources.base import Unit
from stoker.records.cleaning import Finding

SIGNATURE = np.dtype([
    ("content", np.uint8, (32,)),
    ("look", np.uint64),
    ("width", np.int32),
    ("height", np.int32),
    ("mode", np.uint8),
    ("spread", np.uint8),
    ("grey", np.uint8, (16, 16)),
    ("colour", np.uint8, (4, 4, 3)),
])  # fmt: skip
"""SHA-256 of the pixels, perceptual hash, size [pixels], mode (`MODES`), largest difference of two pixels of a channel
at 32 × 32, and two small pictures."""

MODES = (
    "other", "L", "RGB", "RGBA", "P", "1", "LA", "CMYK", "I", "F", "I;16", "I;16B", "I;16L", "YCbCr", "LAB", "HSV",
    "PA", "RGBX",
)  # fmt: skip
"""Pillow's names of what a pixel is made of; a signature has the place in this list."""

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass
class Signed:
    """The samples of a unit: names, labels, places in the unit and signatures of those with pixels; and faults."""

    ids: list[str] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    signatures: NDArray[np.void] = field(default_factory=lambda: np.empty(0, SIGNATURE))
    findings: list[Finding] = field(default_factory=list)


def sign(unit: Unit) -> Signed:
    """Decode every sample of a unit."""
    signed = Signed()
    rows: list[tuple[bytes, Image.Image, NDArray[np.uint8]]] = []
    for index in range(len(unit)):
        item = unit.item(index)
        try:
            if item.problem:
                raise Unreadable("corrupt", item.problem)
            picture = decode(item.content, item.suffix)
        except Unreadable as error:
            signed.findings.append(
                Finding(fault=error.fault, gravity="corrupt", id=item.id, where=unit.split, detail=str(error))
            )
            continue
        if picture.misnamed:
            signed.findings.append(_misnamed(item.id, item.suffix, unit.split, picture))
        signed.ids.append(item.id)
        signed.labels.append(item.label)
        signed.places.append(index)
        rows.append((picture.content, picture.image, _small(picture.image)))
    signed.signatures = _table(rows)
    return signed


def _misnamed(name: str, suffix: str, split: str, picture: Picture) -> Finding:
    return Finding(fault="extension", gravity="fault", id=name, where=split,
                   detail=f"is named {suffix}, and is {picture.misnamed}")  # fmt: skip


def _small(image: Image.Image) -> NDArray[np.uint8]:
    """The picture at 32 × 32 in RGB, each pixel the mean of what it covers."""
    reduced = image.reduce(max(1, min(image.size) // (4 * SIDE))) if image.mode in {"L", "RGB"} else image
    return np.asarray(as_rgb(reduced).resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def _table(rows: list[tuple[bytes, Image.Image, NDArray[np.uint8]]]) -> NDArray[np.void]:
    table = np.zeros(len(rows), SIGNATURE)
    if not rows:
        return table
    small_NHWC = np.stack([small for _, _, small in rows])
    grey_NHW = small_NHWC.astype(np.float32) @ _LUMA
    table["content"] = np.frombuffer(b"".join(content for content, _, _ in rows), np.uint8).reshape(-1, 32)
    table["look"] = perceptual_hashes(grey_NHW)
    table["width"] = [image.width for _, image, _ in rows]
    table["height"] = [image.height for _, image, _ in rows]
    table["mode"] = [MODES.index(image.mode) if image.mode in MODES else 0 for _, image, _ in rows]
    table["spread"] = (small_NHWC.max(axis=(1, 2)) - small_NHWC.min(axis=(1, 2))).max(axis=1)
    table["grey"] = _pooled(grey_NHW[..., None], 16)[..., 0]
    table["colour"] = _pooled(small_NHWC.astype(np.float32), 4)
    return table


def _pooled(images_NHWC: NDArray[np.float32], side: int) -> NDArray[np.uint8]:
    """Means of blocks, `side` of them each way."""
    num, height, width, channels = images_NHWC.shape
    blocks = images_NHWC.reshape(num, side, height // side, side, width // side, channels)
    pooled: NDArray[np.uint8] = np.rint(blocks.mean(axis=(2, 4))).astype(np.uint8)
    return pooled
