"""What a control plane refuses although the log would take it, such as blocks that could not be replayed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.pool import events as on
from stoker.pool.admission import Admission, AwaitsMessages
from stoker.pool.events import sha256
from stoker.pool.lease_index import LeaseIndex
from tests.pool.book import ORDER, Book, offer, opened
from tests.pool.test_gang import GangBook, site


class Blobs:
    """Which key has sent which blob."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._senders = folder, dict[str, set[str]]()

    def note(self, digest: str, key: str) -> None:
        """A key has sent a blob."""
        self.path(digest).touch()
        self._senders.setdefault(digest, set()).add(key)

    def path(self, digest: str) -> Path:
        """Its file."""
        return self.folder / digest

    def senders(self, digest: str) -> set[str]:
        """Keys that have sent it."""
        return set(self._senders.get(digest, ()))

    def size_of(self, _: Iterable[str]) -> int:
        """Large ones, for what may be small only."""
        return 1 << 40


class SentBook(GangBook):
    """A gang whose sites send messages, with what a control plane has of them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.begin()
        self.blobs: Any = Blobs(folder)
        self.index = LeaseIndex(self.state, self.blobs)
        self.admission = Admission(self.state, self.blobs, self.index, lambda: self.now_s)

    def send(self, lease_id: str, update: int, blob: str = "") -> str:
        """A site's agent signs for a message; its blob."""
        lease = self.state.leases[lease_id]
        key = next(one for one in (*self.agents, self.third) if one.public == lease.agent)
        blob = blob or sha256(b"%d %d" % (lease.site, update))
        self.post(key, on.Sent(lease_id=lease_id, update=update, fragment=0, blob=blob))
        self.index.note(self.state.leases[lease_id])
        return blob

    def missing(self, lease_id: str, until: float) -> int:
        """How many messages keep a block from being taken."""
        try:
            self.admission._require_messages(self.state.leases[lease_id], until)
        except AwaitsMessages as refused:
            return int(refused.message.split()[0])
        return 0


def test_a_message_that_is_held_back_stops_no_block_before_its_exchange(tmp_path: Path) -> None:
    """A site whose other one signs for a message and never gives it is paid for what it had done by then."""
    book = SentBook(tmp_path)
    for name, agent in zip(("run-s0.0", "run-s1.0"), book.agents, strict=True):
        book.blobs.note(book.send(name, 4), agent.public)
        book.send(name, 9)
    assert [book.missing("run-s0.0", until) for until in (4, 5, 9, 10, float("inf"))] == [0, 0, 0, 2, 2]


def test_a_block_waits_for_exchanges_that_an_earlier_lease_of_its_site_made(tmp_path: Path) -> None:
    """Else agents that act together commit what cannot be replayed, in a lease that has sent nothing itself."""
    book = SentBook(tmp_path)
    for name in ("run-s0.0", "run-s1.0"):
        book.send(name, 4)
    book.post(book.agent, on.Closed(lease_id="run-s0.0", reason="reclaimed"))
    book.post(book.renter, site(0, "run-s0.1", offer_id="spare"))
    book.post(book.third, on.Accepted(lease_id="run-s0.1"))
    assert not book.state.leases["run-s0.1"].messages
    assert book.missing("run-s0.1", 5) == 2


def test_a_message_is_here_once_its_gang_may_read_it(tmp_path: Path) -> None:
    """A blob that others have sent, and that an agent has named as its message, is not for others to read."""
    book = SentBook(tmp_path)
    blobs = [book.send(name, 4) for name in ("run-s0.0", "run-s1.0")]
    for blob in blobs:
        book.blobs.note(blob, book.third.public)
    assert book.missing("run-s0.0", 5) == 2
    for blob, agent in zip(blobs, book.agents, strict=True):
        book.blobs.note(blob, agent.public)
    assert book.missing("run-s0.0", 5) == 0


def test_a_message_that_its_agent_could_read_before_is_here(tmp_path: Path) -> None:
    """A run that is made once more with its sites changed makes the same blobs, which its agents do not send again."""
    book = SentBook(tmp_path)
    blobs = [book.send(name, 4) for name in ("run-s0.0", "run-s1.0")]
    for blob, agent in zip(blobs, book.agents, strict=True):
        book.blobs.note(blob, agent.public)
    for name, blob in zip(("run-s1.0", "run-s0.0"), blobs, strict=True):
        book.send(name, 9, blob)
    assert book.missing("run-s0.0", 10) == 0


def test_a_message_that_its_agent_reads_by_a_later_lease_is_here_for_its_gang(tmp_path: Path) -> None:
    """Else blocks would count as fit to be replayed whose verifiers may not read a message on which they rest."""
    book = SentBook(tmp_path)
    book.send("run-s0.0", 4)
    blob = sha256(b"of a later lease")
    book.pass_time(10)
    book.post(book.agents[0], on.Offered(offer=offer("more", book.now_s)))
    later = replace(opened("later", offer_id="more"), inputs=(blob,))
    book.post(book.renter, later)
    book.index.note(book.state.leases["later"])
    book.send("run-s0.0", 9, blob)
    assert not book.admission._is_shown(book.state.leases["run-s0.0"], blob)
    book.blobs.note(blob, book.renter.public)
    assert book.admission._is_shown(book.state.leases["run-s0.0"], blob)
    assert {one.public for one in book.agents} <= book.index.readers(blob)


def test_what_a_site_sends_for_another_one_counts_as_named(tmp_path: Path) -> None:
    """Else an agent that leaves it to the others uses up the room that they have for blobs of no lease."""
    book = SentBook(tmp_path)
    blob = book.send("run-s0.0", 4)
    assert book.index.is_named_by(blob, book.other.public)
    assert not book.index.is_named_by(blob, book.third.public)


@pytest.mark.parametrize("whose", ["renter", "agent"])
def test_a_delegate_that_has_part_in_a_lease_pays_for_its_blobs(tmp_path: Path, whose: str) -> None:
    """Large blobs are charged to the leases of who sends them, also where that one co-signs beats."""
    book, blobs = Book(), Blobs(tmp_path)
    key = getattr(book, whose).public
    book.run(delegate=key)
    index = LeaseIndex(book.state, blobs)  # type: ignore[arg-type]
    assert [lease.lease_id for lease in index.own_naming(ORDER, key)] == ["job"]
    other = Book()
    other.run(delegate=other.third.public)
    assert not LeaseIndex(other.state, blobs).own_naming(ORDER, other.third.public)  # type: ignore[arg-type]
