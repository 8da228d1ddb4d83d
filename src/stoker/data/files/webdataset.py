"""WebDataset shards: tar files in which the members of a sample follow each other and share a name up to its first dot.

Shards are made for sequential reads; an index of their members, made once, allows reads in any order.
Source: https://github.com/webdataset/webdataset, "The WebDataset Format".
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from stoker.data.files.image_files import ImageForm, image_form
from stoker.data.files.sample_files import (
    Arrays,
    Clean,
    OpenFiles,
    Paths,
    as_first_seen,
    indexed,
    left_out_of_files,
    note_unreadable,
    require_known,
    shard_paths,
    version_of,
)
from stoker.data.files.source import IndexedSource, Labels, Names, class_names, digest_of_parts
from stoker.data.reading.array_files import npy_header
from stoker.data.reading.file_listing import SUFFIXES, members_of, named
from stoker.errors import BadJob, nearest
from stoker.records.codec import parsed

_IMAGES = frozenset(suffix[1:] for suffix in SUFFIXES)
_PICKLES = frozenset({"pyd", "pickle", "pkl", "pth", "pt"})


@dataclass(frozen=True)
class Members:
    """Places of samples' parts: `shard` [N], `offset` and `size` [N, F] [bytes], `kind` [N, F] into `kinds`; keys."""

    shard: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]
    kind: npt.NDArray[np.int64]
    kinds: tuple[str, ...]
    keys: Names
    num_cleaned: int


