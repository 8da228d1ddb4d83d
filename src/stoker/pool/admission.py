"""What a control plane refuses although the rules of the log would take it: what takes room or offers for nothing.

What: blobs that an event names have to be here, and readable to who names them; large ones are paid for before they are
sent; a lease deposits a minute at least; those who wait have credits. The rules (`rules`) do not ask for it, since no
reader of the log has the blobs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable

from stoker.errors import StokerError
from stoker.pool import events as on
from stoker.pool.blobs import BlobStore
from stoker.pool.escrow import Transfer, credits_text, least_deposit, short
from stoker.pool.events import Body, Draft, Refused
from stoker.pool.forwarding import BULK_BYTES, require_forwardable
from stoker.pool.job_box import MOST_ORDER_BYTES, read_order
from stoker.pool.lease import Lease
from stoker.pool.lease_index import LeaseIndex
from stoker.pool.state import State
from stoker.units import format_bytes, format_seconds

MOST_UNSETTLED = 1000
"""Leases of one renter that are not settled yet, at most."""
MOST_OFFER_S = 30 * 24 * 3600.0
"""Time for which an offer stands unless it is made again: those of agents that are gone are forgotten [s]."""


class AwaitsMessages(Refused):
    """It can be taken once messages are here that went from site to site."""

    http_status = 503


class Admission:
    """What a control plane looks at before it asks the rules.

    Args:
        state: of the pool.
        blobs: that are here.
        leases: the index over them.
        now: the clock [s since 1970].

    Attributes:
        bulk_bytes: from this size on a blob is large [bytes].
        held_elsewhere: keys of which a peer holds a blob, its own included, by the peer's key and the blob.
        asks_link: whether an agent was asked to measure its path to another one.
    """

    def __init__(self, state: State, blobs: BlobStore, leases: LeaseIndex, now: Callable[[], float]) -> None:
        self._state, self._blobs, self._leases, self._now = state, blobs, leases, now
        self.bulk_bytes = BULK_BYTES
        self.held_elsewhere: Callable[[str, str], Collection[str]] = lambda _key, _digest: ()
        self.asks_link: Callable[[str, str], bool] = lambda _agent, _other: False

    @property
    def _rules(self) -> on.Founded:
        assert self._state.rules is not None
        return self._state.rules

    @property
    def _counts_bytes(self) -> bool:
        """Whether large blobs have a price here, or a quota."""
        return bool(self._rules.forward_price or self._rules.forward_quota_bytes)

    def require(self, draft: Draft) -> None:
        """Refuse what is not to be taken.

        Raises:
            Refused: with the reason.
        """
        self._require_asked(draft)
        self._require_stored(draft)
        self._require_deposit(draft)
        self._require_agreed(draft)

    def unpaid(self, lease: Lease, digests: Iterable[str]) -> list[tuple[str, int]]:
        """Large blobs of these that the pool keeps for a lease and that are not paid for, with their sizes [bytes]."""
        if not self._counts_bytes or lease.state == "final":
            return []
        paths = [self._blobs.path(digest) for digest in dict.fromkeys(digests) if digest not in lease.forwarded]
        sizes = [(path.name, path.stat().st_size) for path in paths if path.is_file()]
        return [(name, num_bytes) for name, num_bytes in sizes if num_bytes >= self.bulk_bytes]

    def require_forwardable(self, digest: str, num_bytes: int, key: str) -> None:
        """Refuse the way through the pool for a large blob where leases in which `key` has part do not pay for it.

        Leases of others that name it say nothing: a hash is public once one does.

        Raises:
            Refused: it is over the quota, or over what a renter spends on that.
        """
        if num_bytes >= self.bulk_bytes and self._counts_bytes:
            for lease in self._leases.own_naming(digest, key):
                if lease.state != "final" and digest not in lease.forwarded:
                    self._require_paid(lease, num_bytes)

    def _require_paid(self, lease: Lease, num_bytes: int) -> None:
        """Refuse what its renter would not pay for, or could not."""
        fee = require_forwardable(
            lease.lease_id,
            num_bytes,
            self._rules,
            most=lease.most_forwarding,
            sent_bytes=lease.forwarded_bytes,
            spent=lease.forwarded_credits,
        )
        self._state.accounts.require_covered([Transfer(lease.renter, self._state.operator, fee)])

    def _require_inputs_forwardable(self, body: on.Opened) -> None:
        """Refuse a lease whose large inputs are in the pool, and whose renter does not pay for that."""
        paths = [path for digest in dict.fromkeys(body.inputs) if (path := self._blobs.path(digest)).is_file()]
        large = sum(size for path in paths if (size := path.stat().st_size) >= self.bulk_bytes)
        if large and self._counts_bytes:
            require_forwardable(body.lease_id, large, self._rules, most=body.most_forwarding)

    def _require_stored(self, draft: Draft) -> None:
        """Refuse a commitment, or results, whose blob is not here and readable to who names it: none could check it.

        And a verdict that has a lease's first block begin elsewhere than its order does, which a blob says as well.
        """
        body = draft.read_body()
        if isinstance(body, on.VerdictGiven) and body.block == 0 and body.made and not (body.equal or body.against):
            self._require_begin(body)
        for opened in openings(body):
            self._require_inputs_forwardable(opened)
        if not isinstance(body, on.Committed | on.Sent | on.Finished):
            return
        digest = body.result if isinstance(body, on.Finished) else body.blob
        path = self._blobs.path(digest)
        if isinstance(body, on.Sent) and draft.actor in self.held_elsewhere(draft.actor, digest):
            return  # the others fetch it from there; no block is taken before it is here
        if not isinstance(body, on.Sent):
            until = math.inf if isinstance(body, on.Finished) else body.update
            self._require_messages(self._state.lease(body.lease_id), until)
        renter = self._state.lease(body.lease_id).renter
        if draft.actor in self.held_elsewhere(renter, digest):
            return  # it is held in two places, and by the one who wants it checked
        if not path.is_file() or draft.actor not in self._leases.readers(digest):
            raise Refused(
                f"{draft.kind!r} of lease {body.lease_id} names the blob {digest[:12]}…, which this key has not sent",
                remedy="Send the blob first.",
            )
        lease = self._state.lease(body.lease_id)
        held_bytes = self._blobs.size_of({*lease.blobs, digest})
        if held_bytes > self._blobs.limits.most_lease_bytes:
            raise Refused(
                f"the blobs of lease {body.lease_id} have {format_bytes(held_bytes)}, and at most "
                f"{format_bytes(self._blobs.limits.most_lease_bytes)} are kept for one lease",
                remedy="Longer blocks: --place-option block=5min.",
            )
        for _, num_bytes in self.unpaid(lease, [digest]):
            self._require_paid(lease, num_bytes)
        path.touch()  # it is not deleted before the lease names it

    def _require_asked(self, draft: Draft) -> None:
        """Refuse links that this pool has not asked for, and supplied states that are not here."""
        body = draft.read_body()
        if isinstance(body, on.Linked) and not self.asks_link(draft.actor, body.other):
            raise Refused(
                f"the pool has not asked for the link to {short(body.other)}, or no longer",
                remedy="The answer to a request for work (`links`) says which one is to be measured now.",
            )
        if isinstance(body, on.Supplied):
            for digest in filter(None, (body.before, body.after)):
                if not self._blobs.path(digest).is_file() or draft.actor not in self._leases.readers(digest):
                    raise Refused(
                        f"the state {digest[:12]}… that was supplied is not here", remedy="Send the blob first."
                    )

    def _require_messages(self, lease: Lease, until: float) -> None:
        """Refuse a block of a site, or its results, while messages on which it rests are not here to be replayed.

        Those are the messages of all sites in exchanges of this site, whichever of its leases it made them in, since
        its block before: exchanges after the block say nothing about it. Each site that has got one may send it.

        Args:
            lease: of the site.
            until: updates of the block; infinite: results [updates].
        """
        if (gang := self._state.gangs.get(lease.gang)) is None:
            return
        sites = [[self._state.leases[name] for name in of_site] for of_site in gang.leases]
        own = sites[lease.site]
        done = [block.update for one in own for block in one.commitments if block.update < until]
        begin = max(done, default=0)
        exchanges = {sent.place for one in own for sent in one.messages if begin <= sent.update < until}
        missing = {
            sent.blob
            for of_site in sites
            for one in of_site
            for sent in one.messages
            if sent.place in exchanges and not self._is_shown(one, sent.blob)
        }
        if missing:
            raise AwaitsMessages(
                f"{len(missing)} messages that lease {lease.lease_id} rests on are not here yet: "
                f"{', '.join(one[:12] + '…' for one in sorted(missing)[:4])}",
                remedy="Their agents send them, or those of sites that have got them; then post it again.",
            )

    def _is_shown(self, lease: Lease, digest: str) -> bool:
        """Whether a message that a lease has sent is here, and its gang may read it."""
        return self._blobs.path(digest).is_file() and lease.agent in self._leases.readers(digest)

    def _require_begin(self, body: on.VerdictGiven) -> None:
        """Refuse an unequal verdict on a first block that does not begin where the lease's order goes on from.

        The agent's states would be refused, which begin there. An order that is not here, or is none, says nothing:
        then the agent gives up the search, and whole blocks are compared.
        """
        path = self._blobs.path(self._state.lease(body.lease_id).order)
        try:
            if path.stat().st_size > MOST_ORDER_BYTES:
                return
            order = read_order(path.read_bytes())
        except (OSError, StokerError):
            return
        if body.begins != order.begin:
            raise Refused(
                f"the first block of lease {body.lease_id} begins after update {order.begin:,} by its order, and "
                f"this verdict says {body.begins:,}"
            )

    def _require_deposit(self, draft: Draft) -> None:
        """Refuse a lease or a place that would hold an offer for nothing, and what would take room for ever."""
        body = draft.read_body()
        if isinstance(body, on.Waiting) and not self._state.is_payer(draft.actor):
            raise Refused("a key without credits keeps no place: those who wait come before others who pay")
        if isinstance(body, on.Offered) and body.offer.expires_s > self._now() + MOST_OFFER_S:
            raise Refused(
                f"an offer lapses within {format_seconds(MOST_OFFER_S)}", remedy="Make it again before it does."
            )
        for opened in openings(body):
            self._require_deposit_of(opened)
            self._require_few(draft.actor)

    def _require_few(self, renter: str) -> None:
        """Refuse a lease to a key with too many that are not settled: each is looked at every second.

        Keys without credits count as one: they cost nothing, as leases at a price of 0.
        """
        state, is_payer = self._state, self._state.is_payer(renter)
        others = (state.leases[name].renter for name in state.unsettled)
        count = sum(one == renter or not (is_payer or state.is_payer(one)) for one in others)
        if count >= MOST_UNSETTLED:
            whose = "this key has" if is_payer else "keys without credits have together"
            raise Refused(
                f"{whose} {count:,} leases that are not settled, and no more are taken",
                remedy="Wait until some are, or give them a shorter time to dispute: --place-option window=10min.",
            )

    def _require_agreed(self, draft: Draft) -> None:
        """Refuse a renter that settles a lease before the pool has co-signed its last beats, which are its delegate's.

        They would not be paid: a renter could close and settle in one moment.
        """
        body = draft.read_body()
        if not isinstance(body, on.Final) or draft.actor == self._state.operator:
            return
        lease = self._state.lease(body.lease_id)
        if lease.delegate == self._state.operator and lease.beat_index > lease.paid_index:
            raise Refused(
                f"beats of lease {lease.lease_id} up to {lease.beat_index} are not co-signed yet",
                remedy="The pool does it in a moment; then it can be settled.",
            )

    def _require_deposit_of(self, body: on.Opened) -> None:
        if (listed := self._state.offers.get(body.offer_id)) is None:
            return
        least = least_deposit(listed.offer.min_s, body.rate_per_hour)
        if body.deposit < least:
            raise Refused(
                f"a deposit of {credits_text(body.deposit)} holds no offer: {credits_text(least - body.deposit)} are "
                "missing for its shortest lease, a minute at least",
                remedy=f"Deposit {credits_text(least)}.",
            )
        if (size := self._blobs.size_of({body.order, *body.inputs})) > self._blobs.limits.most_lease_bytes:
            raise Refused(
                f"the blobs that lease {body.lease_id} names have {format_bytes(size)}, and at most "
                f"{format_bytes(self._blobs.limits.most_lease_bytes)} are kept for one lease"
            )


def openings(body: Body) -> tuple[on.Opened, ...]:
    """The leases that an event opens."""
    return (body,) if isinstance(body, on.Opened) else body.leases if isinstance(body, on.GangOpened) else ()


def named_by(body: Body, lease_id: str) -> list[str]:
    """Blobs that an event names for a lease."""
    match body:
        case on.Opened() | on.GangOpened():
            own = [one for one in openings(body) if one.lease_id == lease_id]
            return [digest for one in own for digest in (one.order, *one.inputs)]
        case on.Committed() | on.Sent():
            return [body.blob]
        case on.Finished():
            return [body.result]
        case _:
            return []
