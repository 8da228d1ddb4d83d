"""The table of what each kind of event would change: one function for each.

What: a decider looks at the state and at an event whose place, time and nonce are right, and changes nothing. It
returns what the event would change, or raises `Refused` with a sentence. `rules.decide` calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stoker.pool import escrow
from stoker.pool.events import Body, Event, Refused
from stoker.pool.state import Change, State

Decider = Callable[[State, Event, Any], Change]
DECIDERS: dict[type[Body], Decider] = {}
BY_OPERATOR: set[type[Body]] = set()
"""Kinds of events that only the pool's own key signs."""


def decides(kind: type[Body], *, by_operator: bool = False) -> Callable[[Decider], Decider]:
    """Register the decider of a kind of event; `by_operator`: only the pool's own key signs it."""

    def register(decider: Decider) -> Decider:
        DECIDERS[kind] = decider
        if by_operator:
            BY_OPERATOR.add(kind)
        return decider

    return register


def require_actor(event: Event, what: str, *allowed: str) -> None:
    """Raises Refused if another key than those allowed signed."""
    if event.actor not in allowed:
        raise Refused(f"{event.kind!r} is signed by {escrow.short(event.actor)}: it is for {what} to sign")
