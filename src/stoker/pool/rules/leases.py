"""Rules for a lease from its opening to its end: money in escrow, beats, blocks, notice, silence."""

from __future__ import annotations

import copy
import re
from dataclasses import replace

from stoker.pool import escrow
from stoker.pool import events as on
from stoker.pool.escrow import Transfer, credits_text
from stoker.pool.events import CLOCK_WINDOW_S, Event, NotNow, Offer, Refused
from stoker.pool.fair_use import require_turn, to_preempt
from stoker.pool.gang import (
    Gang,
    begun_by,
    has_waited,
    is_released,
    require_begun,
    require_gang,
    require_one_class,
    require_site,
    with_message,
)
from stoker.pool.lease import ACCEPT_S, LOST_S, METERED, PREEMPTED, SUSPECT_S, Commitment, Lease, run_of
from stoker.pool.rules.deciders import decides, require_actor
from stoker.pool.state import Change, Record, State

_WITH_KEY = re.compile(r"[0-9a-f]{16}-")
"""A lease's name that is for one key alone."""


@decides(on.Opened)
def _opened(state: State, event: Event, body: on.Opened) -> Change:
    listed = state.offers.get(body.offer_id)
    if body.lease_id in state.leases:
        raise Refused(f"there is a lease {body.lease_id!r} already")
    if listed is None or not listed.is_free(event.received_s):
        why = "is gone" if listed is None else "is taken" if listed.lease_id else "has lapsed"
        raise NotNow(f"the offer {body.offer_id!r} {why}", remedy="stoker pool offers shows what is free.")
    _require_not_stopped(state, event, run_of(body.lease_id, body.gang))
    offer, rules = listed.offer, state.rules
    if (other := state.blocked_by(listed, event.received_s)) is not None:
        raise NotNow(
            f"the offers {body.offer_id} and {other.offer.offer_id} did not meet their times at one moment, as if one "
            "device was offered twice",
            remedy="Take another offer; one of both is free again once the other is withdrawn.",
        )
    if _WITH_KEY.match(body.lease_id) and not body.lease_id.startswith(event.actor[:16]):
        raise Refused(f"lease names that begin with {body.lease_id[:17]} are for the key that begins so")
    if event.actor == listed.agent:
        raise Refused("a key cannot rent from itself: it would earn a record for nothing")
    if body.rate_per_hour < offer.price_per_hour:
        raise Refused(
            f"lease {body.lease_id} pays {credits_text(body.rate_per_hour)} an hour, the offer asks "
            f"{credits_text(offer.price_per_hour)}"
        )
    assert rules is not None
    if body.window_s < rules.least_window_s:
        raise Refused(f"the time to dispute is {body.window_s} s, this pool wants {rules.least_window_s} s at least")
    check = escrow.checked_fraction(body.verify_fraction, state.record_of(listed.agent).passed)
    # The control plane asks for more: see `admission`.
    least = max(escrow.required_deposit(body.forecast.credits, check), escrow.pay_for(offer.min_s, body.rate_per_hour))
    if body.deposit < least:
        raise Refused(
            f"the deposit of {credits_text(body.deposit)} does not cover the forecast: "
            f"{credits_text(body.forecast.credits)} for {body.forecast.hours:.2f} h and replaying "
            f"{100 * check:.0f} % of it, {credits_text(least - body.deposit)} are missing",
            remedy=f"Deposit {credits_text(least)}.",
        )
    if body.bond > escrow.MOST_BOND * body.deposit:
        raise Refused(
            f"a bond of {credits_text(body.bond)} for a deposit of {credits_text(body.deposit)}: at most "
            f"{escrow.MOST_BOND} times the deposit is taken"
        )
    lease = Lease(
        lease_id=body.lease_id,
        offer_id=body.offer_id,
        renter=event.actor,
        agent=listed.agent,
        delegate=body.delegate,
        order=body.order,
        device=offer.device.kind,
        determinism_class=offer.determinism_class,
        rate_per_hour=body.rate_per_hour,
        deposit=body.deposit,
        bond=body.bond,
        window_s=body.window_s,
        verify_fraction=body.verify_fraction,
        check_fraction=check,
        value_per_hour=body.value_per_hour,
        forecast=body.forecast,
        promised_s=offer.reclaim_s,
        most_s=offer.max_s,
        opened_s=event.received_s,
        inputs=body.inputs,
        num_devices=offer.device.count,
        contract=_contract_terms(state, event, body, offer),
        most_forwarding=body.most_forwarding,
        gang=body.gang,
        site=body.site,
    ).after("opened")
    require_turn(state, event.actor, listed, event.received_s)
    gang = require_site(state, body, event.actor, offer.determinism_class) if body.gang else None
    return Change(
        gang=None if gang is None else gang.with_lease(lease),
        lease=lease,
        offer=replace(listed, lease_id=lease.lease_id),
        transfers=tuple(escrow.fund(lease)),
        served=event.actor,
    )


