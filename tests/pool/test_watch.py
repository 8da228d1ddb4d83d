from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stoker.pool import events as on
from stoker.pool.bisection import Bisection, points
from stoker.pool.commitment import chain_head
from stoker.pool.escrow import pay_for
from stoker.pool.events import CREDIT, Refused, sha256
from stoker.pool.keys import Key
from stoker.pool.lease import MOST_BLOCK_S, STALLED, STALLED_S, VERDICT_S, Lease
from stoker.pool.rules import apply
from stoker.pool.rules.disputes import draw_message
from stoker.pool.state import State
from stoker.pool.watch import MOST_OPEN, due
from tests.pool.book import Book, offer, opened


def settle(book: Book, present: Mapping[str, str] | None = None, up_since_s: float = 0.0) -> list[str]:
    """Let the control plane sign what is due; the kinds of events."""
    bodies = due(book.state, book.now_s, key=book.operator, up_since_s=up_since_s, present=present or {})
    for body in bodies:
        book.post(book.operator, body)
    return [on.kind_of(body) for body in bodies]


def test_silence_ends_a_lease_in_two_steps() -> None:
    """Suspect after two beats, lost after four; a pool that was itself down counts from its own start."""
    book = Book()
    book.run()
    book.pass_time(19)
    assert settle(book) == []
    book.pass_time(1)
    assert settle(book, up_since_s=book.now_s - 5) == []
    assert settle(book) == ["suspected"]
    book.pass_time(19)
    assert settle(book) == []
    book.pass_time(1)
    assert settle(book, up_since_s=book.now_s - 39) == []
    assert settle(book) == ["lost"]
    book.pass_time(600)
    assert settle(book) == ["final"]
    assert book.balance(book.agent) == 10 * CREDIT + pay_for(30, CREDIT // 2)


def test_a_pool_that_was_away_for_long_waits_for_a_block() -> None:
    """The first beat after that has all of the time without a block in it; the agent had nobody to send one to."""
    book = Book()
    book.run(beats=0, verify_fraction=0.1)
    book.pass_time(STALLED_S)
    book.post(book.agent, on.Beat(lease_id="job", index=0, running_s=STALLED_S))
    assert settle(book, up_since_s=book.now_s - MOST_BLOCK_S + 1) == []
    assert settle(book, up_since_s=book.now_s - MOST_BLOCK_S) == ["closed"]
    assert book.state.leases["job"].reason == STALLED


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
    """Of a deposit for 20 minutes and their replays the meter takes 20 minutes, and verifiers the rest."""
    book, pay = Book(), pay_for(1200, CREDIT // 2)
    book.run(beats=0, deposit=2 * pay, forecast=on.Forecast(hours=1 / 3, credits=pay), bond=pay, verify_fraction=0.05)
    book.pass_time(1200)
    book.post(book.agent, on.Beat(lease_id="job", index=0, running_s=1200))
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


def test_time_in_which_the_pool_was_away_is_not_the_verifiers() -> None:
    """Who was at work on a block before has its whole time after it, and nobody else is asked meanwhile."""
    book = Book()
    book.finish(beats=6, blocks=1, verify_fraction=1.0, window_s=3 * round(VERDICT_S))
    assert settle(book, {book.other.public: ""}) == ["challenged"]
    book.pass_time(VERDICT_S + 1)
    both = {book.other.public: "", book.third.public: ""}
    assert settle(book, both, up_since_s=book.now_s - 100) == []
    assert settle(book, both) == ["challenged"]


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


UPDATES = range(1, 31)
"""Updates of the only block of a lease in dispute."""


def states_of(wrong: int = 0) -> dict[int, str]:
    """States by number of updates, of an honest run, or of one whose update `wrong` was not made."""
    states, state = {}, "beginning"
    for update in UPDATES:
        state = sha256(f"{state} {update if update != wrong else 'skipped'}".encode())
        states[update] = state
    return states


class Dispute:
    """A lease of one block whose agent, verifiers and arbiters answer what the pool asks, each with states of its own.

    Those without states do not answer at all.
    """

    def __init__(self, agent: dict[int, str], others: list[dict[int, str] | None], **rules: Any) -> None:
        self.book, self.agent = Book(**rules), agent
        self.keys = [Key.made() for _ in others]
        self.states = {key.public: states for key, states in zip(self.keys, others, strict=True)}
        self.book.run(beats=6, verify_fraction=1.0)
        self.committed = chain_head("", UPDATES[-1], agent[UPDATES[-1]])
        for key in self.keys:
            self.book.post(self.book.operator, on.Deposited(account=key.public, amount=0))
        self.book.post(
            self.book.agent,
            on.Committed(lease_id="job", block=0, update=UPDATES[-1], state=self.committed, blob=sha256(b"blob")),
        )
        self.book.post(self.book.agent, on.Finished(lease_id="job", result=sha256(b"result")))
        self.agent_answers: dict[int, str] | None = agent
        self.arbiters_decide = True

    @property
    def lease(self) -> Lease:
        """The lease now."""
        return self.book.state.leases["job"]

    def run(self, rounds: int = 60) -> str:
        """Let the pool work, and all answer; how the lease ended."""
        total = self.book.state.accounts.deposited
        for _ in range(rounds):
            present = dict.fromkeys(self.states, "")
            for body in due(
                self.book.state,
                self.book.now_s,
                key=self.book.operator,
                up_since_s=0.0,
                present=present,
                listening=[self.book.agent.public],
            ):
                self.book.post(self.book.operator, body)
            self.book.state.accounts.require_conserved(is_thorough=True)
            if self.lease.state == "final":
                assert self.book.state.accounts.deposited == total
                return self.lease.outcome or "paid"
            self._answer()
            self.book.pass_time(60)
        raise AssertionError(self.lease)

    def _answer(self) -> None:
        by_public = {key.public: key for key in self.keys}
        for asked in self.lease.open_challenges:
            if (states := self.states[asked.verifier]) is None or (asked.update and not self.arbiters_decide):
                continue
            key = by_public[asked.verifier]
            if asked.update:
                search = self.lease.searched(0, asked.against)[1]
                made = states[asked.update]
                self._verdict(key, equal=made == search.agent.end, made=made)
            else:
                equal = states[UPDATES[-1]] == self.agent[UPDATES[-1]]
                self._verdict(key, equal=equal, made="" if equal else states[UPDATES[-1]])
        for verdict in self.lease.challenges:
            if verdict.judges is not False or self.lease.state != "disputed":
                continue
            for key, states in (
                (self.book.agent, self.agent_answers),
                (by_public[verdict.verifier], self.states[verdict.verifier]),
            ):
                search = self.lease.searched(0, verdict.verifier)[1]
                party = self.lease.party(key.public, verdict)
                if states is not None and party is not None and search.waits_for(party):
                    self.post_states(key, verdict.verifier, search, states)

    def _verdict(self, key: Key, **words: Any) -> None:
        self.book.post(key, on.VerdictGiven(lease_id="job", block=0, verifier=key.public, **words))

    def post_states(self, key: Key, verifier: str, search: Bisection, states: dict[int, str]) -> None:
        """State or supply what is asked."""
        if search.update:
            before = sha256(b"before") if search.low > search.begin else ""
            body: on.Body = on.Supplied(
                lease_id="job", block=0, verifier=verifier, before=before, after=sha256(b"after")
            )
        else:
            stated = tuple(states[update] for update in points(search.low, search.high))
            body = on.Traced(lease_id="job", block=0, verifier=verifier, states=stated)
        self.book.post(key, body)

    def replayed(self) -> State:
        """The state that anyone comes to from the log."""
        state = State()
        for event in self.book.events:
            apply(state, event)
        return state


def test_an_arbiter_makes_one_update_and_a_cheat_is_slashed() -> None:
    """The first wrong update is found and stands in the log, with both states and the arbiter's."""
    dispute = Dispute(states_of(wrong=17), [states_of(), states_of()])
    assert dispute.run() == "slashed"
    assert dispute.book.balance(dispute.book.agent) == 9 * CREDIT
    whole, arbiter = sorted(dispute.lease.challenges, key=lambda one: one.update)
    assert (whole.update, arbiter.update, arbiter.against) == (0, 17, whole.verifier)
    [found] = dispute.replayed().leases["job"].found_updates
    assert (found.update, found.agent_state, found.verifier_state) == (17, states_of(17)[17], states_of()[17])
    assert found.arbiters == ((arbiter.verifier, states_of()[17]),)
    [slashed] = [event.draft.body for event in dispute.book.events if event.kind == "slashed"]
    assert all(word in slashed["reason"] for word in ("update 17", states_of(17)[17], states_of()[17]))
    assert len([event for event in dispute.book.events if event.kind == "traced"]) == 2


def test_a_lying_verifier_costs_an_honest_agent_nothing() -> None:
    """Its verdict is dismissed by the arbiter, its record says so, and the block is replayed by another."""
    for _ in range(8):  # whichever is asked first
        dispute = Dispute(states_of(), [states_of(wrong=9), states_of(), states_of()])
        assert dispute.run() == "paid"
        assert dispute.book.balance(dispute.book.agent) == 10 * CREDIT + pay_for(60, CREDIT // 2)
        records = [dispute.book.state.record_of(key.public) for key in dispute.keys]
        was_asked = any(one.verifier == dispute.keys[0].public for one in dispute.lease.challenges)
        assert [record.wrong_verdicts for record in records] == [int(was_asked), 0, 0]
        assert dispute.book.state.record_of(dispute.book.agent.public).passed == 1
        assert dispute.replayed().records == dispute.book.state.records
        if was_asked:
            assert {one.dismissed for one in dispute.lease.challenges if one.judges is None and not one.update} == {
                "contradicted"
            }


def test_a_friend_of_a_cheat_as_arbiter_puts_it_off_and_no_more() -> None:
    """The block is made by another verifier, with another arbiter; then the friend's word was the wrong one."""
    num_seen = 0
    for _ in range(40):  # until the friend is the first arbiter
        dispute = Dispute(states_of(wrong=17), [states_of(), states_of(wrong=17), states_of(), states_of()])
        friend = dispute.keys[1].public
        outcome = dispute.run()
        arbiters = [one.verifier for one in dispute.lease.challenges if one.update]
        if arbiters[:1] == [friend]:
            num_seen += 1
            assert outcome == "slashed"
            assert "contradicted" in {one.dismissed for one in dispute.lease.challenges}
            records = [dispute.book.state.record_of(key.public).wrong_verdicts for key in dispute.keys]
            assert records == [0, 1, 0, 0]
    assert num_seen


@pytest.mark.parametrize("gives_up", [False, True])
def test_an_agent_that_does_not_answer_is_judged_by_whole_blocks(gives_up: bool) -> None:
    """Silence alone costs nothing: an honest one is paid, and a cheat is slashed by two replays, as ever."""
    for wrong, end in ((0, "paid"), (17, "slashed")):
        others = [states_of(), states_of(), states_of(wrong=9)] if not wrong else [states_of(), states_of()]
        dispute = Dispute(states_of(wrong=wrong), others)
        give_up(dispute, dispute.book.agent, aloud=gives_up)
        assert dispute.run() == end
        assert not dispute.lease.found_updates
        assert dispute.book.state.record_of(dispute.book.agent.public).slashed == bool(wrong)


def give_up(dispute: Dispute, key: Key, *, aloud: bool) -> None:
    """Let a side say, each time, that it cannot make the block again; or say nothing."""
    usual = dispute.post_states

    def post(who: Key, verifier: str, search: Bisection, states: dict[int, str]) -> None:
        if who is not key:
            usual(who, verifier, search, states)
        elif aloud:
            dispute.book.post(key, on.Traced(lease_id="job", block=0, verifier=verifier))

    dispute.post_states = post  # type: ignore[method-assign]


def test_a_verifier_that_does_not_answer_has_proved_nothing() -> None:
    """Its verdict is dismissed once its time is over, without a mark, and another one replays the block."""
    for is_asked_to_speak in (False, True):
        dispute = Dispute(states_of(), [states_of(wrong=9)])
        liar = dispute.keys[0]
        give_up(dispute, liar, aloud=is_asked_to_speak)
        assert dispute.run() == "paid"
        assert [one.dismissed for one in dispute.lease.challenges] == ["silent"]
        assert dispute.book.state.record_of(liar.public).wrong_verdicts == 0
        assert dispute.book.balance(dispute.book.agent) == 10 * CREDIT + pay_for(60, CREDIT // 2)


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_verifier_owes_no_states_to_an_agent_that_gives_none(gives_up: bool) -> None:
    """Its verdict is not dismissed for what is of no use: without another verifier the renter has its pay back."""
    dispute = Dispute(states_of(wrong=17), [states_of()])
    give_up(dispute, dispute.book.agent, aloud=gives_up)
    give_up(dispute, dispute.keys[0], aloud=False)
    assert dispute.run() == "refunded"
    assert [one.dismissed for one in dispute.lease.challenges] == [""]


@pytest.mark.parametrize("silent", ["agent", "verifier"])
def test_the_pools_own_absence_is_no_silence_of_a_side(silent: str) -> None:
    """After an outage a side has as long as ever before its verdict is dismissed, or whole blocks are compared."""
    dispute = Dispute(states_of(wrong=17), [states_of(), states_of()])
    book, (first, second) = dispute.book, dispute.keys
    draw = book.operator.sign(draw_message(book.operator.public, dispute.lease))
    of_block: dict[str, Any] = {"lease_id": "job", "block": 0, "verifier": first.public}
    book.post(book.operator, on.Challenged(**of_block, draw=draw))
    book.post(first, on.VerdictGiven(**of_block, equal=False, made=states_of()[30]))
    book.post(book.operator, on.Disputed(lease_id="job"))
    answers, states = (book.agent, states_of(wrong=17)) if silent == "verifier" else (first, states_of())
    dispute.post_states(answers, first.public, dispute.lease.searched(0, first.public)[1], states)
    present = dict.fromkeys((book.agent.public, first.public, second.public), "")
    book.pass_time(2 * VERDICT_S)
    began_s = book.now_s - 1
    assert settle(book, present, began_s) == []
    book.pass_time(VERDICT_S - 2)
    assert settle(book, present, began_s) == []
    book.pass_time(1)
    assert settle(book, present, began_s)[0] == ("dismissed" if silent == "verifier" else "challenged")


def test_states_of_another_run_do_not_end_in_what_was_committed() -> None:
    """A cheat that states an honest run's states is refused, and cannot be helped by its own."""
    dispute = Dispute(states_of(wrong=17), [states_of(), states_of()])
    dispute.agent_answers = states_of()
    with pytest.raises(Refused, match="is not what it committed to as block 0"):
        dispute.run()
    dispute.agent_answers = None
    assert dispute.run() == "slashed"


def test_arbiters_that_come_to_other_states_each_prove_nothing() -> None:
    """A job that computes something else on each machine: the renter has its pay back, and the agent its bond."""
    dispute = Dispute(states_of(wrong=1), [states_of(wrong=number) for number in (2, 3, 4)])
    others = {
        key.public: {update: sha256(f"{key.public}{update}".encode()) for update in UPDATES} for key in dispute.keys
    }
    dispute.states = dict(others)
    assert dispute.run() == "refunded"
    assert dispute.book.balance(dispute.book.agent) == 10 * CREDIT


def test_where_arbiters_decide_nothing_whole_blocks_do() -> None:
    """As where all are of another class: those asked in vain make the block, and a liar takes no pay nor a bond."""
    for wrong, end in ((0, "paid"), (17, "slashed")):
        dispute = Dispute(states_of(wrong=wrong), [states_of(), states_of(), states_of()])
        assert settle(dispute.book, dict.fromkeys(dispute.states, "")) == ["challenged"]
        first = dispute.lease.challenges[0].verifier
        if not wrong:
            dispute.states[first] = states_of(wrong=9)
        dispute.arbiters_decide = False
        assert dispute.run(rounds=120) == end
        assert [one for one in dispute.lease.challenges if one.update]
        records = {key: dispute.book.state.record_of(key).wrong_verdicts for key in dispute.states}
        assert records == {**dict.fromkeys(dispute.states, 0), first: int(not wrong)}
        assert dispute.replayed().leases == dispute.book.state.leases


def test_an_arbiter_that_gave_no_verdict_has_one_word_on_the_block() -> None:
    """Asked for the whole block only once its time is over; then its word as an arbiter comes too late."""
    dispute = Dispute(states_of(wrong=17), [states_of(), states_of()])
    book, (first, second) = dispute.book, dispute.keys
    draw = book.operator.sign(draw_message(book.operator.public, dispute.lease))
    of_block: dict[str, Any] = {"lease_id": "job", "block": 0}
    book.post(book.operator, on.Challenged(**of_block, verifier=first.public, draw=draw))
    verdict = {**of_block, "verifier": first.public, "equal": False}
    book.post(first, on.VerdictGiven(**verdict, made=states_of()[30]))
    book.post(book.operator, on.Disputed(lease_id="job"))
    for _ in range(2):
        for key, states in ((first, states_of()), (book.agent, states_of(wrong=17))):
            dispute.post_states(key, first.public, dispute.lease.searched(0, first.public)[1], states)
    arbiter = on.Challenged(**of_block, verifier=second.public, draw=draw, update=17, against=first.public)
    whole = on.Challenged(**of_block, verifier=second.public, draw=draw)
    book.post(book.operator, arbiter)
    with pytest.raises(Refused, match="was asked for block 0 before"):
        book.post(book.operator, whole)
    book.pass_time(VERDICT_S)
    with pytest.raises(Refused, match="was asked for block 0 before"):
        book.post(book.operator, arbiter)
    book.post(book.operator, whole)
    late: dict[str, Any] = {**of_block, "verifier": second.public, "equal": True, "made": states_of(wrong=17)[17]}
    with pytest.raises(Refused, match="has no open challenge"):
        book.post(second, on.VerdictGiven(**late, against=first.public))
    book.post(second, on.VerdictGiven(**{**of_block, "verifier": second.public}, equal=False, made=states_of()[30]))
    assert dispute.lease.num_agreeing(0) == 2


def test_what_the_pool_may_not_do_in_a_search() -> None:
    """Arbiters for other updates or from the sides, dismissals without a reason, words that contradict themselves."""
    dispute = Dispute(states_of(wrong=17), [states_of(), states_of()])
    book, (first, second) = dispute.book, dispute.keys
    draw = book.operator.sign(draw_message(book.operator.public, dispute.lease))

    def asked(verifier: Key, **more: Any) -> on.Challenged:
        return on.Challenged(lease_id="job", block=0, verifier=verifier.public, draw=draw, **more)

    def refused(key: Key, body: on.Body, why: str) -> None:
        before = book.state.leases["job"]
        with pytest.raises(Refused, match=why):
            book.post(key, body)
        assert book.state.leases["job"] == before

    book.post(book.operator, asked(first))
    made, wrong = states_of()[30], states_of(17)
    book.post(first, on.VerdictGiven(lease_id="job", block=0, verifier=first.public, equal=False, made=made))
    book.post(book.operator, on.Disputed(lease_id="job"))
    of_block: dict[str, Any] = {"lease_id": "job", "block": 0, "verifier": first.public}
    refused(book.operator, asked(second, update=17, against=first.public), "no arbiter is needed")
    refused(book.operator, asked(second, update=17, against=second.public), "has given no unequal verdict")
    refused(second, on.Traced(**of_block, states=(made,) * 30), "the agent of the lease, or the verifier")
    refused(first, on.Dismissed(**of_block), "only the pool's own key")
    refused(book.operator, on.Dismissed(**of_block), "nothing contradicts")
    for key, states in ((first, states_of()), (book.agent, wrong)):
        dispute.post_states(key, first.public, dispute.lease.searched(0, first.public)[1], states)
    for key in (first, book.agent):
        dispute.post_states(key, first.public, dispute.lease.searched(0, first.public)[1], wrong)
    refused(book.operator, asked(second, update=16, against=first.public), "no arbiter is needed")
    refused(book.operator, asked(first, update=17, against=first.public), "was asked for block 0 before")
    refused(book.operator, asked(book.agent, update=17, against=first.public), "another agent than the one that ran")
    book.post(book.operator, asked(second, update=17, against=first.public))
    answer: dict[str, Any] = {"lease_id": "job", "block": 0, "verifier": second.public}
    refused(second, on.VerdictGiven(**answer, equal=True, made=states_of()[17]), "cannot find the agent's")
    refused(second, on.VerdictGiven(**answer, equal=False, made=wrong[17]), "cannot find the agent's")
    refused(book.operator, on.Slashed(lease_id="job", amount=CREDIT, reason="x"), "1 verifiers found")
    book.post(second, on.VerdictGiven(**answer, equal=False, made=states_of()[17]))
    refused(book.operator, on.Dismissed(**of_block), "nothing contradicts")
    book.post(book.operator, on.Slashed(lease_id="job", amount=CREDIT, reason="x"))


@pytest.mark.parametrize(("begins", "is_searched"), [(26, True), (30, False)])
def test_a_run_that_was_gone_on_from_begins_where_its_order_says(begins: int, is_searched: bool) -> None:
    """Of a lease's first block the verifier states where it begins, and the agent the head of the chain there."""
    dispute = Dispute(states_of(wrong=28), [states_of()])
    book, (verifier,) = dispute.book, dispute.keys
    head = sha256(b"head of the lease before")
    lease = dispute.lease
    committed = replace(lease.commitments[0], state=chain_head(head, 30, states_of(28)[30]))
    book.state.leases["job"] = replace(lease, commitments=(committed,))
    draw = book.operator.sign(draw_message(book.operator.public, lease))
    of_block: dict[str, Any] = {"lease_id": "job", "block": 0, "verifier": verifier.public}
    book.post(book.operator, on.Challenged(**of_block, draw=draw))
    book.post(verifier, on.VerdictGiven(**of_block, equal=False, made=states_of()[30], begins=begins))
    book.post(book.operator, on.Disputed(lease_id="job"))
    if not is_searched:
        with pytest.raises(Refused, match="has given no unequal verdict"):
            dispute.lease.searched(0, verifier.public)
        return
    stated = tuple(states_of(28)[update] for update in (27, 28, 29, 30))
    with pytest.raises(Refused, match="is not what it committed to"):
        book.post(book.agent, on.Traced(**of_block, states=stated))
    book.post(book.agent, on.Traced(**of_block, states=stated, previous=head))
    book.post(verifier, on.Traced(**of_block, states=tuple(states_of()[update] for update in (27, 28, 29, 30))))
    assert dispute.lease.searched(0, verifier.public)[1].update == 28
