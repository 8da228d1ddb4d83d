"""What a process carries over from one meeting of several to the next, and how the others get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.records import Position
from stoker.records.codec import JSON, from_json, to_json
from stoker.stepping import Step
from stoker.training.agreement import gathered
from stoker.training.handover import broadcast_state
from stoker.training.loop import Loop
from stoker.training.snapshots import Snapshot, restore_snapshot, snapshot_of


@dataclass(frozen=True)
class Carried:
    """A state between two updates, and how far it is.

    `unevaluated` is where the last update began, if what was due after it did not come to an end; `progress` is what is
    kept with a checkpoint; `state` is None once it is in the step. `outer` is what a site shares with others, and its
    own part of it (`Outer.state`).
    """

    position: Position
    unevaluated: Position | None
    progress: dict[str, JSON]
    state: Snapshot | None = None
    outer: dict[str, Any] | None = None

    @classmethod
    def of(cls, loop: Loop) -> Carried:
        """What `loop` leaves behind; its step is between two updates, and this process can go on without the others."""
        outer = None if loop.step.outer is None else loop.step.outer.state()
        return cls(loop.reached, loop.unevaluated, loop.progress(), snapshot_of(loop.step), outer)

    def as_json(self) -> JSON:
        """All but the state."""
        return {"position": to_json(self.position), "unevaluated": to_json(self.unevaluated), "progress": self.progress}

    @classmethod
    def from_json(cls, value: JSON) -> Carried:
        """What `as_json` gave in another process."""
        unevaluated = value["unevaluated"]
        return cls(
            from_json(value["position"], Position),
            None if unevaluated is None else from_json(unevaluated, Position),
            value["progress"],
        )


def given_by_the_furthest(step: Step, carried: Carried | None) -> Carried | None:
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
    told = gathered(step.world, None if carried is None else carried.as_json())
    everybodys = [None if one is None else Carried.from_json(one) for one in told]
    reached = [-1 if one is None else one.position.updates for one in everybodys]
    furthest = reached.index(max(reached))
    if step.outer is not None and max(reached) >= 0:
        if min(reached) < 0:
            broadcast_state(step, furthest, is_taken=carried is None)
        step.outer.regroup(None if carried is None else carried.outer)
    elif min(reached) < reached[furthest]:
        broadcast_state(step, furthest)
    return everybodys[furthest]