def _require_not_stopped(state: State, event: Event, run: str) -> None:
    if (event.actor, run) in state.stopped:
        raise Refused(
            f"the run {run} was stopped by its renter: no lease of it is opened",
            remedy="Start it again with its command.",
        )


@decides(on.RunStopped)
def _stopped(state: State, event: Event, body: on.RunStopped) -> Change:
    gang, first = state.gangs.get(body.run), state.leases.get(f"{body.run}.0")
    if event.actor not in {one.renter for one in (gang, first) if one is not None}:  # else state grows for nothing
        raise Refused(f"this key has no run {body.run!r} in this pool: it has had no lease")
    run = frozenset({(event.actor, body.run)})
    return Change(stopped=run) if body.is_stopped else Change(started=run)


@decides(on.GangOpened)
def _gang_opened(state: State, event: Event, body: on.GangOpened) -> Change:
    name, known = body.leases[0].gang, state.gangs.get(body.leases[0].gang)
    assert state.rules is not None
    if state.rules.contract:
        raise Refused(
            f"the money of this pool is in the contract {state.rules.contract}, which takes one lease at a time",
            remedy="Train with one agent, or at a pool with internal credits.",
        )
    if _WITH_KEY.match(name) and not name.startswith(event.actor[:16]):
        raise Refused(f"gang names that begin with {name[:17]} are for the key that begins so")
    _require_not_stopped(state, event, name)
    require_gang(body, known, state, event.actor)
    # Before all leases are copied: keys that have nothing cost nothing.
    deposits = [Transfer(event.actor, escrow.escrow_of(one.lease_id), one.deposit) for one in body.leases]
    state.accounts.require_covered(deposits)
    listed = [state.offers[one.offer_id] for one in body.leases if one.offer_id in state.offers]
    # Each lease is decided as after those before it: an offer is taken once, and a quota counts all of them.
    trial = copy.copy(state)
    trial.leases, trial.offers = dict(state.leases), dict(state.offers)
    trial.unsettled, trial.gangs = set(state.unsettled), dict(state.gangs)
    changes = list[Change]()
    before = known or Gang(
        gang=name,
        renter=event.actor,
        sites=len(body.leases),
        determinism_class="",
        leases=((),) * len(body.leases),
    )
    for one in body.leases:
        change = _opened(trial, event, replace(one, gang="", site=0, sites=0))
        assert change.lease is not None
        assert change.offer is not None
        lease = replace(change.lease, gang=name, site=one.site)
        before = before.with_lease(lease)
        changes.append(replace(change, lease=lease))
        trial.leases[lease.lease_id], trial.offers[change.offer.offer.offer_id] = lease, change.offer
        trial.unsettled.add(lease.lease_id)
    gang = replace(before, determinism_class=require_one_class(name, listed, known, state), begun_s=0.0)
    return replace(changes[0], gang=gang, others=tuple(changes[1:]))


