"""Sources of pictures, cut into units of work for processes: folders, WebDataset shards, and arrays (IDX, NumPy).

A folder has one folder per class, below one per split if there are splits. A shard has an image and a label for each
key.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.data.files.sample_files import OpenFiles
from stoker.data.reading.array_files import BadArrayFile, idx_array, numpy_arrays
from stoker.data.reading.file_listing import SUFFIXES, TarMember, files_below, members_of
from stoker.data.reading.table_readers import BadTable
from stoker.errors import BadJob, first_line
from stoker.inspecting.findings import SPLITS, are_splits, split_of
from stoker.records.codec import parsed
from stoker.records.data_check import DataKind, Finding

SAMPLES_OF_A_UNIT = 256
"""Enough that sending a unit to another process costs little, few enough that progress is visible."""


@dataclass(frozen=True)
class StoredSample:
    """A sample as stored.

    `content` is the bytes of an image file, or pixels [height, width] or [height, width, channels]. `suffix` is of its
    name, which promises a format; empty if it has none. `problem` says why there is no content.
    """

    id: str
    content: bytes | NDArray[Any]
    label: str | None = None
    suffix: str = ""
    problem: str = ""


class SampleUnit(Protocol):
    """Some samples of one split, which can be read one by one. Units are sent between processes."""

    @property
    def split(self) -> str:
        """The split; empty if there are none."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def item(self, index: int) -> StoredSample:
        """Sample `index`; an unreadable one has a problem and no content."""
        ...


@dataclass(frozen=True)
class FoundImages:
    """Units to read, classes without a sample (split, class), and faults found while listing them."""

    kind: DataKind
    units: tuple[SampleUnit, ...]
    empty_classes: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = field(default=())


def cut(count: int, size: int = SAMPLES_OF_A_UNIT) -> Sequence[range]:
    """Ranges of at most `size` that cover `count`."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(frozen=True)
class FileUnit:
    """Files of one split; names are relative to `root`, labels are their folders."""

    root: Path
    split: str
    names: tuple[str, ...]
    labels: tuple[str | None, ...]

    def __len__(self) -> int:
        """Number of files."""
        return len(self.names)

    def item(self, index: int) -> StoredSample:
        """File `index` and its bytes."""
        name = self.names[index]
        suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - a million paths: no object for each
        try:
            content, problem = (self.root / name).read_bytes(), ""
        except OSError as error:
            content, problem = b"", f"cannot be read: {error.strerror}"
        return StoredSample(name, content, self.labels[index], suffix, problem)


@dataclass(frozen=True)
class FolderListing:
    """The files below a folder by split and class, classes without files, and files with other suffixes."""

    files: dict[tuple[str, str | None], list[str]]
    empty_classes: tuple[tuple[str, str], ...]
    foreign: tuple[str, ...]


def list_classes(root: Path, suffixes: frozenset[str]) -> FolderListing:
    """The files with one of `suffixes`, sorted; hidden files and folders are skipped."""
    folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
    splits = [(name, SPLITS[name.lower()]) for name in folders] if are_splits(folders) else [("", "")]
    files: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    foreign: list[str] = []
    classes: set[tuple[str, str]] = set()
    for folder, split in splits:
        top = root / folder
        classes |= {(split, entry.name) for entry in os.scandir(top) if entry.is_dir() and entry.name[0] != "."}
        for name in files_below(top):
            relative = f"{folder}/{name}" if folder else name
            label = name.split("/", 1)[0] if "/" in name else None
            if os.path.splitext(name)[1].lower() in suffixes:  # noqa: PTH122 - as above
                files[split, label].append(relative)
            else:
                foreign.append(relative)
    empty = sorted(classes - {(split, label) for split, label in files if label is not None})
    return FolderListing(dict(files), tuple(empty), tuple(foreign))


def find_images(root: Path) -> FoundImages:
    """The images of a folder, cut into units."""
    listing = list_classes(root, SUFFIXES)
    findings = [
        Finding(fault="foreign", gravity="note", id=name, detail="its name is no image's: it was not opened")
        for name in listing.foreign
    ]
    by_split: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for (split, label), names in listing.files.items():
        by_split[split] += [(name, label) for name in names]
    units = []
    for split, samples in by_split.items():
        samples.sort()
        for rows in cut(len(samples)):
            chosen = samples[rows.start : rows.stop]
            units.append(FileUnit(root, split, tuple(name for name, _ in chosen), tuple(label for _, label in chosen)))
    return FoundImages("images", tuple(units), listing.empty_classes, tuple(findings))


_LABEL_KEYS = ("cls", "label", "class", "target", "y")


@dataclass(frozen=True)
class ShardSample:
    """The members of one key: the image, and the member with its label."""

    key: str
    image: TarMember | None
    label: TarMember | None


@dataclass(frozen=True)
class ShardUnit:
    """Some keys of a shard; `name` is the shard's path below the source."""

    path: Path
    name: str
    split: str
    groups: tuple[ShardSample, ...]

    def __len__(self) -> int:
        """Number of keys."""
        return len(self.groups)

    def item(self, index: int) -> StoredSample:
        """Key `index` with its image and its label."""
        group = self.groups[index]
        name = f"{self.name}:{group.key}"
        if group.image is None:
            return StoredSample(name, b"", problem="has no image with its key")
        shard = OpenFiles((self.path,))
        try:
            label = _label(shard.read(0, group.label.offset, group.label.size), group.label) if group.label else None
            content = shard.read(0, group.image.offset, group.image.size)
            return StoredSample(name, content, label, f".{_last(group.image)}")
        except (OSError, EOFError, ValueError) as error:
            return StoredSample(name, b"", problem=f"cannot be read: {first_line(error)}")


