"""The log together with the contract: what one decides, the other pays, and both end with the same money."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

pytest.importorskip("web3", reason="the contract needs web3: pip install 'stoker[chain]'")
pytest.importorskip("eth", reason="an EVM in the process needs py-evm: pip install 'eth-tester[py-evm]'")

from stoker.errors import BadJob, BadRun, PlaceUnreachable
from stoker.pool import events as on
from stoker.pool import watch
from stoker.pool.client import PoolClient
from stoker.pool.contract.custody import ChainSettings, Custody, differing_roots
from stoker.pool.contract.escrow_contract import EscrowContract, connected
from stoker.pool.control_plane import ControlPlane
from stoker.pool.escrow import CHAIN_PREFIX, least_deadline_s, pay_for
from stoker.pool.events import CREDIT, Refused, draft_of, sha256
from stoker.pool.keys import Key, own_key
from stoker.pool.rules.disputes import draw_message
from stoker.pool.state import merkle_root
from tests.pool.book import ORDER, Book, offer, opened
from tests.pool.quick_chain import QuickChain, signers
from tests.pool.server import in_thread, until

WINDOW_S = 600
RATE = CREDIT // 2 + 1


class Both:
    """A pool in memory whose money is in a contract: what is posted is held against the chain first.

    Accounts of the chain start with what they have from earlier ones.
    """

    def __init__(self, chain: QuickChain) -> None:
        self.chain, keys = chain, signers(5)
        self.arbiter = chain.contract(keys[0])
        self.book = Book(float(chain.now_s), contract=self.arbiter.account)
        book = self.book
        names = ("operator", "renter", "agent", "other", "third")
        self.custodies = {
            getattr(book, name).public: Custody(chain.contract(key), book.operator.public)
            for name, key in zip(names, keys, strict=True)
        }
        self.pool = self.custody(book.operator)
        for key in (book.renter, book.agent):
            self.arbiter.grant(self.custody(key).address, 1000 * CREDIT)
        self.first = self.balances()
        for key, name in ((book.agent, "box"), (book.other, "other"), (book.third, "third")):
            self.post(key, on.Offered(offer=offer(name, book.now_s, payee=self.custody(key).address)))

    def custody(self, key: Key) -> Custody:
        """Of a key of the pool."""
        return self.custodies[key.public]

    def post(self, key: Key, body: on.Body) -> None:
        """As the control plane takes it."""
        event = self.book.event(key, body)
        if (check := self.pool.check_of(self.book.state, event.draft)) is not None:
            check()
        self.book.post(key, body)

    def body(self, name: str = "job", **more: Any) -> on.Opened:
        """A lease on the agent's offer."""
        earliest_s = least_deadline_s(self.chain.now_s, offer().max_s, WINDOW_S)
        renter, agent = self.custody(self.book.renter), self.custody(self.book.agent)
        terms = on.ContractTerms(
            payer=renter.address, payee=agent.address, cosigner=self.arbiter.arbiter, deadline_s=int(earliest_s) + 3600
        )
        return opened(name, rate_per_hour=RATE, window_s=WINDOW_S, contract=terms, **more)

    def open(self, body: on.Opened) -> None:
        """Deposit and lease."""
        renter = self.custody(self.book.renter)
        renter.contract.open(renter.terms_of(self.book.renter.public, body))
        self.post(self.book.renter, body)

    def accept(self, name: str) -> None:
        """Bond and lease."""
        agent = self.custody(self.book.agent)
        agent.contract.accept(agent.terms(self.book.state.leases[name]))
        self.post(self.book.agent, on.Accepted(lease_id=name))

    def run(self, name: str, seconds: int) -> None:
        """Let time pass, a beat, and the pool's agreement with its voucher."""
        self.pass_time(seconds)
        lease = self.book.state.leases[name]
        self.post(
            self.book.agent, on.Beat(lease_id=name, index=lease.beat_index + 1, running_s=lease.running_s + seconds)
        )
        lease = self.book.state.leases[name]
        body = on.Cosigned(lease_id=name, index=lease.beat_index)
        self.book_delegate(body)

    def book_delegate(self, body: on.Cosigned) -> None:
        """Co-sign as the pool."""
        self.post(self.book.operator, self.pool.cosigned(self.book.state.leases[body.lease_id], body))

    def commit(self, name: str) -> None:
        """One more block."""
        done = self.book.state.leases[name].commitments
        state = sha256(f"{name}/{len(done)}".encode())
        self.post(
            self.book.agent,
            on.Committed(
                lease_id=name,
                block=len(done),
                update=len(done) + 1,
                state=state,
                blob=state,
                previous=done[-1].state if done else "",
            ),
        )

    def challenge(self, name: str, verifier: Key, *, equal: bool, fee: int, block: int = 0) -> None:
        """Ask for a replay, and let it be answered."""
        draw = self.book.operator.sign(draw_message(self.book.operator.public, self.book.state.leases[name]))
        self.post(
            self.book.operator, on.Challenged(lease_id=name, block=block, verifier=verifier.public, draw=draw, fee=fee)
        )
        self.post(verifier, on.VerdictGiven(lease_id=name, block=block, verifier=verifier.public, equal=equal))

    def pass_time(self, seconds: int) -> None:
        """On both clocks."""
        self.book.pass_time(seconds)
        self.chain.pass_time(seconds)

    def balances(self) -> dict[str, int]:
        """In the contract, by address."""
        return {one.address: self.arbiter.balance(one.address) for one in self.custodies.values()}

    def logged(self) -> dict[str, int]:
        """What addresses should have by the log, where all leases are settled on both sides."""
        account = self.book.state.accounts.balance
        return {address: before + account(CHAIN_PREFIX + address) for address, before in self.first.items()}

    def held(self) -> int:
        """What the contract holds for leases that are not settled there."""
        held = 0
        for lease in self.book.state.leases.values():
            at = self.arbiter.state(self.pool.terms(lease).lease)
            held += lease.deposit * (at in ("funded", "running")) + lease.bond * (at == "running")
        return held

    def end(self, name: str) -> None:
        """Go on from any state to the lease's end, and settle it on the chain."""
        book = self.book
        if (lease := book.state.leases[name]).state in ("funded", "running", "suspect", "reclaiming"):
            self.post(book.renter, on.Closed(lease_id=name, reason="enough"))
        self.pass_time(WINDOW_S + 1)
        lease = book.state.leases[name]
        if lease.state == "closed" and lease.unequal_blocks:
            self.post(book.operator, on.Disputed(lease_id=name))
            lease = book.state.leases[name]
        if lease.state == "disputed" and lease.unequal_blocks:
            self.post(book.operator, on.Refunded(lease_id=name))
        if book.state.leases[name].state != "final":
            self.post(book.operator, on.Final(lease_id=name))
        self.pool.settle(book.state.leases[name])


