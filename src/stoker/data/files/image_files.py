"""Images in files, in a folder for each class or in one folder with a table of labels; and the pixels made of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import numpy.typing as npt

from stoker.data import reading
from stoker.data.files.sample_files import (
    Clean,
    as_first_seen,
    existing_version,
    left_out,
    note_unreadable,
    require_known,
)
from stoker.data.files.source import IndexedSource, Labels, Names, class_names, digest_of_parts, needs, require_choice
from stoker.data.reading.file_listing import SUFFIXES, Resize, files_below
from stoker.data.reading.pixel_scale import REMEDY, are_of_unit_pixels
from stoker.data.reading.table_readers import CsvFile, is_utf8, opened
from stoker.errors import BadJob, nearest
from stoker.records.codec import printable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ImageForm:
    """The conversion of image files to pixels, uint8 [C, H, W], and of pixels to the model's input.

    Attributes:
        size: (H, W); None leaves every image in its own size.
        channels: 1 for grey, 3 for RGB, 4 for RGB and alpha.
        resize: for an image of another shape; bilinear, as `stoker predict` does it.
        mean: subtracted from each channel of pixels from 0 to 1.
        std: divisor after that.
    """

    size: tuple[int, int] | None
    channels: int
    resize: Resize
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def decoded(self, content: bytes) -> npt.NDArray[np.uint8]:
        """The pixels [C, H, W] of an encoded image.

        Raises:
            BadImage: it is damaged or of an unknown format; the text does not name the file.
            BadJob: Pillow is missing.
        """
        with needs("pillow"):
            decoding = reading.image_decoding
        return self.fitted(decoding.upright(decoding.loaded(content)))

    def fitted(self, image: Any) -> npt.NDArray[np.uint8]:
        """The pixels [C, H, W] of a Pillow image, as a writable copy; raises BadImage as `decoded` does."""
        pixels = reading.image_decoding.fitted(image, self.channels, self.size, self.resize)
        return np.require(pixels, requirements=["C", "W"])  # grey ones are a view of Pillow's own

    def prepare(self, pixels: torch.Tensor) -> torch.Tensor:
        """Pixels uint8 [B, C, H, W] as float32 from 0 to 1, less `mean`, divided by `std`; a new tensor."""
        import torch

        values = pixels.to(torch.float32, copy=True)
        if self.mean == (0.0,) and self.std == (1.0,):
            return values.mul_(1 / 255)
        mean = torch.tensor(self.mean, device=values.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=values.device).view(-1, 1, 1)
        return values.mul_(1 / (255 * std)).sub_(mean / std)


def image_form(
    size: int | tuple[int, int] | None,
    channels: int,
    resize: str,
    mean: float | Sequence[float] | None,
    std: float | Sequence[float] | None,
) -> ImageForm:
    """The form for a user's arguments.

    Raises:
        BadJob: an argument is invalid.
    """
    require_choice("resize=…", resize, ("stretch", "crop", "pad"))
    if channels not in (1, 3, 4):
        raise BadJob(f"channels={channels!r} is not known", remedy="Give 1 (grey), 3 (RGB) or 4 (RGB and alpha).")
    sides = _sides(size)
    means, stds = _by_channel("mean", mean, 0.0, channels), _by_channel("std", std, 1.0, channels)
    if not all(std > 0 for std in stds):
        raise BadJob(f"std={std!r} has values that are not positive")
    if not are_of_unit_pixels(means, stds):
        raise BadJob(
            f"mean={mean!r} and std={std!r} are not of pixels from 0 to 1, to which they are applied", remedy=REMEDY
        )
    return ImageForm(sides, channels, cast("Resize", resize), means, stds)


def _sides(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or min(sides) < 1 or any(side != int(side) for side in sides):
        raise BadJob(f"size={size!r} is no size", remedy="Give (height, width) in pixels, or one number for both.")
    return int(sides[0]), int(sides[1])


def _by_channel(what: str, given: float | Sequence[float] | None, default: float, channels: int) -> tuple[float, ...]:
    if given is None:
        return (default,)
    values = (float(given),) if isinstance(given, int | float) else tuple(map(float, given))
    if len(values) not in (1, channels) or not all(map(math.isfinite, values)):
        raise BadJob(
            f"{what}={given!r} does not go with {channels} channels",
            remedy="Give one number, or one for each channel, of pixels from 0 to 1.",
        )
    return values


_SPLITS = frozenset({"train", "training", "val", "valid", "validation", "dev", "test", "testing"})


@dataclass(frozen=True)
class ImageListing:
    """The images of a folder: names below it, sizes [bytes] and times [ns] as [N, 2], labels [N], and classes."""

    names: Names
    versions: np.typing.NDArray[np.int64]
    labels: Labels
    classes: tuple[str, ...]
    note: str | None = None


@final
class ImageFolder(IndexedSource):
    """Images and their classes: uint8 [C, H, W] (prepared: float32), label int64 []."""

    def __init__(
        self, root: Path, form: ImageForm, classes: tuple[str, ...] | None, labels: Path | None, clean: Clean
    ) -> None:
        super().__init__(root.name or str(root), target=1)
        self.root = root
        self.form = form
        self._given_classes = classes
        self._labels_file = labels
        self._clean = clean

    @cached_property
    def _listing(self) -> ImageListing:
        if not self.root.is_dir():
            raise BadJob(f"{self.root} is no folder", remedy="Give the folder that holds the images.")
        dropped = left_out(self._clean, self.root)
        if self._labels_file is not None:
            labelled = list(_labelled(self._labels_file, self.root))
            return self._listed(labelled, self._given_classes, dropped, notes=[])
        names = list(files_below(self.root))
        others = [name for name in names if Path(name).suffix.lower() not in SUFFIXES]
        notes = [f"{len(others):,} files in {self.root} are no images by their names, as {others[0]}"] if others else []
        left_aside = set(others)
        # The label is the first folder of the path, "" if there is none.
        labelled = [(name, name.partition("/")[0] if "/" in name else "") for name in names if name not in left_aside]
        return self._listed(labelled, self._given_classes or _folders(self.root), dropped, notes)

    def _listed(
        self,
        labelled: list[tuple[str, str]],
        classes: tuple[str, ...] | None,
        dropped: frozenset[str],
        notes: list[str],
    ) -> ImageListing:
        """The listing of files with their classes, in the order of their names."""
        root = self.root
        kept = sorted(pair for pair in labelled if not dropped or printable(pair[0]) not in dropped)
        require_known(dropped, len(labelled) - len(kept), str(root))
        known = classes if classes is not None else _in_order({label for _, label in kept})
        numbers = {label: number for number, label in enumerate(known)}
        for name, label in kept:
            if not label:
                raise BadJob(
                    f"{root / name} is in no folder of a class",
                    remedy="Put it into a folder named after its class, leave it out with clean=…, or give "
                    "labels=FILE.",
                )
            if label not in numbers:
                raise BadJob(
                    f"{root / name} is of class {label!r}. {nearest(label, known)}",
                    remedy="Name it among classes=…, or take it away.",
                )
        labels = np.array([numbers[label] for _, label in kept], np.int64)
        if not kept:
            raise BadJob(
                f"there are no images in {root}", remedy="Give a folder with one folder of images for each class."
            )
        counts = np.bincount(labels, minlength=len(known))
        empty = ", ".join(repr(name) for name, count in zip(known, counts, strict=True) if not count)
        if empty and self._given_classes is None:
            raise BadJob(
                f"{root} has no images of {empty} ({len(labels):,} of the other classes)",
                remedy="Take the empty folder away, or name the classes that count: classes=[…].",
            )
        if empty:
            notes = [f"{root} has no images of {empty}", *notes]
        files = [existing_version(root / name, remedy="It is named among the images.") for name, _ in kept]
        versions = np.array(files, np.int64).reshape(-1, 2)
        if len(kept) < len(labelled):
            left = f"{len(labelled) - len(kept):,} of {len(labelled):,} images are left out by the clean list"
            notes = [left, *notes]
        return ImageListing(Names(name for name, _ in kept), versions, labels, known, "; ".join(notes) or None)

    @cached_property
    def _versions(self) -> np.typing.NDArray[np.int64]:
        """Versions of the files [N, 2] for the fingerprint, with repaired files as they were first seen."""
        return as_first_seen(self.root, self._listing.names, self._listing.versions)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        return self._listing.classes

    @property
    def note(self) -> str | None:
        """Counts of files left out."""
        return self._listing.note

    def __len__(self) -> int:
        """Number of images."""
        return len(self._listing.names)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of names, sizes, times of change, labels, classes and the form; reads no pixels."""
        listing = self._listing
        digest = digest_of_parts(
            listing.names, self._versions.tobytes(), listing.labels.tobytes(), listing.classes, repr(self.form)
        )
        return f"{digest} (of names, sizes and times of {len(self):,} files)"

    def sample(self, index: int) -> tuple[torch.Tensor, int]:
        """Image `index` and its label."""
        import torch

        name = self._listing.names[index]
        path = self.root / name
        try:
            pixels = self.form.decoded(path.read_bytes())
        except (OSError, ValueError) as error:
            note_unreadable(self.root, name, self._versions[index])
            raise BadJob(
                f"the image {path} cannot be read: {error}",
                remedy="Put a whole one in its place, and the same command goes on. "
                f"`stoker data check {self.root}` finds all such files.",
            ) from error
        return torch.from_numpy(pixels), int(self._listing.labels[index])

    def sample_id(self, index: int) -> str:
        """The file's path below the folder."""
        return self._listing.names[index]

    def labels(self) -> Labels:
        """The class of every image."""
        return self._listing.labels

    def prepare(self, batch: Any) -> Any:
        """Pixels as the form says, labels as they are."""
        pixels, labels = batch
        return self.form.prepare(pixels), labels


