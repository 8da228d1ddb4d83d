from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from stoker.pool import events as on
from stoker.pool.bisection import points
from stoker.pool.commitment import chain_head
from stoker.pool.escrow import pay_for, required_deposit
from stoker.pool.events import CREDIT, Body, Refused, sha256
from stoker.pool.fair_use import to_preempt
from stoker.pool.forwarding import forwarding_fee
from stoker.pool.keys import Key
from stoker.pool.lease import MOST_COMMITMENTS, STALLED, STALLED_S, TRANSITIONS, Lease, run_of
from stoker.pool.rules import apply
from stoker.pool.rules.disputes import draw_message
from stoker.pool.state import State, merkle_root
from stoker.pool.watch import due
from stoker.units import GIB
from tests.pool.book import Book, offer, opened


def test_a_job_is_paid_by_the_second() -> None:
    """Co-signed seconds go to the agent, the rest of the deposit comes back, and so does the bond."""
    book = Book()
    book.finish(beats=6, every_s=10)
    pay = pay_for(60, CREDIT // 2)
    assert book.balance(book.renter) == 10 * CREDIT - pay
    assert book.balance(book.agent) == 9 * CREDIT
    book.pass_time(601)
    book.post(book.operator, on.Final(lease_id="job"))
    assert book.balance(book.agent) == 10 * CREDIT + pay
    book.state.accounts.require_conserved(is_thorough=True)
    assert set(book.state.accounts.balances) == {
        key.public for key in (book.renter, book.agent, book.other, book.third)
    }


def test_seconds_that_nobody_agreed_to_are_not_paid() -> None:
    """The meter stops at the last co-signed beat, and after the end the renter may still agree to the last ones."""
    book = Book()
    book.run(beats=2)
    book.pass_time(10)
    book.post(book.agent, on.Beat(lease_id="job", index=2, running_s=30))
    book.post(book.agent, on.Finished(lease_id="job", result=sha256(b"r")))
    twin = [*book.events]
    book.post(book.renter, on.Final(lease_id="job"))
    assert book.balance(book.agent) == 10 * CREDIT + pay_for(20, CREDIT // 2)
    state = State()
    for event in twin:
        apply(state, event)
    book.state = state
    book.post(book.renter, on.Cosigned(lease_id="job", index=2))
    book.post(book.renter, on.Final(lease_id="job"))
    assert book.balance(book.agent) == 10 * CREDIT + pay_for(30, CREDIT // 2)


@pytest.mark.parametrize(
    ("body", "signer", "text"),
    [
        (opened(deposit=CREDIT // 2), "renter", "0.50 credits are missing"),
        (opened(verify_fraction=0.05, deposit=CREDIT * 3 // 2), "renter", "100 % of it, 0.50 credits are missing"),
        (opened(deposit=11 * CREDIT), "renter", "1.00 credits are missing"),
        (opened(rate_per_hour=CREDIT // 4), "renter", "the offer asks 0.50"),
        (opened(offer_id="other"), "renter", "is gone"),
        (opened(), "agent", "cannot rent from itself"),
        (opened(bond=31 * CREDIT), "renter", "10 times the deposit"),
        (opened("0" * 16 + "-run.0"), "renter", "for the key that begins so"),
        (on.Offered(offer=offer("cheap", 10**9, price_per_hour=1, cost_per_hour=2)), "agent", "below its cost"),
        (on.Offered(offer=offer("box", 10**9)), "other", "who made the offer"),
        (on.Offered(offer=offer("old", expires_s=5.0)), "agent", "has lapsed"),
        (on.Withdrawn(offer_id="box"), "renter", "who made the offer"),
        (on.Deposited(account="0" * 64, amount=1), "renter", "only the pool's own key"),
    ],
)
def test_what_money_and_offers_refuse(body: Body, signer: str, text: str) -> None:
    """Each with a sentence, and nothing is changed."""
    book = Book()
    book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)))
    before = dict(book.state.accounts.balances), dict(book.state.offers), book.state.head
    with pytest.raises(Refused, match=text):
        book.post(getattr(book, signer), body)
    assert (dict(book.state.accounts.balances), dict(book.state.offers), book.state.head) == before


def test_a_device_is_leased_once_at_a_time() -> None:
    """An offer that is taken is not free until its lease has ended."""
    book = Book()
    book.run()
    with pytest.raises(Refused, match="is taken"):
        book.post(book.renter, opened("second"))
    book.post(book.renter, on.Closed(lease_id="job", reason="enough"))
    book.post(book.renter, opened("second"))


def test_a_withdrawn_offer_does_not_free_its_device() -> None:
    """Nor does the same offer made again while the lease goes on."""
    book = Book()
    book.run()
    book.post(book.agent, on.Withdrawn(offer_id="box"))
    with pytest.raises(Refused, match="is taken"):
        book.post(book.renter, opened("second"))
    book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)))
    with pytest.raises(Refused, match="is taken"):
        book.post(book.renter, opened("second"))
    book.post(book.renter, on.Closed(lease_id="job", reason="enough"))
    book.post(book.agent, on.Withdrawn(offer_id="box"))
    with pytest.raises(Refused, match="is gone"):
        book.post(book.renter, opened("second"))


def test_clocks_that_are_wrong() -> None:
    """An event dated too far from the pool's clock is refused with the difference and the remedy."""
    book = Book()
    with pytest.raises(Refused, match=r"\+121 s from the pool's clock"):
        book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)), skew_s=121)
    book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)), skew_s=-119)


