"""The rules of a pool: whether an event is legal in a state, and what it would change.

What: `decide` checks what all events have (place in the log, time, nonce, pool, who may act), and asks the decider of
its kind: credits, offers, probes and turns are in `market.py`, a lease to its end in `leases.py`, replays, disputes and
money in `disputes.py`. Nothing here looks at a clock or a disk, so that every reader of a log comes to the same state.
"""

from __future__ import annotations

from stoker.pool import escrow
from stoker.pool import events as on
from stoker.pool.events import CLOCK_WINDOW_S, Event, Refused
from stoker.pool.rules import disputes, leases, market
from stoker.pool.rules.deciders import BY_OPERATOR, DECIDERS
from stoker.pool.state import Change, State

__all__ = ["apply", "decide", "disputes", "leases", "market"]


def apply(state: State, event: Event) -> None:
    """Take one event; signatures are checked by who reads a log (`log.audit`) or takes drafts.

    Raises:
        Refused: the event is illegal; `state` is as before.
    """
    state.take(event, decide(state, event))


def decide(state: State, event: Event) -> Change:
    """What an event would change.

    Raises:
        Refused: it is illegal in this state.
    """
    draft = event.draft
    if event.seq != state.seq + 1 or event.previous != state.head:
        raise Refused(f"event {event.seq} does not follow event {state.seq}")
    if event.received_s < state.received_s:
        raise Refused(f"event {event.seq} was received before event {state.seq}")
    if not abs(draft.time_s - event.received_s) <= CLOCK_WINDOW_S:
        raise Refused(
            f"the event is dated {draft.time_s - event.received_s:+.0f} s from the pool's clock; at most "
            f"{CLOCK_WINDOW_S:.0f} s are taken",
            remedy="Set this machine's clock (timedatectl), and send the event again.",
        )
    if state.has_nonce(event.actor, draft.nonce):
        raise Refused("an event with this nonce is in the log: it counts once")
    body = draft.read_body()
    if isinstance(body, on.Founded):
        if state.rules is not None:
            raise Refused("the pool is founded already")
        if event.actor != draft.pool:
            raise Refused("a pool is founded by its own key")
        return Change(founded=body)
    if state.rules is None:
        raise Refused("the first event of a log founds the pool")
    if draft.pool != state.operator:
        raise Refused(
            f"the event is for the pool {escrow.short(draft.pool)}, and this is {escrow.short(state.operator)}"
        )
    if not state.rules.is_open and event.actor not in state.members:
        raise Refused(
            f"the key {escrow.short(event.actor)} is not admitted to this pool",
            remedy=f"Its operator admits it: stoker pool wallet --grant {event.actor}=0.",
        )
    if type(body) in BY_OPERATOR and event.actor != state.operator:
        raise Refused(f"only the pool's own key signs {event.kind!r}")
    change = DECIDERS[type(body)](state, event, body)
    state.accounts.require_covered(change.all_transfers)
    return change