def _contract_terms(state: State, event: Event, body: on.Opened, offer: Offer) -> on.ContractTerms | None:
    """Terms of an escrow in the pool's contract; None: the pool has none.

    That the deposit is there is for the control plane to see before it takes the event, and for auditors on the chain.
    """
    terms = body.contract
    assert state.rules is not None
    if bool(state.rules.contract) != (terms is not None):
        holder = f"the contract {state.rules.contract}" if state.rules.contract else "the pool's own log"
        raise Refused(
            f"the money of this pool is in {holder}: lease {body.lease_id} has other terms",
            remedy="Name the chain and your key of it: STOKER_CHAIN, STOKER_CHAIN_KEY.",
        )
    if terms is None:
        return None
    if terms.payee != offer.payee or not (terms.payer and terms.cosigner):
        raise Refused(f"lease {body.lease_id} pays {terms.payee or 'no address'}, the offer names {offer.payee}")
    least_s = escrow.least_deadline_s(event.received_s - CLOCK_WINDOW_S, offer.max_s, body.window_s)
    if terms.deadline_s < least_s:
        raise Refused(
            f"the deadline of lease {body.lease_id} on the chain is {least_s - terms.deadline_s:.0f} s early:"
            " the longest lease, the time to dispute and replays have to end before it"
        )
    return terms


@decides(on.Accepted)
def _accepted(state: State, event: Event, body: on.Accepted) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the agent of the lease", lease.agent)
    lease = replace(lease.after("accepted"), accepted_s=event.received_s, heard_s=event.received_s)
    return Change(lease=lease, transfers=tuple(escrow.put_up(lease)), gang=begun_by(state, lease))


@decides(on.Beat)
def _beat(state: State, event: Event, body: on.Beat) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the agent of the lease", lease.agent)
    if body.running_s or body.samples:
        require_begun(state, lease, "time on the meter")
    gang = state.gangs.get(lease.gang)
    return Change(
        lease=lease.after("beat").with_beat(
            index=body.index,
            running_s=body.running_s,
            samples=body.samples,
            chain=body.state,
            now_s=event.received_s,
            since_s=max(lease.accepted_s, 0.0 if gang is None else gang.begun_s),
        )
    )


@decides(on.Cosigned)
def _cosigned(state: State, event: Event, body: on.Cosigned) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the renter of the lease, or its delegate,", lease.renter, lease.delegate)
    if bool(body.voucher) != (lease.contract is not None):
        raise Refused(
            f"beats of lease {lease.lease_id} are co-signed {'with' if lease.contract else 'without'} a voucher"
        )
    return Change(lease=lease.after("cosigned").cosigned(body.index, body.voucher))


@decides(on.Committed)
def _committed(state: State, event: Event, body: on.Committed) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the agent of the lease", lease.agent)
    require_begun(state, lease, "block")
    commitment = Commitment(
        block=body.block,
        update=body.update,
        state=body.state,
        blob=body.blob,
        seal=body.seal,
        running_s=lease.running_s,
        at_s=event.received_s,
    )
    return Change(lease=lease.after("committed").with_commitment(commitment, body.previous))


@decides(on.Sent)
def _sent(state: State, event: Event, body: on.Sent) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the agent of the lease", lease.agent)
    return Change(lease=with_message(state, lease.after("sent"), body))


@decides(on.Suspected, by_operator=True)
def _suspected(state: State, event: Event, body: on.Suspected) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("suspected")
    lease.require_silence(SUSPECT_S, event.received_s)
    return Change(lease=after)


@decides(on.Lost, by_operator=True)
def _lost(state: State, event: Event, body: on.Lost) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("lost")
    lease.require_silence(LOST_S, event.received_s)
    return _ended(state, event, replace(after, reason="lost"), "lost")


@decides(on.Reclaiming)
def _reclaiming(state: State, event: Event, body: on.Reclaiming) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the agent of the lease", lease.agent)
    after = lease.after("reclaiming")
    notice_s = body.by_s - event.received_s
    if notice_s < lease.promised_s - 5:
        raise Refused(
            f"notice of {notice_s:.0f} s for lease {lease.lease_id}, its offer promised {lease.promised_s:.0f} s"
        )
    return Change(lease=replace(after, reclaim_by_s=body.by_s))


