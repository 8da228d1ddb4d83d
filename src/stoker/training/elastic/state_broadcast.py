"""The state that survivors carry from one generation to the next, and its broadcast to the others, without a disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stoker.records import Position
from stoker.records.codec import JSON, from_json, to_json
from stoker.stepping.distributed_tensors import buckets
from stoker.stepping.step import Step
from stoker.stepping.world import broadcast_json
from stoker.training.loop import Loop
from stoker.training.named_state import Tensors
from stoker.training.rank_messages import gather_from_ranks
from stoker.training.snapshots import StepSnapshot, restore_snapshot, snapshot_of

_CHUNK_BYTES = 64 * 2**20
"""Size of a message [bytes]."""


def broadcast_state(step: Step, giver: int, *, is_taken: bool = True) -> None:
    """Put the state of process `giver` into the step of every other one; every process calls this.

    Every process holds all of the state, of the same job; optimisers need not have made a step. Without `is_taken` this
    process only takes part in the broadcast: a replica with updates of its own keeps its state.

    Raises:
        BadRun: the models or the optimisers differ.
    """
    if step.world.layout.world_size == 1:
        return
    if not step.world.layout.is_replicated:
        raise ValueError(f"no process holds all of the state in a layout of {step.world.layout.in_words()}")
    device = step.device
    if step.world.rank == giver:
        snapshot = snapshot_of(step)
        kinds = [
            [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            for name, tensor in snapshot.tensors.items()
        ]
        broadcast_json({"skeletons": snapshot.skeletons, "tensors": kinds}, giver, device)
        for names in _chunks({name: tensor.nbytes for name, tensor in snapshot.tensors.items()}):
            flat = torch.cat([snapshot.tensors[name].contiguous().view(-1).view(torch.uint8) for name in names])
            dist.broadcast(flat.to(device), src=giver)
        return
    header = broadcast_json(None, giver, device)
    tensors: Tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in header["tensors"]
    }
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    for names in _chunks(sizes):
        flat = torch.empty(sum(sizes[name] for name in names), dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=giver)
        for name, part in zip(names, flat.cpu().split([sizes[name] for name in names]), strict=True):
            tensors[name].view(-1).view(torch.uint8).copy_(part)
    if is_taken:
        restore_snapshot(step, StepSnapshot(header["skeletons"], tensors))


def _chunks(sizes: dict[str, int], limit: int = _CHUNK_BYTES) -> Iterator[list[str]]:
    """Names of tensors for one message, of `limit` bytes at most, or a single tensor; empty ones are not sent."""
    return buckets((name for name, size in sizes.items() if size), sizes.__getitem__, limit)


@dataclass(frozen=True)
class SurvivorState:
    """A state between two updates, with its position.

    `unevaluated` is the position before the last update, if what was due after that update did not complete; `progress`
    is that of a checkpoint; `state` is None once it is in the step. `outer` is the state of the outer optimiser, of
    replicas with updates of their own (`OuterOptimizer.state`).
    """

    position: Position
    unevaluated: Position | None
    progress: dict[str, JSON]
    state: StepSnapshot | None = None
    outer: dict[str, Any] | None = None

    @classmethod
    def of(cls, loop: Loop) -> SurvivorState:
        """The state of `loop`, whose step is between two updates, in a process that can go on without the others."""
        outer = None if loop.step.outer is None else loop.step.outer.state()
        return cls(loop.reached, loop.unevaluated, loop.progress(), snapshot_of(loop.step), outer)

    def as_json(self) -> JSON:
        """Position and progress, without the state."""
        return {"position": to_json(self.position), "unevaluated": to_json(self.unevaluated), "progress": self.progress}

    @classmethod
    def from_json(cls, value: JSON) -> SurvivorState:
        """The inverse of `as_json`."""
        unevaluated = value["unevaluated"]
        return cls(
            from_json(value["position"], Position),
            None if unevaluated is None else from_json(unevaluated, Position),
            value["progress"],
        )


def state_from_furthest_rank(step: Step, carried: SurvivorState | None) -> SurvivorState | None:
    """Put the state of the furthest process into the step of every process; None if no process carries any.

    Every process calls this; one that carries nothing has just joined. Replicas with updates of their own keep their
    states; only those that have just joined take over one, with the shared weights in it.

    Raises:
        RunFailed: what a replica sent after the loss is not finite.
    """
    if step.world.layout.world_size == 1 and carried is None:
        return None
    if carried is not None and carried.state is not None:
        restore_snapshot(step, carried.state)
    gathered = gather_from_ranks(step.world, None if carried is None else carried.as_json())
    states = [None if state is None else SurvivorState.from_json(state) for state in gathered]
    reached = [-1 if state is None else state.position.updates for state in states]
    furthest = reached.index(max(reached))
    if step.outer is not None and max(reached) >= 0:
        if min(reached) < 0:
            broadcast_state(step, furthest, is_taken=carried is None)
        step.outer.regroup(None if carried is None else carried.outer)
    elif min(reached) < reached[furthest]:
        broadcast_state(step, furthest)
    return states[furthest]
