"""Shards of a packed dataset: made of samples, and read where they lie, with a bound on the memory that takes.

A shard holds one block for each entry of a sample, the rows of all its samples one after the other. Files are mapped
into memory and read by rows in the order they lie in. What was read counts as memory of the process as long as it is
mapped, so pages are given back (to the system's cache, not to the disk) once they may be more than the bound.
"""

from __future__ import annotations

import hashlib
import math
import mmap
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.data.packed_layout import Array
from stoker.data.packed_records import ALIGNMENT, Block, Manifest, Shard
from stoker.errors import BadJob

Indices = npt.NDArray[np.int64]

MOST_RESIDENT = 256 * 2**20
"""Pages that stay mapped at most [bytes], as counted by `_touched`."""
_MOST_OPEN = 400
"""Files mapped at once: each holds a descriptor, of which a process usually has 1,024."""
_MAPPED_AROUND = 64 * 2**10
"""What Linux maps around a page that is read, as far as it is in its cache [bytes]."""
_SMALL_ROW = 512
"""Rows of fewer bytes are read by the block when a file is opened: labels, of which a page holds hundreds."""


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
    content = b"".join(parts) or b"\0"  # of empty arrays only; an empty file cannot be mapped
    return Shard(number, len(samples), len(content), hashlib.sha256(content).hexdigest(), tuple(blocks)), content


class Shards:
    """The samples of a packed dataset that is whole, in `folder`."""

    def __init__(self, folder: Path, manifest: Manifest, *, most_resident: int = MOST_RESIDENT) -> None:
        self.folder, self.manifest = folder, manifest
        self._most_resident = most_resident
        self._entries = manifest.header.entries
        self._shapes = [_common_shape(manifest, entry) for entry in range(len(self._entries))]
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._touched = 0

    def __getstate__(self) -> dict[str, Any]:
        """Without what is mapped: another process maps files for itself."""
        return {**self.__dict__, "_maps": OrderedDict(), "_touched": 0}

    def shape_of(self, entry: int) -> tuple[int, ...] | None:
        """The shape of an entry in every sample; None where samples differ."""
        return self._shapes[entry]

    def rows(self, entry: int, indices: Indices) -> Array:
        """An entry of the samples `indices` [B], of one shape, as an array [B, ...] of its own.

        Raises:
            BadJob: a file is gone, or has been cut off.
        """
        shape = self.shape_of(entry)
        assert shape is not None, "entries of several shapes are read one by one"
        out = np.empty((len(indices), *shape), dtype=np.dtype(self._entries[entry][0]))
        for number, places, rows in self._by_shard(indices):
            block = self._block(number, entry)
            row_bytes = block.nbytes // max(1, len(block))
            self._announce(number, entry, rows, row_bytes)
            out[places] = block[rows]
            self._touched += len(rows) * (-(-row_bytes // _MAPPED_AROUND) + 1) * _MAPPED_AROUND
        self._bound()
        return out

    def one(self, entry: int, index: int) -> Array:
        """An entry of one sample, whatever its shape; an array of its own."""
        number, row = divmod(index, self.manifest.header.rows_per_shard)
        shard = self.manifest.shards[number]
        block = shard.blocks[entry]
        if block.shape is not None:
            found: Array = np.array(self._block(number, entry)[row])
        else:
            ends = self._array(number, block.ends, np.dtype(np.int64), (shard.count,))
            shapes = self._array(number, block.shapes, np.dtype(np.int64), (shard.count, self._entries[entry][1]))
            start = block.offset + (int(ends[row - 1]) if row else 0)
            shape = tuple(int(size) for size in shapes[row])
            found = np.array(self._array(number, start, np.dtype(self._entries[entry][0]), shape))
        self._touched += (-(-found.nbytes // _MAPPED_AROUND) + 3) * _MAPPED_AROUND
        self._bound()
        return found

    def close(self) -> None:
        """Unmap all files."""
        self._maps.clear()  # nothing else holds on to them: what is given out is copied
        self._touched = 0

    def _by_shard(self, indices: Indices) -> Iterator[tuple[int, Indices, Indices]]:
        """Each shard that has some of the samples: its number, their places in `indices`, and their rows, ascending."""
        order = np.argsort(indices, kind="stable")
        numbers, rows = np.divmod(indices[order], self.manifest.header.rows_per_shard)
        begins = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
        for begin, end in zip(begins, [*begins[1:], len(order)], strict=True):
            yield int(numbers[begin]), order[begin:end], rows[begin:end]

    def _block(self, number: int, entry: int) -> Array:
        """An entry of all samples of a shard, mapped [n, ...]."""
        shard = self.manifest.shards[number]
        block, dtype = shard.blocks[entry], np.dtype(self._entries[entry][0])
        assert block.shape is not None, "the caller looked"
        return self._array(number, block.offset, dtype, (shard.count, *block.shape))

    def _array(self, number: int, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
        return np.frombuffer(self._mapped(number), dtype, math.prod(shape), offset).reshape(shape)

    def _mapped(self, number: int) -> mmap.mmap:
        found = self._maps.get(number)
        if found is None:
            found = self._maps[number] = self._opened(self.manifest.shards[number])
            if len(self._maps) > _MOST_OPEN:
                self._maps.popitem(last=False)  # closed with the last array that lies in it
        else:
            self._maps.move_to_end(number)
        return found

    def _opened(self, shard: Shard) -> mmap.mmap:
        path = self.folder / shard.file_name
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as problem:
            raise BadJob(f"{path} cannot be read: {problem}", remedy=_again(self.folder)) from problem
        if len(mapped) != shard.num_bytes:
            raise BadJob(f"{path} has {len(mapped):,} bytes, and had {shard.num_bytes:,}", remedy=_again(self.folder))
        if hasattr(mmap, "MADV_RANDOM"):
            mapped.madvise(mmap.MADV_RANDOM)  # neighbours of a row are not read from the disk with it
            for block, (dtype, _) in zip(shard.blocks, self._entries, strict=True):
                row_bytes = np.dtype(dtype).itemsize * math.prod(block.shape or ())
                if block.shape is not None and row_bytes < _SMALL_ROW:
                    _announce(mapped, block.offset, row_bytes * shard.count)
        return mapped

    def _announce(self, number: int, entry: int, rows: Indices, row_bytes: int) -> None:
        """Have the rows read from the disk side by side, instead of page after page as they are touched."""
        if hasattr(mmap, "MADV_WILLNEED") and row_bytes >= _SMALL_ROW:
            mapped, offset = self._mapped(number), self.manifest.shards[number].blocks[entry].offset
            for row in rows.tolist():
                _announce(mapped, offset + row * row_bytes, row_bytes)

    def _bound(self) -> None:
        """Give pages back once they may be more than the bound."""
        if self._touched <= self._most_resident:
            return
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)
        self._touched = 0


def _announce(mapped: mmap.mmap, start: int, num_bytes: int) -> None:
    aligned = start - start % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_WILLNEED, aligned, start + num_bytes - aligned)


def _common_shape(manifest: Manifest, entry: int) -> tuple[int, ...] | None:
    shapes = {shard.blocks[entry].shape for shard in manifest.shards}
    return shapes.pop() if len(shapes) == 1 else None


def _again(folder: Path) -> str:
    return f"Run the same command again: what is missing of {folder} is packed again."
