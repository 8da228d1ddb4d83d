from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from stoker.pool import events as on
from stoker.pool.escrow import pay_for
from stoker.pool.events import CREDIT, sha256
from stoker.pool.keys import Key
from stoker.pool.lease import VERDICT_S
from stoker.pool.watch import MOST_OPEN, due
from tests.pool.book import Book, offer, opened


def settle(book: Book, present: Mapping[str, str] | None = None, up_since_s: float = 0.0) -> list[str]:
    """Let the control plane sign what is due; the kinds of events."""
    bodies = due(book.state, book.now_s, key=book.operator, up_since_s=up_since_s, present=present or {})
    for body in bodies:
        book.post(book.operator, body)
    return [on.kind_of(body) for body in bodies]


def test_silence_ends_a_lease_in_two_steps() -> None:
    """Suspect after three beats, lost after a minute; a pool that was itself down counts from its own start."""
    book = Book()
    book.run()
    book.pass_time(29)
    assert settle(book) == []
    book.pass_time(1)
    assert settle(book, up_since_s=book.now_s - 5) == []
    assert settle(book) == ["suspected"]
    book.pass_time(29)
    assert settle(book) == []
    book.pass_time(1)
    assert settle(book, up_since_s=book.now_s - 59) == []
    assert settle(book) == ["lost"]
    book.pass_time(600)
    assert settle(book) == ["final"]
    assert book.balance(book.agent) == 10 * CREDIT + pay_for(30, CREDIT // 2)


def test_an_agent_that_never_accepts() -> None:
    """The whole deposit comes back after a minute."""
    book = Book()
    book.post(book.agent, on.Offered(offer=offer(now_s=book.now_s)))
    book.post(book.renter, opened(window_s=0))
    book.pass_time(59)
    assert settle(book) == []
    book.pass_time(11)
    assert settle(book, up_since_s=book.now_s - 60) == []
    assert settle(book) == ["closed"]
    assert book.balance(book.renter) == 10 * CREDIT
    assert settle(book) == ["final"]


def test_the_pool_cosigns_for_a_renter_who_sleeps() -> None:
    """If the renter named it, and only then."""
    book = Book()
    book.run(beats=0, delegate=book.operator.public)
    book.pass_time(10)
    book.post(book.agent, on.Beat(lease_id="job", index=0, running_s=10))
    assert settle(book) == ["cosigned"]
    assert settle(book) == []
    other = Book()
    other.run(beats=0)
    other.pass_time(10)
    other.post(other.agent, on.Beat(lease_id="job", index=0, running_s=10))
    assert settle(other) == []


def test_a_deposit_that_is_used_up_ends_the_lease() -> None:
    """The agent is paid what there is, without debts."""
    book = Book()
    book.run(beats=0, deposit=CREDIT, forecast=on.Forecast(hours=2.0, credits=CREDIT))
    for index in range(2):
        book.pass_time(3600)
        book.post(book.agent, on.Beat(lease_id="job", index=index, running_s=3600 * (index + 1)))
        book.post(book.renter, on.Cosigned(lease_id="job", index=index))
    assert settle(book)[0] == "closed"
    book.pass_time(601)
    assert settle(book) == ["final"]
    assert book.balance(book.agent) == 11 * CREDIT
    assert book.balance(book.renter) == 9 * CREDIT


def test_what_replays_need_is_not_run_up_by_the_meter() -> None:
    """Of a deposit for an hour and its replays the meter takes an hour, and verifiers the rest."""
    book = Book()
    book.run(beats=0, deposit=CREDIT, forecast=on.Forecast(hours=1.0, credits=CREDIT // 2), verify_fraction=0.05)
    book.pass_time(3600)
    book.post(book.agent, on.Beat(lease_id="job", index=0, running_s=3600))
    assert settle(book)[0] == "closed"
    assert book.state.leases["job"].reason == "the deposit is used up"


def test_a_verifier_has_a_few_blocks_at_a_time() -> None:
    """However many blocks were drawn; each verdict makes room for the next."""
    book = Book()
    book.finish(beats=6, blocks=40, verify_fraction=1.0)
    present = {book.other.public: ""}
    assert settle(book, present) == ["challenged"] * MOST_OPEN
    assert settle(book, present) == []
    one = book.state.leases["job"].open_challenges[0]
    book.post(book.other, on.VerdictGiven(lease_id="job", block=one.block, verifier=one.verifier, equal=True))
    assert settle(book, present) == ["challenged"]


@pytest.mark.parametrize(
    ("kind", "counts", "asked"),
    [("h100", (1, 4), "third"), ("h100", (1, 1), ""), ("cpu", (1, 1), "both"), ("l4", (2, 2), "")],
)
def test_blocks_of_several_devices_are_for_who_has_as_many(kind: str, counts: tuple[int, int], asked: str) -> None:
    """Processes on a CPU are made again on any CPU; several GPUs on as many, or more, of the kind."""
    book = Book()
    book.finish(beats=6, blocks=8, verify_fraction=1.0)
    lease_kind = "h100" if kind == "l4" else kind
    book.state.leases["job"] = replace(book.state.leases["job"], device=lease_kind, num_devices=2)
    for key, count in zip((book.other, book.third), counts, strict=True):
        device = on.OfferedDevice(kind=kind, count=count)
        book.post(key, on.Offered(offer=offer(key.public[:8], book.now_s, device=device)))
    settle(book, {book.other.public: "", book.third.public: ""})
    found = {one.verifier for one in book.state.leases["job"].challenges}
    assert found <= {book.other.public, book.third.public}
    assert {"": 0, "third": 1, "both": 2}[asked] == len(found)
    assert asked != "third" or found == {book.third.public}


def answer(book: Book, keys: Mapping[str, Key], block: int, *, equal: bool) -> None:
    """Let all who were asked for a block answer."""
    for one in book.state.leases["job"].open_challenges:
        if one.block == block:
            verdict = on.VerdictGiven(lease_id="job", block=block, verifier=one.verifier, equal=equal)
            book.post(keys[one.verifier], verdict)


def test_a_pool_that_starts_again_settles_nothing_at_once() -> None:
    """Before the first request for work those at work are neither taken for gone nor asked for twice."""
    for is_disputed in (False, True):
        book = Book()
        book.finish(beats=6, blocks=2, verify_fraction=1.0)
        keys = {key.public: key for key in (book.other, book.third)}
        both = dict.fromkeys(keys, "")
        book.pass_time(300)
        assert settle(book, {book.other.public: ""}) == ["challenged"] * 2
        if is_disputed:
            answer(book, keys, 0, equal=False)
            assert settle(book, both) == ["disputed"]
            assert settle(book, both) == ["challenged"]
        book.pass_time(301)
        began_s = book.now_s
        assert settle(book, {}, up_since_s=began_s) == []
        book.pass_time(1)
        assert settle(book, {book.third.public: ""}, up_since_s=began_s) == []
        book.pass_time(91)
        assert settle(book, both, up_since_s=began_s) == []
        book.pass_time(VERDICT_S)
        assert settle(book, {}, up_since_s=began_s) == ["refunded" if is_disputed else "final"]


def test_a_lie_about_one_block_does_not_keep_the_others_from_being_checked() -> None:
    """A friend of a cheat who finds an honest block unequal does not end the replays of those that are wrong."""
    book = Book()
    book.finish(beats=6, blocks=80, verify_fraction=1.0)
    keys = {key.public: key for key in (book.other, book.third, Key.made())}
    for key in keys:
        book.post(book.operator, on.Deposited(account=key, amount=0))
    present = dict.fromkeys(keys, "")
    settle(book, present)
    answer(book, keys, 0, equal=False)
    for _ in range(10):
        settle(book, present)
        for block in range(80):
            answer(book, keys, block, equal=block < 60)
    assert book.state.leases["job"].outcome == "slashed"


def test_a_dispute_for_nothing_holds_pay_no_longer_than_the_window() -> None:
    """Without an unequal replay blocks are asked for as without a dispute."""
    book = Book()
    book.finish(beats=6, blocks=40, verify_fraction=1.0)
    present = {book.other.public: "", book.third.public: ""}
    book.pass_time(599)
    book.post(book.renter, on.Disputed(lease_id="job"))
    assert settle(book, present) == ["challenged"] * (2 * MOST_OPEN)
    book.pass_time(VERDICT_S - 1)
    assert settle(book, present) == []
    book.pass_time(1)
    assert settle(book, present) == ["final"]


def test_an_agent_that_won_a_dispute_has_passed() -> None:
    """One liar costs an honest agent nothing of its record."""
    book = Book()
    book.finish(beats=6, blocks=1, verify_fraction=1.0)
    keys = {key.public: key for key in (book.other, book.third, Key.made())}
    for key in keys:
        book.post(book.operator, on.Deposited(account=key, amount=0))
    settle(book, dict.fromkeys(keys, ""))
    answer(book, keys, 0, equal=False)
    for _ in range(4):
        settle(book, dict.fromkeys(keys, ""))
        answer(book, keys, 0, equal=True)
    assert book.state.leases["job"].state == "final"
    assert book.state.record_of(book.agent.public).passed == 1


def test_a_verifier_out_of_time_keeps_no_fee_from_the_next() -> None:
    """The second one is promised as much as the first; a late verdict is not paid out of the agent's pay."""
    book = Book()
    book.finish(beats=6, blocks=2, verify_fraction=1.0, window_s=3600)
    keys = {key.public: key for key in (book.other, book.third)}
    settle(book, {book.other.public: ""})
    book.pass_time(VERDICT_S)
    assert settle(book, dict.fromkeys(keys, "")) == ["challenged"] * 2
    fees = {one.fee for one in book.state.leases["job"].challenges}
    assert fees == {pay_for(60, CREDIT // 2) // 2}
    for _ in range(2):
        answer(book, keys, 0, equal=True)
        answer(book, keys, 1, equal=True)
    book.pass_time(3600)
    assert "final" in settle(book)
    assert book.balance(book.agent) == 10 * CREDIT + pay_for(60, CREDIT // 2)


def drive(
    book: Book, lies: set[str], present: Mapping[str, str], rounds: int = 60, made: Mapping[str, str] | None = None
) -> str:
    """Let the pool work, and verifiers answer; how the lease ended.

    Those in `lies` say that a block is unequal, and that they came to the state in `made`.
    """
    keys = {key.public: key for key in (book.other, book.third, book.agent)}
    for _ in range(rounds):
        settle(book, present)
        lease = book.state.leases["job"]
        for one in lease.open_challenges:
            is_equal = one.verifier not in lies
            verdict = on.VerdictGiven(
                lease_id="job",
                block=one.block,
                verifier=one.verifier,
                equal=is_equal,
                made="" if is_equal else (made or {}).get(one.verifier, ""),
            )
            book.post(keys[one.verifier], verdict)
        if lease.state == "final":
            kinds = [event.kind for event in book.events]
            return next(kind for kind in ("slashed", "refunded", "final") if kind in kinds)
        book.pass_time(30)
    raise AssertionError(book.state.leases["job"].state)


def test_all_blocks_of_a_new_provider_are_replayed_and_paid_for() -> None:
    """Each by another agent of the same class, at the block's share of the pay, out of the deposit."""
    book = Book()
    book.finish(beats=6, blocks=3, verify_fraction=0.05)
    present = {book.other.public: "other class", book.third.public: "", book.agent.public: ""}
    assert drive(book, set(), present) == "final"
    pay = pay_for(60, CREDIT // 2)
    assert {one.verifier for one in book.state.leases["job"].challenges} == {book.third.public}
    assert book.balance(book.third) == 10 * CREDIT + 3 * (pay // 3)
    assert book.balance(book.agent) == 10 * CREDIT + pay
    assert book.state.record_of(book.agent.public).passed == 1


def test_a_cheat_is_slashed_by_two_verifiers() -> None:
    """The first unequal replay brings a second one; both agree, and pay and bond go to the renter."""
    book = Book()
    book.finish(beats=6, blocks=3, verify_fraction=0.05)
    present = {book.other.public: "", book.third.public: ""}
    assert drive(book, {book.other.public, book.third.public}, present) == "slashed"
    assert book.balance(book.agent) == 9 * CREDIT
    assert book.state.record_of(book.agent.public).slashed == 1


@pytest.mark.parametrize(
    ("states", "end"),
    [((b"a", b"a"), "slashed"), ((b"a", b"b"), "refunded"), ((b"a", b""), "slashed"), ((b"", b""), "slashed")],
)
def test_verifiers_that_contradict_each_other_cut_no_bond(states: tuple[bytes, bytes], end: str) -> None:
    """A job that computes something else on each machine: two replays that differ from each other prove nothing.

    Where one of them compared by tolerance, in another class, its state says nothing about the other's.
    """
    book = Book()
    book.finish(beats=6, blocks=1, verify_fraction=1.0)
    verifiers = (book.other.public, book.third.public)
    made = {key: sha256(state) if state else "" for key, state in zip(verifiers, states, strict=True)}
    assert drive(book, set(verifiers), dict.fromkeys(verifiers, ""), made=made) == end
    assert book.balance(book.agent) == (9 if end == "slashed" else 10) * CREDIT
    assert book.state.record_of(book.agent.public).slashed == (end == "slashed")


def test_one_liar_slashes_nobody() -> None:
    """Verdicts that contradict each other do not cut a bond, whichever verifier was asked first."""
    for liar in ("other", "third"):
        book = Book()
        book.finish(beats=6, blocks=1, verify_fraction=1.0)
        present = {book.other.public: "", book.third.public: ""}
        assert drive(book, {getattr(book, liar).public}, present) == "final"
        assert book.balance(book.agent) >= 10 * CREDIT


def test_a_lone_verifier_cannot_cut_a_bond() -> None:
    """Where no other verifier can replay, the renter has its money back, and the agent its bond."""
    book = Book()
    book.finish(beats=6, blocks=1, verify_fraction=1.0)
    assert drive(book, {book.other.public}, {book.other.public: ""}) == "refunded"
    assert book.balance(book.agent) == 10 * CREDIT


def test_a_result_that_nobody_can_replay_is_final_after_its_time() -> None:
    """Without verifiers the agent is paid, and its record does not grow."""
    book = Book()
    book.finish(beats=6, blocks=1, verify_fraction=1.0)
    assert drive(book, set(), {}) == "final"
    assert book.state.record_of(book.agent.public).passed == 0


def test_an_hour_has_its_root() -> None:
    """Once an hour, and not again at once."""
    book = Book()
    book.pass_time(3599)
    assert settle(book) == []
    book.pass_time(1)
    assert settle(book) == ["anchored"]
    assert settle(book) == []
