"""From what is stored to pixels, every byte of it decoded; and what is wrong where that fails.

Hashes of what a picture looks like.

What: pHash, 64 bits: the signs of the 8 × 8 lowest frequencies (discrete cosine transform, type II) of the picture at
    32 × 32 grey pixels, against the median of those that are not the mean.
Use when: pictures that were stored again, scaled or brightened should be found. Such copies differ in few bits; other
    pictures in about half of them, where pictures vary enough.
Does not find: what was mirrored, turned, or cut to another part.
Source: C. Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010, section 3.2.1.

What is kept of each picture: 354 bytes, whatever its size.

Signatures of any number of samples: written to a temporary file as they come, then mapped.

All samples with pixels, decoded once, on every core: what every check of pictures stands on.
"""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import signal
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.reading.image_decoding import loaded, upright
from stoker.data.reading.text_tables import BadImage
from stoker.errors import RunFailed
from stoker.inspecting.findings import Tell
from stoker.inspecting.image_sources import SampleUnit
from stoker.records.data_check import Fault, Finding, SplitFacts

_SAME_FORMAT = {"MPO": "JPEG", "DIB": "BMP"}


class Unreadable(ValueError):
    """A sample without pixels; `fault` is what it counts as."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault: Fault = fault


@dataclass(frozen=True)
class DecodedImage:
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


def decode(content: bytes | NDArray[Any], suffix: str = "") -> DecodedImage:
    """The whole image.

    Raises:
        Unreadable: it is empty, damaged, cut off, of no known format, larger than Pillow's limit, or not finite.
    """
    if isinstance(content, bytes):
        return _of_bytes(content, suffix)
    return DecodedImage(_of_array(content), values=None if _are_levels(content) else content)


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


def _of_bytes(content: bytes, suffix: str) -> DecodedImage:
    try:
        image = loaded(content, is_strict=True)
    except BadImage as error:
        raise Unreadable(error.fault, f"cannot be decoded: {error}") from None
    found = _SAME_FORMAT.get(image.format or "", image.format or "")
    promised = _formats().get(suffix, "")
    return DecodedImage(upright(image), found if promised and found != promised else "")


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


SIDE = 32
"""Pixels of a side that hashes are made of."""

_KEPT = 8


def _cosines(kept: int, side: int) -> NDArray[np.float32]:
    """The first rows [kept, side] of the matrix of the orthonormal DCT-II."""
    rows, columns = np.arange(kept)[:, None], np.arange(side)[None, :]
    basis: NDArray[np.float64] = np.cos(np.pi * (2 * columns + 1) * rows / (2 * side)) * np.sqrt(2 / side)
    basis[0] /= np.sqrt(2)
    return np.asarray(basis, np.float32)


_BASIS = _cosines(_KEPT, SIDE)


def perceptual_hashes(grey_NHW: NDArray[np.float32]) -> NDArray[np.uint64]:
    """The hash of each picture [N, 32, 32] of grey values."""
    low_NK = (_BASIS @ grey_NHW @ _BASIS.T).reshape(len(grey_NHW), _KEPT * _KEPT)
    median_N1 = np.median(low_NK[:, 1:], axis=1, keepdims=True)
    packed = np.packbits(low_NK > median_N1, axis=1)
    return np.ascontiguousarray(packed).view(">u8").reshape(len(grey_NHW)).astype(np.uint64)


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


def sign(unit: SampleUnit) -> Signed:
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


def _misnamed(name: str, suffix: str, split: str, picture: DecodedImage) -> Finding:
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


class Spool:
    """Rows of one dtype. The file has no name and goes with the object, whatever happens to the process."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._file = tempfile.TemporaryFile(prefix="stoker-data-")  # noqa: SIM115 - lives as long as the map of it
        self._rows = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Write rows at the end."""
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self._rows += len(rows)

    def rows(self) -> NDArray[Any]:
        """All of them, asked for once, at the end; pages that are not in use leave memory when it is needed."""
        if not self._rows:
            self._file.close()
            return np.empty(0, self._dtype)
        self._file.flush()
        mapped = np.memmap(self._file, self._dtype, "r", shape=(self._rows,))
        self._file.close()  # the map holds the file by itself
        return mapped


_FEWEST_FOR_PROCESSES = 1500
"""Samples below which starting processes takes longer than decoding."""

_AHEAD = 4
"""Units handed out per process: enough to keep it busy, few enough that results do not pile up."""


@dataclass(frozen=True)
class ImageSurvey:
    """Every sample that could be decoded, in the order of its source.

    `labels` and `splits` are places in `classes` and `split_names`, a label is −1 where there is none; `unit` and
    `place` say where the sample can be read again.
    """

    units: Sequence[SampleUnit]
    ids: Sequence[str]
    labels: NDArray[np.int32]
    classes: tuple[str, ...]
    splits: NDArray[np.int16]
    split_names: tuple[str, ...]
    unit: NDArray[np.int32]
    place: NDArray[np.int32]
    signatures: NDArray[Any]
    findings: tuple[Finding, ...]

    def __len__(self) -> int:
        """Samples that could be decoded."""
        return len(self.ids)

    def split_name(self, row: int) -> str:
        """The split of a sample."""
        return self.split_names[int(self.splits[row])]

    def label(self, row: int) -> str | None:
        """The label of a sample."""
        code = int(self.labels[row])
        return None if code < 0 else self.classes[code]

    def picture(self, row: int) -> Image.Image:
        """A sample in RGB, decoded again."""
        item = self.units[self.unit[row]].item(int(self.place[row]))
        return as_rgb(decode(item.content, item.suffix).image)

    def facts(self) -> tuple[SplitFacts, ...]:
        """How many samples of each class each split has."""
        found = []
        for code, name in enumerate(self.split_names):
            labels = self.labels[self.splits == code]
            counts = np.bincount(labels[labels >= 0], minlength=len(self.classes))
            classes = {one: int(count) for one, count in zip(self.classes, counts, strict=True) if count}
            found.append(SplitFacts(name=name, num_samples=len(labels), classes=classes))
        return tuple(found)


def survey(units: Sequence[SampleUnit], workers: int, tell: Tell) -> ImageSurvey:
    """Decode everything.

    Raises:
        RunFailed: a process that decodes died.
    """
    spool, ids = Spool(SIGNATURE), list[str]()
    labels, splits, unit_of, place = (list[NDArray[Any]]() for _ in range(4))
    findings: list[Finding] = []
    classes: dict[str, int] = {}
    split_codes: dict[str, int] = {}
    total, done = sum(map(len, units)), 0
    for number, (unit, signed) in enumerate(zip(units, _signed(units, workers, total), strict=True)):
        spool.append(signed.signatures)
        ids += signed.ids
        codes = [-1 if one is None else classes.setdefault(one, len(classes)) for one in signed.labels]
        labels.append(np.array(codes, np.int32))
        split = split_codes.setdefault(unit.split, len(split_codes))
        splits.append(np.full(len(signed.ids), split, np.int16))
        unit_of.append(np.full(len(signed.ids), number, np.int32))
        place.append(np.array(signed.places, np.int32))
        findings += signed.findings
        done += len(unit)
        tell("decoding", done, total)
    named, codes_in_order = _in_order_of_names(classes, _joined(labels, np.int32))
    return ImageSurvey(
        units=units, ids=ids, labels=codes_in_order, classes=named, splits=_joined(splits, np.int16),
        split_names=tuple(split_codes), unit=_joined(unit_of, np.int32), place=_joined(place, np.int32),
        signatures=spool.rows(), findings=tuple(findings),
    )  # fmt: skip


def _signed(units: Sequence[SampleUnit], workers: int, total: int) -> Iterator[Signed]:
    """Each unit's signatures in order, from as many processes."""
    if workers <= 1 or total < _FEWEST_FOR_PROCESSES:
        yield from map(sign, units)
        return
    waiting: deque[Future[Signed]] = deque()
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C is this process's to tell of
    ) as pool:
        try:
            for unit in units:
                waiting.append(pool.submit(sign, unit))
                if len(waiting) >= _AHEAD * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise RunFailed(
                "A process that decodes images died, of a lack of memory or of an image that its library cannot bear",
                remedy="Free memory and try again with --workers 1; if it dies again, check halves of the folder.",
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order_of_names(classes: dict[str, int], labels: NDArray[np.int32]) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Classes sorted, numbers as numbers, and the labels that mean them."""
    named = sorted(classes, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    new = np.full(len(classes) + 1, -1, np.int32)  # the last one is where −1 points to
    for code, name in enumerate(named):
        new[classes[name]] = code
    return tuple(named), new[labels]


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
