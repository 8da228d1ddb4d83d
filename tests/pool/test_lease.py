from __future__ import annotations

from itertools import product
from typing import get_args

import pytest

from stoker.pool import events as on
from stoker.pool.events import KINDS, Refused, sha256
from stoker.pool.lease import LIVE, METERED, TRANSITIONS, LeaseState
from tests.cases import each_of
from tests.pool.book import Book

STATES = get_args(LeaseState)
OF_LEASES = sorted(kind for kind, body in KINDS.items() if "lease_id" in body.__dataclass_fields__)

LEGAL = {
    "open": {"opened": "funded"},
    "funded": {"accepted": "running", "closed": "closed"},
    "running": {
        "beat": "running",
        "cosigned": "running",
        "committed": "running",
        "suspected": "suspect",
        "reclaiming": "reclaiming",
        "preempting": "reclaiming",
        "finished": "closed",
        "closed": "closed",
    },
    "suspect": {"beat": "running", "cosigned": "suspect", "committed": "suspect", "lost": "closed", "closed": "closed"},
    "reclaiming": {
        "beat": "reclaiming",
        "cosigned": "reclaiming",
        "committed": "reclaiming",
        "lost": "closed",
        "finished": "closed",
        "closed": "closed",
    },
    "closed": {
        "cosigned": "closed",
        "challenged": "closed",
        "verdict": "closed",
        "disputed": "disputed",
        "final": "final",
    },
    "disputed": {
        "challenged": "disputed",
        "verdict": "disputed",
        "traced": "disputed",
        "supplied": "disputed",
        "dismissed": "disputed",
        "slashed": "slashed",
        "refunded": "refunded",
        "final": "final",
    },
    "slashed": {"final": "final"},
    "refunded": {"final": "final"},
    "final": {},
}
for _state in set(LEGAL) - {"open", "final"}:
    LEGAL[_state]["forwarded"] = _state  # a large blob that went through the pool is paid for at any time
for _state in ("running", "suspect", "reclaiming"):
    LEGAL[_state]["sent"] = _state


@each_of(product(STATES, OF_LEASES))
def test_every_pair_of_state_and_event(pair: tuple[LeaseState, str]) -> None:
    """What the table of the design allows happens, and everything else is refused with what is possible."""
    state, kind = pair
    book = Book()
    book.run()
    book.forced(state)
    lease = book.state.leases["job"]
    if kind in LEGAL[state]:
        assert lease.after(kind).state == LEGAL[state][kind]
    else:
        with pytest.raises(Refused, match=f"is {state}"):
            lease.after(kind)


def test_the_log_refuses_what_the_table_refuses() -> None:
    """Through whole events, for each state: an event that the table lacks changes nothing."""
    bodies = {
        "accepted": on.Accepted(lease_id="job"),
        "beat": on.Beat(lease_id="job", index=3, running_s=31),
        "finished": on.Finished(lease_id="job", result=sha256(b"")),
        "slashed": on.Slashed(lease_id="job", amount=1, reason="x"),
        "final": on.Final(lease_id="job"),
        "refunded": on.Refunded(lease_id="job"),
        "lost": on.Lost(lease_id="job"),
    }
    for state, (kind, body) in product(STATES, bodies.items()):
        if (state, kind) in TRANSITIONS:
            continue
        book = Book()
        book.run()
        book.forced(state)
        before = dict(book.state.accounts.balances), book.state.leases["job"], book.state.seq
        signer = book.agent if kind in ("accepted", "beat", "finished") else book.operator
        book.pass_time(1000)
        with pytest.raises(Refused, match=f"is {state}"):
            book.post(signer, body)
        assert (dict(book.state.accounts.balances), book.state.leases["job"], book.state.seq) == before


def test_every_state_is_reached_and_left() -> None:
    """No state is an island, and only `final` is an end."""
    reached = {after for (before, _), after in TRANSITIONS.items() if after != before}
    left = {before for (before, _), after in TRANSITIONS.items() if after != before}
    assert reached == set(STATES) - {"open"}
    assert left == set(STATES) - {"final"}
    assert METERED < LIVE


def test_a_second_accept_is_refused() -> None:
    """A lease is accepted once."""
    book = Book()
    book.run(beats=0)
    with pytest.raises(Refused, match="'accepted' is not possible"):
        book.post(book.agent, on.Accepted(lease_id="job"))


@pytest.mark.parametrize(
    ("index", "running_s", "text"),
    [(2, 40, "out of order"), (4, 40, "out of order"), (3, 29, "goes back"), (3, 43, "ahead of the clock")],
)
def test_beats_that_are_no_progress_of_the_clock(index: int, running_s: int, text: str) -> None:
    """A beat that is repeated, skipped, decreasing or faster than the clock is refused."""
    book = Book()
    book.run(beats=3)
    book.pass_time(10)
    with pytest.raises(Refused, match=text):
        book.post(book.agent, on.Beat(lease_id="job", index=index, running_s=running_s))
    book.post(book.agent, on.Beat(lease_id="job", index=3, running_s=40))


