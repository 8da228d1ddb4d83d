"""The pool's state: a fold over its log. Every reader of the log comes to the same balances, leases and records.

`decide(state, event)` looks and changes nothing: it returns what the event would change, or raises `Refused` with a
sentence. `State.take` makes the change. So an event that is refused leaves no trace, and the control plane can put an
event on the disk before it counts.
"""

from __future__ import annotations

import copy
import hashlib
import math
import random
import re
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from stoker.pool import escrow
from stoker.pool import events as on
from stoker.pool.bisection import Bisection, Party, Side
from stoker.pool.commitment import chain_head
from stoker.pool.escrow import Accounts, Transfer, bond_of, credits_text, escrow_of
from stoker.pool.events import CLOCK_WINDOW_S, FIRST_PREVIOUS, Body, Event, NotNow, Offer, Refused, canonical
from stoker.pool.fair_use import WaitingRequest, require_turn, to_preempt
from stoker.pool.forwarding import require_forwardable
from stoker.pool.gang import (
    Gang,
    begun_by,
    is_released,
    require_begun,
    require_gang,
    require_one_class,
    require_site,
    with_message,
)
from stoker.pool.joint_probe import (
    PROBES_TO_MARK,
    Clash,
    Pair,
    blocked_by,
    clashes,
    counted,
    is_late,
    is_slower_than_claimed,
)
from stoker.pool.keys import is_signed
from stoker.pool.lease import ACCEPT_S, LOST_S, METERED, PREEMPTED, SUSPECT_S, Challenge, Commitment, Lease, on_chain
from stoker.records.codec import OMIT_DEFAULT

MOST_OFFERS = 64
"""Offers that one key may have."""
MOST_WAITING, MOST_WAIT_S = 16, 600.0
"""Requests of one key that wait, and how long before they are posted again [s]."""
_WITH_KEY = re.compile(r"[0-9a-f]{16}-")
"""A lease's name that is for one key alone."""
Dismissal = Literal["contradicted", "silent"]
LAPSED_S = 3600.0
"""Offers that lapsed so long ago are forgotten with the next root [s]."""


@dataclass(frozen=True, kw_only=True)
class ListedOffer:
    """An offer, who made it, when it was made last [s since 1970], and the lease that holds its device ("": free).

    `probed_s`: when it met its time together with others last [s since 1970]; 0: never. See `joint_probe`.
    """

    offer: Offer
    agent: str
    offered_s: float
    lease_id: str = ""
    probed_s: float = field(default=0.0, metadata=OMIT_DEFAULT)

    def is_free(self, now_s: float) -> bool:
        """Whether it stands and its device is not leased; `State.is_free` looks at other offers as well."""
        return not self.lease_id and now_s < self.offer.expires_s

    def stands(self, now_s: float) -> bool:
        """Whether its device is lent, or may be taken."""
        return bool(self.lease_id) or now_s < self.offer.expires_s


@dataclass(frozen=True, kw_only=True)
class Record:
    """Evidence about an agent: counts from settled and ended leases, never a judgement.

    Attributes:
        finished, lost, reclaimed, left: leases that ended with results, by silence, by notice, without notice.
        declined: renters of whom it did not take up a lease.
        slashed: leases for which its bond was cut.
        passed, failed: jobs that a replay found right, or wrong.
        ran_s: time that its leases were running [s]: what its hazard is estimated from.
        verdicts, wrong_verdicts: replays it made for others, and those that other replays contradicted.
    """

    finished: int = 0
    lost: int = 0
    reclaimed: int = 0
    left: int = 0
    declined: int = 0
    slashed: int = 0
    passed: int = 0
    failed: int = 0
    ran_s: float = 0.0
    verdicts: int = 0
    wrong_verdicts: int = 0


_NO_RECORD = Record()


@dataclass(frozen=True, kw_only=True)
class Change:
    """What one event changes."""

    transfers: tuple[Transfer, ...] = ()
    lease: Lease | None = None
    offer: ListedOffer | None = None
    gone_offer: str = ""
    records: tuple[tuple[str, Record], ...] = ()
    declined: tuple[str, str] | None = None
    admitted: str = ""
    founded: on.Founded | None = None
    anchored: on.Anchored | None = None
    team: on.TeamMade | None = None
    waiting: WaitingRequest | None = None
    served: str = ""
    probed: tuple[ListedOffer, ...] = ()
    clashes: tuple[tuple[Pair, Clash | None], ...] = ()
    gang: Gang | None = None
    others: tuple[Change, ...] = ()
    """What the same event changes besides, of leases that are opened together."""

    @property
    def leases(self) -> list[Lease]:
        """All leases that it changes."""
        own = [] if self.lease is None else [self.lease]
        return own + [lease for other in self.others for lease in other.leases]

    @property
    def all_transfers(self) -> tuple[Transfer, ...]:
        """All money that it moves."""
        return (*self.transfers, *(move for other in self.others for move in other.all_transfers))


