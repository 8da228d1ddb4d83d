"""Tensors of a checkpoint, read block by block, whichever processes wrote them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import safetensors
import torch

from stoker.errors import BadRun
from stoker.records import CheckpointManifest, StoredPiece, StoredTensor
from stoker.training.shards import region
from stoker.training.state import Tensors, laid_out

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "C64": "complex64", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu",
}  # fmt: skip
"""PyTorch's names of dtypes by safetensors' own."""


Give = Callable[[str, list[int]], torch.Tensor]
"""Gives the tensor of this name, with these strides."""


class Source(Protocol):
    """Named tensors, on disk or in memory."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor; KeyError if there is none of that name."""
        ...

    def block(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """A block of a tensor, on the CPU, in memory of its own."""
        ...


class InMemory:
    """Whole tensors that were copied."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """As `Source.shape`."""
        return tuple(self._tensors[name].shape)

    def block(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """As `Source.block`."""
        return self._tensors[name][region(offsets, sizes)].clone()


class OnDisk:
    """The tensors of a checkpoint; made by `opened`, which closes its files."""

    def __init__(self, path: Path, manifest: CheckpointManifest) -> None:
        self._path = path
        self._files: dict[str, Any] = {}
        self._tensors = manifest.tensors or self._whole_ones(manifest)

    def shape(self, name: str) -> tuple[int, ...]:
        """As `Source.shape`."""
        return self._tensors[name].shape

    def block(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """As `Source.block`.

        As they are read tensors lie at any address; kernels add in another order there, which showed as other bits in
        L-BFGS. So each comes back in memory that PyTorch allocated.

        Raises:
            BadRun: a file cannot be read, or the pieces are not all of the block.
        """
        stored = self._tensors[name]
        dtype = getattr(torch, stored.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise BadRun(f"{self._path} states {stored.dtype!r} as the type of {name}, which is none")
        found = torch.empty(sizes, dtype=dtype)
        num_filled = 0
        for piece in stored.pieces:
            if (overlap := _overlap(piece, offsets, sizes)) is not None:
                within, here = overlap
                part = self._read(piece.file, piece.key(name), within)
                found[here] = part
                num_filled += part.numel()
        if num_filled != found.numel():
            raise BadRun(f"{self._path} holds {num_filled:,} of {found.numel():,} elements of {name}",
                         remedy="The checkpoint is damaged; use another one.")  # fmt: skip
        return found

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()

    def _read(self, file_name: str, name: str, within: tuple[slice, ...]) -> torch.Tensor:
        try:
            file = self._open(file_name)
            found: torch.Tensor = file.get_slice(name)[within] if within else file.get_tensor(name)
        except (OSError, safetensors.SafetensorError) as error:
            raise BadRun(f"{self._path / file_name} cannot be read: {error}") from error
        return found

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            file: Any = safetensors.safe_open(self._path / file_name, framework="pt", device="cpu")
            self._files[file_name] = file.__enter__()
        return self._files[file_name]

    def _whole_ones(self, manifest: CheckpointManifest) -> dict[str, StoredTensor]:
        """What one process wrote: each tensor whole, in the file of its part, which says its shape and dtype."""
        found: dict[str, StoredTensor] = {}
        for name in (file.name for file in manifest.files if file.name.endswith(".safetensors")):
            try:
                file = self._open(name)
                for key in file.keys():  # noqa: SIM118 - it is no dict
                    header = file.get_slice(key)
                    shape, dtype = tuple(header.get_shape()), _DTYPES.get(header.get_dtype(), header.get_dtype())
                    piece = StoredPiece(file=name, offsets=(0,) * len(shape), sizes=shape)
                    found[key] = StoredTensor(shape=shape, dtype=dtype, pieces=(piece,))
            except (OSError, safetensors.SafetensorError) as error:
                raise BadRun(f"{self._path / name} cannot be read: {error}") from error
        return found


@contextmanager
def opened(path: Path, manifest: CheckpointManifest) -> Iterator[OnDisk]:
    """The tensors of a checkpoint.

    Raises:
        BadRun: a file of it cannot be read.
    """
    disk = OnDisk(path, manifest)
    try:
        yield disk
    finally:
        disk.close()


def whole_from(source: Source) -> Give:
    """Gives whole tensors, laid out as they were; one that is there twice is one."""
    known: Tensors = {}

    def whole(name: str, strides: list[int]) -> torch.Tensor:
        if name not in known:
            shape = source.shape(name)
            known[name] = source.block(name, (0,) * len(shape), shape)
        return laid_out(known[name], strides)

    return whole


def _overlap(
    piece: StoredPiece, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a piece meets a block: as index into the piece, and into the block; None where they do not meet."""
    within, here = [], []
    for at, length, offset, size in zip(piece.offsets, piece.sizes, offsets, sizes, strict=True):
        start, stop = max(at, offset), min(at + length, offset + size)
        if stop <= start:
            return None
        within.append(slice(start - at, stop - at))
        here.append(slice(start - offset, stop - offset))
    return tuple(within), tuple(here)