def test_beats_of_another_agent_are_forged() -> None:
    """Only the agent of the lease beats, and only the renter or its delegate agrees to it."""
    book = Book()
    book.run(beats=1)
    book.pass_time(10)
    with pytest.raises(Refused, match="for the agent of the lease"):
        book.post(book.other, on.Beat(lease_id="job", index=1, running_s=20))
    book.post(book.agent, on.Beat(lease_id="job", index=1, running_s=20))
    with pytest.raises(Refused, match="for the renter of the lease"):
        book.post(book.agent, on.Cosigned(lease_id="job", index=1))
    with pytest.raises(Refused, match="has no beat 2"):
        book.post(book.renter, on.Cosigned(lease_id="job", index=2))
    book.post(book.renter, on.Cosigned(lease_id="job", index=1))
    with pytest.raises(Refused, match="co-signed already"):
        book.post(book.renter, on.Cosigned(lease_id="job", index=1))


def test_one_voucher_pays_for_all_beats_before_it() -> None:
    """A renter that was away agrees to the last beat alone."""
    book = Book()
    book.run(beats=0, delegate="")
    for index in range(5):
        book.pass_time(10)
        book.post(book.agent, on.Beat(lease_id="job", index=index, running_s=10 * (index + 1)))
    book.post(book.renter, on.Cosigned(lease_id="job", index=4))
    assert book.state.leases["job"].paid_s == 50
    assert book.state.leases["job"].unsigned == ()


def test_beats_that_wait_for_long_are_kept_few() -> None:
    """Of a renter that never answers the last thousand can be agreed to, and with any of them all before."""
    book = Book()
    book.run(beats=0)
    for index in range(1002):
        book.pass_time(10)
        book.post(book.agent, on.Beat(lease_id="job", index=index, running_s=10 * (index + 1)))
    assert len(book.state.leases["job"].unsigned) == 1000
    with pytest.raises(Refused, match="co-sign 2 or later"):
        book.post(book.renter, on.Cosigned(lease_id="job", index=1))
    book.post(book.renter, on.Cosigned(lease_id="job", index=2))
    assert book.state.leases["job"].paid_s == 30


def test_commitments_are_a_chain() -> None:
    """A commitment that skips a block, or follows another state than the last, is refused."""
    book = Book()
    book.run(blocks=2)
    good = {"lease_id": "job", "block": 2, "update": 30, "state": sha256(b"2"), "blob": sha256(b"2")}
    for wrong, text in (
        ({"block": 3}, "out of order"),
        ({"previous": sha256(b"0")}, "does not follow"),
        ({"update": 20}, "at update 20"),
    ):
        with pytest.raises(Refused, match=text):
            book.post(book.agent, on.Committed(**{**good, "previous": sha256(b"1"), **wrong}))
    book.post(book.agent, on.Committed(**good, previous=sha256(b"1")))


def test_only_silence_makes_a_lease_suspect_and_lost() -> None:
    """The operator cannot end a lease whose agent beats; after four beats of silence it can, and the meter stands."""
    book = Book()
    book.run()
    book.pass_time(10)
    with pytest.raises(Refused, match="only silence"):
        book.post(book.operator, on.Suspected(lease_id="job"))
    book.pass_time(10)
    book.post(book.operator, on.Suspected(lease_id="job"))
    with pytest.raises(Refused, match="only silence"):
        book.post(book.operator, on.Lost(lease_id="job"))
    book.post(book.agent, on.Beat(lease_id="job", index=3, running_s=50))
    assert book.state.leases["job"].state == "running"
    book.pass_time(60)
    book.post(book.operator, on.Suspected(lease_id="job"))
    book.post(book.operator, on.Lost(lease_id="job"))
    lease = book.state.leases["job"]
    assert (lease.state, lease.reason, lease.paid_s) == ("closed", "lost", 30)
    assert book.state.record_of(book.agent.public).lost == 1
    assert not book.state.offers["box"].lease_id


def test_an_owner_gives_the_notice_that_was_promised() -> None:
    """Shorter notice is refused; after it the agent leaves, and it does not count as a loss."""
    book = Book()
    book.run()
    with pytest.raises(Refused, match="promised 120 s"):
        book.post(book.agent, on.Reclaiming(lease_id="job", by_s=book.now_s + 60))
    book.post(book.agent, on.Reclaiming(lease_id="job", by_s=book.now_s + 120))
    book.pass_time(120)
    book.post(book.agent, on.Closed(lease_id="job", reason="owner is back"))
    record = book.state.record_of(book.agent.public)
    assert (record.reclaimed, record.left, record.lost) == (1, 0, 0)
