"""Rules for credits, offers, probes, forwarded blobs, turns and roots."""

from __future__ import annotations

from dataclasses import replace

from stoker.pool import escrow
from stoker.pool import events as on
from stoker.pool.escrow import Transfer, credits_text
from stoker.pool.events import Event, Refused
from stoker.pool.fair_use import WaitingRequest
from stoker.pool.forwarding import require_forwardable
from stoker.pool.joint_probe import Clash, Pair, clashes, counted, is_late, is_slower_than_claimed
from stoker.pool.pair_links import StatedLink
from stoker.pool.rules.deciders import decides, require_actor
from stoker.pool.state import Change, ListedOffer, State, merkle_root

MOST_OFFERS = 64
"""Offers that one key may have."""
MOST_WAITING, MOST_WAIT_S = 16, 600.0
"""Requests of one key that wait, and how long before they are posted again [s]."""


@decides(on.Deposited, by_operator=True)
def _deposited(state: State, _: Event, body: on.Deposited) -> Change:
    assert state.rules is not None
    if state.rules.contract and body.amount:
        raise Refused(
            f"the money of this pool is in the contract {state.rules.contract}: a key is admitted with 0",
            remedy=f"stoker pool wallet --grant {body.account}=0",
        )
    return Change(transfers=(Transfer(None, body.account, body.amount),), admitted=body.account)


@decides(on.Offered)
def _offered(state: State, event: Event, body: on.Offered) -> Change:
    offer, known = body.offer, state.offers.get(body.offer.offer_id)
    if known is not None:
        require_actor(event, "who made the offer", known.agent)
    elif state.num_offers[event.actor] >= MOST_OFFERS:
        raise Refused(f"one key has at most {MOST_OFFERS} offers", remedy="Withdraw one, or use another key.")
    assert state.rules is not None
    if state.rules.contract and not offer.payee:
        raise Refused(
            f"offer {offer.offer_id} names no address that the contract {state.rules.contract} pays",
            remedy="Give the agent a key of that chain: STOKER_CHAIN_KEY.",
        )
    if offer.price_per_hour < offer.cost_per_hour:
        raise Refused(
            f"offer {offer.offer_id} asks {credits_text(offer.price_per_hour)} an hour, below its cost of "
            f"{credits_text(offer.cost_per_hour)}",
            remedy="Raise --price, or correct --cost.",
        )
    if offer.expires_s <= event.received_s:
        raise Refused(f"offer {offer.offer_id} has lapsed {event.received_s - offer.expires_s:.0f} s ago")
    if known is not None:
        claimed, shown = offer.measured.fp32_flop_per_s, known.offer.measured.fp32_flop_per_s
        is_shown = offer.device == known.offer.device and claimed <= shown  # the probe was held against that claim
        probed_s = known.probed_s if is_shown else 0.0
        return Change(offer=replace(known, offer=offer, offered_s=event.received_s, probed_s=probed_s))
    return Change(offer=ListedOffer(offer=offer, agent=event.actor, offered_s=event.received_s))


@decides(on.Withdrawn)
def _withdrawn(state: State, event: Event, body: on.Withdrawn) -> Change:
    if (known := state.offers.get(body.offer_id)) is None:
        raise Refused(f"there is no offer {body.offer_id!r}")
    require_actor(event, "who made the offer", known.agent)
    if known.lease_id:  # kept until the lease ends: its device is not free under that name
        return Change(offer=replace(known, offer=replace(known.offer, expires_s=event.received_s)))
    return Change(gone_offer=body.offer_id)