@pytest.fixture
def both() -> Both:
    """A pool and its contract."""
    return Both(QuickChain(signers(1)[0]))


SHARED: list[QuickChain] = []


class SideBySide(RuleBasedStateMachine):
    """Random histories of leases: log and contract hold the same money at each step, and pay the same at the end."""

    @initialize()
    def found(self) -> None:
        if not SHARED:
            SHARED.append(QuickChain(signers(1)[0]))
        self.both, self.count = Both(SHARED[0]), 0
        self.total = sum(self.both.first.values())

    def name(self) -> str:
        """The lease that is on the agent's offer, or was last."""
        return f"job-{self.count}"

    def is_in(self, *states: str) -> bool:
        """Whether that lease is in one of these states."""
        lease = self.both.book.state.leases.get(self.name())
        return lease is not None and lease.state in states

    @rule(hours=st.integers(0, 3), bond=st.integers(0, 5), share=st.sampled_from([0.0, 0.1, 1.0]))
    def open(self, hours: int, bond: int, share: float) -> None:
        if not self.is_in("funded", "running"):
            self.count += 1
            forecast = on.Forecast(hours=hours, credits=hours * RATE)
            deposit = 2 * hours * RATE + RATE + bond
            self.both.open(
                self.both.body(
                    self.name(),
                    deposit=deposit,
                    bond=bond * CREDIT // 3,
                    forecast=forecast,
                    verify_fraction=share,
                    delegate=self.both.book.operator.public,
                )
            )

    @rule()
    def accept(self) -> None:
        if self.is_in("funded"):
            self.both.accept(self.name())

    @rule(seconds=st.integers(0, 2000), is_committed=st.booleans())
    def run(self, seconds: int, is_committed: bool) -> None:
        if self.is_in("running"):
            self.both.run(self.name(), seconds)
            if is_committed:
                self.both.commit(self.name())

    @rule(how=st.sampled_from(["finished", "renter", "agent"]))
    def stop(self, how: str) -> None:
        book = self.both.book
        with suppress(Refused):  # a lease that nobody accepted is not finished
            if how == "finished":
                self.both.post(book.agent, on.Finished(lease_id=self.name(), result=ORDER))
            else:
                self.both.post(getattr(book, how), on.Closed(lease_id=self.name(), reason=how))

    @precondition(lambda self: self.is_in("closed", "disputed"))
    @rule(
        who=st.sampled_from(["other", "third"]),
        equal=st.booleans(),
        fee=st.integers(0, 3 * RATE),
        block=st.integers(0, 2),
    )
    def replay(self, who: str, equal: bool, fee: int, block: int) -> None:
        with suppress(Refused):  # no such block, asked before, or no money for the fee
            self.both.challenge(self.name(), getattr(self.both.book, who), equal=equal, fee=fee, block=block)

    @precondition(lambda self: self.is_in("closed", "disputed"))
    @rule(
        verdict=st.sampled_from(["disputed", "slashed", "refunded", "final"]),
        by_renter=st.booleans(),
        share=st.integers(0, 3),
    )
    def judge(self, verdict: str, by_renter: bool, share: int) -> None:
        book, name = self.both.book, self.name()
        bond = book.state.held(name)[1]
        body: on.Body = {
            "disputed": on.Disputed(lease_id=name),
            "refunded": on.Refunded(lease_id=name),
            "slashed": on.Slashed(lease_id=name, amount=bond * share // 2, reason="unequal"),
            "final": on.Final(lease_id=name),
        }[verdict]
        with suppress(Refused):  # too early, or not enough replays
            self.both.post(book.renter if by_renter else book.operator, body)

    @rule(seconds=st.sampled_from([1, 60, WINDOW_S]))
    def wait(self, seconds: int) -> None:
        self.both.pass_time(seconds)

    @rule()
    def settle(self) -> None:
        for lease in self.both.book.state.leases.values():
            if lease.state == "final":
                self.both.pool.settle(lease)

    @invariant()
    def nothing_is_made_or_lost(self) -> None:
        self.both.book.state.accounts.require_conserved(is_thorough=True)
        assert sum(self.both.balances().values()) + self.both.held() == self.total

    def teardown(self) -> None:
        if hasattr(self, "both"):
            for name in self.both.book.state.leases:
                self.both.end(name)
            assert self.both.balances() == self.both.logged()
            assert self.both.held() == 0


TestSideBySide = pytest.mark.filterwarnings("ignore")(SideBySide.TestCase)
SideBySide.TestCase.settings = settings(
    max_examples=6, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def paid(both: Both, key: Key) -> int:
    """What an address has more than at first."""
    address = both.custody(key).address
    return both.balances()[address] - both.first[address]


def test_a_cheat_loses_pay_and_bond_in_the_contract(both: Both) -> None:
    """The log slashes; the contract cuts the bond by the verdict, and pays the verifiers out of the deposit."""
    both.open(both.body(verify_fraction=1.0, delegate=both.book.operator.public))
    both.accept("job")
    both.run("job", 1000)
    both.commit("job")
    both.post(both.book.agent, on.Finished(lease_id="job", result=ORDER))
    for verifier in (both.book.other, both.book.third):
        both.challenge("job", verifier, equal=False, fee=100)
    both.post(both.book.operator, on.Disputed(lease_id="job"))
    both.post(both.book.operator, on.Slashed(lease_id="job", amount=CREDIT, reason="unequal"))
    both.end("job")
    assert [paid(both, key) for key in (both.book.renter, both.book.agent, both.book.other, both.book.third)] == [
        CREDIT - 200,
        -CREDIT,
        100,
        100,
    ]
    assert both.balances() == both.logged()


def test_what_is_not_on_the_chain_does_not_count(both: Both) -> None:
    """A lease without its deposit, with other terms than were paid for, an accept without the bond, a bad voucher."""
    book, renter = both.book, both.custody(both.book.renter)
    body = both.body(delegate=book.operator.public)
    with pytest.raises(Refused, match="no deposit for lease job"):
        both.post(book.renter, body)
    renter.contract.open(renter.terms_of(book.renter.public, body))
    with pytest.raises(Refused, match="no deposit for lease job"):
        both.post(book.renter, replace(body, deposit=body.deposit + 1))
    with pytest.raises(Refused, match="no deposit for lease job"):  # another key of the pool, with this one's deposit
        both.post(book.third, body)
    both.post(book.renter, body)
    with pytest.raises(Refused, match="no bond for lease job"):
        both.post(book.agent, on.Accepted(lease_id="job"))
    both.accept("job")
    both.pass_time(10)
    both.post(book.agent, on.Beat(lease_id="job", index=0, running_s=10))
    lease = book.state.leases["job"]
    other = both.arbiter.voucher(both.pool.terms(lease).lease, 11).hex()
    with pytest.raises(Refused, match="the voucher of 10 s"):
        both.post(book.operator, on.Cosigned(lease_id="job", index=0, voucher=other))
    with pytest.raises(Refused, match="with a voucher"):
        both.book.post(book.operator, on.Cosigned(lease_id="job", index=0))
    both.book_delegate(on.Cosigned(lease_id="job", index=0))


def test_what_such_a_pool_refuses(both: Both) -> None:
    """Credits in the log, offers without an address, leases with other terms; each with a sentence."""
    book = both.book
    with pytest.raises(Refused, match="is admitted with 0"):
        both.post(book.operator, on.Deposited(account=book.renter.public, amount=1))
    with pytest.raises(Refused, match="no address"):
        both.post(book.agent, on.Offered(offer=offer("plain", book.now_s)))
    body = both.body()
    assert body.contract is not None
    for changed, text in (
        (replace(body, contract=None), "has other terms"),
        (replace(body, contract=replace(body.contract, payee="0x" + "1" * 40)), "the offer names"),
        (replace(body, contract=replace(body.contract, deadline_s=int(book.now_s) + 60)), "s early"),
    ):
        with pytest.raises(Refused, match=text):
            book.post(book.renter, changed)
    plain = Book()
    plain.post(plain.agent, on.Offered(offer=offer(now_s=plain.now_s)))
    with pytest.raises(Refused, match="in the pool's own log"):
        plain.post(plain.renter, body)


def test_a_lost_pool_pays_by_the_last_voucher(both: Both) -> None:
    """No verdict comes: after the deadline the agent claims what was co-signed, with nothing but the lease's record."""
    both.open(both.body(delegate=both.book.operator.public))
    renter, agent = both.custody(both.book.renter), both.custody(both.book.agent)
    both.accept("job")
    both.run("job", 3601)
    lease = both.book.state.leases["job"]
    assert agent.get_back(lease) is None
    both.chain.pass_time(12 * 86400)
    assert renter.get_back(lease) is None
    assert agent.get_back(lease) is not None
    assert paid(both, both.book.agent) == pay_for(3601, RATE)
    assert agent.get_back(lease) is None


def test_a_deposit_that_no_lease_came_of_is_taken_back(both: Both) -> None:
    """By the renter, before the agent accepts; and where the agent never claims, a week after the deadline."""
    renter = both.custody(both.book.renter)
    for name in ("first", "second"):
        both.open(both.body(name, delegate=both.book.operator.public))
        if name == "second":
            both.accept(name)
            both.chain.pass_time(20 * 86400)
        assert renter.get_back(both.book.state.leases[name]) is not None
        assert paid(both, both.book.renter) == 0
        both.post(both.book.renter, on.Closed(lease_id=name, reason="enough"))


def test_a_signer_that_is_away(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a key that another program holds: that is a sentence, after which the pool goes on with other leases."""

    def away(*_: Any) -> bytes:
        raise ConnectionRefusedError

    monkeypatch.setattr(both.arbiter.signer, "sign", away)
    for ask in (
        lambda: both.arbiter.voucher(bytes(32), 1),
        lambda: both.arbiter.verdict(bytes(32), pay=0, slashed=0, fees=[]),
    ):
        with pytest.raises(PlaceUnreachable, match="the signer cannot be reached"):
            ask()


def test_a_pool_that_ends_brings_nothing_more(both: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lease may wait minutes for its node: after a signal no further one is begun."""
    both.open(both.body(delegate=both.book.operator.public))
    lease, begun = both.book.state.leases["job"], list[str]()
    monkeypatch.setattr(both.pool, "settle", lambda one: (begun.append(one.lease_id), both.pool.is_over.set()))
    both.pool.keep_up([], [lease, replace(lease, lease_id="next")])
    assert begun == ["job"]


def test_a_log_that_was_cut_or_rewritten_differs_from_its_roots(both: Both) -> None:
    """The contract's roots are those of the log; not of one that ends before the last, or has another event."""
    book = both.book
    for _ in range(2):
        first, last = book.state.first_unanchored, book.state.seq
        root = merkle_root(book.state.unanchored)
        both.post(book.operator, on.Anchored(first=first, last=last, root=root))
        both.pool.keep_up(book.state.roots, [])
    roots = book.state.roots
    assert differing_roots(both.arbiter, roots) == (2, "")
    assert differing_roots(both.arbiter, [*roots, replace(roots[1], first=99, last=120)])[1] == ""  # not there yet
    assert "cut short" in differing_roots(both.arbiter, roots[:1])[1]
    assert "the log's" in differing_roots(both.arbiter, [roots[0], replace(roots[1], root="0" * 64)])[1]
    assert "cut short" in differing_roots(both.arbiter, [])[1]


def test_a_job_whose_money_is_in_a_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over HTTP, with an in-process chain that mines: deposit, bond, vouchers, verdict, equal balances at the end."""
    web3, keys = connected("memory"), signers(3)
    contract = EscrowContract.deployed(web3, keys[0])
    for key in keys[1:]:
        contract.grant(key.address, 10 * CREDIT)
    pool = own_key("control", tmp_path).public
    custody, renting, lending = (Custody(EscrowContract(web3, contract.address, key), pool) for key in keys)
    custody.require_arbiter()
    with pytest.raises(BadRun, match="the arbiter of"):
        renting.require_arbiter()
    monkeypatch.setattr("stoker.pool.control_plane._CHAIN_S", 0.05)
    monkeypatch.setattr(watch, "ANCHOR_S", 0.0)
    with in_thread(tmp_path, custody=custody, contract=contract.account) as (plane, operator):
        renter, agent = (PoolClient(operator.address, Key.made()) for _ in range(2))
        for client in (renter, agent):
            assert client.key is not None
            operator.post(on.Deposited(account=client.key.public, amount=0))
        box = offer(now_s=time.time(), payee=lending.address)
        agent.post(on.Offered(offer=box))
        body = opened(order=renter.put_blob(b"what"), delegate=plane.key.public, window_s=0)
        renting.open(renter, body, box)
        lending.put_up(agent.lease("job"))
        lending.put_up(agent.lease("job"))  # again, after its answer was lost
        agent.post(on.Accepted(lease_id="job"))
        agent.post(on.Beat(lease_id="job", index=0, running_s=2))
        until(lambda: renter.lease("job").paid_s == 2)
        agent.post(on.Finished(lease_id="job", result=agent.put_blob(b"results")))
        lease = until(lambda: (found := renter.lease("job")).state == "final" and found)
        until(lambda: contract.state(custody.terms(lease).lease) == "settled")
        pay = pay_for(2, CREDIT // 2)
        assert contract.balance(lending.address) == 10 * CREDIT + pay
        assert contract.balance(renting.address) == 10 * CREDIT - pay
        assert bytes.fromhex(until(lambda: renter.lease("job").verdict))
        until(lambda: contract.anchored() > 5)
        logged = {name: amount for name, amount in operator.state("balances")["balances"].items() if amount}
        assert logged == {CHAIN_PREFIX + lending.address: pay, CHAIN_PREFIX + renting.address: -pay}
        # An offer that somebody else took: the deposit comes back.
        taken = opened("second", order=body.order, offer_id="gone", delegate=plane.key.public, window_s=0)
        with pytest.raises(Refused, match="is gone"):
            renting.open(renter, taken, box)
        assert contract.balance(renting.address) == 10 * CREDIT - pay


def test_a_pool_is_not_served_without_its_contract(tmp_path: Path) -> None:
    """Nor with another one, nor by a key that is not its arbiter."""
    web3, keys = connected("memory"), signers(2)
    pool = own_key("control", tmp_path).public
    one, other = (EscrowContract.deployed(web3, keys[0]) for _ in range(2))
    with in_thread(tmp_path, custody=Custody(one, pool), contract=one.account):
        pass
    with pytest.raises(BadRun, match="without which it is not served"), in_thread(tmp_path):
        pass
    with pytest.raises(BadRun, match="and this is"), in_thread(tmp_path, custody=Custody(other, pool)):
        pass


def test_members_name_their_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renter without a node or a key reads which variables name them; another chain is refused."""
    rules = on.Founded(name="p", contract="eip155:1:0x" + "1" * 40)
    with pytest.raises(BadJob, match="the money of this pool is in the contract") as told:
        Custody.of_member(rules, "a" * 64, {})
    assert "STOKER_CHAIN_KEY" in str(told.value.remedy)
    with pytest.raises(BadRun, match="no contract"):
        ChainSettings(url="memory", contract="0x" + "1" * 40).connected()


def on_chain(tmp_path: Path) -> tuple[ControlPlane, Custody, Key, Key, on.Opened]:
    """A pool with a contract of an in-process chain; keys of a renter and an agent; a lease whose deposit is there."""
    web3, keys = connected("memory"), signers(3)
    contract = EscrowContract.deployed(web3, keys[0])
    contract.grant(keys[1].address, 10 * CREDIT)
    key, renter, agent = own_key("control", tmp_path), Key.made(), Key.made()
    custody, renting = (Custody(EscrowContract(web3, contract.address, one), key.public) for one in keys[:2])
    rules = on.Founded(name="p", is_open=True, contract=contract.account)
    plane = ControlPlane(tmp_path, key, rules, custody=custody)
    box = offer(now_s=time.time(), payee=keys[2].address)
    asyncio.run(plane.submit(draft_of(on.Offered(offer=box), agent, key.public)))
    terms = on.ContractTerms(
        payer=renting.address,
        payee=keys[2].address,
        cosigner=contract.arbiter,
        deadline_s=int(least_deadline_s(time.time(), box.max_s, 0)) + 3600,
    )
    body = opened(contract=terms, window_s=0)
    renting.contract.open(renting.terms_of(renter.public, body))
    return plane, custody, renter, agent, body


def test_an_accept_beside_its_lease_is_held_against_the_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent whose accept arrives while the lease is being written puts up its bond all the same."""
    plane, _, renter, agent, body = on_chain(tmp_path)
    accepted = draft_of(on.Accepted(lease_id="job"), agent, plane.key.public)
    append, beside = plane.log.append, []

    async def both() -> None:
        loop = asyncio.get_running_loop()

        def appended(event: on.Event) -> None:
            if event.kind == "opened":
                beside.append(asyncio.run_coroutine_threadsafe(plane.submit(accepted), loop))
                until(lambda: plane._turn._waiters)
            append(event)

        monkeypatch.setattr(plane.log, "append", appended)
        await plane.submit(draft_of(body, renter, plane.key.public))
        with pytest.raises(Refused, match="no bond for lease job"):
            await asyncio.wrap_future(beside[0])

    asyncio.run(both())
    assert plane.state.leases["job"].state == "funded"
    plane.log.close()


def test_a_node_that_does_not_answer_stops_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that wait for the chain have threads of their own: beats of other leases are written."""
    plane, custody, renter, _, body = on_chain(tmp_path)
    answers = threading.Event()
    monkeypatch.setattr(custody.contract, "state", lambda *_, **__: answers.wait(60) and "none")

    async def many() -> None:
        drafts = [draft_of(replace(body, lease_id=f"job-{number}"), renter, plane.key.public) for number in range(40)]
        waiting = [asyncio.ensure_future(plane.submit(draft)) for draft in drafts]
        try:
            await asyncio.sleep(0)
            plain = draft_of(on.Deposited(account="a" * 64, amount=0), plane.key, plane.key.public)
            await asyncio.wait_for(plane.submit(plain), 60)
        finally:
            answers.set()
            found = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(one, Refused) for one in found)

    asyncio.run(many())
    plane.log.close()
