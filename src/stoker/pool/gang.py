"""Gangs: the leases of one run that several agents have together, one site of `Job(sync=…)` each.

What: the leases of all sites are opened by one event, or none is. No meter runs until all agents have accepted; where
one has not in time, all leases end, and every deposit and bond is back at once. After that each site is a lease of its
own: beats, blocks, replays and pay are those of any lease, and a site that is lost gets its next lease alone.
Messages between sites are events: `sent` names the blob with a site's message of an exchange, signed by its agent. Of a
site the first message of an exchange stands for good, whichever agent sent it: all others have gone on from it. They
are kept until all leases of the gang are settled, since a replay of one site reads those of the others.
Rule: all sites of a gang are of one determinism class, so that a site that is made again, by its next agent or by a
verifier, sends the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stoker.pool import events as on
from stoker.pool.events import Refused
from stoker.pool.lease import LEAST_WAIT_S, LIVE, MOST_MESSAGES, WAITED, Lease, SentMessage

if TYPE_CHECKING:
    from stoker.pool.state import ListedOffer, State


@dataclass(frozen=True, kw_only=True)
class Gang:
    """A run of several sites.

    Attributes:
        gang: its name.
        renter: whose it is.
        sites: number of sites.
        determinism_class: of all of them.
        leases: names of all its leases so far, by site, the oldest first.
        begun_s: when all agents had accepted, so that meters may run [s since 1970]; 0: they have not.
    """

    gang: str
    renter: str
    sites: int
    determinism_class: str
    leases: tuple[tuple[str, ...], ...]
    begun_s: float = 0.0

    @property
    def is_begun(self) -> bool:
        """Whether all agents have accepted once."""
        return self.begun_s > 0

    def with_lease(self, lease: Lease) -> Gang:
        """The gang with one more lease."""
        of_sites = list(self.leases)
        of_sites[lease.site] = (*of_sites[lease.site], lease.lease_id)
        return replace(self, leases=tuple(of_sites))

    @property
    def names(self) -> list[str]:
        """All leases."""
        return [name for of_site in self.leases for name in of_site]


def newest_leases(state: State, gang: Gang) -> list[Lease]:
    """The newest lease of each site."""
    return [state.leases[of_site[-1]] for of_site in gang.leases if of_site]


def require_gang(body: on.GangOpened, known: Gang | None, state: State, renter: str) -> None:
    """Refuse leases that are no gang, or of one of which a lease goes on; one that has ended may be opened again."""
    first = body.leases[0]
    for site, one in enumerate(body.leases):
        if (one.gang, one.sites, one.site) != (first.gang, len(body.leases), site):
            raise Refused(
                f"lease {one.lease_id} is of site {one.site} of {one.sites} of the gang {one.gang!r}, and stands as "
                f"site {site} of {len(body.leases)} of {first.gang!r}"
            )
    if known is None:
        return
    if known.renter != renter or known.sites != len(body.leases):
        raise Refused(f"there is a gang {first.gang!r} of another renter, or of another number of sites")
    if any(lease.state in LIVE for lease in newest_leases(state, known)):
        raise Refused(f"the gang {first.gang!r} is at work: a site that is lost gets its next lease alone")


def require_one_class(gang: str, offers: list[ListedOffer], known: Gang | None, state: State) -> str:
    """The determinism class of all offers, and of what was done before.

    Raises:
        Refused: they are of several, or of none that is stated.
    """
    earlier = [] if known is None else [state.leases[name] for name in known.names]
    classes = {one.offer.determinism_class for one in offers}
    classes |= {one.determinism_class for one in earlier if one.messages or one.commitments}
    if len(classes) > 1 or not min(classes):
        raise Refused(
            f"the sites of the gang {gang!r} would be of {len(classes)} determinism classes: one that is replayed, or "
            "goes on elsewhere, has to send the same bytes",
            remedy="Take offers of one class: equal devices and versions.",
        )
    return classes.pop()


def require_site(state: State, body: on.Opened, renter: str, determinism_class: str) -> Gang:
    """The gang that a single lease joins in the place of one that ended.

    Raises:
        Refused: there is no such gang or place.
    """
    gang = state.gangs.get(body.gang)
    if gang is None or gang.renter != renter or body.sites != gang.sites or body.site >= gang.sites:
        raise Refused(
            f"there is no gang {body.gang!r} of this key with a site {body.site} of {body.sites}",
            remedy="All sites are opened together first: an event of kind `gang`.",
        )
    last = state.leases[gang.leases[body.site][-1]]
    if not gang.is_begun or last.state in LIVE:
        raise Refused(f"site {body.site} of the gang {body.gang!r} has the lease {last.lease_id}, or it never began")
    if determinism_class != gang.determinism_class:
        raise Refused(f"the sites of the gang {body.gang!r} are of another determinism class than that offer")
    return gang


def begun_by(state: State, accepted: Lease) -> Gang | None:
    """The gang that begins now that a lease is accepted; None: it does not, or has."""
    gang = state.gangs.get(accepted.gang)
    if gang is None or gang.is_begun:
        return None
    others = [lease for lease in newest_leases(state, gang) if lease.lease_id != accepted.lease_id]
    is_complete = all(lease.state in LIVE and lease.accepted_s for lease in others)
    return replace(gang, begun_s=accepted.accepted_s) if is_complete else None


def is_released(state: State, lease: Lease) -> bool:
    """Whether a lease waits for a gang that will not be complete: another site's lease ended before all began."""
    gang = state.gangs.get(lease.gang)
    return gang is not None and not gang.is_begun and any(one.state not in LIVE for one in newest_leases(state, gang))