def test_a_nonce_counts_once() -> None:
    """A second event with the nonce of an earlier one is refused, as long as its clock is not stale anyway."""
    book = Book()
    event = book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)))
    with pytest.raises(Refused, match="counts once"):
        book.post(book.agent, on.Offered(offer=offer("again", book.now_s)), nonce=event.draft.nonce)


def test_strangers_act_only_in_open_pools() -> None:
    """A key that the operator did not admit cannot even make an offer, unless the pool is open."""
    body = on.Offered(offer=offer(now_s=2_000_000.0))
    with pytest.raises(Refused, match="not admitted"):
        Book().post(Key.made(), body)
    Book(is_open=True).post(Key.made(), body)


def test_an_event_for_another_pool_is_refused() -> None:
    """A signature names its pool."""
    book, other = Book(), Book()
    event = other.event(other.operator, on.Deposited(account=book.agent.public, amount=5))
    with pytest.raises(Refused, match=r"does not follow|for the pool"):
        apply(book.state, event)


def challenged(book: Book, verifier: Key, *, equal: bool, fee: int = 0) -> None:
    """Ask for a replay of block 1, and let it be answered."""
    draw = book.operator.sign(draw_message(book.operator.public, book.state.leases["job"]))
    book.post(book.operator, on.Challenged(lease_id="job", block=1, verifier=verifier.public, draw=draw, fee=fee))
    book.post(verifier, on.VerdictGiven(lease_id="job", block=1, verifier=verifier.public, equal=equal))


def test_a_cheat_loses_its_pay_and_its_bond() -> None:
    """Two verifiers that find the same block unequal make the bond slashable; one does not."""
    book = Book()
    book.finish(beats=6, blocks=3, verify_fraction=0.05)
    challenged(book, book.other, equal=False, fee=100)
    book.post(book.operator, on.Disputed(lease_id="job", reason="unequal"))
    with pytest.raises(Refused, match="1 verifiers found"):
        book.post(book.operator, on.Slashed(lease_id="job", amount=CREDIT, reason="skipped"))
    challenged(book, book.third, equal=False, fee=100)
    with pytest.raises(Refused, match="cannot be cut"):
        book.post(book.operator, on.Slashed(lease_id="job", amount=CREDIT + 1, reason="skipped"))
    book.post(book.operator, on.Slashed(lease_id="job", amount=CREDIT, reason="skipped"))
    book.post(book.operator, on.Final(lease_id="job"))
    assert book.balance(book.agent) == 9 * CREDIT
    assert book.balance(book.renter) == 11 * CREDIT - 200
    assert book.balance(book.other) == 10 * CREDIT + 100
    record = book.state.record_of(book.agent.public)
    assert (record.slashed, record.failed, record.passed) == (1, 1, 0)
    lease = book.state.leases["job"]
    assert (lease.state, lease.outcome) == ("final", "slashed")
    book.state.accounts.require_conserved(is_thorough=True)


