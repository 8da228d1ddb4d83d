"""Shards of a packed dataset: made of samples, and read by rows where they lie.

A shard holds one block for each entry of a sample, the rows of all its samples one after the other. The rows of a batch
are announced to the system first, which then fetches them from the disk side by side, and read in the order they lie
in, straight into the batch. Files are read, not mapped: on Linux 6 with ext4, a mapped file left 0.9 MB of pages in the
process for each image of 12 KB, and took three times as long; and a file that is cut off under a mapping kills the
process, where reading it raises.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from stoker.data.files.shards import OpenFiles
from stoker.data.packed_layout import Array
from stoker.data.packed_records import ALIGNMENT, Block, Manifest, Shard
from stoker.errors import BadJob

Indices = npt.NDArray[np.int64]

_SMALL_ROW, _SMALL_BLOCK = 512, 2**20
"""Rows of fewer bytes, such as labels, are read by the block where that has no more than so many bytes."""
_MOST_KEPT = 64 * 2**20
"""Of such blocks are kept [bytes]."""


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
        self._shapes = [_common_shape(manifest, entry) for entry in range(len(self._entries))]
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
        """An array that lies in a file."""
        out = np.empty(shape, np.dtype(dtype))
        self._files.read_into(number, offset, out.reshape(-1).view(np.uint8).data)
        return out


class _Files(OpenFiles):
    """The files of a packed dataset, of which rows are read in no order."""

    most_open: ClassVar[int] = 400
    """A process may usually have 1,024 files open."""

    def announce(self, number: int, offset: int, num_bytes: int) -> None:
        """Have the system fetch a stretch from the disk, without waiting for it."""
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


def _common_shape(manifest: Manifest, entry: int) -> tuple[int, ...] | None:
    shapes = {shard.blocks[entry].shape for shard in manifest.shards}
    return shapes.pop() if len(shapes) == 1 else None
