"""Folders of files: a class per folder, below one folder per split where there are such."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stoker.data.reading.folders import files_below
from stoker.data.reading.image_kinds import SUFFIXES
from stoker.inspecting.sources.base import SAMPLES_OF_A_UNIT, Found, Item, Unit, cut
from stoker.inspecting.sources.splits import SPLITS, are_splits
from stoker.records.cleaning import Finding


@dataclass(frozen=True)
class FileUnit:
    """Files of one split; names are relative to `root`, labels are the folders that they are in."""

    root: Path
    split: str
    names: tuple[str, ...]
    labels: tuple[str | None, ...]

    def __len__(self) -> int:
        """How many."""
        return len(self.names)

    def item(self, index: int) -> Item:
        """A file and its bytes."""
        name = self.names[index]
        suffix = os.path.splitext(name)[1].lower()  # noqa: PTH122 - a million paths: no object for each
        try:
            content, problem = (self.root / name).read_bytes(), ""
        except OSError as error:
            content, problem = b"", f"cannot be read: {error.strerror}"
        return Item(name, content, self.labels[index], suffix, problem)


@dataclass(frozen=True)
class Listing:
    """The files below a folder by split and class, and the classes that have none."""

    files: dict[tuple[str, str | None], list[str]]
    empty_classes: tuple[tuple[str, str], ...]
    foreign: tuple[str, ...]


def list_classes(root: Path, suffixes: frozenset[str]) -> Listing:
    """The files with one of `suffixes`, sorted; hidden files and folders are passed over."""
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
    return Listing(dict(files), tuple(empty), tuple(foreign))


def find_images(root: Path) -> Found:
    """The images of a folder, cut into units."""
    listing = list_classes(root, SUFFIXES)
    findings = [
        Finding(fault="foreign", gravity="note", id=name, detail="its name is no image's: it was not opened")
        for name in listing.foreign
    ]
    return Found("images", tuple(_units(root, listing)), listing.empty_classes, tuple(findings))


def _units(root: Path, listing: Listing) -> Iterator[Unit]:
    by_split: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for (split, label), names in listing.files.items():
        by_split[split] += [(name, label) for name in names]
    for split, samples in by_split.items():
        samples.sort()
        for rows in cut(len(samples), SAMPLES_OF_A_UNIT):
            chosen = samples[rows.start : rows.stop]
            yield FileUnit(root, split, tuple(name for name, _ in chosen), tuple(label for _, label in chosen))
