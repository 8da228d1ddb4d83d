"""Rules for replays, disputes and what a lease comes to: which blocks are drawn, whose word counts, who is paid."""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import replace
from typing import Literal

from stoker.pool import escrow
from stoker.pool import events as on
from stoker.pool.bisection import Bisection, Party, Side
from stoker.pool.commitment import chain_head
from stoker.pool.escrow import Transfer, credits_text, escrow_of
from stoker.pool.events import Event, Refused, canonical
from stoker.pool.keys import is_signed
from stoker.pool.lease import Challenge, Lease, on_chain
from stoker.pool.rules.deciders import decides, require_actor
from stoker.pool.state import Change, Record, State

Dismissal = Literal["contradicted", "silent"]


def draw_message(pool: str, lease: Lease) -> bytes:
    """What the pool signs to draw blocks: its signature is unknown before, and anyone can check it after."""
    return b"stoker pool draw 1\n" + canonical({"pool": pool, "lease_id": lease.lease_id, "ended_by": lease.ended_by})


def drawn_blocks(lease: Lease, draw: str) -> list[int]:
    """Blocks of an ended lease that are replayed, drawn by the pool's signature `draw`; one at least, if any is."""
    num_blocks = len(lease.commitments)
    count = min(num_blocks, math.ceil(lease.check_fraction * num_blocks))
    return sorted(random.Random(draw).sample(range(num_blocks), count))


@decides(on.Challenged, by_operator=True)
def _challenged(state: State, event: Event, body: on.Challenged) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("challenged")
    if body.block >= len(lease.commitments):
        raise Refused(f"lease {lease.lease_id} has {len(lease.commitments)} blocks, and no block {body.block}")
    if not is_signed(state.operator, draw_message(state.operator, lease), body.draw):
        raise Refused(f"the draw of blocks of lease {lease.lease_id} is not signed by the pool")
    if body.verifier in (lease.agent, lease.renter):
        raise Refused("a block is replayed by another agent than the one that ran it, and not by the renter")
    if body.update:
        _require_arbitrable(lease, body)
    if body.verifier in lease.asked_for(body.block, event.received_s, whole=not body.update):
        raise Refused(f"{escrow.short(body.verifier)} was asked for block {body.block} before")
    free = escrow.free_for_fees(lease, state.held(lease.lease_id)[0], event.received_s)
    if body.fee > free:
        raise Refused(f"the fee of {credits_text(body.fee)} is not covered: {credits_text(free)} are free for replays")
    challenge = Challenge(
        block=body.block,
        verifier=body.verifier,
        fee=body.fee,
        since_s=event.received_s,
        account=_fee_account(state, lease, body.verifier),
        update=body.update,
        against=body.against,
    )
    return Change(lease=replace(after, challenges=(*lease.challenges, challenge)))


def _require_arbitrable(lease: Lease, body: on.Challenged) -> None:
    """Refuse an arbiter for an update on which the sides do not differ first."""
    _, search = _open_search(lease, body.block, body.against)
    if not search.is_ready or search.update != body.update:
        raise Refused(f"no arbiter is needed for update {body.update:,} of lease {lease.lease_id}")


def _fee_account(state: State, lease: Lease, verifier: str) -> str:
    """The account that gets a verifier's fee: its key, or the address that an offer of it names."""
    if lease.contract is None:
        return verifier
    payees = (one.offer.payee for one in state.offers.values() if one.agent == verifier)
    if not (payee := next(filter(None, payees), "")):
        raise Refused(f"{escrow.short(verifier)} has no offer, whose address a fee could go to")
    accounts = {one.account for one in lease.challenges} | {on_chain(payee)}
    if len(accounts) > escrow.MOST_VERIFIERS:
        raise Refused(f"lease {lease.lease_id} has {escrow.MOST_VERIFIERS} verifiers, and a contract pays no more")
    return on_chain(payee)


@decides(on.VerdictGiven)
def _verdict(state: State, event: Event, body: on.VerdictGiven) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the verifier that is named", body.verifier)
    after = lease.after("verdict")
    same = [one for one in lease.challenges if one.block == body.block and one.verifier == body.verifier]
    asked = same[-1] if same else None  # an arbiter that gave no verdict may be asked for the whole block after that
    if asked is None or asked.equal is not None or body.against not in ("", asked.against):
        raise Refused(f"{escrow.short(body.verifier)} has no open challenge for block {body.block} of {lease.lease_id}")
    held = state.held(lease.lease_id)[0]
    is_late = not lease.is_in_time(asked, event.received_s)  # it is paid out of what is promised to no other
    fee = min(asked.fee, escrow.free_for_fees(lease, held, event.received_s) if is_late else held)
    given = replace(asked, equal=body.equal, evidence=body.evidence, fee=fee, made=body.made)
    if asked.update:
        _require_consistent(lease, given)
    elif not body.equal and body.made:
        given = replace(given, bisection=_search(lease, body, event.received_s))
    record = state.record_of(body.verifier)
    return Change(
        lease=after.with_challenge(asked, given),
        transfers=(Transfer(escrow_of(lease.lease_id), asked.account, fee),) if fee else (),
        records=((body.verifier, replace(record, verdicts=record.verdicts + 1)),),
    )


