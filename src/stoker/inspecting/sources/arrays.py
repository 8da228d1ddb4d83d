"""Images held in arrays: IDX files of unsigned bytes (gzipped or not), and NumPy's .npy and .npz.

Source of the IDX format: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", "File formats".
"""

from __future__ import annotations

import gzip
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import BadJob, first_line
from stoker.inspecting.sources.base import SAMPLES_OF_A_UNIT, Found, Item, Unit, cut
from stoker.inspecting.sources.splits import split_of
from stoker.records.cleaning import Finding

_IDX = re.compile(r"^(?P<stem>.*?)[-_.](?P<what>images|labels)[-_.]idx(?P<dims>\d)[-_.]ubyte(\.gz)?$")
_LABEL_NAMES = re.compile(r"(^|_)(labels?|targets?|y|classes)(_|$)", re.IGNORECASE)


class Damaged(ValueError):
    """A file that is not what it says it is."""


@dataclass(frozen=True)
class RowsUnit:
    """Rows of one array with its labels, the first of which is row `first` of `name`."""

    name: str
    split: str
    first: int
    images: NDArray[Any]
    labels: NDArray[Any] | None

    def __len__(self) -> int:
        """How many rows."""
        return len(self.images)

    def item(self, index: int) -> Item:
        """A row and its label."""
        label = None if self.labels is None or index >= len(self.labels) else str(self.labels[index])
        return Item(f"{self.name}:{self.first + index}", np.asarray(self.images[index]), label)


def idx_pairs(paths: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """IDX files by what their names begin with: `{"train": {"images": …, "labels": …}}`."""
    pairs: dict[str, dict[str, Path]] = {}
    for path in paths:
        if found := _IDX.match(path.name):
            pairs.setdefault(found["stem"], {})[found["what"]] = path
    return {stem: pair for stem, pair in pairs.items() if "images" in pair}


def find_idx(root: Path, paths: Sequence[Path]) -> Found:
    """The images of IDX files, each with the labels beside it."""
    units: list[Unit] = []
    findings: list[Finding] = []
    for stem, pair in sorted(idx_pairs(paths).items(), key=lambda item: (split_of(item[0]) != "train", item[0])):
        read = [_tried(read_idx, pair[what], findings) if what in pair else None for what in ("images", "labels")]
        if read[0] is not None:
            units += _units(_below(root, pair["images"]), split_of(stem), read[0], read[1], findings)
    return Found("arrays", tuple(units), (), tuple(findings))


def find_numpy(root: Path, paths: Sequence[Path]) -> Found:
    """The images of .npy and .npz files; of these, each array of images with the labels of its name."""
    units: list[Unit] = []
    findings: list[Finding] = []
    for path in paths:
        arrays = _tried(read_numpy, path, findings) or {}
        pairs = _paired(arrays)
        if arrays and not pairs:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            findings.append(Finding(fault="foreign", gravity="note", id=_below(root, path),
                                    detail=f"holds no images [rows, height, width(, channels)]: {shapes}"))  # fmt: skip
        for name, (images, labels) in pairs.items():
            split = split_of(name) or split_of(path.name.partition(".")[0])
            inside = _below(root, path) if len(pairs) == 1 else f"{_below(root, path)}/{name}"
            units += _units(inside, split, images, labels, findings)
    return Found("arrays", tuple(units), (), tuple(findings))


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of an IDX file; mapped where it is not gzipped.

    Raises:
        Damaged: it is truncated, or of another kind.
    """
    is_zipped = path.suffix == ".gz"
    try:
        with gzip.open(path) if is_zipped else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:3] != b"\x00\x00\x08":
                raise Damaged(f"is no IDX file of unsigned bytes: it starts with {head.hex(' ')}")
            shape = struct.unpack(f">{head[3]}I", file.read(4 * head[3]))
            start, size = 4 + 4 * head[3], math.prod(shape)
            if not is_zipped:
                if path.stat().st_size != start + size:
                    raise Damaged(f"has {path.stat().st_size - start:,} bytes of values, its header says {size:,}")
                return np.memmap(path, np.uint8, "r", start, shape)
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise Damaged(f"cannot be read: {first_line(error)}") from error
    if len(content) != size:
        raise Damaged(f"has {len(content):,} bytes of values, its header says {size:,}")
    return np.frombuffer(content, np.uint8).reshape(shape)


def read_numpy(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a .npy (mapped) or .npz file; nothing is unpickled.

    Raises:
        Damaged: it cannot be read.
    """
    try:
        if path.suffix.lower() == ".npy":
            return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False)}
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise Damaged(f"cannot be read: {first_line(error)}") from error


def _paired(arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[NDArray[Any], NDArray[Any] | None]]:
    """Arrays of images, each with the labels of as many rows whose name has the most in common with its own."""
    images = {name: array for name, array in arrays.items() if _are_images(array) and not _LABEL_NAMES.search(name)}
    labels = {name: array for name, array in arrays.items() if array.ndim == 1 and array.dtype.kind in "iuUSb"}
    pairs: dict[str, tuple[NDArray[Any], NDArray[Any] | None]] = {}
    for name, array in images.items():
        fit = [one for one in labels if len(labels[one]) == len(array)]
        same = [one for one in fit if split_of(one) == split_of(name)]
        chosen = (same or (fit if len(fit) == 1 else []))[:1]
        pairs[name] = (array, labels[chosen[0]] if chosen else None)
    return pairs


def _are_images(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "uif" and (array.ndim == 3 or (array.ndim == 4 and array.shape[-1] in {1, 3, 4}))


def _units(
    name: str, split: str, images: NDArray[Any], labels: NDArray[Any] | None, findings: list[Finding]
) -> list[Unit]:
    """Units of an array of images; a number of labels that differs is told."""
    if not _are_images(images):
        raise BadJob(f"{name} holds an array of shape {images.shape}: wanted [rows, height, width(, channels)]")
    if labels is not None and len(labels) != len(images):
        findings.append(Finding(fault="ragged", gravity="corrupt", where=name,
                                detail=f"{len(images):,} images have {len(labels):,} labels"))  # fmt: skip
    return [
        RowsUnit(name, split, rows.start, images[rows.start : rows.stop],
                 None if labels is None else labels[rows.start : rows.stop])
        for rows in cut(len(images), 4 * SAMPLES_OF_A_UNIT)
    ]  # fmt: skip


def _tried(read: Callable[[Path], Any], path: Path, findings: list[Finding]) -> Any:
    """What `read` gives; None, and a finding, where the file is damaged."""
    try:
        return read(path)
    except Damaged as error:
        findings.append(Finding(fault="corrupt", gravity="corrupt", where=path.name, detail=str(error)))
        return None


def _below(root: Path, path: Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()