@decides(on.Preempting, by_operator=True)
def _preempting(state: State, event: Event, body: on.Preempting) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("preempting")
    if lease not in to_preempt(state, event.received_s):
        raise Refused(f"no lease of a higher priority waits for the device of lease {lease.lease_id}")
    if body.by_s < event.received_s + lease.promised_s:
        raise Refused(f"lease {lease.lease_id} has a notice of {lease.promised_s:.0f} s")
    return Change(lease=replace(after, reclaim_by_s=body.by_s, reason=PREEMPTED))


@decides(on.Finished)
def _finished(state: State, event: Event, body: on.Finished) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the agent of the lease", lease.agent)
    require_begun(state, lease, "result")
    after = replace(lease.after("finished"), result=body.result, reason="finished", uncommitted_s=lease.tail_s)
    return _ended(state, event, after, "finished")


@decides(on.Closed)
def _closed(state: State, event: Event, body: on.Closed) -> Change:
    lease = state.lease(body.lease_id)
    require_actor(event, "the renter, the agent or the pool", lease.renter, lease.agent, state.operator)
    after = replace(lease.after("closed"), reason=body.reason)
    if event.actor == state.operator and not _may_close(state, lease, event.received_s):
        raise Refused(f"lease {lease.lease_id} goes on: the pool closes what is not accepted, used up or too long")
    how = None
    if event.actor == lease.agent and lease.state in METERED and lease.reason != PREEMPTED:
        how = "reclaimed" if lease.state == "reclaiming" else "left"  # with notice, and it may leave before it is over
    is_used_up = escrow.is_used_up(lease, state.held(lease.lease_id)[0])
    if event.actor == state.operator and lease.is_stalled:  # also where it is the renter
        how = "left"
    elif event.actor == lease.renter or (event.actor == state.operator and is_used_up):
        after = replace(after, uncommitted_s=lease.tail_s)  # else the agent could have committed before
    if how == "left" and has_waited(state, after):
        how = None
    return _ended(state, event, after, how)


def _may_close(state: State, lease: Lease, now_s: float) -> bool:
    """Whether the pool itself may end a lease: not accepted in time, deposit used up, or longer than offered."""
    if is_released(state, lease):
        return True
    if lease.state == "funded":
        return now_s - lease.opened_s >= ACCEPT_S
    is_used_up = escrow.is_used_up(lease, state.held(lease.lease_id)[0])
    is_too_long = now_s - lease.accepted_s >= lease.most_s
    is_reclaimed = lease.reclaim_by_s > 0 and now_s >= lease.reclaim_by_s
    return is_used_up or is_too_long or is_reclaimed or lease.is_stalled


def _ended(state: State, event: Event, lease: Lease, how: str | None) -> Change:
    """The meter stops: money that is not needed any more goes back, the offer is free, the agent's record grows."""
    lease = replace(lease, closed_s=event.received_s, closed_by=event.actor, ended_by=event.hash)
    listed = state.offers.get(lease.offer_id)
    records: tuple[tuple[str, Record], ...] = ()
    declined = None
    if lease.accepted_s:
        record = state.record_of(lease.agent)
        # A lost machine ran until it was heard last.
        until_s = lease.heard_s if how == "lost" else event.received_s
        record = replace(record, ran_s=record.ran_s + until_s - lease.accepted_s)
        if how is not None:
            record = replace(record, **{how: getattr(record, how) + 1})
        records = ((lease.agent, record),)
    # Not the renter, who may take back what waits; nor an agent that is released with the rest of its gang.
    elif event.actor in (lease.agent, state.operator) and not is_released(state, lease):
        declined = (lease.agent, lease.renter)
        if declined not in state.declined:  # of one renter's leases that cannot run the first says enough
            record = state.record_of(lease.agent)
            records = ((lease.agent, replace(record, declined=record.declined + 1)),)
    return Change(
        lease=lease,
        declined=declined,
        offer=replace(listed, lease_id="") if listed is not None and listed.lease_id == lease.lease_id else None,
        transfers=tuple(escrow.end(lease, state.held(lease.lease_id)[0])),
        records=records,
    )
