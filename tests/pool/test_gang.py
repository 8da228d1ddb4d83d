"""Gangs in the log: all leases or none, no meter before all are there, and messages that stand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.errors import BadSetting
from stoker.pool import events as on
from stoker.pool import watch
from stoker.pool.events import CREDIT, Refused, sha256
from stoker.pool.keys import Key
from stoker.pool.lease import ACCEPT_S, RELEASED, SAVES_NOTHING, STALLED, STALLED_S, WAITED
from stoker.pool.rules import apply
from stoker.pool.state import State
from tests.pool.book import Book, offer, opened

NAMES = ("a", "b")
CLASS = "c" * 64


def site(number: int, lease_id: str = "", **more: Any) -> on.Opened:
    """A lease of one of two sites, at the offer of that number."""
    fields = {"offer_id": NAMES[number], "gang": "gang", "site": number, "sites": 2}
    return opened(lease_id or f"run-s{number}.0", **{**fields, **more})


class GangBook(Book):
    """A pool with two agents of one class, and an idle third one."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(**rules)
        self.agents: list[Key] = [self.agent, self.other]
        for key, name in zip((*self.agents, self.third), (*NAMES, "spare"), strict=True):
            self.post(key, on.Offered(offer=offer(name, self.now_s, determinism_class=CLASS)))

    def open(self) -> None:
        """Open both leases."""
        self.post(self.renter, on.GangOpened(leases=(site(0), site(1))))

    def begin(self) -> None:
        """Open both, and let both agents accept."""
        self.open()
        for number, key in enumerate(self.agents):
            self.post(key, on.Accepted(lease_id=f"run-s{number}.0"))

    def due(self) -> list[on.Body]:
        """What the control plane signs now."""
        return watch.due(self.state, self.now_s, key=self.operator, up_since_s=0.0, present={})

    def settle(self) -> None:
        """Sign all that is due, until nothing is."""
        while bodies := self.due():
            for body in bodies:
                self.post(self.operator, body)


def test_all_leases_are_opened_or_none() -> None:
    """Two offers are taken by one event; where one is taken already, or money is short, nothing has changed."""
    book = GangBook()
    with pytest.raises(Refused, match=r"2\.00 credits are missing"):
        book.post(book.renter, on.GangOpened(leases=(site(0, deposit=6 * CREDIT), site(1, deposit=6 * CREDIT))))
    book.post(book.third, opened("first", offer_id="b"))
    before = dict(book.state.accounts.balances), book.state.head
    with pytest.raises(Refused, match="is taken"):
        book.open()
    with pytest.raises(Refused, match="is taken"):
        book.post(book.renter, on.GangOpened(leases=(site(0), site(1, offer_id="a"))))
    assert (dict(book.state.accounts.balances), book.state.head) == before
    assert book.state.offers["a"].is_free(book.now_s)
    assert not book.state.gangs
    poor = Key.made()
    book.post(book.operator, on.Deposited(account=poor.public, amount=0))
    with pytest.raises(Refused, match=r"3\.00 credits are missing"):  # before anything is copied for it
        book.post(poor, on.GangOpened(leases=(site(0), site(1))))
    book.post(book.third, on.Closed(lease_id="first", reason="enough"))
    book.open()
    assert {lease.state for name, lease in book.state.leases.items() if lease.gang} == {"funded"}
    assert book.balance(book.renter) == 4 * CREDIT


@pytest.mark.parametrize(
    ("leases", "text"),
    [
        ((site(1), site(0)), "stands as site 0 of 2"),
        ((site(0), site(1, gang="other")), "stands as site 1 of 2 of 'gang'"),
        ((site(0), site(1, offer_id="odd")), "of 2 determinism classes"),
        ((site(0, gang="0" * 16 + "-run"), site(1, gang="0" * 16 + "-run")), "for the key that begins so"),
        ((site(0), site(1, lease_id="run-s0.0")), "there is a lease 'run-s0.0' already"),
    ],
)
def test_leases_that_are_no_gang(leases: tuple[on.Opened, ...], text: str) -> None:
    """Sites in another order, of two gangs, of two classes, or with a name that is not the renter's."""
    book = GangBook()
    book.post(book.third, on.Offered(offer=offer("odd", book.now_s, determinism_class="d" * 64)))
    with pytest.raises(Refused, match=text):
        book.post(book.renter, on.GangOpened(leases=leases))
    with pytest.raises(BadSetting, match="wanted 2 to 16"):
        on.GangOpened(leases=(site(0),))
    assert not book.state.leases