def test_a_wrong_accusation_costs_the_accuser_its_record() -> None:
    """A verdict that another replay contradicts is written down, and the honest agent is paid."""
    book = Book()
    book.finish(beats=6, blocks=3, verify_fraction=0.05)
    challenged(book, book.other, equal=False)
    with pytest.raises(Refused, match=r"disputed first|can be disputed until"):
        book.post(book.operator, on.Final(lease_id="job"))
    book.post(book.operator, on.Disputed(lease_id="job"))
    challenged(book, book.third, equal=True)
    book.post(book.operator, on.Final(lease_id="job"))
    assert book.balance(book.agent) == 10 * CREDIT + pay_for(60, CREDIT // 2)
    assert book.state.record_of(book.other.public).wrong_verdicts == 1
    assert book.state.record_of(book.third.public).wrong_verdicts == 0


def test_a_verifier_at_work_is_paid_before_the_lease_is_settled() -> None:
    """A renter cannot save its fee by settling early."""
    book = Book()
    book.finish(beats=6, blocks=3, verify_fraction=0.05)
    draw = book.operator.sign(draw_message(book.operator.public, book.state.leases["job"]))
    asked = on.Challenged(lease_id="job", block=1, verifier=book.other.public, draw=draw, fee=100)
    with pytest.raises(Refused, match="not signed by the pool"):
        book.post(book.operator, on.Challenged(lease_id="job", block=1, verifier=book.other.public, draw="0" * 128))
    book.post(book.operator, asked)
    with pytest.raises(Refused, match="its verifier is paid first"):
        book.post(book.renter, on.Final(lease_id="job"))
    book.post(book.other, on.VerdictGiven(lease_id="job", block=1, verifier=book.other.public, equal=True))
    book.post(book.renter, on.Final(lease_id="job"))
    assert book.balance(book.other) == 10 * CREDIT + 100


def test_a_dispute_does_not_save_a_verifiers_fee() -> None:
    """A renter that disputes cannot settle while a block is being replayed."""
    book = Book()
    book.finish(beats=6, blocks=3, verify_fraction=0.05)
    draw = book.operator.sign(draw_message(book.operator.public, book.state.leases["job"]))
    book.post(book.operator, on.Challenged(lease_id="job", block=1, verifier=book.other.public, draw=draw, fee=100))
    book.post(book.renter, on.Disputed(lease_id="job"))
    book.pass_time(601)
    with pytest.raises(Refused, match="its verifier is paid first"):
        book.post(book.renter, on.Final(lease_id="job"))


@pytest.mark.parametrize(("blocks", "verify", "paid_s"), [(0, 0.05, 0), (1, 0.05, 1200), (0, 0.0, 1200)])
def test_work_that_cannot_be_checked_is_not_paid(blocks: int, verify: float, paid_s: int) -> None:
    """Of a lease that is checked, seconds count up to the last commitment."""
    book = Book()
    book.finish(beats=2, every_s=600, blocks=blocks, verify_fraction=verify)
    book.pass_time(601)
    book.post(book.operator, on.Final(lease_id="job"))
    assert book.balance(book.agent) == 10 * CREDIT + pay_for(paid_s, CREDIT // 2)


def test_a_lease_has_a_bounded_number_of_blocks() -> None:
    """No agent can make the log's readers carry millions of commitments."""
    book = Book()
    book.run(blocks=1)
    lease = book.state.leases["job"]
    book.state.leases["job"] = replace(lease, commitments=lease.commitments * MOST_COMMITMENTS)
    body = on.Committed(lease_id="job", block=MOST_COMMITMENTS, update=10**6, state="1" * 64, blob="1" * 64)
    with pytest.raises(Refused, match="no more are taken"):
        book.post(book.agent, body)


def test_a_job_that_leaves_within_its_notice_was_reclaimed() -> None:
    """It may save and go before the notice is over; without notice it has left."""
    for has_notice in (True, False):
        book = Book()
        book.run()
        if has_notice:
            book.post(book.agent, on.Reclaiming(lease_id="job", by_s=book.now_s + 120))
        book.post(book.agent, on.Closed(lease_id="job", reason="reclaimed: the owner is back"))
        record = book.state.record_of(book.agent.public)
        assert (record.reclaimed, record.left) == (int(has_notice), int(not has_notice))


def test_values_that_cannot_be_meant() -> None:
    """A bond that is held for years, and a device that a terminal takes for markup."""
    with pytest.raises(ValueError, match="window_s"):
        opened(window_s=10**9)
    with pytest.raises(ValueError, match=r"device\.kind"):
        on.OfferedDevice(kind="[/x]")
    assert on.OfferedDevice(kind="cuda:0").count == 1


def test_a_lease_that_passed_adds_to_the_record() -> None:
    """After a replay that was equal, the next lease of that provider has one more passed job behind it."""
    book = Book()
    book.finish(beats=6, blocks=3, verify_fraction=0.05)
    challenged(book, book.other, equal=True)
    book.pass_time(601)
    book.post(book.operator, on.Final(lease_id="job"))
    assert book.state.record_of(book.agent.public).passed == 1


def test_roots_are_of_all_events_since_the_last() -> None:
    """A root of other events, or a wrong one, is refused; after a right one the next begins with it."""
    book = Book()
    last, root = book.state.seq, merkle_root(book.state.unanchored)
    with pytest.raises(Refused, match="the root of events"):
        book.post(book.operator, on.Anchored(root=sha256(b""), first=1, last=last))
    with pytest.raises(Refused, match="the next root"):
        book.post(book.operator, on.Anchored(root=root, first=2, last=last))
    book.post(book.operator, on.Anchored(root=root, first=1, last=last))
    assert (book.state.first_unanchored, len(book.state.unanchored)) == (last + 1, 1)
    book.post(book.operator, on.Anchored(root=merkle_root(book.state.unanchored), first=last + 1, last=last + 1))
    assert book.state.first_unanchored == last + 2


END = sha256(b"end")
"""Digest of the state after each block of a random lease."""


@pytest.mark.slow
@pytest.mark.parametrize("needed", [1, 2])
def test_money_over_thousands_of_random_operations(needed: int) -> None:
    """Whatever happens, in whatever order, no credit is made or lost, none is owed, and refusals change nothing."""
    draw = random.Random(7)
    book = Book(verdicts_to_slash=needed, forward_price=CREDIT)
    keys = [book.operator, book.renter, book.agent, book.other, book.third]
    taken = refused = 0
    kinds, expected = set[str](), set(on.KINDS) - {"founded", "preempting"}
    for number in range(30_000):
        if number >= 6_000 and kinds >= expected:
            break
        book.pass_time(draw.choice((0.5, 5, 5, 40)))
        key, body = draw.choice(keys), random_body(book, draw, number)
        if draw.random() < 0.85:
            key = rightful(book, body, draw)
        before = (book.state.seq, dict(book.state.accounts.balances), book.state.accounts.deposited)
        try:
            book.post(key, body)
            taken += 1
            kinds.add(on.kind_of(body))
        except Refused:
            refused += 1
            assert (book.state.seq, dict(book.state.accounts.balances), book.state.accounts.deposited) == before
        book.state.accounts.require_conserved(is_thorough=True)
    assert taken > 800, (taken, refused)
    assert refused > 400, (taken, refused)
    assert kinds >= expected, expected - kinds
    for lease in book.state.leases.values():
        if lease.state in ("final", "slashed", "refunded"):
            assert book.state.held(lease.lease_id) == (0, 0)
    twin = State()
    for event in book.events:
        apply(twin, event)
    assert twin.accounts.balances == book.state.accounts.balances
    assert twin.leases == book.state.leases
    assert twin.gangs == book.state.gangs
    assert twin.records == book.state.records


def rightful(book: Book, body: Body, draw: random.Random) -> Key:
    """Who may sign such an event, most often."""
    by_public = {key.public: key for key in (book.operator, book.renter, book.agent, book.other, book.third)}
    lease = book.state.leases.get(getattr(body, "lease_id", ""))
    match body:
        case on.Offered() | on.Withdrawn():
            name = body.offer.offer_id if isinstance(body, on.Offered) else body.offer_id
            return by_public[book.state.offers[name].agent] if name in book.state.offers else book.agent
        case on.Waiting():
            return draw.choice([book.renter, book.other])
        case on.Linked():
            return draw.choice([book.agent, book.other])
        case on.Opened() | on.GangOpened() | on.Cosigned() | on.RunStopped():
            return book.renter
        case on.Accepted() | on.Beat() | on.Committed() | on.Sent() | on.Reclaiming() | on.Finished():
            return book.agent if lease is None else by_public[lease.agent]
        case on.VerdictGiven():
            return by_public[body.verifier]
        case on.Traced() | on.Supplied():
            waits = lease is not None and lease.searched(body.block, body.verifier)[1].waits_for("agent")
            return by_public[lease.agent if waits and lease is not None else body.verifier]
        case _:
            return book.operator


def random_body(book: Book, draw: random.Random, number: int) -> Body:
    """Something that might be legal now, or not."""
    leases = list(book.state.leases.values())
    lively = [lease for lease in leases if lease.state != "final"]
    lease = draw.choice(lively or leases) if leases else None
    name = "none" if lease is None else lease.lease_id
    box, anyone = f"box{draw.randrange(4)}", draw.choice([book.renter, book.agent, book.other]).public
    if draw.random() < 0.03 and number % 3 == 0 and len(book.state.offers) > 1:
        agents = {one: listed.agent for one, listed in sorted(book.state.offers.items())[:2]}
        took_s = (draw.choice([1.0, 9.0]),)
        return on.Probed(
            offers=tuple(
                on.ProbeTimes(offer_id=one, agent=agent, claimed_s=1.0, alone_s=(1.0,), together_s=took_s)
                for one, agent in agents.items()
            )
        )
    if draw.random() < 0.03:
        return draw.choice(
            [
                on.TeamMade(team=draw.choice(["a", "b"]), members=(anyone,), priority=draw.randrange(3), weight=2.0),
                on.Waiting(request_id=f"r{draw.randrange(3)}", until_s=book.now_s + draw.randrange(1, 700)),
                on.RunStopped(run=run_of(name, "") or "none", is_stopped=draw.random() < 0.5),
                on.Linked(other=anyone, upload_bytes_per_s=1e6, download_bytes_per_s=2e6, delay_s=0.01),
            ]
        )
    for ready in to_preempt(book.state, book.now_s):
        if draw.random() < 0.5:
            return on.Preempting(lease_id=ready.lease_id, by_s=book.now_s + draw.choice([60, 130]))
    if lease is None or draw.random() < (0.08 if len(lively) > 4 else 0.5):
        rate = draw.randrange(1, CREDIT)
        bodies: list[Body] = [
            on.Offered(
                offer=offer(box, book.now_s, price_per_hour=draw.randrange(CREDIT), min_s=1, determinism_class="c" * 64)
            ),
            on.Withdrawn(offer_id=box),
            on.Deposited(account=anyone, amount=draw.randrange(CREDIT)),
            opened(
                f"job{number}.0",
                offer_id=box,
                rate_per_hour=rate,
                deposit=draw.randrange(2 * CREDIT),
                bond=draw.randrange(CREDIT),
                most_forwarding=number * 500,
                window_s=draw.randrange(3000),
                verify_fraction=draw.choice([0.05, 1]),
                forecast=on.Forecast(hours=0.1, credits=draw.randrange(CREDIT // 2)),
            ),
        ]
        gangs = [random_gang(book, draw, number) for _ in range(2)]
        return draw.choice([*bodies, bodies[0], bodies[-1], bodies[-1], bodies[-1], *gangs])
    if number % 29 == 0:
        blob, num_bytes = draw.choice([lease.order, *lease.blobs, sha256(b"none")]), number << 9
        return on.Forwarded(lease_id=name, blob=blob, num_bytes=num_bytes, amount=forwarding_fee(num_bytes, CREDIT))
    head = lease.commitments[-1].state if lease.commitments else ""
    state = chain_head(head, number + 1, END)
    verifier = draw.choice([book.other, book.third, book.operator]).public
    signed = book.operator.sign(draw_message(book.operator.public, lease))
    asked = draw.choice(lease.challenges) if lease.challenges else None
    block = draw.randrange(max(1, len(lease.commitments)))
    acts: list[Body] = [
        on.Accepted(lease_id=name),
        on.Beat(
            lease_id=name,
            index=max(0, lease.beat_index + draw.choice([1, 1, 1, 0, 2])),
            running_s=max(0, lease.running_s + draw.choice([0, 3, 5, 30, -1])),
        ),
        on.Cosigned(lease_id=name, index=max(0, lease.beat_index + draw.choice([0, 0, -1, 1]))),
        on.Committed(
            lease_id=name, block=len(lease.commitments), update=number + 1, state=state, blob=state, previous=head
        ),
        on.Sent(lease_id=name, update=number, fragment=0, blob=draw.choice([state, sha256(b"message")])),
        on.Suspected(lease_id=name),
        on.Lost(lease_id=name),
        on.Reclaiming(lease_id=name, by_s=book.now_s + draw.choice([60, 120, 300])),
        on.Finished(lease_id=name, result=state),
        on.Closed(lease_id=name, reason="x"),
        on.Challenged(lease_id=name, block=block, verifier=verifier, draw=signed, fee=draw.randrange(2000)),
        on.VerdictGiven(
            lease_id=name,
            block=block if asked is None else asked.block,
            verifier=verifier if asked is None else asked.verifier,
            equal=draw.random() < 0.5,
            made="" if asked is not None and asked.update else draw.choice(["", sha256(b"made"), state]),
        ),
        on.Disputed(lease_id=name),
        on.Slashed(lease_id=name, amount=draw.randrange(CREDIT), reason="x"),
        on.Refunded(lease_id=name),
        on.Final(lease_id=name),
        on.Anchored(root=merkle_root(book.state.unanchored), first=book.state.first_unanchored, last=book.state.seq),
    ]
    acts += 3 * [body for body in acts if isinstance(body, on.Beat | on.Cosigned | on.Committed)]
    acts += 8 * [body for body in acts if isinstance(body, on.Accepted) and lease.gang]
    acts += 3 * [body for body in acts if isinstance(body, on.Challenged)]
    if asked is not None and asked.equal is None:
        acts += 8 * [body for body in acts if isinstance(body, on.VerdictGiven)]
    if lease.unequal_blocks:
        acts += 4 * [body for body in acts if isinstance(body, on.Disputed | on.Slashed)]
    if lease.state == "disputed" and draw.random() < 0.9:  # mostly a search comes to its end
        searches = search_acts(book, draw, lease, signed)
        if searches and lease.open_challenges:
            searches = [body for body in acts if isinstance(body, on.VerdictGiven)]
        acts = searches or acts
    if draw.random() < 0.85:  # mostly what the table allows in that state
        acts = [body for body in acts if (lease.state, on.kind_of(body)) in TRANSITIONS] or acts
    return draw.choice(acts)


def random_gang(book: Book, draw: random.Random, number: int) -> Body:
    """Leases of both sites of a gang, or the next one of a site."""
    gang, boxes = f"gang{number % 5}", draw.sample(range(4), 2)
    leases = tuple(
        opened(
            f"job{number}-{site}",
            offer_id=f"box{box}",
            rate_per_hour=CREDIT,
            deposit=draw.randrange(CREDIT),
            bond=draw.randrange(CREDIT // 4),
            window_s=draw.randrange(3000),
            forecast=on.Forecast(hours=0.1, credits=draw.randrange(CREDIT // 4)),
            gang=gang,
            site=site,
            sites=2,
        )
        for site, box in enumerate(boxes)
    )
    return draw.choice([on.GangOpened(leases=leases), on.GangOpened(leases=leases), *leases])


def search_acts(book: Book, draw: random.Random, lease: Lease, signed: str) -> list[Body]:
    """What might bring a search of a lease on: answers of the side that is asked, arbiters, a dismissal."""
    found: list[Body] = []
    for one in lease.challenges:
        search = one.bisection
        if search is None or one.dismissed:
            continue
        of_block: dict[str, Any] = {"lease_id": lease.lease_id, "block": one.block, "verifier": one.verifier}
        count = len(points(search.low, search.high)) - (draw.random() < 0.1)
        end = (search.agent.end or END) if search.waits_for("agent") else search.verifier.end
        states = (*(sha256(draw.choice((b"a", b"b"))) for _ in range(count - 1)), draw.choice([end, end, sha256(b"a")]))
        before = "" if search.low == search.begin else sha256(b"before")
        arbiter = draw.choice([book.other, book.third, book.operator]).public
        asked = on.Challenged(
            **{**of_block, "verifier": arbiter}, draw=signed, fee=9, update=search.update, against=one.verifier
        )
        after = draw.choice([sha256(b"after")] * 9 + [""])
        found += [
            on.Supplied(**of_block, before=draw.choice([before, before, ""]) if after else "", after=after)
            if search.update
            else on.Traced(**of_block, states=draw.choice([states] * 19 + [()])),
            asked if search.is_ready else on.Dismissed(**of_block),
        ]
        found += 2 * found[-2:-1]
        if lease.num_agreeing(one.block) > 1:
            found.append(on.Slashed(lease_id=lease.lease_id, amount=lease.bond, reason="x"))
    return found


def test_what_was_never_accepted_is_settled_at_once() -> None:
    """Leases that were not taken do not pile up for the time to dispute."""
    book = Book()
    book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)))
    book.post(book.renter, opened(window_s=7 * 24 * 3600))
    book.post(book.agent, on.Closed(lease_id="job", reason="refused: no"))
    book.post(book.operator, on.Final(lease_id="job"))
    assert book.balance(book.renter) == 10 * CREDIT
    assert not book.state.unsettled


def test_leases_that_nobody_can_run_count_once_against_an_agent() -> None:
    """One renter cannot spoil a record lease by lease; another renter's lease is another piece of evidence."""
    book = Book()
    book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)))
    for number, renter in enumerate((book.renter, book.renter, book.renter, book.other)):
        book.post(renter, opened(f"job-{number}"))
        book.post(book.agent, on.Closed(lease_id=f"job-{number}", reason="refused: a package is missing"))
    assert book.state.record_of(book.agent.public).declined == 2


def test_forwarding_is_paid_once_and_within_what_the_renter_said() -> None:
    """By the pool's price, for blobs of the lease; by the pool alone, whose quota holds as well."""
    book = Book(forward_price=GIB, forward_quota_bytes=1000)  # a micro-credit a byte
    book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)))
    inputs = tuple(sha256(b"%d" % number) for number in range(4))
    book.post(book.renter, opened(inputs=inputs, most_forwarding=900))
    renter, operator = book.balance(book.renter), book.balance(book.operator)

    def forwarded(blob: str, num_bytes: int, amount: int) -> on.Forwarded:
        return on.Forwarded(lease_id="job", blob=blob, num_bytes=num_bytes, amount=amount)

    for key, body, why in (
        (book.agent, forwarded(inputs[0], 600, 600), "only the pool's own key"),
        (book.operator, forwarded(inputs[0], 600, 599), "costs 600 micro-credits"),
        (book.operator, forwarded(sha256(b"other"), 600, 600), "is none of lease"),
        (book.operator, forwarded(inputs[0], 1001, 1001), "a lease at most"),
        (book.operator, forwarded(inputs[0], 901, 901), "spends 0.0009 credits"),
    ):
        with pytest.raises(Refused, match=why):
            book.post(key, body)
    book.post(book.operator, forwarded(inputs[0], 600, 600))
    with pytest.raises(Refused, match="is paid for"):
        book.post(book.operator, forwarded(inputs[0], 100, 100))
    with pytest.raises(Refused, match=r"of which 0\.0006 credits are gone"):
        book.post(book.operator, forwarded(inputs[1], 301, 301))
    book.post(book.operator, forwarded(inputs[1], 300, 300))
    assert (book.balance(book.renter), book.balance(book.operator)) == (renter - 900, operator + 900)


