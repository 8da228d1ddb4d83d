"""One process's whole state, given to the others without a disk: for those that fell behind, or have just come.

What a process carries over from one meeting of several to the next, and how the others get it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from stoker.records import Position
from stoker.records.codec import JSON, from_json, to_json
from stoker.stepping.step import Step
from stoker.stepping.world import broadcast_json
from stoker.training.loop import Loop
from stoker.training.named_state import Tensors
from stoker.training.rank_messages import gather_from_ranks
from stoker.training.snapshots import StepSnapshot, restore_snapshot, snapshot_of

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


def _give(snapshot: StepSnapshot, giver: int, device: torch.device) -> None:
    kinds = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
             for name, tensor in snapshot.tensors.items()]  # fmt: skip
    broadcast_json({"skeletons": snapshot.skeletons, "tensors": kinds}, giver, device)
    sizes = {name: tensor.nbytes for name, tensor in snapshot.tensors.items()}
    for names in _chunks(sizes):
        flat = torch.cat([snapshot.tensors[name].contiguous().view(-1).view(torch.uint8) for name in names])
        dist.broadcast(flat.to(device), src=giver)


def _taken(giver: int, device: torch.device) -> StepSnapshot:
    told = broadcast_json(None, giver, device)
    tensors: Tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, dtype, shape in told["tensors"]}
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    for names in _chunks(sizes):
        flat = torch.empty(sum(sizes[name] for name in names), dtype=torch.uint8, device=device)
        dist.broadcast(flat, src=giver)
        for name, part in zip(names, flat.cpu().split([sizes[name] for name in names]), strict=True):
            tensors[name].view(-1).view(torch.uint8).copy_(part)
    return StepSnapshot(told["skeletons"], tensors)


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


@dataclass(frozen=True)
class SurvivorState:
    """A state between two updates, and how far it is.

    `unevaluated` is where the last update began, if what was due after it did not come to an end; `progress` is what is
    kept with a checkpoint; `state` is None once it is in the step. `outer` is what a site shares with others, and its
    own part of it (`Outer.state`).
    """

    position: Position
    unevaluated: Position | None
    progress: dict[str, JSON]
    state: StepSnapshot | None = None
    outer: dict[str, Any] | None = None

    @classmethod
    def of(cls, loop: Loop) -> SurvivorState:
        """What `loop` leaves behind; its step is between two updates, and this process can go on without the others."""
        outer = None if loop.step.outer is None else loop.step.outer.state()
        return cls(loop.reached, loop.unevaluated, loop.progress(), snapshot_of(loop.step), outer)

    def as_json(self) -> JSON:
        """All but the state."""
        return {"position": to_json(self.position), "unevaluated": to_json(self.unevaluated), "progress": self.progress}

    @classmethod
    def from_json(cls, value: JSON) -> SurvivorState:
        """What `as_json` gave in another process."""
        unevaluated = value["unevaluated"]
        return cls(
            from_json(value["position"], Position),
            None if unevaluated is None else from_json(unevaluated, Position),
            value["progress"],
        )


def state_from_furthest_rank(step: Step, carried: SurvivorState | None) -> SurvivorState | None:
    """Put the furthest process's state into every process's step; None where nobody carries any.

    Called by all of them; a process that carries nothing has just come. Sites that make updates of their own keep
    their states; only those that have just come take over one, with the weights that all share in it.

    Raises:
        RunFailed: what a site sent after the loss is not finite.
    """
    if step.world.layout.world_size == 1 and carried is None:
        return None
    if carried is not None and carried.state is not None:
        restore_snapshot(step, carried.state)
    told = gather_from_ranks(step.world, None if carried is None else carried.as_json())
    everybodys = [None if one is None else SurvivorState.from_json(one) for one in told]
    reached = [-1 if one is None else one.position.updates for one in everybodys]
    furthest = reached.index(max(reached))
    if step.outer is not None and max(reached) >= 0:
        if min(reached) < 0:
            broadcast_state(step, furthest, is_taken=carried is None)
        step.outer.regroup(None if carried is None else carried.outer)
    elif min(reached) < reached[furthest]:
        broadcast_state(step, furthest)
    return everybodys[furthest]