def test_a_stopped_gang_gets_no_lease() -> None:
    """Neither all of its sites again, nor one of them alone in the place of one that was lost."""
    book = GangBook()
    book.begin()
    book.post(book.renter, on.Closed(lease_id="run-s1.0", reason="stopped"))
    book.post(book.renter, on.RunStopped(run="gang"))
    with pytest.raises(Refused, match="was stopped by its renter"):
        book.post(book.renter, site(1, "run-s1.1"))
    book.post(book.renter, on.Closed(lease_id="run-s0.0", reason="stopped"))
    with pytest.raises(Refused, match="was stopped by its renter"):
        book.post(book.renter, on.GangOpened(leases=(site(0, "run-s0.1"), site(1, "run-s1.1"))))
    book.post(book.renter, on.RunStopped(run="gang", is_stopped=False))
    book.post(book.renter, on.GangOpened(leases=(site(0, "run-s0.1"), site(1, "run-s1.1"))))


def test_a_gang_that_is_not_complete_is_released() -> None:
    """One agent does not accept in time: the other's lease ends as well, all deposits and bonds are back at once."""
    book = GangBook()
    book.open()
    book.post(book.agent, on.Accepted(lease_id="run-s0.0"))
    assert book.balance(book.agent) == 9 * CREDIT
    book.post(book.agent, on.Beat(lease_id="run-s0.0", index=0, running_s=0))
    for refused in (
        on.Beat(lease_id="run-s0.0", index=1, running_s=1),
        on.Committed(lease_id="run-s0.0", block=0, update=1, state="1" * 64, blob="1" * 64),
        on.Finished(lease_id="run-s0.0", result="1" * 64),
        on.Sent(lease_id="run-s0.0", update=0, fragment=0, blob="1" * 64),
    ):
        book.pass_time(1)
        with pytest.raises(Refused, match="waits for the other sites of its gang 'gang'"):
            book.post(book.agent, refused)
    with pytest.raises(Refused, match="goes on"):
        book.post(book.operator, on.Closed(lease_id="run-s0.0", reason="because"))
    for _ in range(3):  # the agent that is there is heard, meanwhile
        book.pass_time(ACCEPT_S / 2.4)
        index = book.state.leases["run-s0.0"].beat_index + 1
        book.post(book.agent, on.Beat(lease_id="run-s0.0", index=index, running_s=0))
    book.settle()
    leases = book.state.leases
    assert (leases["run-s0.0"].reason, leases["run-s0.0"].state) == (RELEASED, "final")
    assert leases["run-s1.0"].reason.startswith("not accepted")
    assert [book.balance(key) for key in (book.renter, book.agent, book.other)] == [10 * CREDIT] * 3
    assert [book.state.record_of(key.public).declined for key in book.agents] == [0, 1]
    assert book.state.record_of(book.agent.public).left == 0
    book.post(book.renter, on.GangOpened(leases=(site(0, "run-s0.1"), site(1, "run-s1.1", offer_id="spare"))))
    book.post(book.agent, on.Accepted(lease_id="run-s0.1"))
    assert not book.state.gangs["gang"].is_begun
    book.post(book.third, on.Accepted(lease_id="run-s1.1"))
    assert book.state.gangs["gang"].is_begun


def test_no_time_is_paid_before_all_agents_have_accepted() -> None:
    """An agent that says afterwards that it ran while it waited is ahead of the clock."""
    book = GangBook()
    book.open()
    book.post(book.agent, on.Accepted(lease_id="run-s0.0"))
    book.pass_time(40)
    book.post(book.other, on.Accepted(lease_id="run-s1.0"))
    book.pass_time(10)
    with pytest.raises(Refused, match="ahead of the clock: 30 s of running 10 s after it could begin"):
        book.post(book.agent, on.Beat(lease_id="run-s0.0", index=0, running_s=30))
    book.post(book.agent, on.Beat(lease_id="run-s0.0", index=0, running_s=10))