def worked(*blocks_s: int, tail_s: int, **more: Any) -> Book:
    """A lease that is checked, of blocks each of which took so long on the meter, and what came after the last one."""
    return worked_in(Book(), *blocks_s, tail_s=tail_s, **more)


def worked_in(book: Book, *blocks_s: int, tail_s: int, **more: Any) -> Book:
    """As `worked`, in a pool that is given."""
    book.run(beats=0, verify_fraction=0.05, **more)
    passed_s, previous = 0, ""
    for index, each_s in enumerate((*blocks_s, tail_s)):
        book.pass_time(each_s)
        passed_s += each_s
        book.post(book.agent, on.Beat(lease_id="job", index=index, running_s=passed_s))
        book.post(book.renter, on.Cosigned(lease_id="job", index=index))
        if index < len(blocks_s):
            state = sha256(b"%d" % index)
            block = {"block": index, "update": index + 1, "state": state, "blob": state, "previous": previous}
            book.post(book.agent, on.Committed(lease_id="job", **block))
            previous = state
    return book


def settled_pay(book: Book) -> int:
    """What the agent has more than before, once the lease that has ended is settled [micro-credits]."""
    book.pass_time(600)
    book.post(book.operator, on.Final(lease_id="job"))
    book.state.accounts.require_conserved(is_thorough=True)
    return book.balance(book.agent) - 10 * CREDIT


