"""The pool's state: a fold over its log. Every reader of the log comes to the same balances, leases and records.

`rules.decide` looks at a state and an event and changes nothing: it returns a `Change`, or raises `Refused` with a
sentence. `State.take` makes the change. So an event that is refused leaves no trace, and the control plane can put an
event on the disk before it counts.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from dataclasses import dataclass, field

from stoker.pool import events as on
from stoker.pool.escrow import Accounts, Transfer, bond_of, escrow_of
from stoker.pool.events import CLOCK_WINDOW_S, FIRST_PREVIOUS, Event, Offer, Refused
from stoker.pool.fair_use import WaitingRequest
from stoker.pool.gang import Gang
from stoker.pool.joint_probe import PROBES_TO_MARK, Clash, Pair, blocked_by
from stoker.pool.lease import Lease
from stoker.pool.pair_links import KEPT_S, StatedLink

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
    probed_s: float = 0.0

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
    linked: tuple[tuple[tuple[str, str], StatedLink], ...] = ()
    gang: Gang | None = None
    stopped: frozenset[tuple[str, str]] = frozenset()
    started: frozenset[tuple[str, str]] = frozenset()
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
    stopped: set[tuple[str, str]] = field(default_factory=set)
    """Runs of which no lease is opened, each with its renter before it."""
    records: dict[str, Record] = field(default_factory=dict)
    declined: set[tuple[str, str]] = field(default_factory=set)
    unsettled: set[str] = field(default_factory=set)
    teams: dict[str, on.TeamMade] = field(default_factory=dict)
    waiting: dict[tuple[str, str], WaitingRequest] = field(default_factory=dict)
    num_offers: Counter[str] = field(default_factory=Counter)
    clashes: dict[Pair, Clash] = field(default_factory=dict)
    """Agents that were late together with another one."""
    links: dict[tuple[str, str], StatedLink] = field(default_factory=dict)
    """What agents measured of their direct paths, by (who says it, to whom)."""
    roots: list[on.Anchored] = field(default_factory=list)
    unanchored: list[str] = field(default_factory=list)
    first_unanchored: int = 1
    anchored_s: float = 0.0
    _nonces: set[tuple[str, str]] = field(default_factory=set)
    _nonce_times: deque[tuple[float, tuple[str, str]]] = field(default_factory=deque)

    def record_of(self, agent: str) -> Record:
        """Evidence about an agent."""
        return self.records.get(agent, _NO_RECORD)

    def is_payer(self, key: str) -> bool:
        """Whether a key can pay for leases: keys alone cost nothing."""
        is_on_chain = self.rules is not None and bool(self.rules.contract)  # its credits are there
        return (is_on_chain and key in self.members) or self.accounts.balance(key) > 0

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
        self.stopped |= change.stopped
        self.stopped -= change.started
        if change.offer is not None:
            self.num_offers[change.offer.agent] += change.offer.offer.offer_id not in self.offers
            self.offers[change.offer.offer.offer_id] = change.offer
        for listed in change.probed:
            self.offers[listed.offer.offer_id] = listed
        after = {**self.clashes, **dict(change.clashes)}
        self.clashes = {pair: clash for pair, clash in after.items() if clash is not None}
        self.links.update(change.linked)
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
            self.links = {pair: link for pair, link in self.links.items() if event.received_s - link.at_s < KEPT_S}

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


def merkle_root(hashes: list[str]) -> str:
    """Root of a Merkle tree over hashes (hex): what of an hour of the log is published, or goes into a contract.

    Source: RFC 6962, section 2.1: leaves and nodes are hashed with different first bytes.
    """
    level = [hashlib.sha256(b"\0" + bytes.fromhex(one)).digest() for one in hashes]
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [hashlib.sha256(b"\1" + b"".join(pair)).digest() if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0].hex() if level else hashlib.sha256(b"").hexdigest()