@final
class WebDataset(IndexedSource):
    """Samples of shards: a tuple with an entry for each of `fields`."""

    reads_labels = True

    def __init__(
        self, paths: tuple[Path, ...], fields: tuple[str, ...], form: ImageForm, classes: tuple[str, ...], clean: Clean
    ) -> None:
        name = paths[0].name if len(paths) == 1 else f"{paths[0].name} to {paths[-1].name}"
        super().__init__(name, classes=classes, target=len(fields) - 1 if len(fields) > 1 else None)
        self.paths = paths
        self.fields = fields
        self.form = form
        self._clean = clean
        self._files = OpenFiles(paths)

    @cached_property
    def members(self) -> Members:
        """The index of all samples; read on first use."""
        indices = [indexed(path, "shard", index_of) for path in self.paths]
        dropped = left_out_of_files(self._clean, self.paths)
        field_of = {kind: index for index, field in enumerate(self.fields) for kind in field.lower().split(";")}
        kinds = tuple(field_of)
        numbers = {kind: number for number, kind in enumerate(kinds)}
        shards: list[int] = []
        keys: list[str] = []
        places: list[list[tuple[int, int, int]]] = []
        num_cleaned = 0
        for shard, (path, arrays) in enumerate(zip(self.paths, indices, strict=True)):
            for key, parts in _samples_of(path, arrays):
                if key in dropped[shard]:
                    num_cleaned += 1
                    continue
                # Of alternatives the one named first, wherever it stands in the tar.
                chosen = {field_of[kind]: (*parts[kind], numbers[kind]) for kind in reversed(kinds) if kind in parts}
                for index, field in enumerate(self.fields):
                    if index not in chosen:
                        raise BadJob(
                            f"sample {key} in {path} has no {field}; it has {', '.join(sorted(parts))}",
                            remedy="Name the members in fields=[…], or leave the sample out with clean=….",
                        )
                shards.append(shard)
                keys.append(key)
                places.append([chosen[index] for index in range(len(self.fields))])
        require_known(frozenset().union(*dropped), num_cleaned, self.paths[0].name)
        if not keys:
            raise BadJob(f"{self.paths[0]} has no samples", remedy="Members are called KEY.KIND, as in 000001.jpg.")
        array = np.array(places, np.int64)
        return Members(
            np.array(shards, np.int64), array[:, :, 0], array[:, :, 1], array[:, :, 2], kinds, Names(keys), num_cleaned
        )

    @property
    def note(self) -> str | None:
        """Count of samples left out."""
        count = self.members.num_cleaned
        return f"{self.name}: {count:,} samples are left out by the clean list" if count else None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.members.keys)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the shards' names, sizes and times, of the index of their members, and of how they are read."""
        members, names = self.members, [path.name for path in self.paths]
        arrays = b"".join(array.tobytes() for array in (members.shard, members.offset, members.size))
        digest = digest_of_parts(
            names, self._versions.tobytes(), arrays, members.keys, self.fields, self.classes, repr(self.form)
        )
        return f"{digest} (of names, sizes and times of {len(self.paths):,} shards, and of their members)"

    @cached_property
    def _versions(self) -> npt.NDArray[np.int64]:
        """Versions of the shards [S, 2] for the fingerprint, with repaired shards as they were first seen."""
        return np.concatenate(
            [as_first_seen(path.parent, [path.name], np.array([version_of(path)], np.int64)) for path in self.paths]
        )

    def sample(self, index: int) -> tuple[Any, ...]:
        """Sample `index` with its members decoded by kind."""
        return tuple(self._entry(index, field) for field in range(len(self.fields)))

    def sample_id(self, index: int) -> str:
        """The shard and the key in it."""
        return f"{self.paths[int(self.members.shard[index])].name}:{self.members.keys[index]}"

    @cached_property
    def _labels(self) -> Labels | None:
        """The last field of every sample, if it is `cls`."""
        if self.fields[-1] != "cls":
            return None
        last = len(self.fields) - 1
        return np.array([self._entry(index, last) for index in range(len(self))], np.int64)

    def prepare(self, batch: Any) -> Any:
        """Images as the form says, the rest as it is."""
        pairs = zip(self.fields, batch, strict=True)
        is_image = {field: field.lower().split(";")[0].rpartition(".")[2] in _IMAGES for field in self.fields}
        return tuple(self.form.prepare(entry) if is_image[field] else entry for field, entry in pairs)

    def _entry(self, index: int, field: int) -> Any:
        members = self.members
        shard, kind = int(members.shard[index]), members.kinds[int(members.kind[index, field])]
        try:
            content = self._files.read(shard, int(members.offset[index, field]), int(members.size[index, field]))
            return self._decoded(content, kind)
        except (OSError, ValueError) as error:
            path = self.paths[shard]
            note_unreadable(path.parent, path.name, self._versions[shard])
            raise BadJob(
                f"{members.keys[index]}.{kind} in {path} cannot be read: {error}",
                remedy="Put a whole shard in its place, with the same members, and the same command goes on. "
                f"`stoker data check {path}` finds all such samples.",
            ) from error

    def _decoded(self, content: bytes, kind: str) -> Any:
        """A member's content decoded by the last part of its name; raises ValueError if it is invalid."""
        last = kind.rpartition(".")[2]
        if last in _IMAGES:
            import torch

            return torch.from_numpy(self.form.decoded(content))
        if last in {"cls", "cls2", "index", "inx", "id"}:
            text = content.decode().strip()
            if text in self.classes:
                return self.classes.index(text)
            try:
                number = int(text)
            except ValueError:
                raise ValueError(f"{text!r} is no class. {nearest(text, self.classes)}") from None
            if self.classes and not 0 <= number < len(self.classes):
                raise ValueError(f"there are {len(self.classes)} classes, it is of number {number}")
            if abs(number) >= 2**63:
                raise ValueError(f"{text[:30]} is no number of a class")
            return number
        decoders: dict[str, Callable[[bytes], Any]] = {
            "txt": bytes.decode,
            "text": bytes.decode,
            "json": parsed,
            "npy": _array,
        }
        return decoders.get(last, bytes)(content)