@pytest.mark.parametrize("who", ["agent", "renter", "silence", "results"])
@pytest.mark.parametrize(
    ("blocks_s", "tail_s", "of_tail_s"),
    [((), 290, 0), ((60, 50), 40, 40), ((60, 50), 290, 50), ((200, 40, 200), 200, 40)],
)
def test_seconds_are_paid_by_the_block_that_they_led_to(
    who: str, blocks_s: tuple[int, ...], tail_s: int, of_tail_s: int
) -> None:
    """An agent that accepts and does nothing gets nothing, whoever ends it; set-up is paid with the first block.

    After the last block nothing is paid where it is the agent that ends the lease or falls silent; else no more than
    the shortest block took.
    """
    book = worked(*blocks_s, tail_s=tail_s)
    if who == "silence":
        book.pass_time(40)
        book.post(book.operator, on.Suspected(lease_id="job"))
        book.post(book.operator, on.Lost(lease_id="job"))
    elif who == "results":
        book.post(book.agent, on.Finished(lease_id="job", result=sha256(b"result")))
    else:
        book.post(getattr(book, who), on.Closed(lease_id="job", reason="enough"))
    expected_s = sum(blocks_s) + (of_tail_s if who in ("renter", "results") else 0)
    held = book.state.held("job")[0]
    assert held == required_deposit(pay_for(expected_s, CREDIT // 2), 1.0), "what cannot be paid is back at once"
    assert settled_pay(book) == pay_for(expected_s, CREDIT // 2)


def test_a_lease_without_a_block_is_ended_by_the_pool() -> None:
    """Unpaid, and it stands in the agent's record; not before its agent would have left it, had it been honest."""
    book = worked(60, tail_s=STALLED_S - 1)
    with pytest.raises(Refused, match="goes on"):
        book.post(book.operator, on.Closed(lease_id="job", reason=STALLED))
    book.pass_time(1)
    book.post(book.agent, on.Beat(lease_id="job", index=2, running_s=60 + STALLED_S))
    book.post(book.renter, on.Cosigned(lease_id="job", index=2))
    assert [body.reason for body in stalled_bodies(book)] == [STALLED]
    for body in stalled_bodies(book):
        book.post(book.operator, body)
    assert book.state.record_of(book.agent.public).left == 1
    assert settled_pay(book) == pay_for(60, CREDIT // 2)


def test_the_pool_as_a_renter_ends_a_stalled_lease_as_the_pool() -> None:
    """An operator may rent as well: what its agent did not do is not paid for that."""
    book = Book()
    book.post(book.operator, on.Deposited(account=book.operator.public, amount=10 * CREDIT))
    book.renter = book.operator
    book = worked_in(book, 60, tail_s=STALLED_S)
    book.post(book.operator, on.Closed(lease_id="job", reason=STALLED))
    assert book.state.record_of(book.agent.public).left == 1
    assert settled_pay(book) == pay_for(60, CREDIT // 2)


def test_a_block_has_an_update_at_least() -> None:
    """Else an agent would commit to the state that a run begins with, which replays find equal, and be paid for it."""
    book = Book()
    book.run(beats=1, verify_fraction=0.05)
    state = sha256(b"begin")
    with pytest.raises(Refused, match="a block has an update at least"):
        book.post(book.agent, on.Committed(lease_id="job", block=0, update=0, state=state, blob=state))


def stalled_bodies(book: Book) -> list[on.Closed]:
    """What the control plane closes now."""
    bodies = due(book.state, book.now_s, key=book.operator, up_since_s=0.0, present={})
    return [body for body in bodies if isinstance(body, on.Closed)]


def test_a_deposit_that_runs_out_pays_for_no_idle_minute() -> None:
    """However short a lease an offer allows, so that its deposit is used up at once."""
    minute = pay_for(60, CREDIT // 2)
    terms = {"deposit": 2 * minute, "bond": minute, "forecast": on.Forecast(hours=1 / 60, credits=minute)}
    for blocks_s, paid_s in (((), 0), ((20,), 40)):
        book = worked(*blocks_s, tail_s=60, **terms)
        book.post(book.operator, on.Closed(lease_id="job", reason="the deposit is used up"))
        assert settled_pay(book) == pay_for(paid_s, CREDIT // 2)


def test_no_lease_of_a_stopped_run_is_opened() -> None:
    """By none of its renter's machines, until it is started again; others, and their runs, are not concerned."""
    book = Book()
    for name in ("box", "twin"):
        book.post(book.agent, on.Offered(offer=offer(name, book.now_s)))
    with pytest.raises(Refused, match="has had no lease"):
        book.post(book.renter, on.RunStopped(run="run"))
    book.post(book.renter, opened("run.0"))
    with pytest.raises(Refused, match="has had no lease"):
        book.post(book.other, on.RunStopped(run="run"))
    book.post(book.renter, on.RunStopped(run="run"))
    book.post(book.renter, on.Closed(lease_id="run.0", reason="stopped"))
    with pytest.raises(Refused, match="was stopped by its renter"):
        book.post(book.renter, opened("run.1"))
    book.post(book.renter, opened("runs.1", offer_id="twin", deposit=2 * CREDIT))
    book.post(book.renter, on.RunStopped(run="run", is_stopped=False))
    book.post(book.renter, opened("run.1"))
    assert book.state.stopped == set()