@pytest.mark.parametrize("who", ["agent", "renter"])
def test_a_site_that_is_declined_releases_the_others(who: str) -> None:
    """Also where the agent says at once that it cannot, or the renter takes one back; before and after an accept."""
    for has_accepted in (False, True):
        book = GangBook()
        book.open()
        if has_accepted:
            book.post(book.other, on.Accepted(lease_id="run-s1.0"))
        book.post(getattr(book, who), on.Closed(lease_id="run-s0.0", reason="refused: no room"))
        book.settle()
        assert {one.state for one in book.state.leases.values()} == {"final"}
        assert [book.balance(key) for key in (book.renter, book.agent, book.other)] == [10 * CREDIT] * 3
        assert book.state.record_of(book.other.public).declined == 0


def test_a_site_that_is_lost_gets_its_next_lease_alone() -> None:
    """Of the same class, and only once the one before has ended; the other goes on; each is paid for what it did."""
    book = GangBook()
    book.begin()
    with pytest.raises(Refused, match="is at work"):
        book.post(book.renter, on.GangOpened(leases=(site(0, "x", offer_id="spare"), site(1, "y"))))
    book.post(book.third, on.Offered(offer=offer("odd", book.now_s, determinism_class="d" * 64)))
    with pytest.raises(Refused, match=r"has the lease run-s1\.0"):
        book.post(book.renter, site(1, "run-s1.1", offer_id="spare", deposit=2 * CREDIT))
    book.pass_time(10)
    for number, key in enumerate(book.agents):
        book.post(key, on.Beat(lease_id=f"run-s{number}.0", index=0, running_s=10))
        book.post(book.renter, on.Cosigned(lease_id=f"run-s{number}.0", index=0))
    book.post(book.other, on.Closed(lease_id="run-s1.0", reason="refused: the disk is full"))
    assert not [body for body in book.due() if isinstance(body, on.Closed)]
    for lease, text in (
        (site(1, "run-s1.1", offer_id="odd"), "another determinism class"),
        (site(1, "run-s1.1", offer_id="spare", gang="none"), "there is no gang 'none'"),
        (site(1, "run-s1.1", offer_id="spare", sites=3), "with a site 1 of 3"),
    ):
        with pytest.raises(Refused, match=text):
            book.post(book.renter, replace(lease, deposit=2 * CREDIT))
    with pytest.raises(Refused, match="there is no gang"):
        book.post(book.third, site(1, "run-s1.1", deposit=2 * CREDIT))
    book.post(book.renter, site(1, "run-s1.1", offer_id="spare", deposit=2 * CREDIT))
    book.post(book.third, on.Accepted(lease_id="run-s1.1"))
    book.pass_time(10)
    book.post(book.third, on.Beat(lease_id="run-s1.1", index=0, running_s=5))
    assert book.state.gangs["gang"].leases == (("run-s0.0",), ("run-s1.0", "run-s1.1"))


@pytest.mark.parametrize(
    ("reason", "other_sent", "waits_s", "verify", "num_left"),
    [
        (WAITED, False, 900, 0.1, 0),
        ("failed: no message came for an hour", False, 900, 0.0, 0),  # the log shows it, whatever the reason
        (WAITED, True, 900, 0.1, 0),  # it may be none, or held back: not paid either, and blamed on nobody here
        (WAITED, True, 900, 0.0, 1),
        (SAVES_NOTHING, True, 900, 0.1, 1),
        (WAITED, False, 300, 0.1, 1),
    ],
)
def test_a_site_that_waits_in_vain_leaves_without_a_mark(
    reason: str, other_sent: bool, waits_s: int, verify: float, num_left: int
) -> None:
    """For a message of another site, and for long; who is waited for is not excused."""
    book = GangBook()
    book.post(book.renter, on.GangOpened(leases=tuple(site(each, verify_fraction=verify) for each in (0, 1))))
    for number, key in enumerate(book.agents):
        book.post(key, on.Accepted(lease_id=f"run-s{number}.0"))
    book.post(book.agent, on.Sent(lease_id="run-s0.0", update=4, fragment=0, blob=sha256(b"0")))
    if other_sent:
        book.post(book.other, on.Sent(lease_id="run-s1.0", update=4, fragment=0, blob=sha256(b"1")))
    book.pass_time(waits_s)
    for number, key in enumerate(book.agents):
        book.post(key, on.Beat(lease_id=f"run-s{number}.0", index=0, running_s=waits_s))
    book.post(book.agent, on.Closed(lease_id="run-s0.0", reason=reason))
    book.post(book.other, on.Closed(lease_id="run-s1.0", reason=reason))
    has_excuse = other_sent and num_left == 0
    assert [book.state.record_of(key.public).left for key in book.agents] == [num_left, 0 if has_excuse else 1]