@dataclass
class State:
    """What the log says so far."""

    operator: str = ""
    rules: on.Founded | None = None
    seq: int = 0
    head: str = FIRST_PREVIOUS
    received_s: float = 0.0
    accounts: Accounts = field(default_factory=Accounts)
    members: set[str] = field(default_factory=set)
    offers: dict[str, ListedOffer] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    gangs: dict[str, Gang] = field(default_factory=dict)
    records: dict[str, Record] = field(default_factory=dict)
    declined: set[tuple[str, str]] = field(default_factory=set)
    unsettled: set[str] = field(default_factory=set)
    teams: dict[str, on.TeamMade] = field(default_factory=dict)
    waiting: dict[tuple[str, str], WaitingRequest] = field(default_factory=dict)
    num_offers: Counter[str] = field(default_factory=Counter)
    clashes: dict[Pair, Clash] = field(default_factory=dict)
    """Agents that were late together with another one."""
    roots: list[on.Anchored] = field(default_factory=list)
    unanchored: list[str] = field(default_factory=list)
    first_unanchored: int = 1
    anchored_s: float = 0.0
    _nonces: set[tuple[str, str]] = field(default_factory=set)
    _nonce_times: deque[tuple[float, tuple[str, str]]] = field(default_factory=deque)

    def record_of(self, agent: str) -> Record:
        """Evidence about an agent."""
        return self.records.get(agent, _NO_RECORD)

    def lease(self, lease_id: str) -> Lease:
        """The lease of that name.

        Raises:
            Refused: there is none.
        """
        if lease_id not in self.leases:
            raise Refused(f"there is no lease {lease_id!r} in this pool")
        return self.leases[lease_id]

    def blocked_by(self, listed: ListedOffer, now_s: float) -> ListedOffer | None:
        """The offer with which an offer cannot be had at one moment, by two probes; None: there is none."""
        marked = [pair for pair, clash in self.clashes.items() if clash.count >= PROBES_TO_MARK]
        return blocked_by(listed, self.offers.values(), marked, now_s) if marked else None

    def is_free(self, listed: ListedOffer, now_s: float) -> bool:
        """Whether an offer can be taken."""
        return listed.is_free(now_s) and self.blocked_by(listed, now_s) is None

    def held(self, lease_id: str) -> tuple[int, int]:
        """What a lease's escrow and bond have [micro-credits]."""
        return self.accounts.balance(escrow_of(lease_id)), self.accounts.balance(bond_of(lease_id))

    def take(self, event: Event, change: Change) -> None:
        """Make the change that `decide` found for `event`."""
        for each in (change, *change.others):
            self._make(event, each)
        self.seq, self.head, self.received_s = event.seq, event.hash, event.received_s
        self.unanchored.append(self.head)
        self._remember(event)
        self.accounts.require_conserved()

    def _make(self, event: Event, change: Change) -> None:
        if change.founded is not None:
            self.rules, self.operator, self.anchored_s = change.founded, event.actor, event.received_s
            self.members.add(event.actor)
        if change.admitted:
            self.members.add(change.admitted)
        self.accounts.move(change.transfers)
        if change.lease is not None:
            self.leases[change.lease.lease_id] = change.lease
            self.unsettled.add(change.lease.lease_id)
            if change.lease.state == "final":
                self.unsettled.discard(change.lease.lease_id)
        if change.gang is not None:
            self.gangs[change.gang.gang] = change.gang
        if change.offer is not None:
            self.num_offers[change.offer.agent] += change.offer.offer.offer_id not in self.offers
            self.offers[change.offer.offer.offer_id] = change.offer
        for listed in change.probed:
            self.offers[listed.offer.offer_id] = listed
        after = {**self.clashes, **dict(change.clashes)}
        self.clashes = {pair: clash for pair, clash in after.items() if clash is not None}
        if change.gone_offer:
            self._drop_offer(change.gone_offer)
        self.records.update(change.records)
        if change.declined is not None:
            self.declined.add(change.declined)
        self._take_turns(event, change)
        if change.anchored is not None:
            self.roots.append(change.anchored)
            del self.unanchored[: change.anchored.last - self.first_unanchored + 1]
            self.first_unanchored, self.anchored_s = change.anchored.last + 1, event.received_s
            for name in [
                name
                for name, listed in self.offers.items()
                if not listed.lease_id and listed.offer.expires_s < event.received_s - LAPSED_S
            ]:
                self._drop_offer(name)

    def _take_turns(self, event: Event, change: Change) -> None:
        """Teams, and who waits: until its time is over, or it has a lease on such a device."""
        if change.team is not None:
            self.teams[change.team.team] = change.team
        if change.waiting is not None:
            self.waiting[change.waiting.renter, change.waiting.request.request_id] = change.waiting
        for key, one in list(self.waiting.items()):
            is_served = one.renter == change.served and change.lease is not None and one.asks_for(change.lease.device)
            if is_served or event.received_s >= one.request.until_s:
                del self.waiting[key]

    def _drop_offer(self, offer_id: str) -> None:
        self.num_offers[self.offers.pop(offer_id).agent] -= 1

    def _remember(self, event: Event) -> None:
        nonce = (event.actor, event.draft.nonce)
        self._nonces.add(nonce)
        self._nonce_times.append((event.received_s, nonce))
        while self._nonce_times and self._nonce_times[0][0] < event.received_s - 2 * CLOCK_WINDOW_S:
            self._nonces.discard(self._nonce_times.popleft()[1])

    def has_nonce(self, actor: str, nonce: str) -> bool:
        """Whether an event with that nonce came in the last minutes; older ones are stale by their clock."""
        return (actor, nonce) in self._nonces


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
    if isinstance(body, _BY_OPERATOR) and event.actor != state.operator:
        raise Refused(f"only the pool's own key signs {event.kind!r}")
    change = _DECIDERS[type(body)](state, event, body)
    state.accounts.require_covered(change.all_transfers)
    return change