def webdataset(  # noqa: PLR0913 - what can be said of shards of images
    shards: Paths,
    *,
    fields: Sequence[str] = ("jpg;jpeg;png;webp", "cls"),
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    resize: str = "stretch",
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    classes: Sequence[str] = (),
    clean: Clean = None,
) -> WebDataset:
    """The samples of tar shards, in file order; at first only the first bytes of each shard are read.

    Args:
        shards: `train-{0000..0146}.tar`, with `*`, or a list.
        fields: the members that make a sample, in order; `;` separates alternative names of one, of which a sample's
            first is taken. Images become uint8 [C, H, W], `cls` a number, `txt` text, `json` its value, `npy` an array;
            others stay bytes.
        size: of images, (height, width), or one number for both; without it all must have one size.
        channels: of images: 1, 3 or 4.
        resize: "stretch", "crop" or "pad".
        mean: subtracted from pixels from 0 to 1, for all channels or each; default 0.
        std: divisor after that; default 1.
        classes: their names, if `cls` holds names; else for reports.
        clean: the clean list of `stoker data check`, whose samples are left out.

    Raises:
        BadJob: a shard is missing, compressed or no tar file; a sample lacks a field; a field is a pickle.
    """
    form = image_form(size, channels, resize, mean, std)
    for field in fields:
        if _PICKLES & {name.rpartition(".")[2] for name in field.split(";")}:
            raise BadJob(
                f"the field {field!r} is a pickle, which can run any code when it is opened",
                remedy="Write arrays as .npy, and the rest as .json.",
            )
    if not fields:
        raise BadJob("fields=[] leaves nothing of a sample", remedy='As in fields=["jpg;png", "cls"].')
    return WebDataset(shard_paths(shards), tuple(fields), form, class_names(classes), clean)


def index_of(path: Path) -> Arrays:
    """The parts of samples in a shard: offset and size of each [bytes] as [M], and its name.

    Raises:
        BadJob: it is no tar file, or is cut off.
    """
    members = list(members_of(path))
    stored = Names(f"{member.key}.{member.kind}" for member in members)
    return {
        "offset": np.array([member.offset for member in members], np.int64),
        "size": np.array([member.size for member in members], np.int64),
        "names": np.frombuffer(stored.blob, np.uint8),
        "ends": stored.ends,
    }


def _samples_of(path: Path, arrays: Arrays) -> list[tuple[str, dict[str, tuple[int, int]]]]:
    """Keys in order, each with its members by kind: (offset, size) [bytes]."""
    names = Names.of_parts(arrays["names"].tobytes(), arrays["ends"])
    samples: list[tuple[str, dict[str, tuple[int, int]]]] = []
    for name, offset, size in zip(names, arrays["offset"].tolist(), arrays["size"].tolist(), strict=True):
        key_and_kind = named(name)
        assert key_and_kind is not None, "only such names are in the index"
        key, kind = key_and_kind
        if not samples or samples[-1][0] != key:
            samples.append((key, {}))
        if kind in samples[-1][1]:
            raise BadJob(f"{path} has {name} twice in a row", remedy="Give each sample a key of its own.")
        samples[-1][1][kind] = (offset, size)
    return samples


def _array(content: bytes) -> Any:
    """The array in a .npy file; allocates no more memory than the file's size, whatever its header says.

    Raises:
        ValueError: it is no array, holds objects, or is of a type that PyTorch does not know.
    """
    import torch

    stream = io.BytesIO(content)
    try:
        shape, is_fortran, dtype, start = npy_header(stream)
        count = math.prod(shape)
        if dtype.hasobject or count < 0:
            raise ValueError(f"it has the shape {shape} and the type {dtype}")
        array = np.frombuffer(content, dtype, count, start) if count else np.empty(0, dtype)
        return torch.from_numpy(array.reshape(shape, order="F" if is_fortran else "C").copy())
    except Exception as error:  # NumPy and PyTorch refuse types and shapes with errors of many kinds
        raise ValueError(f"it is no array that can be read: {error}") from error
