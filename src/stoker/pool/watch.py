"""What the control plane does by itself: it closes what fell silent, draws replays, judges disputes, and settles.

`due` decides from the state and the clock alone, and returns the events to sign; a pool that was down for a while takes
up where it stood, and counts silence from its own start, so that its own absence neither ends nor settles a lease.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Generator, Iterator, Mapping

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
    return list(_Look(state, now_s, key, up_since_s, present, listening).due())


class _Look:
    """One look at a pool, with what was asked of verifiers in it.

    Attributes:
        num_open: blocks that each verifier is asked for now.
        fees: promised in this look [micro-credits], by lease.
        known_from_s: before that the pool is up for too short to say who has gone [s since 1970].
    """

    def __init__(
        self,
        state: State,
        now_s: float,
        key: Key,
        up_since_s: float,
        present: Mapping[str, str],
        listening: Collection[str],
    ) -> None:
        assert state.rules is not None
        self.state, self.now_s, self.key, self.up_since_s, self.present = state, now_s, key, up_since_s, present
        self.num_to_slash, self.known_from_s = state.rules.verdicts_to_slash, up_since_s + PRESENT_S
        self.listening = frozenset(listening) | present.keys()
        self.num_open, self.fees = Counter[str](), Counter[str]()

    def due(self) -> Iterator[Body]:
        """What the control plane has to sign now."""
        state, now_s = self.state, self.now_s
        for name in state.unsettled:
            for asked in state.leases[name].challenges:
                self.num_open[asked.verifier] += self._is_at_it(state.leases[name], asked)
        for name in sorted(state.unsettled):
            lease = state.leases[name]
            match lease.state:
                case "funded":
                    yield from self._funded(lease)
                case "running" | "suspect" | "reclaiming":
                    yield from self._running(lease)
                case "closed":
                    yield from self._closed(lease)
                case "disputed":
                    yield from self._disputed(lease)
                case "slashed" | "refunded":
                    yield on.Final(lease_id=name)
        for lease in to_preempt(state, now_s) if state.waiting else ():
            yield on.Preempting(lease_id=lease.lease_id, by_s=now_s + lease.promised_s + BEAT_S)
        if now_s - state.anchored_s >= ANCHOR_S and len(state.unanchored) > 1:
            yield on.Anchored(root=merkle_root(state.unanchored), first=state.first_unanchored, last=state.seq)

    def _funded(self, lease: Lease) -> Iterator[Body]:
        if is_released(self.state, lease):
            yield on.Closed(lease_id=lease.lease_id, reason=RELEASED)
        elif self.now_s - max(lease.opened_s, lease.heard_s, self.up_since_s) >= ACCEPT_S + BEAT_S:
            yield on.Closed(lease_id=lease.lease_id, reason=f"not accepted within {ACCEPT_S:.0f} s")

    def _running(self, lease: Lease) -> Iterator[Body]:
        name, now_s = lease.lease_id, self.now_s
        silent_s = now_s - max(lease.heard_s, self.up_since_s)
        yield from self._agreed(lease)
        if is_released(self.state, lease):
            yield on.Closed(lease_id=name, reason=RELEASED)
        elif lease.is_stalled and now_s - self.up_since_s >= MOST_BLOCK_S:  # before that a block may be on its way
            yield on.Closed(lease_id=name, reason=STALLED)
        elif escrow.is_used_up(lease, self.state.held(name)[0]):
            yield on.Closed(lease_id=name, reason=USED_UP)
        elif now_s - lease.accepted_s >= lease.most_s:
            yield on.Closed(lease_id=name, reason=f"the offer lends for {lease.most_s:.0f} s at most")
        elif lease.state == "reclaiming" and now_s >= lease.reclaim_by_s + BEAT_S:
            yield on.Closed(lease_id=name, reason=lease.reason or "reclaimed by the owner")
        elif lease.state == "running" and silent_s >= SUSPECT_S:
            yield on.Suspected(lease_id=name)
        elif lease.state != "running" and silent_s >= LOST_S:
            yield on.Lost(lease_id=name)

    def _agreed(self, lease: Lease) -> Iterator[Body]:
        """Co-sign for a renter who named the pool: its rules have already refused what is ahead of the clock."""
        if lease.delegate == self.key.public and lease.beat_index > lease.paid_index:
            yield on.Cosigned(lease_id=lease.lease_id, index=lease.beat_index)

    def _closed(self, lease: Lease) -> Iterator[Body]:
        yield from self._agreed(lease)
        if lease.unequal_blocks:
            why = f"a replay of block {lease.unequal_blocks[0]} was unequal"
            yield on.Disputed(lease_id=lease.lease_id, reason=why)
            return
        ends_s, draw = self._window_end(lease), self._draw(lease)
        is_open = yield from self._drawn(lease, drawn_blocks(lease, draw), ends_s)
        if self.now_s >= ends_s and not is_open:
            yield on.Final(lease_id=lease.lease_id)

    def _draw(self, lease: Lease) -> str:
        """The pool's signature from which blocks of a lease are drawn."""
        return self.key.sign(draw_message(self.key.public, lease))

    def _window_end(self, lease: Lease) -> float:
        """When the time to dispute is over [s since 1970].

        After the pool was away, when no verifier could answer, as long after its start as a verifier has.
        """
        if lease.settles_s == lease.closed_s:
            return lease.settles_s
        up_since_s = max(lease.heard_s, self.up_since_s)
        return max(lease.settles_s, up_since_s + min(lease.window_s, lease.verdict_s))

    def _drawn(self, lease: Lease, blocks: list[int], ends_s: float) -> Generator[Body, None, bool]:
        """Ask for blocks that are not found equal yet, until `ends_s`; whether one of them may still get a verdict."""
        is_open = False
        for block in blocks:
            if not lease.equal(block):
                is_open = True
                if self.now_s < ends_s:
                    yield from self._asked(lease, block)
        return is_open and (self.now_s < ends_s or self._is_awaited(lease))

    def _is_awaited(self, lease: Lease) -> bool:
        """Whether a verifier was asked, is there, and still has time."""
        return any(self._is_at_it(lease, one) for one in lease.open_challenges)

    def _is_at_it(self, lease: Lease, challenge: Challenge) -> bool:
        """Whether the verifier of a challenge has still to answer: one that has gone is waited for no longer."""
        is_there = challenge.verifier in self.present or self.now_s < self.known_from_s
        heard_s = self.now_s - max(challenge.since_s, self.up_since_s)  # a verdict could come
        return challenge.equal is None and heard_s < lease.verdict_s and is_there

    def _asked(self, lease: Lease, block: int, *, update: int = 0, against: str = "") -> Iterator[Body]:
        """Ask another agent for a block, if none is at it: one of the same determinism class where there is one.

        With `update` and `against` an arbiter is asked. Each agent has one word on a block (`Lease.asked_for`): a
        friend of a cheat that cleared it as an arbiter does not pass the block as a verifier as well.
        """
        of_block = [one for one in lease.challenges if one.block == block]
        same = [one for one in of_block if one.against == against]
        if len(same) >= MOST_ASKED or any(self._is_at_it(lease, one) for one in same):
            return
        asked = lease.asked_for(block, self.now_s, whole=not update) | {lease.agent, lease.renter}
        free = sorted(one for one in self.present if one not in asked and self.num_open[one] < MOST_OPEN)
        if lease.num_devices > 1:
            able = {one.agent for one in self.state.offers.values() if _has_devices_of(one.offer.device, lease)}
            free = [agent for agent in free if agent in able]
        same_class = [agent for agent in free if self.present[agent] == lease.determinism_class]
        if verifiers := same_class or free:
            draw, name = self._draw(lease), lease.lease_id
            verifier = random.Random(f"{draw}/{block}/{len(of_block)}").choice(verifiers)
            self.num_open[verifier] += 1
            free_fee = escrow.free_for_fees(lease, self.state.held(name)[0], self.now_s) - self.fees[name]
            fee = max(0, min(escrow.replay_fee(lease), free_fee))
            self.fees[name] += fee
            yield on.Challenged(
                lease_id=name, block=block, verifier=verifier, draw=draw, fee=fee, update=update, against=against
            )

    def _disputed(self, lease: Lease) -> Iterator[Body]:
        """Bring blocks that were ever found unequal to a decision; the others are asked for in the window alone."""
        needed, name, ends_s = self.num_to_slash, lease.lease_id, self._window_end(lease)
        is_open, bad = False, lease.unequal_blocks
        for block in bad:
            if lease.num_agreeing(block) >= needed:
                evidence = next(one.evidence for one in lease.challenges if one.block == block and one.judges is False)
                bond, reason = self.state.held(name)[1], _reason(lease, block, needed)
                yield on.Slashed(lease_id=name, amount=bond, evidence=evidence, reason=reason)
                return
        doubted = sorted({*bad, *(one.block for one in lease.challenges if one.dismissed)})
        for block in doubted:
            is_searched = yield from self._searched(lease, block)
            if is_searched is not None:
                is_open |= is_searched
            elif len(lease.equal(block)) < (needed if block in bad else 1):
                before = [*self._asked(lease, block)]
                yield from before
                is_open |= bool(before) or self._is_awaited(lease) or self.now_s < ends_s
        drawn = drawn_blocks(lease, self._draw(lease)) or list(range(len(lease.commitments)))[:1]
        is_open |= yield from self._drawn(lease, [block for block in drawn if block not in doubted], ends_s)
        if is_open:
            return
        for block in bad:
            if len(lease.unequal(block)) > len(lease.equal(block)):
                why = f"block {block} is unequal, and no other verifier could replay it"
                yield on.Refunded(lease_id=name, reason=why)
                return
        if bad or drawn or self.now_s >= ends_s:
            yield on.Final(lease_id=name)

    def _searched(self, lease: Lease, block: int) -> Generator[Body, None, bool | None]:
        """Bring searches for the first bad update of a block on; whether one may still come to something.

        None: none goes on, since a side is gone or cannot make the block again, or no arbiter is left that could
        decide. Then whole blocks are compared, as by verifiers that compare no bits.
        """
        found: bool | None = None
        for verdict in [one for one in lease.challenges if one.block == block and one.judges is False]:
            search = verdict.bisection
            if search is None:
                continue
            if why_dismissed(lease, verdict, self.num_to_slash, self._silent_s(search)) is not None:
                reason = lease.found_update(verdict, search).words()
                yield on.Dismissed(lease_id=lease.lease_id, block=block, verifier=verdict.verifier, reason=reason[:900])
                found = True
            elif search.is_ready:
                asked = [*self._asked(lease, block, update=search.update, against=verdict.verifier)]
                yield from asked
                if asked or self._is_awaited(lease):
                    found = True
            elif not self._is_left(lease, verdict, search):
                found = True
        return found

    def _silent_s(self, search: Bisection) -> float:
        """For how long a search waits for an answer that this control plane could have taken [s]."""
        return self.now_s - max(search.since_s, self.up_since_s)

    def _is_left(self, lease: Lease, verdict: Challenge, search: Bisection) -> bool:
        """Whether a side of a search does not answer: it said so, has gone, or is out of time."""
        sides: tuple[tuple[str, Party], ...] = ((lease.agent, "agent"), (verdict.verifier, "verifier"))
        is_late = self._silent_s(search) >= lease.verdict_s
        for key, party in sides:
            is_there = key in self.listening or self.now_s < self.known_from_s
            if search.side(party).has_given_up or (search.waits_for(party) and (is_late or not is_there)):
                return True
        return False


def _has_devices_of(device: on.OfferedDevice, lease: Lease) -> bool:
    """Whether a machine that lends this device can be asked for blocks of a lease: any CPU runs several processes."""
    return device.kind == lease.device and (device.kind == "cpu" or device.count >= lease.num_devices)


def _reason(lease: Lease, block: int, num_needed: int) -> str:
    """Why an agent is slashed, as words: the update where there is one, the states after it, and who confirms them."""
    for found in lease.found_updates:
        if found.block == block and 1 + found.for_verifier >= num_needed:
            return found.words()[:900]
    return f"block {block} is unequal by {lease.num_agreeing(block)} replays"
