"""Sharded tensors: which part of the state a process holds, which of its holders writes it, and reading parts back.

A tensor is whole in every process of a stage, or a DTensor, whose placements define the part held here. The holders of
a part follow from the layout, without communication, so that all processes know which of them writes it: the one with
the least to write so far. A checkpoint is read block by block, whichever processes wrote it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch

from stoker.errors import BadRun, RunFailed
from stoker.records import CheckpointManifest, Layout, StoredPiece, StoredTensor
from stoker.stepping.distributed_tensors import Runs, is_spread, local, runs_of, spread_as
from stoker.stepping.world import World
from stoker.training.named_state import Tensors, laid_out

Sizes = tuple[int, ...]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class TensorShard:
    """The part of a tensor of `shape` that a process holds: the indices `runs` of each dimension, joined in `local`.

    `holders` are the processes that hold the same part, ascending.
    """

    shape: Sizes
    runs: tuple[Runs, ...]
    local: torch.Tensor
    holders: tuple[int, ...]

    def blocks(self) -> Iterator[tuple[Sizes, Sizes, Index]]:
        """The blocks of the tensor held here: offsets, sizes, and the index in `local`."""
        placed = []  # of each dimension: start and stop of each run, and its offset in `local`
        for runs in self.runs:
            places = itertools.accumulate((stop - start for start, stop in runs), initial=0)
            placed.append([(start, stop, place) for (start, stop), place in zip(runs, places, strict=False)])
        for block in itertools.product(*placed):
            offsets, sizes = tuple(start for start, _, _ in block), tuple(stop - start for start, stop, _ in block)
            if math.prod(sizes) or not math.prod(self.shape):
                yield offsets, sizes, region(tuple(place for _, _, place in block), sizes)


def shard_of(tensor: torch.Tensor, world: World) -> TensorShard:
    """The part of `tensor` that this process holds.

    Raises:
        RunFailed: its placements do not define it.
    """
    here, shape = local(tensor).detach(), tuple(tensor.shape)
    if not is_spread(tensor):
        return TensorShard(
            shape, tuple(((0, size),) for size in shape), here, world.layout.with_same_modules(world.rank)
        )
    spread: Any = tensor
    mesh, placements = spread.device_mesh, tuple(spread.placements)
    if any(placement.is_partial() for placement in placements):
        raise RunFailed(
            f"the state holds a tensor of shape {list(shape)} that is still to be added up over processes",
            remedy="An optimiser's state is to be whole, or spread as its parameters.",
        )
    runs = runs_of(tensor)
    if tuple(sum(stop - start for start, stop in each) for each in runs) != tuple(here.shape):
        raise RunFailed(
            f"of a tensor of shape {list(shape)}, spread as {placements} over {mesh.size()} processes, a part of shape "
            f"{list(here.shape)} is here, which these placements do not explain, so that no checkpoint can hold it",
            remedy="Use a number of shards and of tensor processes whose product divides the model's sizes.",
        )
    return TensorShard(shape, runs, here, _holders(mesh, placements, world.layout, world.rank))


def shards_to_write(tensors: Tensors, world: World) -> dict[str, TensorShard]:
    """The parts that this process writes, by name: each part is written by one of its holders.

    All holders of a part have to pass the same tensors in the same order.
    """
    written: defaultdict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    mine: dict[str, TensorShard] = {}
    for name, tensor in tensors.items():
        part = shard_of(tensor, world)
        loads = written[part.holders]
        writer = min(part.holders, key=lambda rank: (loads.get(rank, 0), rank))
        loads[writer] = loads.get(writer, 0) + part.local.nbytes
        if writer == world.rank and (part.local.numel() or not math.prod(part.shape)):
            mine[name] = part
    return mine


def filled_like(target: torch.Tensor, block: Callable[[Sizes, Sizes], torch.Tensor], world: World) -> torch.Tensor:
    """A DTensor with placements and strides of `target`, filled with the blocks of `block(offsets, sizes)`."""
    part = shard_of(target, world)
    filled: torch.Tensor | None = None
    for offsets, sizes, index in part.blocks():
        values = block(offsets, sizes)
        filled = torch.empty_like(part.local, dtype=values.dtype) if filled is None else filled
        filled[index] = values
    if filled is None:  # an empty part, of the right dtype
        filled = torch.empty_like(part.local, dtype=block((0,) * len(part.shape), (0,) * len(part.shape)).dtype)
    return spread_as(target, filled, shape=target.shape, stride=target.stride())


def region(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a block in its tensor."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


@functools.lru_cache(maxsize=64)
def _holders(mesh: Any, placements: tuple[Any, ...], layout: Layout, rank: int) -> tuple[int, ...]:
    """The processes that hold the same block of a DTensor as process `rank`.

    They differ only in axes of the world that the tensor's mesh lacks, or along dimensions of the mesh over which the
    tensor is replicated.
    """
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    at: dict[Sizes, Sizes] = {}  # index in the mesh by coordinates in the world
    for index in torch.ones_like(mesh.mesh).nonzero():
        at[layout.coordinates(int(mesh.mesh[tuple(index)]))] = tuple(int(i) for i in index)
    mine = layout.coordinates(rank)
    is_spanned = [len({coordinates[axis] for coordinates in at}) > 1 for axis in range(len(mine))]
    holders = []
    for other in layout.with_same_modules(rank):
        theirs = layout.coordinates(other)
        twin: Sizes = tuple(them if spans else me for them, me, spans in zip(theirs, mine, is_spanned, strict=True))
        if all(at[twin][dim] == at[mine][dim] for dim in cut):
            holders.append(other)
    return tuple(holders)


_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "complex64",
    "BOOL": "bool",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""PyTorch's names of dtypes by those of safetensors."""