@decides(on.Probed, by_operator=True)
def _probed(state: State, event: Event, body: on.Probed) -> Change:
    standing = []
    for times in body.offers:
        listed = state.offers.get(times.offer_id)
        if listed is None or listed.agent != times.agent:
            raise Refused(f"{escrow.short(times.agent)} has no offer {times.offer_id!r}")
        standing.append(listed)
    rounds = {len(times.together_s) for times in body.offers}
    if len(rounds) != 1 or not min(rounds):
        raise Refused("the offers of a probe have as many rounds each, one at least")
    met = [
        replace(listed, probed_s=event.received_s)
        for listed, times in zip(standing, body.offers, strict=True)
        if times.claimed_s
        and not is_slower_than_claimed(times)
        and not any(is_late(times, number) for number in range(min(rounds)))
    ]
    names, found = [times.offer_id for times in body.offers], list[tuple[Pair, Clash | None]]()
    for pair, is_one in clashes(body).items():
        known = state.clashes.get(pair)
        is_standing = known is not None and known.is_of_standing(state.offers, event.received_s)
        found.append((pair, counted(known, names, is_late=is_one, is_standing=is_standing)))
    return Change(probed=tuple(met), clashes=tuple(found))


@decides(on.Linked)
def _linked(state: State, event: Event, body: on.Linked) -> Change:
    for agent in (event.actor, body.other):
        if not state.num_offers[agent]:
            raise Refused(f"{escrow.short(agent)} has no offer: links are measured between agents")
    if body.other == event.actor:
        raise Refused("a link is one to another agent")
    link = StatedLink(
        upload_bytes_per_s=body.upload_bytes_per_s,
        download_bytes_per_s=body.download_bytes_per_s,
        delay_s=body.delay_s,
        at_s=event.received_s,
    )
    return Change(linked=(((event.actor, body.other), link),))


@decides(on.Anchored, by_operator=True)
def _anchored(state: State, event: Event, body: on.Anchored) -> Change:
    if body.first != state.first_unanchored or not body.first <= body.last < event.seq:
        raise Refused(f"the next root is of events from {state.first_unanchored} on, up to {event.seq - 1} at most")
    if body.root != (expected := merkle_root(state.unanchored[: body.last - body.first + 1])):
        raise Refused(f"the root of events {body.first} to {body.last} is {expected[:12]}…, not {body.root[:12]}…")
    return Change(anchored=body)


@decides(on.Forwarded, by_operator=True)
def _forwarded(state: State, _: Event, body: on.Forwarded) -> Change:
    lease = state.lease(body.lease_id)
    if body.blob not in lease.blobs or body.blob in lease.forwarded:
        raise Refused(f"the blob {body.blob[:12]}… is none of lease {lease.lease_id}, or is paid for")
    assert state.rules is not None
    fee = require_forwardable(
        lease.lease_id,
        body.num_bytes,
        state.rules,
        most=lease.most_forwarding,
        sent_bytes=lease.forwarded_bytes,
        spent=lease.forwarded_credits,
    )
    if body.amount != fee:
        raise Refused(f"forwarding {body.num_bytes:,} bytes costs {fee} micro-credits here, not {body.amount}")
    lease = replace(
        lease.after("forwarded"),
        forwarded=(*lease.forwarded, body.blob),
        forwarded_bytes=lease.forwarded_bytes + body.num_bytes,
        forwarded_credits=lease.forwarded_credits + fee,
    )
    return Change(transfers=(Transfer(lease.renter, state.operator, fee),), lease=lease)


@decides(on.TeamMade, by_operator=True)
def _team(state: State, _: Event, body: on.TeamMade) -> Change:
    taken = {member: team.team for team in state.teams.values() for member in team.members if team.team != body.team}
    if both := [member for member in body.members if member in taken]:
        raise Refused(f"the key {escrow.short(both[0])} is in team {taken[both[0]]} already")
    return Change(team=body)


@decides(on.Waiting)
def _waiting(state: State, event: Event, body: on.Waiting) -> Change:
    mine = [one for one in state.waiting.values() if one.renter == event.actor]
    known = next((one for one in mine if one.request.request_id == body.request_id), None)
    if known is None and len(mine) >= MOST_WAITING:
        raise Refused(f"one key waits for {MOST_WAITING} devices at most")
    if body.until_s > event.received_s + MOST_WAIT_S:
        raise Refused(f"a request waits for {MOST_WAIT_S:.0f} s at most", remedy="Post it again before it lapses.")
    since_s = event.received_s if known is None else known.since_s
    return Change(waiting=WaitingRequest(renter=event.actor, request=body, since_s=since_s))
