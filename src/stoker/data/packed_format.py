"""The files of a packed dataset: a manifest, and shards that hold samples as arrays and are read by rows.

A sample is a tensor, an array or a number, or nested tuples, lists and dicts of these. One layout describes all
samples: shapes may differ between samples, types and numbers of dimensions may not. A shard holds one block for each
entry of a sample, with the rows of all its samples one after the other.

The rows of a batch are announced to the system first, which then reads them from the disk in parallel; they are read in
file order, straight into the batch. Files are read, not mapped: on Linux 6 with ext4, a mapped file left 0.9 MB of
pages in the process for each image of 12 KB, and took three times as long; and a mapped file that is cut off kills the
process, where a read raises.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from stoker.data.files.sample_files import OpenFiles
from stoker.errors import BadJob
from stoker.records.codec import JSON, digest, loads
from stoker.store.disk_errors import read_errors
from stoker.store.files import file_digests
from stoker.units import format_bytes

MANIFEST = "manifest.json"
JOURNAL = "building.jsonl"
"""Shards that are whole, one a line, while not all of them are; the first line is the header."""
LOCK = "lock"
SHARDS = "shard-*.bin"
_QUIET_BYTES = 2**30
"""Less than this is read in a second or so, without a word."""
ALIGNMENT = 64
"""Alignment of blocks in a shard [bytes]: rows of any type can be read in place."""


@dataclass(frozen=True)
class Block:
    """One entry of all samples of a shard, from `offset` [bytes]; `shape` is the shape in every sample.

    `shape` is None if shapes differ: then `shapes` and `ends` are the offsets of int64 arrays [n, dims] and [n], and a
    sample's values begin at the end of those before it [bytes from `offset`].
    """

    offset: int
    shape: tuple[int, ...] | None
    shapes: int = 0
    ends: int = 0


@dataclass(frozen=True)
class Shard:
    """Samples number * `rows_per_shard` and on, `count` of them, in one file."""

    schema: ClassVar[int] = 1
    number: int
    count: int
    num_bytes: int
    sha256: str
    blocks: tuple[Block, ...]

    @property
    def file_name(self) -> str:
        """Name of its file."""
        return f"shard-{self.number:06d}.bin"

    def is_there(self, folder: Path) -> bool:
        """True if its file exists with the recorded size."""
        try:
            return (folder / self.file_name).stat().st_size == self.num_bytes
        except FileNotFoundError:
            return False


@dataclass(frozen=True)
class Header:
    """The packed dataset: `source` is its fingerprint, `form` and `entries` (dtype, dimensions) its samples' layout."""

    schema: ClassVar[int] = 1
    source: str
    length: int
    rows_per_shard: int
    form: JSON
    entries: tuple[tuple[str, int], ...]

    @property
    def num_shards(self) -> int:
        """Number of files [shards]."""
        return -(-self.length // self.rows_per_shard)


@dataclass(frozen=True)
class Manifest:
    """A packed dataset that is whole."""

    schema: ClassVar[int] = 1
    header: Header
    shards: tuple[Shard, ...]
    checksum: str = ""
    """SHA-256 of the above."""

    def with_checksum(self) -> Manifest:
        """The same, with the checksum of what it holds."""
        return replace(self, checksum=digest(replace(self, checksum="")))

    @property
    def num_bytes(self) -> int:
        """Size on disk [bytes]."""
        return sum(shard.num_bytes for shard in self.shards)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`; None where there is none.

    Raises:
        BadJob: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    with read_errors(path, "the manifest"):
        text = path.read_bytes()
    try:
        manifest = loads(text, Manifest)
        if manifest != manifest.with_checksum():
            raise ValueError("it is not as it was written")
    except ValueError as problem:
        raise BadJob(
            f"{path} is no manifest of a packed dataset: {problem}", remedy=f"Delete {folder}: it is packed again."
        ) from problem
    return manifest


def not_whole(folder: Path, shards: Iterable[Shard], tell: Callable[[str], None]) -> tuple[list[Shard], list[Shard]]:
    """Shards whose file is missing or has another size, and those whose content differs from what was packed.

    Raises:
        BadJob: a file cannot be read.
    """
    there = [shard for shard in shards if shard.is_there(folder)]
    with read_errors(folder, "the packed dataset"):
        digests = file_digests(
            folder,
            [shard.file_name for shard in there],
            reading=lambda size: (
                tell(f"reading {format_bytes(size)} in {folder} to see that nothing is damaged")
                if size > _QUIET_BYTES
                else None
            ),
        )
    damaged = [shard for shard in there if digests.get(shard.file_name) != shard.sha256]
    return [shard for shard in shards if shard not in there], damaged


Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True)
class ArrayEntry:
    """One array of a sample: `dtype` as NumPy spells it, and how many dimensions it has."""

    dtype: str
    num_dims: int


@dataclass(frozen=True)
class SampleLayout:
    """The form of a sample: `form` is its tuples, lists and dicts with the numbers of `entries` in their places."""

    form: JSON
    entries: tuple[ArrayEntry, ...]

    def filled(self, entries: Sequence[Any]) -> Any:
        """A sample, or a batch, of its entries."""
        return _filled(self.form, entries)


def layout_of(sample: Any, what: str) -> SampleLayout:
    """The form of a sample; `what` names it in errors.

    Raises:
        BadJob: something in it is no number, tensor or array.
    """
    found: list[Array] = []
    form = _form(sample, found, what)
    return SampleLayout(form, tuple(ArrayEntry(array.dtype.str, array.ndim) for array in found))


def entries_of(sample: Any, layout: SampleLayout, what: str) -> list[Array]:
    """The entries of a sample, contiguous, in the order of the layout.

    Raises:
        BadJob: the sample has another form.
    """
    found: list[Array] = []
    form = _form(sample, found, what)
    own = SampleLayout(form, tuple(ArrayEntry(array.dtype.str, array.ndim) for array in found))
    if own != layout:
        raise BadJob(
            f"{what} is {_spelled_form(own)}, and the first one is {_spelled_form(layout)}",
            remedy="Make all samples of one form: convert types in the dataset (numbers too: 1 is no 1.0).",
        )
    return found


def _form(value: Any, found: list[Array], what: str) -> JSON:
    """The form of `value`; its entries go to the end of `found`."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise BadJob(f"{what} has keys that are no texts: {', '.join(map(repr, value))}")
        return {key: _form(item, found, f"{what}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple | list):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, *(_form(item, found, f"{what}[{place}]") for place, item in enumerate(value))]
    found.append(_array_of(value, what))
    return len(found) - 1


def _filled(form: JSON, entries: Sequence[Any]) -> Any:
    if isinstance(form, dict):
        return {key: _filled(item, entries) for key, item in form.items()}
    if isinstance(form, list):
        items = [_filled(item, entries) for item in form[1:]]
        return items if form[0] == "list" else tuple(items)
    return entries[form]


def _array_of(value: Any, what: str) -> Array:
    """An entry as an array; images of PIL channels first, as models take them."""
    if hasattr(value, "detach"):  # a tensor
        try:
            value = value.detach().cpu().numpy()
        except TypeError as problem:
            raise BadJob(
                f"{what} is a tensor of {value.dtype}, which NumPy has no type for", remedy="Convert it to float32."
            ) from problem
    elif hasattr(value, "getbands"):  # an image of PIL
        if value.mode.startswith("P"):
            raise BadJob(
                f"{what} is an image with a palette: its numbers are places in that, and no colours",
                remedy="Turn it into colours in the dataset: image.convert('RGB').",
            )
        value = np.asarray(value)
        value = value[None] if value.ndim == 2 else value.transpose(2, 0, 1)
    array = np.asarray(value)
    if array.dtype.kind not in "biufc":
        raise BadJob(
            f"{what} is a {type(value).__name__}, and a packed dataset holds numbers, tensors, arrays and images",
            remedy="Leave it out of the samples, or turn it into numbers (text into tokens).",
        )
    # As PyTorch's collate function makes batches of them: whole numbers in 64 bits, as NumPy has them by itself.
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)


def _spelled_form(layout: SampleLayout) -> str:
    described = [f"{np.dtype(entry.dtype).name} of {entry.num_dims} dimensions" for entry in layout.entries]
    return f"{layout.filled(described)}"


Indices = npt.NDArray[np.int64]

_SMALL_ROW, _SMALL_BLOCK = 512, 2**20
"""Rows of fewer bytes, such as labels, are read by the block where that has no more than so many bytes."""
_MOST_KEPT = 64 * 2**20
"""Most that is kept of such blocks [bytes]."""


def shard_of(number: int, samples: Sequence[Sequence[Array]]) -> tuple[Shard, bytes]:
    """The record and the content of a shard of these samples, each a list of its entries."""
    parts: list[Any] = []
    blocks: list[Block] = []
    end = 0

    def put(arrays: Sequence[Array]) -> int:
        nonlocal end
        padding = -end % ALIGNMENT
        parts.append(bytes(padding))
        parts.extend(array.reshape(-1).view(np.uint8) for array in arrays)
        start, end = end + padding, end + padding + sum(array.nbytes for array in arrays)
        return start

    for arrays in zip(*samples, strict=True):
        offset, shapes = put(arrays), {array.shape for array in arrays}
        if len(shapes) == 1:
            blocks.append(Block(offset, shapes.pop()))
        else:
            each = np.array([array.shape for array in arrays], dtype=np.int64)
            ends = np.cumsum([array.nbytes for array in arrays], dtype=np.int64)
            blocks.append(Block(offset, None, put([each]), put([ends])))
    content = b"".join(parts)
    return Shard(number, len(samples), len(content), hashlib.sha256(content).hexdigest(), tuple(blocks)), content


class Shards:
    """The samples of a packed dataset that is whole, in `folder`."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._entries = manifest.header.entries
        shapes = [{shard.blocks[entry].shape for shard in manifest.shards} for entry in range(len(self._entries))]
        self._shapes = [found.pop() if len(found) == 1 else None for found in shapes]
        self._files = _Files([folder / shard.file_name for shard in manifest.shards])
        self._kept: OrderedDict[tuple[int, int], Array] = OrderedDict()
        self._kept_bytes = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without what is kept: another process reads for itself."""
        return {**self.__dict__, "_kept": OrderedDict(), "_kept_bytes": 0}

    def shape_of(self, entry: int) -> tuple[int, ...] | None:
        """The shape of an entry in every sample; None where samples differ."""
        return self._shapes[entry]

    def rows(self, entry: int, indices: Indices) -> Array:
        """An entry of the samples `indices` [B], of one shape, as an array [B, ...].

        Raises:
            BadJob: a file is gone, or has been cut off.
        """
        shape = self.shape_of(entry)
        assert shape is not None, "entries of several shapes are read one by one"
        out = np.empty((len(indices), *shape), dtype=np.dtype(self._entries[entry][0]))
        row_bytes = out.nbytes // max(1, len(out))
        groups = list(self._by_shard(indices))
        if row_bytes < _SMALL_ROW and row_bytes * self.manifest.header.rows_per_shard <= _SMALL_BLOCK:
            for number, places, rows in groups:
                out[places] = self._block(number, entry)[rows]
            return out
        where = [
            (place, number, self.manifest.shards[number].blocks[entry].offset + row * row_bytes)
            for number, places, rows in groups
            for place, row in zip(places.tolist(), rows.tolist(), strict=True)
        ]
        for _, number, offset in where:
            self._files.announce(number, offset, row_bytes)
        into = out.reshape(-1).view(np.uint8).data
        for place, number, offset in where:
            self._files.read_into(number, offset, into[place * row_bytes : (place + 1) * row_bytes])
        return out

    def one(self, entry: int, index: int) -> Array:
        """An entry of one sample, whatever its shape.

        Raises:
            BadJob: a file is gone, or has been cut off.
        """
        number, row = divmod(index, self.manifest.header.rows_per_shard)
        block, (dtype, num_dims) = self.manifest.shards[number].blocks[entry], self._entries[entry]
        if block.shape is not None:
            row_bytes = np.dtype(dtype).itemsize * math.prod(block.shape)
            return self._array(number, block.offset + row * row_bytes, dtype, block.shape)
        shape = self._array(number, block.shapes + row * 8 * num_dims, "<i8", (num_dims,))
        start = int(self._array(number, block.ends + (row - 1) * 8, "<i8", ())) if row else 0
        return self._array(number, block.offset + start, dtype, tuple(shape.tolist()))

    def _by_shard(self, indices: Indices) -> Iterator[tuple[int, Indices, Indices]]:
        """Each shard that has some of the samples: its number, their places in `indices`, and their rows, ascending."""
        order = np.argsort(indices, kind="stable")
        numbers, rows = np.divmod(indices[order], self.manifest.header.rows_per_shard)
        begins = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        for begin, end in zip(begins, [*begins[1:], len(order)], strict=True):
            yield int(numbers[begin]), order[begin:end], rows[begin:end]

    def _block(self, number: int, entry: int) -> Array:
        """A small entry of all samples of a shard [n, ...], kept for the next time."""
        found = self._kept.get((number, entry))
        if found is not None:
            self._kept.move_to_end((number, entry))
            return found
        shard = self.manifest.shards[number]
        block = shard.blocks[entry]
        assert block.shape is not None, "the caller looked"
        found = self._array(number, block.offset, self._entries[entry][0], (shard.count, *block.shape))
        self._kept[number, entry] = found
        self._kept_bytes += found.nbytes
        while self._kept_bytes > _MOST_KEPT:
            self._kept_bytes -= self._kept.popitem(last=False)[1].nbytes
        return found

    def _array(self, number: int, offset: int, dtype: str, shape: tuple[int, ...]) -> Array:
        """An array in a file."""
        out = np.empty(shape, np.dtype(dtype))
        self._files.read_into(number, offset, out.reshape(-1).view(np.uint8).data)
        return out


class _Files(OpenFiles):
    """The files of a packed dataset, of which rows are read in no order."""

    most_open: ClassVar[int] = 400
    """A process may usually have 1,024 files open."""

    def announce(self, number: int, offset: int, num_bytes: int) -> None:
        """Ask the system to read a range from the disk, without waiting for it."""
        if not hasattr(os, "posix_fadvise"):
            return
        try:
            os.posix_fadvise(self._descriptor(number), offset, num_bytes, os.POSIX_FADV_WILLNEED)
        except OSError as problem:
            raise _unreadable(self.paths[number], problem) from problem

    def read_into(self, number: int, offset: int, into: memoryview) -> None:
        """Fill `into` from a place on.

        Raises:
            BadJob: the file is gone, or ends before.
        """
        try:
            descriptor = self._descriptor(number)
            while into:
                got = os.preadv(descriptor, [into], offset)
                if not got:
                    raise OSError(f"it ends {len(into):,} bytes before the end of the sample")
                into, offset = into[got:], offset + got
        except OSError as problem:
            raise _unreadable(self.paths[number], problem) from problem


def _unreadable(path: Path, problem: OSError) -> BadJob:
    return BadJob(
        f"{path} cannot be read: {problem.strerror or problem}",
        remedy="Run the same command again: what is missing there is packed again.",
    )
