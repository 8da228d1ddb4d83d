"""Which part of the state a process holds, who else holds the same, and which of them writes it. No communication.

A tensor is whole in every process of a stage, or a DTensor, whose placements say which block of it is here. Processes
that hold the same block are counted from the layout, so all of them know alike which one writes it: the one that has
least to write so far.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from stoker.errors import RunFailed
from stoker.records import Layout
from stoker.stepping.world import World
from stoker.training.state import Tensors, held_here


@dataclass(frozen=True)
class Block:
    """What a process holds of a tensor of `shape`: it begins at `offsets`, and has the sizes of `local`.

    `holders` are the processes that hold the same, ascending.
    """

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    local: torch.Tensor
    holders: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the block."""
        return tuple(self.local.shape)


def block_of(tensor: torch.Tensor, world: World) -> Block:
    """What this process holds of `tensor`.

    Raises:
        RunFailed: what it holds is not one block of the tensor.
    """
    local, shape = held_here(tensor), tuple(tensor.shape)
    if not is_spread(tensor):
        return Block(shape, (0,) * len(shape), local, _stage(world.layout, world.rank))
    spread: Any = tensor
    holders = _holders(spread.device_mesh, tuple(spread.placements), world.layout, world.rank)
    return Block(shape, _offsets(spread, tuple(local.shape)), local, holders)


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a DTensor."""
    return hasattr(tensor, "to_local")


def to_write(tensors: Tensors, world: World) -> dict[str, Block]:
    """What this process writes of the tensors it holds, by name: each block is written by one of its holders.

    All holders of a block have to name the same tensors in the same order.
    """
    written: defaultdict[tuple[int, ...], dict[int, int]] = defaultdict(dict)
    mine: dict[str, Block] = {}
    for name, tensor in tensors.items():
        block = block_of(tensor, world)
        loads = written[block.holders]
        writer = min(block.holders, key=lambda rank: (loads.get(rank, 0), rank))
        loads[writer] = loads.get(writer, 0) + block.local.nbytes
        if writer == world.rank and block.local.numel() >= min(1, math.prod(block.shape)):
            mine[name] = block
    return mine


def like(target: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as this process's part of a tensor spread like `target`, laid out like its part."""
    if not is_spread(target):
        return local
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - takes time to import, and is there already

    spread: Any = target
    placed = torch.empty_like(held_here(target), dtype=local.dtype).copy_(local)
    return DTensor.from_local(
        placed, spread.device_mesh, spread.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


def part_like(target: torch.Tensor, whole: torch.Tensor, world: World) -> torch.Tensor:
    """Of a whole tensor what this process holds of `target`, spread like it."""
    if not is_spread(target) or is_spread(whole):
        return whole
    block = block_of(target, world)
    return like(target, whole[region(block.offsets, block.sizes)])


def region(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    """The index of a block in its tensor."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))


def _stage(layout: Layout, rank: int) -> tuple[int, ...]:
    """The processes of the same stage."""
    stage = layout.coordinates(rank)[0]
    return tuple(other for other in range(layout.world_size) if layout.coordinates(other)[0] == stage)


def _offsets(spread: Any, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Where this process's block begins.

    Matrices are split first and their parts sharded then, which `_StridedShard` stands for; only where all of it
    divides is a part of a part one block.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415 - as above

    shape, mesh = tuple(spread.shape), spread.device_mesh
    expected, offsets = compute_local_shape_and_global_offset(shape, mesh, spread.placements)
    strided = {placement.dim for placement in spread.placements if hasattr(placement, "split_factor")}
    uneven = [dim for dim in strided if shape[dim] % _num_parts(spread, dim)]
    if uneven or tuple(expected) != sizes:
        raise RunFailed(
            f"a tensor of shape {list(shape)} spread as {spread.placements} over {mesh.size()} processes is here "
            f"{list(sizes)}, which is not one block of it, so that no checkpoint can hold it",
            remedy="Use a number of shards and of tensor processes whose product divides the model's sizes.",
        )
    return tuple(int(offset) for offset in offsets) if math.prod(sizes) else (0,) * len(shape)


def _num_parts(spread: Any, dim: int) -> int:
    """Into how many parts a dimension is cut."""
    sizes = [spread.device_mesh.size(axis) for axis, one in enumerate(spread.placements) if not one.is_replicate()
             and one.dim == dim]  # fmt: skip
    return math.prod(sizes)


@functools.lru_cache(maxsize=64)
def _holders(mesh: Any, placements: tuple[Any, ...], layout: Layout, rank: int) -> tuple[int, ...]:
    """The processes whose block of a DTensor is that of process `rank`.

    Its mesh is a part of the world's: processes that differ only in axes of the world that it lacks hold the same, as
    do those that differ only along dimensions of the mesh over which the tensor is replicated.
    """
    place = {int(other): index for index, other in _indexed(mesh.mesh)}
    cut = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    at = {layout.coordinates(other): index for other, index in place.items()}
    mine = layout.coordinates(rank)
    is_spanned = [len({coordinates[axis] for coordinates in at}) > 1 for axis in range(len(mine))]
    holders = []
    for other in _stage(layout, rank):
        theirs = layout.coordinates(other)
        twin = tuple(them if spans else me for them, me, spans in zip(theirs, mine, is_spanned, strict=True))
        if all(at[twin][dim] == place[rank][dim] for dim in cut):
            holders.append(other)
    return tuple(holders)


def _indexed(ranks: torch.Tensor) -> list[tuple[tuple[int, ...], int]]:
    """Index and value of each element."""
    return [(tuple(int(i) for i in index), int(ranks[tuple(index)])) for index in torch.ones_like(ranks).nonzero()]
