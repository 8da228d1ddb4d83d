"""What the control plane does by itself: it closes what fell silent, draws replays, judges disputes, and settles.

`due` decides from the state and the clock alone, and returns the events to sign; a pool that was down for a while takes
up where it stood, and counts silence from its own start, so that its own absence neither ends nor settles a lease.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping

from stoker.pool import escrow
from stoker.pool import events as on
from stoker.pool.bisection import Bisection, Party
from stoker.pool.events import Body
from stoker.pool.fair_use import to_preempt
from stoker.pool.gang import is_released
from stoker.pool.keys import Key
from stoker.pool.lease import (
    ACCEPT_S,
    BEAT_S,
    LOST_S,
    MOST_BLOCK_S,
    RELEASED,
    STALLED,
    SUSPECT_S,
    USED_UP,
    Challenge,
    Lease,
)
from stoker.pool.presence import PRESENT_S
from stoker.pool.rules.disputes import draw_message, drawn_blocks, why_dismissed
from stoker.pool.state import State, merkle_root

MOST_OPEN, MOST_ASKED = 8, 16
"""Blocks that one verifier is asked for at a time, which it makes in ten times that of one; verifiers for one block."""
ANCHOR_S = 3600.0
"""Time between two Merkle roots [s]."""


def due(
    state: State,
    now_s: float,
    *,
    key: Key,
    up_since_s: float,
    present: Mapping[str, str],
    listening: Collection[str] = (),
) -> list[Body]:
    """What the control plane has to sign now.

    Args:
        state: of the pool.
        now_s: the clock [s since 1970].
        key: the pool's, which draws blocks.
        up_since_s: when this control plane began to answer.
        present: keys of agents that listen now and replay blocks, with their determinism class.
        listening: keys of agents that listen now, whether or not they replay blocks of others.
    """
    bodies: list[Body] = []
    verifiers = Verifiers(present, up_since_s, listening)
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
    """Determinism classes of those who may replay, by key.

    Attributes:
        num_open: blocks that each is asked for now.
        fees: promised in this look [micro-credits], by lease.
        up_since_s: when the control plane began to answer [s since 1970].
        known_from_s: before that the pool is up for too short to say who has gone [s since 1970].
        listening: all agents that are there.
    """

    def __init__(self, classes: Mapping[str, str], up_since_s: float, listening: Collection[str] = ()) -> None:
        super().__init__(classes)
        self.up_since_s, self.known_from_s = up_since_s, up_since_s + PRESENT_S
        self.listening = frozenset(listening) | self.keys()
        self.num_open, self.fees = Counter[str](), Counter[str]()

    def silent_s(self, search: Bisection, now_s: float) -> float:
        """For how long a search waits for an answer that this control plane could have taken [s]."""
        return now_s - max(search.since_s, self.up_since_s)


_Decide = Callable[[State, Lease, float, Key, float, Verifiers], Iterator[Body]]


def _funded(state: State, lease: Lease, now_s: float, _: Key, up_since_s: float, __: Verifiers) -> Iterator[Body]:
    if is_released(state, lease):
        yield on.Closed(lease_id=lease.lease_id, reason=RELEASED)
    elif now_s - max(lease.opened_s, up_since_s) >= ACCEPT_S + BEAT_S:
        yield on.Closed(lease_id=lease.lease_id, reason=f"not accepted within {ACCEPT_S:.0f} s")


def _running(
    state: State, lease: Lease, now_s: float, key: Key, heard_s: float, verifiers: Verifiers
) -> Iterator[Body]:
    name, silent_s = lease.lease_id, now_s - heard_s
    yield from _agreed(lease, key)
    if is_released(state, lease):
        yield on.Closed(lease_id=name, reason=RELEASED)
    elif lease.is_stalled and now_s - verifiers.up_since_s >= MOST_BLOCK_S:  # before that a block may be on its way
        yield on.Closed(lease_id=name, reason=STALLED)
    elif escrow.is_used_up(lease, state.held(name)[0]):
        yield on.Closed(lease_id=name, reason=USED_UP)
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


def _closed(
    state: State, lease: Lease, now_s: float, key: Key, up_since_s: float, present: Verifiers
) -> Iterator[Body]:
    yield from _agreed(lease, key)
    if lease.unequal_blocks:
        yield on.Disputed(lease_id=lease.lease_id, reason=f"a replay of block {lease.unequal_blocks[0]} was unequal")
        return
    draw, ends_s = key.sign(draw_message(key.public, lease)), _window_end(lease, up_since_s)
    is_open = yield from _drawn(state, lease, drawn_blocks(lease, draw), now_s, ends_s, draw, present)
    if now_s >= ends_s and not is_open:
        yield on.Final(lease_id=lease.lease_id)


def _window_end(lease: Lease, up_since_s: float) -> float:
    """When the time to dispute is over [s since 1970].

    After the pool was away, when no verifier could answer, as long after its start as a verifier has.
    """
    if lease.settles_s == lease.closed_s:
        return lease.settles_s
    return max(lease.settles_s, up_since_s + min(lease.window_s, lease.verdict_s))


def _drawn(
    state: State, lease: Lease, blocks: list[int], now_s: float, ends_s: float, draw: str, present: Verifiers
) -> Generator[Body, None, bool]:
    """Ask for blocks that are not found equal yet, until `ends_s`; whether one of them may still get a verdict."""
    is_open = False
    for block in blocks:
        if not lease.equal(block):
            is_open = True
            if now_s < ends_s:
                yield from _asked(state, lease, block, now_s, draw, present)
    return is_open and (now_s < ends_s or _is_awaited(lease, now_s, present))


def _is_awaited(lease: Lease, now_s: float, present: Verifiers) -> bool:
    """Whether a verifier was asked, is there, and still has time."""
    return any(_is_at_it(lease, one, now_s, present) for one in lease.open_challenges)


def _is_at_it(lease: Lease, challenge: Challenge, now_s: float, present: Verifiers) -> bool:
    """Whether the verifier of a challenge has still to answer: one that has gone is waited for no longer."""
    is_there = challenge.verifier in present or now_s < present.known_from_s
    heard_s = now_s - max(challenge.since_s, present.up_since_s)  # a verdict could come
    return challenge.equal is None and heard_s < lease.verdict_s and is_there


def _asked(
    state: State,
    lease: Lease,
    block: int,
    now_s: float,
    draw: str,
    present: Verifiers,
    *,
    update: int = 0,
    against: str = "",
) -> Iterator[Body]:
    """Ask another agent for a block, if none is at it: one of the same determinism class where there is one.

    With `update` and `against` an arbiter is asked. Each agent has one word on a block (`Lease.asked_for`): a friend of
    a cheat that cleared it as an arbiter does not pass the block as a verifier as well.
    """
    of_block = [one for one in lease.challenges if one.block == block]
    same = [one for one in of_block if one.against == against]
    if len(same) >= MOST_ASKED or any(_is_at_it(lease, one, now_s, present) for one in same):
        return
    asked = lease.asked_for(block, now_s, whole=not update) | {lease.agent, lease.renter}
    free = sorted(agent for agent in present if agent not in asked and present.num_open[agent] < MOST_OPEN)
    if lease.num_devices > 1:
        able = {one.agent for one in state.offers.values() if _has_devices_of(one.offer.device, lease)}
        free = [agent for agent in free if agent in able]
    same_class = [agent for agent in free if present[agent] == lease.determinism_class]
    if verifiers := same_class or free:
        verifier = random.Random(f"{draw}/{block}/{len(of_block)}").choice(verifiers)
        present.num_open[verifier] += 1
        free_fee = escrow.free_for_fees(lease, state.held(lease.lease_id)[0], now_s) - present.fees[lease.lease_id]
        fee = max(0, min(escrow.replay_fee(lease), free_fee))
        present.fees[lease.lease_id] += fee
        yield on.Challenged(
            lease_id=lease.lease_id,
            block=block,
            verifier=verifier,
            draw=draw,
            fee=fee,
            update=update,
            against=against,
        )


def _has_devices_of(device: on.OfferedDevice, lease: Lease) -> bool:
    """Whether a machine that lends this device can be asked for blocks of a lease: any CPU runs several processes."""
    return device.kind == lease.device and (device.kind == "cpu" or device.count >= lease.num_devices)


def _disputed(
    state: State, lease: Lease, now_s: float, key: Key, up_since_s: float, present: Verifiers
) -> Iterator[Body]:
    """Blocks that were ever found unequal are brought to a decision; the others are asked for in the window alone."""
    assert state.rules is not None
    needed, name = state.rules.verdicts_to_slash, lease.lease_id
    draw, ends_s = key.sign(draw_message(key.public, lease)), _window_end(lease, up_since_s)
    is_open, bad = False, lease.unequal_blocks
    for block in bad:
        if lease.num_agreeing(block) >= needed:
            evidence = next(one.evidence for one in lease.challenges if one.block == block and one.judges is False)
            yield on.Slashed(
                lease_id=name, amount=state.held(name)[1], evidence=evidence, reason=_reason(lease, block, needed)
            )
            return
    doubted = sorted({*bad, *(one.block for one in lease.challenges if one.dismissed)})
    for block in doubted:
        is_searched = yield from _searched(state, lease, block, now_s, draw, present)
        if is_searched is not None:
            is_open |= is_searched
        elif len(lease.equal(block)) < (needed if block in bad else 1):
            before = [*_asked(state, lease, block, now_s, draw, present)]
            yield from before
            is_open |= bool(before) or _is_awaited(lease, now_s, present) or now_s < ends_s
    drawn = drawn_blocks(lease, draw) or list(range(len(lease.commitments)))[:1]
    rest = [block for block in drawn if block not in doubted]
    is_open |= yield from _drawn(state, lease, rest, now_s, ends_s, draw, present)
    if is_open:
        return
    for block in bad:
        if len(lease.unequal(block)) > len(lease.equal(block)):
            yield on.Refunded(lease_id=name, reason=f"block {block} is unequal, and no other verifier could replay it")
            return
    if bad or drawn or now_s >= ends_s:
        yield on.Final(lease_id=name)


def _searched(
    state: State, lease: Lease, block: int, now_s: float, draw: str, present: Verifiers
) -> Generator[Body, None, bool | None]:
    """Bring searches for the first bad update of a block on; whether one may still come to something.

    None: none goes on, since a side is gone or cannot make the block again, or no arbiter is left that could decide.
    Then whole blocks are compared, as by verifiers that compare no bits.
    """
    assert state.rules is not None
    found: bool | None = None
    for verdict in [one for one in lease.challenges if one.block == block and one.judges is False]:
        search = verdict.bisection
        if search is None:
            continue
        silent_s = present.silent_s(search, now_s)
        if why_dismissed(lease, verdict, state.rules.verdicts_to_slash, silent_s) is not None:
            reason = lease.found_update(verdict, search).words()
            yield on.Dismissed(lease_id=lease.lease_id, block=block, verifier=verdict.verifier, reason=reason[:900])
            found = True
        elif search.is_ready:
            update, against = search.update, verdict.verifier
            asked = [*_asked(state, lease, block, now_s, draw, present, update=update, against=against)]
            yield from asked
            if asked or _is_awaited(lease, now_s, present):
                found = True
        elif not _is_left(lease, verdict, search, now_s, present):
            found = True
    return found


def _is_left(lease: Lease, verdict: Challenge, search: Bisection, now_s: float, present: Verifiers) -> bool:
    """Whether a side of a search does not answer: it said so, has gone, or is out of time."""
    sides: tuple[tuple[str, Party], ...] = ((lease.agent, "agent"), (verdict.verifier, "verifier"))
    for key, party in sides:
        is_there = key in present.listening or now_s < present.known_from_s
        is_late = present.silent_s(search, now_s) >= lease.verdict_s
        if search.side(party).has_given_up or (search.waits_for(party) and (is_late or not is_there)):
            return True
    return False


def _reason(lease: Lease, block: int, num_needed: int) -> str:
    """Why an agent is slashed, as words: the update where there is one, the states after it, and who confirms them."""
    for found in lease.found_updates:
        if found.block == block and 1 + found.for_verifier >= num_needed:
            return found.words()[:900]
    return f"block {block} is unequal by {lease.num_agreeing(block)} replays"


def _settled(_: State, lease: Lease, __: float, ___: Key, ____: float, _____: Verifiers) -> Iterator[Body]:
    yield on.Final(lease_id=lease.lease_id)


_BY_STATE: dict[str, _Decide] = {
    "funded": _funded,
    "running": _running,
    "suspect": _running,
    "reclaiming": _running,
    "closed": _closed,
    "disputed": _disputed,
    "slashed": _settled,
    "refunded": _settled,
}
