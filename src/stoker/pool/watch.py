"""What the control plane does by itself: it closes what fell silent, draws replays, judges disputes, and settles.

`due` decides from the state and the clock alone, and returns the events to sign; a pool that was down for a while takes
up where it stood, and counts silence from its own start, so that its own absence ends no lease.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from stoker.pool import escrow
from stoker.pool import events as on
from stoker.pool.events import Body
from stoker.pool.fair_use import to_preempt
from stoker.pool.keys import Key
from stoker.pool.lease import ACCEPT_S, BEAT_S, LOST_S, SUSPECT_S, Challenge, Lease
from stoker.pool.state import State, draw_message, drawn_blocks, merkle_root

MOST_OPEN, MOST_ASKED = 16, 16
"""Blocks that one verifier replays at a time, and verifiers that are asked for one block."""
VERDICT_S = 600.0
"""Least time that a verifier has for a block, before another one is asked [s]."""
ANCHOR_S = 3600.0
"""Time between two Merkle roots [s]."""


def due(state: State, now_s: float, *, key: Key, up_since_s: float, present: Mapping[str, str]) -> list[Body]:
    """What the control plane has to sign now.

    Args:
        state: of the pool.
        now_s: the clock [s since 1970].
        key: the pool's, which draws blocks.
        up_since_s: when this control plane began to answer.
        present: keys of agents that listen now and replay blocks, with their determinism class.
    """
    bodies: list[Body] = []
    verifiers = Verifiers(present)
    for name in state.unsettled:
        for asked in state.leases[name].challenges:
            verifiers.num_open[asked.verifier] += _is_at_it(state.leases[name], asked, now_s, verifiers)
    for name in sorted(state.unsettled):
        lease = state.leases[name]
        bodies += _BY_STATE[lease.state](state, lease, now_s, key, max(lease.heard_s, up_since_s), verifiers)
    for lease in to_preempt(state, now_s) if state.waiting else ():
        bodies.append(on.Preempting(lease_id=lease.lease_id, by_s=now_s + lease.promised_s + BEAT_S))
    if now_s - state.anchored_s >= ANCHOR_S and len(state.unanchored) > 1:
        bodies.append(on.Anchored(root=merkle_root(state.unanchored), first=state.first_unanchored, last=state.seq))
    return bodies


class Verifiers(dict[str, str]):
    """Determinism classes of those who may replay, by key; `num_open`: blocks that each is asked for now."""

    def __init__(self, classes: Mapping[str, str]) -> None:
        super().__init__(classes)
        self.num_open = Counter[str]()


_Decide = Callable[[State, Lease, float, Key, float, Verifiers], Iterator[Body]]


def _funded(_: State, lease: Lease, now_s: float, __: Key, up_since_s: float, ___: Verifiers) -> Iterator[Body]:
    if now_s - max(lease.opened_s, up_since_s) >= ACCEPT_S + BEAT_S:
        yield on.Closed(lease_id=lease.lease_id, reason=f"not accepted within {ACCEPT_S:.0f} s")


def _running(state: State, lease: Lease, now_s: float, key: Key, heard_s: float, _: Verifiers) -> Iterator[Body]:
    name, silent_s = lease.lease_id, now_s - heard_s
    yield from _agreed(lease, key)
    if escrow.is_used_up(lease, state.held(name)[0]):
        yield on.Closed(lease_id=name, reason="the deposit is used up")
    elif now_s - lease.accepted_s >= lease.most_s:
        yield on.Closed(lease_id=name, reason=f"the offer lends for {lease.most_s:.0f} s at most")
    elif lease.state == "reclaiming" and now_s >= lease.reclaim_by_s + BEAT_S:
        yield on.Closed(lease_id=name, reason=lease.reason or "reclaimed by the owner")
    elif lease.state == "running" and silent_s >= SUSPECT_S:
        yield on.Suspected(lease_id=name)
    elif lease.state != "running" and silent_s >= LOST_S:
        yield on.Lost(lease_id=name)


def _agreed(lease: Lease, key: Key) -> Iterator[Body]:
    """Co-sign for a renter who named the pool: its rules have already refused what is ahead of the clock."""
    if lease.delegate == key.public and lease.beat_index > lease.paid_index:
        yield on.Cosigned(lease_id=lease.lease_id, index=lease.beat_index)


def _closed(state: State, lease: Lease, now_s: float, key: Key, _: float, present: Verifiers) -> Iterator[Body]:
    yield from _agreed(lease, key)
    if lease.unequal_blocks:
        yield on.Disputed(lease_id=lease.lease_id, reason=f"a replay of block {lease.unequal_blocks[0]} was unequal")
        return
    draw = key.sign(draw_message(key.public, lease))
    is_open = False
    for block in drawn_blocks(lease, draw):
        if not lease.equal(block):
            is_open = True
            if now_s < lease.closed_s + lease.window_s:
                yield from _asked(state, lease, block, now_s, draw, present)
    if now_s >= lease.closed_s + lease.window_s and not (is_open and _is_awaited(lease, now_s, present)):
        yield on.Final(lease_id=lease.lease_id)


def _is_awaited(lease: Lease, now_s: float, present: Verifiers) -> bool:
    """Whether a verifier was asked, is there, and still has time."""
    return any(_is_at_it(lease, one, now_s, present) for one in lease.open_challenges)


def _is_at_it(lease: Lease, challenge: Challenge, now_s: float, present: Verifiers) -> bool:
    """Whether the verifier of a challenge has still to answer: one that has gone is waited for no longer."""
    is_in_time = now_s - challenge.since_s < verdict_time(lease)
    return challenge.equal is None and is_in_time and challenge.verifier in present


def verdict_time(lease: Lease) -> float:
    """How long a verifier has for one block [s]: ten times as long as the block took, and ten minutes at least."""
    return max(VERDICT_S, 10 * lease.running_s / max(1, len(lease.commitments)))


def _asked(state: State, lease: Lease, block: int, now_s: float, draw: str, present: Verifiers) -> Iterator[Body]:
    """Ask another agent for a block, if none is at it: one of the same determinism class where there is one."""
    of_block = [one for one in lease.challenges if one.block == block]
    if len(of_block) >= MOST_ASKED or any(_is_at_it(lease, one, now_s, present) for one in of_block):
        return
    asked = {one.verifier for one in of_block} | {lease.agent, lease.renter}
    free = sorted(agent for agent in present if agent not in asked and present.num_open[agent] < MOST_OPEN)
    alike = [agent for agent in free if present[agent] == lease.determinism_class]
    if verifiers := alike or free:
        verifier = random.Random(f"{draw}/{block}/{len(of_block)}").choice(verifiers)
        present.num_open[verifier] += 1
        fee = min(escrow.replay_fee(lease), escrow.free_for_fees(lease, state.held(lease.lease_id)[0]))
        yield on.Challenged(lease_id=lease.lease_id, block=block, verifier=verifier, draw=draw, fee=fee)


def _disputed(state: State, lease: Lease, now_s: float, key: Key, _: float, present: Verifiers) -> Iterator[Body]:
    assert state.rules is not None
    needed, name = state.rules.verdicts_to_slash, lease.lease_id
    draw = key.sign(draw_message(key.public, lease))
    blocks = lease.unequal_blocks or drawn_blocks(lease, draw) or list(range(len(lease.commitments)))[:1]
    for block in blocks:
        unequal, equal = lease.unequal(block), lease.equal(block)
        if len(unequal) >= needed:
            evidence = next(one.evidence for one in lease.challenges if one.block == block and one.equal is False)
            yield on.Slashed(
                lease_id=name, amount=state.held(name)[1], evidence=evidence,
                reason=f"block {block} is unequal by {len(unequal)} replays",
            )  # fmt: skip
            return
        if len(equal) < (needed if unequal else 1):
            before = [*_asked(state, lease, block, now_s, draw, present)]
            yield from before
            is_waiting = bool(before) or _is_awaited(lease, now_s, present) or now_s < lease.closed_s + lease.window_s
            if is_waiting:
                return
            if len(unequal) > len(equal):
                yield on.Refunded(lease_id=name, reason=f"block {block} is unequal, and nobody else could replay it")
                return
    if blocks or now_s >= lease.closed_s + lease.window_s:
        yield on.Final(lease_id=name)


def _settled(_: State, lease: Lease, __: float, ___: Key, ____: float, _____: Verifiers) -> Iterator[Body]:
    yield on.Final(lease_id=lease.lease_id)


_BY_STATE: dict[str, _Decide] = {
    "funded": _funded, "running": _running, "suspect": _running, "reclaiming": _running, "closed": _closed,
    "disputed": _disputed, "slashed": _settled, "refunded": _settled,
}  # fmt: skip
