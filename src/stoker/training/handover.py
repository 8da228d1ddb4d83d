"""One process's whole state, given to the others without a disk: for those that fell behind, or have just come."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from stoker.stepping import Step
from stoker.stepping.world import broadcast_json
from stoker.training.snapshots import Snapshot, restore_snapshot, snapshot_of
from stoker.training.state import Tensors

_CHUNK_BYTES = 64 * 2**20
"""How much goes in one message."""


def broadcast_state(step: Step, giver: int, *, is_taken: bool = True) -> None:
    """Put the state of process `giver` into the step of every other one; each of them calls this.

    `is_taken`: this process takes it, unless it gives it; a site that has a state of its own only passes it on.

    Every process holds all of the state, and is of the same job; optimisers need not have made a step.

    Raises:
        BadRun: they are of different models or optimisers.
    """
    if step.world.layout.world_size == 1:
        return
    if not step.world.layout.is_replicated:
        raise ValueError(f"no process holds all of the state in a layout of {step.world.layout.in_words()}")
    if step.world.rank == giver:
        _give(snapshot_of(step), giver, step.device)
        return
    taken = _taken(giver, step.device)
    if is_taken:
        restore_snapshot(step, taken)


def _give(snapshot: Snapshot, giver: int, device: torch.device) -> None:
    kinds = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
             for name, tensor in snapshot.tensors.items()]  # fmt: skip
    broadcast_json({"skeletons": snapshot.skeletons, "tensors": kinds}, giver, device)
    sizes = {name: tensor.nbytes for name, tensor in snapshot.tensors.items()}
    for names in _chunks(sizes):
        flat = torch.cat([snapshot.tensors[name].contiguous().view(-1).view(torch.uint8) for name in names])
        dist.broadcast(flat.to(device), src=giver)


def _taken(giver: int, device: torch.device) -> Snapshot:
    told = broadcast_json(None, giver, device)
    tensors: Tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in told["tensors"]}
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    for names in _chunks(sizes):
        flat = torch.empty(sum(sizes[name] for name in names), dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=giver)
        for name, part in zip(names, flat.cpu().split([sizes[name] for name in names]), strict=True):
            tensors[name].view(-1).view(torch.uint8).copy_(part)
    return Snapshot(told["skeletons"], tensors)


def _chunks(sizes: dict[str, int], limit: int = _CHUNK_BYTES) -> Iterator[list[str]]:
    """Names of tensors that go together, of so many bytes at most or one alone."""
    names: list[str] = []
    for name, size in sizes.items():
        if names and sum(sizes[one] for one in names) + size > limit:
            yield names
            names = []
        if size:
            names.append(name)
    if names:
        yield names