def _require_consistent(lease: Lease, given: Challenge) -> None:
    """Refuse an arbiter's word that its own state contradicts."""
    _, search = lease.searched(given.block, given.against)
    if given.made and given.equal is not (given.made == search.agent.end):
        raise Refused(
            f"an arbiter that came to {given.made[:12]}… cannot find the agent's {search.agent.end[:12]}… "
            f"{'equal' if given.equal else 'unequal'}"
        )


def _search(lease: Lease, body: on.VerdictGiven, now_s: float) -> Bisection | None:
    """The search that an unequal verdict begins; None for a block that has no updates."""
    high = lease.commitments[body.block].update
    begin = lease.commitments[body.block - 1].update if body.block else body.begins
    if begin >= high:
        return None
    return Bisection(begin=begin, low=begin, high=high, agent=Side(), verifier=Side(end=body.made), since_s=now_s)


@decides(on.Traced)
def _traced(state: State, event: Event, body: on.Traced) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("traced")
    verdict, search = _open_search(lease, body.block, body.verifier)
    party = _party(event, lease, verdict)
    found = search.traced(party, body.states, event.received_s)
    if party == "agent" and body.states and not search.agent.end:
        committed = lease.commitments[body.block]
        previous = lease.commitments[body.block - 1].state if body.block else body.previous
        if chain_head(previous, committed.update, body.states[-1]) != committed.state:
            raise Refused(
                f"the states of the agent end in {body.states[-1][:12]}…, which is not what it committed to as block "
                f"{body.block} of lease {lease.lease_id}"
            )
    return Change(lease=after.with_challenge(verdict, replace(verdict, bisection=found)))


@decides(on.Supplied)
def _supplied(state: State, event: Event, body: on.Supplied) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("supplied")
    verdict, search = _open_search(lease, body.block, body.verifier)
    found = search.supplied(_party(event, lease, verdict), body.before, body.after, event.received_s)
    return Change(lease=after.with_challenge(verdict, replace(verdict, bisection=found)))


def _open_search(lease: Lease, block: int, verifier: str) -> tuple[Challenge, Bisection]:
    """The search that a verdict began which still counts."""
    verdict, search = lease.searched(block, verifier)
    if verdict.dismissed:
        raise Refused(f"the verdict of {escrow.short(verifier)} on block {block} of {lease.lease_id} was dismissed")
    return verdict, search


def _party(event: Event, lease: Lease, verdict: Challenge) -> Party:
    party = lease.party(event.actor, verdict)
    if party is None:
        require_actor(event, "the agent of the lease, or the verifier that is named,", lease.agent, verdict.verifier)
    assert party is not None
    return party


def why_dismissed(lease: Lease, verdict: Challenge, num_needed: int, silent_s: float) -> Dismissal | None:
    """Why an unequal verdict counts no more; None: it counts.

    Each side counts itself: so many arbiters clear an agent as would, with the verifier, convict it. A verifier that
    lets its time pass, or cannot make the block again, has proved nothing; where the agent does not answer either,
    nothing is lost by its silence.

    Args:
        lease: that is disputed.
        verdict: one on a block of it.
        num_needed: agents that convict.
        silent_s: time that the search waits for an answer [s].
    """
    search = verdict.bisection
    if search is None:
        return None
    if search.is_void or 1 + len(lease.arbiters(verdict, against_agent=False)) >= max(2, num_needed):
        return "contradicted"
    is_answered = not (search.waits_for("agent") or search.agent.has_given_up)
    is_late = is_answered and search.waits_for("verifier") and silent_s >= lease.verdict_s
    return "silent" if search.verifier.has_given_up or is_late else None


@decides(on.Dismissed, by_operator=True)
def _dismissed(state: State, event: Event, body: on.Dismissed) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("dismissed")
    verdict, search = _open_search(lease, body.block, body.verifier)
    assert state.rules is not None
    why = why_dismissed(lease, verdict, state.rules.verdicts_to_slash, event.received_s - search.since_s)
    if why is None:
        raise Refused(f"nothing contradicts the verdict of {escrow.short(body.verifier)} on block {body.block} yet")
    wrong = lease.arbiters(verdict, against_agent=True) | {body.verifier} if why == "contradicted" else set[str]()
    return Change(
        lease=after.with_challenge(verdict, replace(verdict, dismissed=why)),
        records=tuple(
            (key, replace(record, wrong_verdicts=record.wrong_verdicts + 1))
            for key in sorted(wrong)
            for record in [state.record_of(key)]
        ),
    )