_BY_OPERATOR = (
    on.Deposited,
    on.Suspected,
    on.Lost,
    on.Challenged,
    on.Slashed,
    on.Refunded,
    on.Anchored,
    on.TeamMade,
    on.Preempting,
    on.Forwarded,
    on.Probed,
    on.Dismissed,
)

_Decider = Callable[[State, Event, Any], Change]
_DECIDERS: dict[type[Body], _Decider] = {}


def _decides(kind: type[Body]) -> Callable[[_Decider], _Decider]:
    def register(decider: _Decider) -> _Decider:
        _DECIDERS[kind] = decider
        return decider

    return register


def _by(event: Event, what: str, *allowed: str) -> None:
    """Raises Refused if another key than those allowed signed."""
    if event.actor not in allowed:
        raise Refused(f"{event.kind!r} is signed by {escrow.short(event.actor)}: it is for {what} to sign")


# ----------------------------------------------------------------------------------------------- credits, offers, roots


@_decides(on.Deposited)
def _deposited(state: State, _: Event, body: on.Deposited) -> Change:
    assert state.rules is not None
    if state.rules.contract and body.amount:
        raise Refused(
            f"the money of this pool is in the contract {state.rules.contract}: a key is admitted with 0",
            remedy=f"stoker pool wallet --grant {body.account}=0",
        )
    return Change(transfers=(Transfer(None, body.account, body.amount),), admitted=body.account)


@_decides(on.Offered)
def _offered(state: State, event: Event, body: on.Offered) -> Change:
    offer, known = body.offer, state.offers.get(body.offer.offer_id)
    if known is not None:
        _by(event, "who made the offer", known.agent)
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


@_decides(on.Withdrawn)
def _withdrawn(state: State, event: Event, body: on.Withdrawn) -> Change:
    if (known := state.offers.get(body.offer_id)) is None:
        raise Refused(f"there is no offer {body.offer_id!r}")
    _by(event, "who made the offer", known.agent)
    if known.lease_id:  # kept until the lease ends: its device is not free under that name
        return Change(offer=replace(known, offer=replace(known.offer, expires_s=event.received_s)))
    return Change(gone_offer=body.offer_id)


@_decides(on.Probed)
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