def require_begun(state: State, lease: Lease, what: str) -> None:
    """Refuse what counts as work before all sites are there."""
    gang = state.gangs.get(lease.gang)
    if gang is not None and not gang.is_begun:
        raise Refused(f"lease {lease.lease_id} waits for the other sites of its gang {lease.gang!r}: no {what} before")


def has_waited(state: State, lease: Lease) -> bool:
    """Whether a lease that ends was without a block for long since another site's message did not come.

    The log shows it where another site has sent none for an exchange of this one. It does not show whether a message
    that was sent can be had, and is one: there the agent's word counts, in a lease that is checked, whose agent was not
    paid for that time. Sites make the same exchanges in the same order: who has not sent what another one has is waited
    for itself, whatever it has sent of exchanges that are not made.
    """
    gang = state.gangs.get(lease.gang)
    if gang is None or lease.running_s - lease.committed_s < LEAST_WAIT_S:
        return False
    sent = [{one.place for name in of_site for one in state.leases[name].messages} for of_site in gang.leases]
    own = sent[lease.site]
    if set[tuple[int, int]]().union(*sent) - own:
        return False
    return any(own - places for places in sent) or bool(
        own and lease.check_fraction and lease.reason.startswith(WAITED)
    )


def with_message(state: State, lease: Lease, body: on.Sent) -> Lease:
    """The lease with one more message.

    Raises:
        Refused: it is of no gang, or its site has sent one for that exchange.
    """
    gang = state.gangs.get(lease.gang)
    if gang is None:
        raise Refused(f"lease {lease.lease_id} is of no gang: there is none to send messages to")
    require_begun(state, lease, "message")
    if len(lease.messages) >= MOST_MESSAGES:
        raise Refused(f"lease {lease.lease_id} has sent {MOST_MESSAGES} messages, the most that are taken")
    message = SentMessage(update=body.update, fragment=body.fragment, blob=body.blob)
    for name in gang.leases[lease.site]:
        for known in state.leases[name].messages:
            if known.place == message.place:
                raise Refused(
                    f"site {lease.site} has sent its message after update {body.update + 1:,} in lease {name}, "
                    f"{'the same one' if known.blob == body.blob else 'another one'}: the first one stands"
                )
    return replace(lease, messages=(*lease.messages, message))