def find_shards(root: Path, paths: Sequence[Path]) -> FoundImages:
    """The keys of some shards, cut into units; a shard that is cut off is read as far as it goes, and reported."""
    units: list[SampleUnit] = []
    findings: list[Finding] = []
    for path in paths:
        name = _below(root, path)
        groups, problem = list_groups(path)
        if problem:
            findings.append(Finding(fault="corrupt", gravity="corrupt", where=name, detail=problem))
        split = split_of(path.name.partition(".")[0]) or split_of(path.parent.name if path != root else "")
        units += [ShardUnit(path, name, split, tuple(groups[rows.start : rows.stop])) for rows in cut(len(groups))]
    return FoundImages("shards", tuple(units), (), tuple(findings))


def list_groups(path: Path) -> tuple[list[ShardSample], str]:
    """The keys of a shard in order, and why it is damaged, if it is; reads only headers."""
    members: dict[str, list[TarMember]] = {}
    problem = ""
    try:
        for member in members_of(path, is_strict=True):
            members.setdefault(member.key, []).append(member)
    except BadTable as error:
        problem = error.what
    groups = []
    for key, parts in members.items():
        image = next((part for part in parts if f".{_last(part)}" in SUFFIXES), None)
        label = next((part for kind in ("cls", "json") for part in parts if part.kind == kind), None)
        groups.append(ShardSample(key, image, label))
    return groups, problem


def _last(member: TarMember) -> str:
    """`png` of `seg.png`."""
    return member.kind.rpartition(".")[2]


def _label(content: bytes, member: TarMember) -> str | None:
    """The label in a `.cls`, or in a `.json` under one of `_LABEL_KEYS`."""
    if member.kind == "cls":
        return content.decode("utf-8").strip()
    value = parsed(content)
    if not isinstance(value, dict):
        return str(value)
    return next((str(value[key]) for key in _LABEL_KEYS if value.get(key) is not None), None)


_IDX = re.compile(r"^(?P<stem>.*?)[-_.](?P<what>images|labels)[-_.]idx(?P<dims>\d)[-_.]ubyte(\.gz)?$")
_LABEL_NAMES = re.compile(r"(^|_)(labels?|targets?|y|classes)(_|$)", re.IGNORECASE)


@dataclass(frozen=True)
class RowsUnit:
    """Rows of one array with their labels; the first is row `first` of `name`."""

    name: str
    split: str
    first: int
    images: NDArray[Any]
    labels: NDArray[Any] | None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.images)

    def item(self, index: int) -> StoredSample:
        """Row `index` and its label."""
        label = None if self.labels is None or index >= len(self.labels) else str(self.labels[index])
        return StoredSample(f"{self.name}:{self.first + index}", np.asarray(self.images[index]), label)