Give = Callable[[str, list[int]], torch.Tensor]
"""Returns the tensor of a name, with the given strides."""


class InMemory:
    """Whole tensors in memory."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor; KeyError for an unknown name."""
        return tuple(self._tensors[name].shape)

    def block(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """A block of a tensor, in memory of its own."""
        return self._tensors[name][region(offsets, sizes)].clone()


class OnDisk:
    """The tensors of a checkpoint; `opened` closes its files."""

    def __init__(self, path: Path, manifest: CheckpointManifest) -> None:
        self._path = path
        self._files: dict[str, Any] = {}
        self._tensors = manifest.tensors or self._read_headers(manifest)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor; KeyError for an unknown name."""
        return self._tensors[name].shape

    def block(self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        """A block of a tensor, on the CPU.

        The block is in memory that PyTorch allocated: tensors read from a file have any address, where kernels add in
        another order, which showed as other bits in L-BFGS.

        Raises:
            BadRun: a file cannot be read, or the pieces do not fill the block.
        """
        stored = self._tensors[name]
        dtype = getattr(torch, stored.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise BadRun(f"{self._path} states {stored.dtype!r} as the type of {name}, which is none")
        block = torch.empty(sizes, dtype=dtype)
        num_filled = 0
        for piece in stored.pieces:
            if (overlap := _overlap(piece, offsets, sizes)) is not None:
                within, here = overlap
                try:
                    file, key = self._open(piece.file), piece.key(name)
                    part: torch.Tensor = file.get_slice(key)[within] if within else file.get_tensor(key)
                except (OSError, safetensors.SafetensorError) as error:
                    raise BadRun(f"{self._path / piece.file} cannot be read: {error}") from error
                block[here] = part
                num_filled += part.numel()
        if num_filled != block.numel():
            raise BadRun(
                f"{self._path} holds {num_filled:,} of {block.numel():,} elements of {name}",
                remedy="The checkpoint is damaged; use another one.",
            )
        return block

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.__exit__(None, None, None)
        self._files.clear()

    def _open(self, file_name: str) -> Any:
        if file_name not in self._files:
            file: Any = safetensors.safe_open(self._path / file_name, framework="pt", device="cpu")
            self._files[file_name] = file.__enter__()
        return self._files[file_name]

    def _read_headers(self, manifest: CheckpointManifest) -> dict[str, StoredTensor]:
        """The tensors that a process alone wrote: whole, with shape and dtype from the headers of their files."""
        headers: dict[str, StoredTensor] = {}
        for name in (file.name for file in manifest.files if file.name.endswith(".safetensors")):
            try:
                file = self._open(name)
                for key in file.keys():  # noqa: SIM118 - it is no dict
                    header = file.get_slice(key)
                    shape, dtype = tuple(header.get_shape()), _DTYPES.get(header.get_dtype(), header.get_dtype())
                    piece = StoredPiece(file=name, offsets=(0,) * len(shape), sizes=shape)
                    headers[key] = StoredTensor(shape=shape, dtype=dtype, pieces=(piece,))
            except (OSError, safetensors.SafetensorError) as error:
                raise BadRun(f"{self._path / name} cannot be read: {error}") from error
        return headers


TensorSource = InMemory | OnDisk
"""Named tensors, in memory or on disk."""


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


def whole_from(source: TensorSource) -> Give:
    """Returns whole tensors, with their strides; one that occurs twice is the same tensor."""
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
    """The overlap of a piece with a block, as index into the piece and into the block; None without one."""
    within, here = [], []
    for begin, length, offset, size in zip(piece.offsets, piece.sizes, offsets, sizes, strict=True):
        start, stop = max(begin, offset), min(begin + length, offset + size)
        if stop <= start:
            return None
        within.append(slice(start - begin, stop - begin))
        here.append(slice(start - offset, stop - offset))
    return tuple(within), tuple(here)