@pytest.mark.parametrize("reason", [WAITED, "enough", None])
def test_who_is_waited_for_has_not_waited(reason: str | None) -> None:
    """A message of an exchange that nobody makes is no excuse, neither for leaving nor for doing nothing."""
    book = GangBook()
    book.post(book.renter, on.GangOpened(leases=tuple(site(each, verify_fraction=0.1) for each in (0, 1))))
    for number, key in enumerate(book.agents):
        book.post(key, on.Accepted(lease_id=f"run-s{number}.0"))
    book.post(book.agent, on.Sent(lease_id="run-s0.0", update=10**6, fragment=0, blob=sha256(b"0")))
    book.post(book.other, on.Sent(lease_id="run-s1.0", update=4, fragment=0, blob=sha256(b"1")))
    book.pass_time(STALLED_S)
    book.post(book.agent, on.Beat(lease_id="run-s0.0", index=0, running_s=STALLED_S))
    key, why = (book.operator, STALLED) if reason is None else (book.agent, reason)
    book.post(key, on.Closed(lease_id="run-s0.0", reason=why))
    assert book.state.record_of(book.agent.public).left == 1


def test_the_first_message_of_an_exchange_stands() -> None:
    """Of a site, whichever lease sent it; the same again, or another one, is refused; only its agent may send it."""
    book = GangBook()
    book.post(book.third, on.Offered(offer=offer("box", book.now_s)))
    book.begin()
    blob = sha256(b"message")
    sent = on.Sent(lease_id="run-s1.0", update=4, fragment=0, blob=blob)
    with pytest.raises(Refused, match="the agent of the lease"):
        book.post(book.agent, sent)
    book.post(book.other, sent)
    assert book.state.leases["run-s1.0"].messages[0].place == (4, 0)
    assert blob in book.state.leases["run-s1.0"].blobs
    for again, text in ((blob, "the same one"), (sha256(b"another"), "another one")):
        with pytest.raises(Refused, match=f"{text}: the first one stands"):
            book.post(book.other, replace(sent, blob=again))
    book.post(book.agent, replace(sent, lease_id="run-s0.0"))
    book.post(book.other, on.Closed(lease_id="run-s1.0", reason="refused: no more"))
    book.post(book.renter, site(1, "run-s1.1", offer_id="spare", deposit=2 * CREDIT))
    book.post(book.third, on.Accepted(lease_id="run-s1.1"))
    with pytest.raises(Refused, match=r"in lease run-s1\.0, another one"):
        book.post(book.third, replace(sent, lease_id="run-s1.1", blob=sha256(b"another")))
    book.post(book.third, replace(sent, lease_id="run-s1.1", update=9))
    book.post(book.renter, opened("single", deposit=2 * CREDIT))
    book.post(book.third, on.Accepted(lease_id="single"))
    with pytest.raises(Refused, match="is of no gang"):
        book.post(book.third, replace(sent, lease_id="single"))


def test_a_log_with_a_gang_is_read_again() -> None:
    """The same balances, leases and gangs."""
    book = GangBook()
    book.begin()
    book.post(book.agent, on.Sent(lease_id="run-s0.0", update=4, fragment=0, blob=sha256(b"message")))
    state = State()
    for event in book.events:
        apply(state, event)
    assert (state.gangs, state.leases, state.accounts.balances) == (
        book.state.gangs,
        book.state.leases,
        book.state.accounts.balances,
    )


def test_a_contract_takes_no_gang() -> None:
    """Its money is put up lease by lease."""
    book = Book(contract="eip155:1:0x" + "1" * 40)
    with pytest.raises(Refused, match="takes one lease at a time"):
        book.post(book.renter, on.GangOpened(leases=(site(0), site(1))))