def idx_pairs(paths: Sequence[Path]) -> dict[str, dict[str, Path]]:
    """IDX files by the beginning of their names: `{"train": {"images": …, "labels": …}}`."""
    pairs: dict[str, dict[str, Path]] = {}
    for path in paths:
        if match := _IDX.match(path.name):
            pairs.setdefault(match["stem"], {})[match["what"]] = path
    return {stem: pair for stem, pair in pairs.items() if "images" in pair}


def find_idx(root: Path, paths: Sequence[Path]) -> FoundImages:
    """The images of IDX files with their labels."""
    units: list[SampleUnit] = []
    findings: list[Finding] = []
    for stem, pair in sorted(idx_pairs(paths).items(), key=lambda item: (split_of(item[0]) != "train", item[0])):
        read = [_tried(idx_array, pair[what], findings) if what in pair else None for what in ("images", "labels")]
        if read[0] is not None:
            units += _array_units(_below(root, pair["images"]), split_of(stem), read[0], read[1], findings)
    return FoundImages("arrays", tuple(units), (), tuple(findings))


def find_numpy(root: Path, paths: Sequence[Path]) -> FoundImages:
    """The images of .npy and .npz files, with the labels that match each array of images by name."""
    units: list[SampleUnit] = []
    findings: list[Finding] = []
    for path in paths:
        arrays = _tried(numpy_arrays, path, findings) or {}
        pairs = _paired(arrays)
        if arrays and not pairs:
            shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
            findings.append(
                Finding(
                    fault="foreign",
                    gravity="note",
                    id=_below(root, path),
                    detail=f"holds no images [rows, height, width(, channels)]: {shapes}",
                )
            )
        for name, (images, labels) in pairs.items():
            split = split_of(name) or split_of(path.name.partition(".")[0])
            inside = _below(root, path) if len(pairs) == 1 else f"{_below(root, path)}/{name}"
            units += _array_units(inside, split, images, labels, findings)
    return FoundImages("arrays", tuple(units), (), tuple(findings))


def _paired(arrays: Mapping[str, NDArray[Any]]) -> dict[str, tuple[NDArray[Any], NDArray[Any] | None]]:
    """Arrays of images, each with the labels of as many rows: of the same split, or the only ones that fit."""
    images = {name: array for name, array in arrays.items() if _are_images(array) and not _LABEL_NAMES.search(name)}
    labels = {name: array for name, array in arrays.items() if array.ndim == 1 and array.dtype.kind in "iuUSb"}
    pairs: dict[str, tuple[NDArray[Any], NDArray[Any] | None]] = {}
    for name, array in images.items():
        fit = [label for label in labels if len(labels[label]) == len(array)]
        same = [label for label in fit if split_of(label) == split_of(name)]
        chosen = (same or (fit if len(fit) == 1 else []))[:1]
        pairs[name] = (array, labels[chosen[0]] if chosen else None)
    return pairs


def _are_images(array: NDArray[Any]) -> bool:
    return array.dtype.kind in "uif" and (array.ndim == 3 or (array.ndim == 4 and array.shape[-1] in {1, 3, 4}))


def _array_units(
    name: str, split: str, images: NDArray[Any], labels: NDArray[Any] | None, findings: list[Finding]
) -> list[SampleUnit]:
    """Units of an array of images; reports another number of labels."""
    if not _are_images(images):
        raise BadJob(f"{name} holds an array of shape {images.shape}: wanted [rows, height, width(, channels)]")
    if labels is not None and len(labels) != len(images):
        findings.append(
            Finding(
                fault="ragged",
                gravity="corrupt",
                where=name,
                detail=f"{len(images):,} images have {len(labels):,} labels",
            )
        )
    return [
        RowsUnit(
            name,
            split,
            rows.start,
            images[rows.start : rows.stop],
            None if labels is None else labels[rows.start : rows.stop],
        )
        for rows in cut(len(images), 4 * SAMPLES_OF_A_UNIT)
    ]


def _tried(read: Callable[[Path], Any], path: Path, findings: list[Finding]) -> Any:
    """The result of `read`; None, and a finding, if the file is damaged."""
    try:
        return read(path)
    except BadArrayFile as error:
        findings.append(Finding(fault="corrupt", gravity="corrupt", where=path.name, detail=str(error)))
        return None


def _below(root: Path, path: Path) -> str:
    return path.name if path == root else path.relative_to(root).as_posix()
