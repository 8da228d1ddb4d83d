"""Which leases a blob, or a key, has to do with: who may read a blob, which blobs are needed, whose work a lease is.

What: an index over a pool's leases, which the control plane keeps up with each change (`note`). Of a blob it has all
leases that name it, settled ones included, until it is deleted; of a key the unsettled ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from stoker.pool.blobs import BlobStore
from stoker.pool.lease import LIVE, MOST_EVIDENCE_BYTES, Lease
from stoker.pool.state import State


class LeaseIndex:
    """An index over the leases of a state, and the blobs that they name.

    Args:
        state: of the pool.
        blobs: that are here, with who sent them.
    """

    def __init__(self, state: State, blobs: BlobStore) -> None:
        self._state, self._blobs = state, blobs
        self._named: dict[str, set[str]] = defaultdict(set)
        self._evidence_of: dict[str, set[str]] = defaultdict(set)
        self._concerned: dict[str, set[str]] = defaultdict(set)
        self._rented: dict[str, set[str]] = defaultdict(set)
        for lease in state.leases.values():
            self.note(lease)

    def note(self, lease: Lease) -> set[str]:
        """Keep in mind which blobs a lease names and whose work it is; the keys that it concerns."""
        for digest in lease.blobs:
            self._named[digest].add(lease.lease_id)
        for digest in lease.evidence:
            self._evidence_of[digest].add(lease.lease_id)
        concerned = {lease.agent, *(asked.verifier for asked in lease.challenges)}
        for names in (self._rented[lease.renter], *(self._concerned[key] for key in concerned)):
            if lease.state == "final":
                names.discard(lease.lease_id)
            else:
                names.add(lease.lease_id)
        return concerned

    def forget(self, digests: Iterable[str]) -> None:
        """Blobs were deleted."""
        for digest in digests:
            self._named.pop(digest, None)
            self._evidence_of.pop(digest, None)

    def of_key(self, key: str) -> list[Lease]:
        """Unsettled leases in which a key is the agent or a verifier."""
        return [self._state.leases[name] for name in sorted(self._concerned.get(key, ()))]

    def is_at_work(self, agent: str) -> bool:
        """Whether an agent has a lease that is live, or a block to replay."""
        return any(
            (one.agent == agent and one.state in LIVE) or any(asked.verifier == agent for asked in one.open_challenges)
            for one in self.of_key(agent)
        )

    def rents(self, key: str) -> bool:
        """Whether a key has an unsettled lease as its renter."""
        return bool(self._rented.get(key))

    def naming(self, digest: str) -> list[Lease]:
        """Leases that name a blob, the oldest first."""
        leases = [self._state.leases[name] for name in self._named.get(digest, ())]
        return sorted(leases, key=lambda lease: lease.opened_s)

    def own_naming(self, digest: str, key: str) -> list[Lease]:
        """Leases that name a blob and in which a key has part other than as a delegate, which sends nothing.

        Of a site's message also those in which it has another site of the gang.
        """
        return [
            lease
            for lease in self.naming(digest)
            if any(key in senders_of(one) for one in self._sharing(lease, digest))
        ]

    def parties(self, lease: Lease, digest: str) -> set[str]:
        """Keys that have part in a blob of a lease: those of the lease, and of a message those of all its gang."""
        return set[str]().union(*(parties_of(one) for one in self._sharing(lease, digest)))

    def _sharing(self, lease: Lease, digest: str) -> list[Lease]:
        """Leases that share a blob which one of them names: a message is for all leases of its gang."""
        if not (lease.gang and lease.has_sent(digest)):
            return [lease]
        return [self._state.leases[name] for name in self._state.gangs[lease.gang].names]

    def is_named_by(self, digest: str, key: str) -> bool:
        """Whether a lease in which a key has part names a blob: others' leases are no room for what it sends.

        Of a message the other sites of its gang, which send it where its own does not. Or a verdict of its own names it
        as its record, which is small.
        """
        named = [self._state.leases[name] for name in self._named.get(digest, ())]
        if any(key in (one.renter, one.agent) for lease in named for one in self._sharing(lease, digest)):
            return True
        is_small = self._blobs.size_of([digest]) <= MOST_EVIDENCE_BYTES
        return is_small and any(key in lease.evidence.get(digest, ()) for lease in self._judged_by(digest))

    def readers(self, digest: str) -> set[str]:
        """Keys that may read a blob: who sent it, and who has part in a lease in which one who may read it named it.

        Naming alone gives nothing: else a lease on a hash out of the log would open what others sent.
        """
        readers, others = self._blobs.senders(digest), self.naming(digest)
        while True:  # who reads it by one lease opens it by another, whichever of both is older
            named, others = others, list[Lease]()
            for lease in named:
                namer = lease.renter if digest in (lease.order, *lease.inputs) else lease.agent
                if namer in readers:
                    readers |= self.parties(lease, digest)
                else:
                    others.append(lease)
            if len(others) == len(named):
                break
        for lease in self._judged_by(digest):
            if lease.evidence.get(digest, set()) & self._blobs.senders(digest):
                readers |= parties_of(lease)
        return readers - {""}

    def needed(self) -> set[str]:
        """Blobs that unsettled leases need."""
        leases = [self._state.leases[name] for name in self._state.unsettled]
        evidence = self._blobs.sizes_of(digest for lease in leases for digest in lease.evidence)
        small = {digest for digest, num_bytes in evidence.items() if num_bytes <= MOST_EVIDENCE_BYTES}
        # A replay of one site reads the messages of all.
        gangs = {lease.gang for lease in leases} & self._state.gangs.keys()
        siblings = [self._state.leases[name] for gang in gangs for name in self._state.gangs[gang].names]
        messages = {message.blob for lease in siblings for message in lease.messages}
        return small.union(messages, *(lease.blobs | lease.supplied for lease in leases))

    def _judged_by(self, digest: str) -> Iterator[Lease]:
        """Leases on whose blocks a blob is evidence."""
        return (self._state.leases[name] for name in self._evidence_of.get(digest, ()))


def senders_of(lease: Lease) -> set[str]:
    """Keys that send blobs of a lease."""
    return {lease.renter, lease.agent, *(one.verifier for one in lease.challenges)}


def parties_of(lease: Lease) -> set[str]:
    """Keys that have part in a lease."""
    return senders_of(lease) | {lease.delegate}