def image_folder(  # noqa: PLR0913 - what can be said of a folder of images
    path: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    resize: str = "stretch",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    classes: Sequence[str] | None = None,
    labels: str | Path | None = None,
    clean: Clean = None,
) -> ImageFolder:
    """The images below `path`, where each folder is a class; nothing is read until it is needed.

    Args:
        path: the folder; names that begin with a dot, or have no image's suffix, are left out, the latter with a note.
        size: (height, width), or one number for both; without it all images must have one size.
        channels: 1, 3 or 4.
        resize: "stretch", "crop" or "pad".
        mean: subtracted from pixels from 0 to 1, for all channels or each; default 0.
        std: divisor after that; default 1.
        classes: their names in the order of their numbers; default: the folders, sorted.
        labels: a CSV file with a header, if there are no folders of classes: its first column is a file below `path`,
            its second the class; classes that are whole numbers are sorted by value.
        clean: the clean list of `stoker data check`, whose samples are left out.

    Raises:
        BadJob: an argument is invalid; and, when the folder is listed, a class has no images.
    """
    form = image_form(size, channels, resize, mean, std)
    named = None if classes is None else class_names(classes)
    # Absolute from the start: the working directory may change before the data are read.
    root, table = Path(path).expanduser().absolute(), None if labels is None else Path(labels).absolute()
    return ImageFolder(root, form, named, table, clean)