@decides(on.Disputed)
def _disputed(state: State, event: Event, body: on.Disputed) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the renter or the pool", lease.renter, state.operator)
    after = lease.after("disputed")
    if event.received_s > lease.closed_s + lease.window_s and not lease.unequal_blocks:
        raise Refused(f"the time to dispute lease {lease.lease_id} ended {lease.window_s:.0f} s after it was closed")
    return Change(lease=after)


@decides(on.Slashed, by_operator=True)
def _slashed(state: State, _: Event, body: on.Slashed) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("slashed")
    assert state.rules is not None
    needed = state.rules.verdicts_to_slash
    found = max((lease.num_agreeing(one.block) for one in lease.challenges), default=0)
    if found < needed:
        raise Refused(
            f"{found} verifiers found a block of lease {lease.lease_id} unequal and agree, {needed} are needed to slash"
        )
    record = state.record_of(lease.agent)
    record = replace(record, slashed=record.slashed + 1, failed=record.failed + 1, passed=0)
    held, bond = state.held(lease.lease_id)
    settlement = escrow.refund_of(lease, bond, body.amount)
    return Change(
        lease=replace(after, outcome="slashed", settlement=settlement),
        transfers=tuple(escrow.carry_out(lease, settlement, held, bond)),
        records=((lease.agent, record), *_contradicted(state, lease, is_right=False)),
    )


@decides(on.Refunded, by_operator=True)
def _refunded(state: State, _: Event, body: on.Refunded) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("refunded")
    held, bond = state.held(lease.lease_id)
    settlement = escrow.refund_of(lease, bond)
    after = replace(after, outcome="refunded", settlement=settlement)
    return Change(lease=after, transfers=tuple(escrow.carry_out(lease, settlement, held, bond)))


@decides(on.Final)
def _final(state: State, event: Event, body: on.Final) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the renter or the pool", lease.renter, state.operator)
    after = lease.after("final")
    if lease.state in ("slashed", "refunded"):
        return Change(lease=after)
    is_early = event.received_s < lease.settles_s
    if event.actor != state.operator:
        if lease.open_challenges and (is_early or lease.state == "disputed"):
            raise Refused(f"a block of lease {lease.lease_id} is being replayed: its verifier is paid first")
    elif lease.state == "closed":
        if is_early:
            raise Refused(f"lease {lease.lease_id} can be disputed until {lease.window_s:.0f} s after it was closed")
        if any(lease.unequal(one.block) for one in lease.challenges):
            raise Refused(f"a replay of lease {lease.lease_id} was unequal: it is disputed first")
    records: list[tuple[str, Record]] = []
    is_cleared = all(len(lease.equal(block)) > len(lease.unequal(block)) for block in lease.unequal_blocks)
    if any(one.judges for one in lease.challenges) and is_cleared:
        record = state.record_of(lease.agent)
        records.append((lease.agent, replace(record, passed=record.passed + 1)))
    records += _contradicted(state, lease, is_right=True)
    held, bond = state.held(lease.lease_id)
    settlement = escrow.settlement_of(lease, held)
    return Change(
        lease=replace(after, settlement=settlement),
        records=tuple(records),
        transfers=tuple(escrow.carry_out(lease, settlement, held, bond)),
    )


def _contradicted(state: State, lease: Lease, *, is_right: bool) -> list[tuple[str, Record]]:
    """Records of verifiers whose word was not the one that held.

    Where the agent was right, those of dismissed verdicts have it already. Where it was wrong, it is those who passed a
    block that others found wrong, and arbiters who were for the agent; a verdict that such arbiters had dismissed, and
    that came to the state which held, was none.
    """
    held = [one for one in lease.challenges if one.judges is False]
    change = Counter[str]()
    if is_right:
        change.update({one.verifier for one in held})
    else:
        states, bad = {(one.block, one.made) for one in held if one.made}, {one.block for one in held}
        dismissed = [one for one in lease.challenges if one.dismissed == "contradicted"]
        vindicated = [one for one in dismissed if (one.block, one.made) in states]
        verdicts = {(one.block, one.verifier) for one in (*held, *vindicated)}
        wrong = [one for one in lease.challenges if one.equal is True]
        change.update({one.verifier for one in wrong if one.judges is True and one.block in bad})
        change.update({one.verifier for one in wrong if (one.block, one.against) in verdicts})
        change.subtract({one.verifier for one in vindicated})
    records = [(verifier, count, state.record_of(verifier)) for verifier, count in sorted(change.items()) if count]
    return [(key, replace(one, wrong_verdicts=max(0, one.wrong_verdicts + count))) for key, count, one in records]
