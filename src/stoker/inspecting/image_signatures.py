"""The survey of a data set's pictures: each is decoded completely, once, on every core, into a signature of 354 bytes.

What: a signature has the SHA-256 of the pixels, small copies, and a 64-bit pHash: the signs of the 8 × 8 lowest
    frequencies (discrete cosine transform, type II) of the picture at 32 × 32 grey pixels, relative to the median of
    those that are not the mean. Signatures go to a temporary file and are mapped.
Use when: pictures that were stored again, scaled or brightened should be found. Such copies differ in few bits; other
    pictures in about half of them.
Does not find: pictures that were mirrored, rotated, or cropped.
Source: C. Zauner, "Implementation and Benchmarking of Perceptual Image Hash Functions", 2010, section 3.2.1.
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
from stoker.data.reading.table_readers import BadImage
from stoker.errors import RunFailed
from stoker.inspecting.findings import Tell
from stoker.inspecting.image_sources import SampleUnit
from stoker.records.data_check import Fault, Finding, SplitFacts

_SAME_FORMAT = {"MPO": "JPEG", "DIB": "BMP"}


class Unreadable(ValueError):
    """A sample without pixels, and its kind of fault."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault: Fault = fault


@dataclass(frozen=True)
class DecodedImage:
    """A decoded image, upright, in its stored mode; `misnamed` is its real format if the suffix promises another.

    `values` are the stored numbers if the image of 8 bits does not show all of them, as of 16 bits or fractions.
    """

    image: Image.Image
    misnamed: str = ""
    values: NDArray[Any] | None = None

    @property
    def content(self) -> bytes:
        """SHA-256 of the pixels; of stored values as numbers of any type, where 0 and -0 are equal."""
        if self.values is None:
            return digest(self.image)
        kind = "<f8" if self.values.dtype.kind == "f" else "<i8"
        numbers = np.ascontiguousarray(self.values.astype(kind)) + 0
        return hashlib.sha256(f"values {kind} {self.values.shape} ".encode() + numbers.tobytes()).digest()


def decode(content: bytes | NDArray[Any], suffix: str = "") -> DecodedImage:
    """The whole image.

    Raises:
        Unreadable: it is empty, damaged, cut off, of no known format, larger than Pillow's limit, or not finite.
    """
    if isinstance(content, bytes):
        try:
            image = loaded(content, is_strict=True)
        except BadImage as error:
            raise Unreadable(error.fault, f"cannot be decoded: {error}") from None
        actual = _SAME_FORMAT.get(image.format or "", image.format or "")
        promised = _formats().get(suffix, "")
        return DecodedImage(upright(image), actual if promised and actual != promised else "")
    return DecodedImage(_of_array(content), values=None if _are_levels(content) else content)


def digest(image: Image.Image) -> bytes:
    """SHA-256 of what is seen: equal for equal pixels in any format and mode.

    Grey, palette and RGB images of 8 bits are compared as RGB, those with transparency as RGBA, deeper ones as stored.
    """
    if image.mode in {"I", "F", "I;16", "I;16B", "I;16L"}:
        shown = image
    else:
        shown = image.convert("RGBA" if image.has_transparency_data else "RGB")
    head = f"{shown.mode} {shown.width} {shown.height} ".encode()
    return hashlib.sha256(head + shown.tobytes()).digest()


def as_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB of 8 bits; transparent pixels become white, deeper values are scaled by their largest value."""
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
    """True if values are whole and between 0 and 255, so that an image of 8 bits shows all of them."""
    if pixels.dtype.kind == "f":
        return False
    return pixels.dtype == np.uint8 or (int(pixels.min(initial=0)) >= 0 and int(pixels.max(initial=0)) <= 255)


@functools.cache
def _formats() -> dict[str, str]:
    """The format that each suffix promises."""
    return {suffix: _SAME_FORMAT.get(name, name) for suffix, name in Image.registered_extensions().items()}


SIDE = 32
"""Side of the picture that hashes are made of [pixels]."""

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


SIGNATURE = np.dtype(
    [
        ("content", np.uint8, (32,)),
        ("look", np.uint64),
        ("width", np.int32),
        ("height", np.int32),
        ("mode", np.uint8),
        ("spread", np.uint8),
        ("grey", np.uint8, (16, 16)),
        ("colour", np.uint8, (4, 4, 3)),
    ]
)
"""SHA-256 of the pixels, perceptual hash, size [pixels], mode (`MODES`), largest difference of two pixels of a channel
at 32 × 32, and two small pictures."""

MODES = (
    "other",
    "L",
    "RGB",
    "RGBA",
    "P",
    "1",
    "LA",
    "CMYK",
    "I",
    "F",
    "I;16",
    "I;16B",
    "I;16L",
    "YCbCr",
    "LAB",
    "HSV",
    "PA",
    "RGBX",
)
"""Pillow's modes; a signature has the index into this list."""