@_decides(on.Anchored)
def _anchored(state: State, event: Event, body: on.Anchored) -> Change:
    if body.first != state.first_unanchored or not body.first <= body.last < event.seq:
        raise Refused(f"the next root is of events from {state.first_unanchored} on, up to {event.seq - 1} at most")
    if body.root != (expected := merkle_root(state.unanchored[: body.last - body.first + 1])):
        raise Refused(f"the root of events {body.first} to {body.last} is {expected[:12]}…, not {body.root[:12]}…")
    return Change(anchored=body)


@_decides(on.Forwarded)
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


@_decides(on.TeamMade)
def _team(state: State, _: Event, body: on.TeamMade) -> Change:
    taken = {member: team.team for team in state.teams.values() for member in team.members if team.team != body.team}
    if both := [member for member in body.members if member in taken]:
        raise Refused(f"the key {escrow.short(both[0])} is in team {taken[both[0]]} already")
    return Change(team=body)


@_decides(on.Waiting)
def _waiting(state: State, event: Event, body: on.Waiting) -> Change:
    mine = [one for one in state.waiting.values() if one.renter == event.actor]
    known = next((one for one in mine if one.request.request_id == body.request_id), None)
    if known is None and len(mine) >= MOST_WAITING:
        raise Refused(f"one key waits for {MOST_WAITING} devices at most")
    if body.until_s > event.received_s + MOST_WAIT_S:
        raise Refused(f"a request waits for {MOST_WAIT_S:.0f} s at most", remedy="Post it again before it lapses.")
    since_s = event.received_s if known is None else known.since_s
    return Change(waiting=WaitingRequest(renter=event.actor, request=body, since_s=since_s))


def merkle_root(hashes: list[str]) -> str:
    """Root of a Merkle tree over hashes (hex).

    Source: RFC 6962, section 2.1: leaves and nodes are hashed with different first bytes.
    """
    level = [hashlib.sha256(b"\0" + bytes.fromhex(one)).digest() for one in hashes]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [hashlib.sha256(b"\1" + b"".join(pair)).digest() if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0].hex() if level else hashlib.sha256(b"").hexdigest()


# -------------------------------------------------------------------------------------------------- a lease, to its end


@_decides(on.Opened)
def _opened(state: State, event: Event, body: on.Opened) -> Change:
    listed = state.offers.get(body.offer_id)
    if body.lease_id in state.leases:
        raise Refused(f"there is a lease {body.lease_id!r} already")
    if listed is None or not listed.is_free(event.received_s):
        why = "is gone" if listed is None else "is taken" if listed.lease_id else "has lapsed"
        raise NotNow(f"the offer {body.offer_id!r} {why}", remedy="stoker pool offers shows what is free.")
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
    # The control plane asks for more (`ControlPlane`); logs of before it did are as right as they were.
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


@_decides(on.GangOpened)
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
    require_gang(body, known, state, event.actor)
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


@_decides(on.Accepted)
def _accepted(state: State, event: Event, body: on.Accepted) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the agent of the lease", lease.agent)
    lease = replace(lease.after("accepted"), accepted_s=event.received_s, heard_s=event.received_s)
    return Change(lease=lease, transfers=tuple(escrow.put_up(lease)), gang=begun_by(state, lease))


@_decides(on.Beat)
def _beat(state: State, event: Event, body: on.Beat) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the agent of the lease", lease.agent)
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


@_decides(on.Cosigned)
def _cosigned(state: State, event: Event, body: on.Cosigned) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the renter of the lease, or its delegate,", lease.renter, lease.delegate)
    if bool(body.voucher) != (lease.contract is not None):
        raise Refused(
            f"beats of lease {lease.lease_id} are co-signed {'with' if lease.contract else 'without'} a voucher"
        )
    return Change(lease=lease.after("cosigned").cosigned(body.index, body.voucher))


@_decides(on.Committed)
def _committed(state: State, event: Event, body: on.Committed) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the agent of the lease", lease.agent)
    require_begun(state, lease, "block")
    commitment = Commitment(
        block=body.block,
        update=body.update,
        state=body.state,
        blob=body.blob,
        running_s=lease.running_s,
        at_s=event.received_s,
    )
    return Change(lease=lease.after("committed").with_commitment(commitment, body.previous))


@_decides(on.Sent)
def _sent(state: State, event: Event, body: on.Sent) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the agent of the lease", lease.agent)
    return Change(lease=with_message(state, lease.after("sent"), body))


@_decides(on.Suspected)
def _suspected(state: State, event: Event, body: on.Suspected) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("suspected")
    lease.require_silence(SUSPECT_S, event.received_s)
    return Change(lease=after)