def _in_order(labels: set[str]) -> tuple[str, ...]:
    """The labels of a table, sorted; by value if all are whole numbers, so that 0 to 11 keep theirs."""
    are_numbers = all(label.isascii() and label.isdecimal() for label in labels)
    return tuple(sorted(sorted(labels), key=int) if are_numbers else sorted(labels))


def _folders(root: Path) -> tuple[str, ...]:
    """The folders of classes, sorted; refuses folders of splits, which would be learned as classes."""
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if folders and {name.lower() for name in folders} <= _SPLITS:
        raise BadJob(
            f"the folders of {root} are called {', '.join(folders)}, which are parts of a data set and no classes",
            remedy=f"Give one for each of data, valid and test: image_folder({str(root / folders[0])!r}). "
            "If they are classes, say so: classes=[…].",
        )
    return tuple(folders)


def _labelled(path: Path, root: Path) -> Iterator[tuple[str, str]]:
    """Files below `root` and their classes from a table.

    Raises:
        BadJob: it cannot be read, has no header, a row has no two fields, or a file is listed twice.
    """
    seen: set[str] = set()
    table = CsvFile(path)
    if (root / table.header[0]).is_file():
        raise BadJob(
            f"{path} has no header: its first line names the image {table.header[0]!r}, which would be left out",
            remedy="Put a line before it that names the columns, as file,label.",
        )
    with opened(path) as content:
        for row, record in enumerate(table.records(content)):
            name, label = [*record.fields, "", ""][:2]
            if record.fault or not (name and label and is_utf8(label)):
                reason = record.fault.words if record.fault else f"wants a file and its class, and has {record.fields}"
                raise BadJob(f"{path}: row {row} {reason}", remedy="Give a file and its class in each row.")
            place = os.path.normpath(root / name)  # a.png and ./a.png are one file
            if place in seen:
                raise BadJob(f"{path}: row {row}: {name!r} has a label already", remedy="Leave one of them out.")
            seen.add(place)
            yield name, label