_LUMA = np.array([0.299, 0.587, 0.114], np.float32)


@dataclass
class Signed:
    """A unit's samples with pixels: names, labels, places in the unit and signatures; and findings about the others."""

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
            detail = f"is named {item.suffix}, and is {picture.misnamed}"
            finding = Finding(fault="extension", gravity="fault", id=item.id, where=unit.split, detail=detail)
            signed.findings.append(finding)
        signed.ids.append(item.id)
        signed.labels.append(item.label)
        signed.places.append(index)
        reduced = picture.image
        if reduced.mode in {"L", "RGB"}:  # a cheap first step towards the mean of what a small pixel covers
            reduced = reduced.reduce(max(1, min(reduced.size) // (4 * SIDE)))
        small = np.asarray(as_rgb(reduced).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
        rows.append((picture.content, picture.image, small))
    signed.signatures = _table(rows)
    return signed


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
    """Means of `side` × `side` blocks."""
    num, height, width, channels = images_NHWC.shape
    blocks = images_NHWC.reshape(num, side, height // side, side, width // side, channels)
    pooled: NDArray[np.uint8] = np.rint(blocks.mean(axis=(2, 4))).astype(np.uint8)
    return pooled


class Spool:
    """Rows of one dtype in a file without a name, which vanishes with the object or the process."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._file = tempfile.TemporaryFile(prefix="stoker-data-")  # noqa: SIM115 - lives as long as the map of it
        self._rows = 0

    def append(self, rows: NDArray[Any]) -> None:
        """Write rows at the end."""
        self._file.write(np.ascontiguousarray(rows, self._dtype).tobytes())
        self._rows += len(rows)

    def rows(self) -> NDArray[Any]:
        """All rows, memory-mapped; call it once, at the end."""
        if not self._rows:
            self._file.close()
            return np.empty(0, self._dtype)
        self._file.flush()
        mapped = np.memmap(self._file, self._dtype, "r", shape=(self._rows,))
        self._file.close()  # the map holds the file by itself
        return mapped


_FEWEST_FOR_PROCESSES = 1500
"""Number of samples below which starting processes takes longer than decoding."""

_AHEAD = 4
"""Units submitted per process: enough to keep it busy, few enough that results do not pile up."""


@dataclass(frozen=True)
class ImageSurvey:
    """Every sample that could be decoded, in the order of its source.

    `labels` and `splits` are indices into `classes` and `split_names`, −1 for no label; `unit` and `place` say where
    the sample can be read again.
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
        """Number of samples that could be decoded."""
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
        """Number of samples of each class in each split."""
        splits = []
        for code, name in enumerate(self.split_names):
            labels = self.labels[self.splits == code]
            counts = np.bincount(labels[labels >= 0], minlength=len(self.classes))
            classes = {label: int(count) for label, count in zip(self.classes, counts, strict=True) if count}
            splits.append(SplitFacts(name=name, num_samples=len(labels), classes=classes))
        return tuple(splits)


def survey(units: Sequence[SampleUnit], workers: int, tell: Tell) -> ImageSurvey:
    """Decode all samples.

    Raises:
        RunFailed: a decoding process died.
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
        codes = [-1 if label is None else classes.setdefault(label, len(classes)) for label in signed.labels]
        labels.append(np.array(codes, np.int32))
        split = split_codes.setdefault(unit.split, len(split_codes))
        splits.append(np.full(len(signed.ids), split, np.int16))
        unit_of.append(np.full(len(signed.ids), number, np.int32))
        place.append(np.array(signed.places, np.int32))
        findings += signed.findings
        done += len(unit)
        tell("decoding", done, total)
    # Classes in the order of their names, numbers as numbers; labels are renumbered.
    named = sorted(classes, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name))
    codes_of = np.full(len(classes) + 1, -1, np.int32)  # the last one is for label −1
    for code, name in enumerate(named):
        codes_of[classes[name]] = code
    return ImageSurvey(
        units=units,
        ids=ids,
        labels=codes_of[_joined(labels, np.int32)],
        classes=tuple(named),
        splits=_joined(splits, np.int16),
        split_names=tuple(split_codes),
        unit=_joined(unit_of, np.int32),
        place=_joined(place, np.int32),
        signatures=spool.rows(),
        findings=tuple(findings),
    )


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
        initargs=(signal.SIGINT, signal.SIG_IGN),  # this process handles Ctrl-C
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


def _joined(parts: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