@_decides(on.Lost)
def _lost(state: State, event: Event, body: on.Lost) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("lost")
    lease.require_silence(LOST_S, event.received_s)
    return _ended(state, event, replace(after, reason="lost"), "lost")


@_decides(on.Reclaiming)
def _reclaiming(state: State, event: Event, body: on.Reclaiming) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the agent of the lease", lease.agent)
    after = lease.after("reclaiming")
    notice_s = body.by_s - event.received_s
    if notice_s < lease.promised_s - 5:
        raise Refused(
            f"notice of {notice_s:.0f} s for lease {lease.lease_id}, its offer promised {lease.promised_s:.0f} s"
        )
    return Change(lease=replace(after, reclaim_by_s=body.by_s))


@_decides(on.Preempting)
def _preempting(state: State, event: Event, body: on.Preempting) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("preempting")
    if lease not in to_preempt(state, event.received_s):
        raise Refused(f"no lease of a higher priority waits for the device of lease {lease.lease_id}")
    if body.by_s < event.received_s + lease.promised_s:
        raise Refused(f"lease {lease.lease_id} has a notice of {lease.promised_s:.0f} s")
    return Change(lease=replace(after, reclaim_by_s=body.by_s, reason=PREEMPTED))


@_decides(on.Finished)
def _finished(state: State, event: Event, body: on.Finished) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the agent of the lease", lease.agent)
    require_begun(state, lease, "result")
    return _ended(state, event, replace(lease.after("finished"), result=body.result, reason="finished"), "finished")


@_decides(on.Closed)
def _closed(state: State, event: Event, body: on.Closed) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the renter, the agent or the pool", lease.renter, lease.agent, state.operator)
    after = replace(lease.after("closed"), reason=body.reason)
    if event.actor == state.operator and not _may_close(state, lease, event.received_s):
        raise Refused(f"lease {lease.lease_id} goes on: the pool closes what is not accepted, used up or too long")
    how = None
    if event.actor == lease.agent and lease.state in METERED and lease.reason != PREEMPTED:
        how = "reclaimed" if lease.state == "reclaiming" else "left"  # with notice, and it may leave before it is over
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
    return is_used_up or is_too_long or is_reclaimed


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


# --------------------------------------------------------------------------------------------- replays, disputes, money


def draw_message(pool: str, lease: Lease) -> bytes:
    """What the pool signs to draw blocks: its signature is unknown before, and anyone can check it after."""
    return b"stoker pool draw 1\n" + canonical({"pool": pool, "lease_id": lease.lease_id, "ended_by": lease.ended_by})


def drawn_blocks(lease: Lease, draw: str) -> list[int]:
    """Blocks of an ended lease that are replayed, drawn by the pool's signature `draw`; one at least, if any is."""
    num_blocks = len(lease.commitments)
    count = min(num_blocks, math.ceil(lease.check_fraction * num_blocks))
    return sorted(random.Random(draw).sample(range(num_blocks), count))


@_decides(on.Challenged)
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


@_decides(on.VerdictGiven)
def _verdict(state: State, event: Event, body: on.VerdictGiven) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the verifier that is named", body.verifier)
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


@_decides(on.Traced)
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


@_decides(on.Supplied)
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
        _by(event, "the agent of the lease, or the verifier that is named,", lease.agent, verdict.verifier)
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


@_decides(on.Dismissed)
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


@_decides(on.Disputed)
def _disputed(state: State, event: Event, body: on.Disputed) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the renter or the pool", lease.renter, state.operator)
    after = lease.after("disputed")
    if event.received_s > lease.closed_s + lease.window_s and not lease.unequal_blocks:
        raise Refused(f"the time to dispute lease {lease.lease_id} ended {lease.window_s:.0f} s after it was closed")
    return Change(lease=after)


@_decides(on.Slashed)
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


@_decides(on.Refunded)
def _refunded(state: State, _: Event, body: on.Refunded) -> Change:
    lease = state.lease(body.lease_id)
    after = lease.after("refunded")
    held, bond = state.held(lease.lease_id)
    settlement = escrow.refund_of(lease, bond)
    after = replace(after, outcome="refunded", settlement=settlement)
    return Change(lease=after, transfers=tuple(escrow.carry_out(lease, settlement, held, bond)))


@_decides(on.Final)
def _final(state: State, event: Event, body: on.Final) -> Change:
    lease = state.lease(body.lease_id)
    _by(event, "the renter or the pool", lease.renter, state.operator)
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
