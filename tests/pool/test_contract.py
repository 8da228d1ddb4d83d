"""The contract by itself: who may do what, what it refuses, and that money is neither made nor lost."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from dataclasses import replace

import pytest

pytest.importorskip("web3", reason="the contract needs web3: pip install 'stoker[chain]'")
pytest.importorskip("eth", reason="an EVM in the process needs py-evm: pip install 'eth-tester[py-evm]'")

from stoker.errors import BadJob, BadRun, PlaceUnreachable
from stoker.pool.contract.custody import CLAIM_S
from stoker.pool.contract.escrow_contract import EscrowContract, Terms, connected, lease_name
from stoker.pool.contract.signers import signer_of
from stoker.pool.events import CREDIT, Refused
from tests.pool.contract_compiler import COMPILED, SOURCE, compiled
from tests.pool.quick_chain import QuickChain, QuickContract, signers

DAY_S = 86400


class Chain(QuickChain):
    """A contract with an arbiter, a renter, an agent, a verifier and a stranger; two have ten credits."""

    def __init__(self) -> None:
        self.keys = signers(5)
        super().__init__(self.keys[0])
        self.arbiter, self.renter, self.agent, self.verifier, self.stranger = (self.contract(key) for key in self.keys)
        for one in (self.renter, self.agent):
            self.arbiter.grant(address(one), 10 * CREDIT)

    def terms(self, name: str = "job", **more: object) -> Terms:
        """Two credits for four hours."""
        plain = Terms(
            renter=address(self.renter),
            agent=address(self.agent),
            cosigner=address(self.renter),
            deposit=2 * CREDIT,
            name=lease_name("a" * 64, "b" * 64, name),
            rate_per_hour=CREDIT // 2,
            bond=CREDIT,
            deadline_s=self.now_s + DAY_S,
        )
        return replace(plain, **more)

    def running(self, **more: object) -> Terms:
        """A lease that was accepted."""
        terms = self.terms(**more)
        self.renter.open(terms)
        self.agent.accept(terms)
        return terms

    def settle(
        self,
        terms: Terms,
        *,
        by: QuickContract | None = None,
        pay: int = 0,
        slashed: int = 0,
        fee: int = 0,
        agreed_s: int = 3600,
        voucher: bytes | None = None,
        verdict: bytes | None = None,
    ) -> None:
        """A verdict and a voucher, brought by a stranger."""
        fees = [(address(self.verifier), fee)] if fee else []
        judged = self.arbiter.verdict(terms.lease, pay=pay, slashed=slashed, fees=fees)
        (by or self.stranger).settle(
            terms,
            pay=pay,
            slashed=slashed,
            fees=fees,
            running_s=agreed_s,
            verdict=judged if verdict is None else verdict,
            voucher=self.renter.voucher(terms.lease, agreed_s) if voucher is None else voucher,
        )

    def balances(self) -> list[int]:
        """Of renter, agent and verifier."""
        return [self.arbiter.balance(address(one)) for one in (self.renter, self.agent, self.verifier)]


def address(contract: QuickContract) -> str:
    """Of who acts."""
    assert contract.signer is not None
    return contract.signer.address


@pytest.fixture
def chain() -> Chain:
    """A new one."""
    return Chain()


def test_the_bytecode_is_of_the_source() -> None:
    """The source is that which was compiled: `python -m tests.pool.contract_compiler` after each change."""
    document = json.loads(COMPILED.read_text())
    assert document["source_sha256"] == hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def test_compiling_again_gives_the_same_bytes() -> None:
    """Bytecode and ABI in the package are what the compiler makes of the source."""
    pytest.importorskip("vyper", reason="only who changes the contract needs its compiler: pip install vyper==0.4.3")
    assert json.loads(COMPILED.read_text()) == json.loads(json.dumps(compiled()))


def test_a_job_takes_three_transactions(chain: Chain) -> None:
    """Deposit, bond, settlement: pay and fee by the verdict, the rest to the renter, the bond to the agent."""
    terms = chain.running()
    assert chain.balances() == [8 * CREDIT, 9 * CREDIT, 0]
    chain.settle(terms, pay=CREDIT // 2, fee=1000)
    assert chain.balances() == [10 * CREDIT - CREDIT // 2 - 1000, 10 * CREDIT + CREDIT // 2, 1000]
    assert chain.arbiter.state(terms.lease) == "settled"


@pytest.mark.parametrize(
    ("terms", "reason"),
    [
        ({"renter": "0x" + "11" * 20}, "renter only"),
        ({"agent": "0x" + "0" * 40}, "agent"),
        ({"cosigner": "0x" + "0" * 40}, "cosigner"),
        ({"deposit": 11 * CREDIT}, "balance"),
        ({"deposit": 10**15 + 1}, "amount"),
        ({"rate_per_hour": 2**255}, "amount"),
        ({"deadline_s": 5}, "deadline"),
        ({"deadline_s": 10**11}, "deadline"),
    ],
)
def test_what_open_refuses(chain: Chain, terms: dict[str, object], reason: str) -> None:
    """Terms that are another's, make no sense, or would hold money for ever."""
    with pytest.raises(Refused, match=reason):
        chain.renter.open(chain.terms(**terms))
    assert chain.balances() == [10 * CREDIT, 10 * CREDIT, 0]


def test_nobody_rents_from_themselves(chain: Chain) -> None:
    """The agent's address is another one."""
    with pytest.raises(Refused, match="agent"):
        chain.renter.open(chain.terms(agent=address(chain.renter)))


def test_a_lease_is_opened_and_accepted_once(chain: Chain) -> None:
    """By those whom it names."""
    terms = chain.terms()
    chain.renter.open(terms)
    with pytest.raises(Refused, match="opened before"):
        chain.renter.open(terms)
    with pytest.raises(Refused, match="agent only"):
        chain.stranger.accept(terms)
    with pytest.raises(Refused, match="not funded"):
        chain.agent.accept(replace(terms, bond=0))
    chain.agent.accept(terms)
    with pytest.raises(Refused, match="not funded"):
        chain.agent.accept(terms)
    with pytest.raises(Refused, match="deadline"):
        chain.renter.refund(terms)


def test_a_voucher_counts_for_its_lease_its_contract_and_its_seconds(chain: Chain) -> None:
    """Not for another lease, another contract or chain, more seconds, or signed by another."""
    terms, other = chain.running(), chain.running(name="other")
    elsewhere = Chain()
    foreign = elsewhere.renter.voucher(terms.lease, 3600)
    for voucher, seconds in (
        (chain.renter.voucher(other.lease, 3600), 3600),
        (foreign if elsewhere.renter.account != chain.renter.account else b"", 3600),
        (chain.renter.voucher(terms.lease, 3600), 3601),
        (chain.agent.voucher(terms.lease, 3600), 3600),
        (bytes(65), 3600),
        (b"", 3600),
    ):
        with pytest.raises(Refused, match="voucher"):
            chain.settle(terms, pay=CREDIT // 2, agreed_s=seconds, voucher=voucher)
    forked = chain.renter.voucher(terms.lease, 3600)
    chain.renter.chain_id += 1
    with pytest.raises(Refused, match="voucher"):
        chain.settle(terms, pay=1, voucher=chain.renter.voucher(terms.lease, 3600))
    chain.settle(terms, pay=CREDIT // 2, voucher=forked)


def test_the_arbiter_pays_no_more_than_was_agreed_to_and_held(chain: Chain) -> None:
    """Its verdict is bounded by the voucher, the deposit and the bond, and pays an agent or cuts its bond."""
    terms = chain.running()
    for what, reason in (
        ({"pay": CREDIT // 2 + 1}, "more than the voucher"),
        ({"pay": 2 * CREDIT + 1, "agreed_s": 10**7}, "more than the deposit"),
        ({"pay": CREDIT, "fee": CREDIT + 1, "agreed_s": 10**7}, "more than the deposit"),
        ({"fee": 2 * CREDIT + 1}, "more than the deposit"),
        ({"slashed": CREDIT + 1}, "more than the bond"),
        ({"pay": 1, "slashed": 1}, "pay and slash"),
        ({"verdict": chain.stranger.verdict(terms.lease, pay=0, slashed=0, fees=[])}, "verdict"),
        ({"slashed": 1, "verdict": chain.arbiter.verdict(terms.lease, pay=0, slashed=0, fees=[])}, "verdict"),
    ):
        with pytest.raises(Refused, match=reason):
            chain.settle(terms, **what)
    before = chain.balances()
    chain.settle(terms, slashed=CREDIT, fee=5)
    assert chain.balances() == [before[0] + 3 * CREDIT - 5, before[1], 5]
    with pytest.raises(Refused, match="no such lease"):
        chain.settle(terms)


def test_a_bond_that_was_not_put_up_is_not_cut(chain: Chain) -> None:
    """A lease that was not accepted has its deposit alone."""
    terms = chain.terms()
    chain.renter.open(terms)
    with pytest.raises(Refused, match="more than the bond"):
        chain.settle(terms, slashed=1)
    chain.settle(terms)
    assert chain.balances() == [10 * CREDIT, 10 * CREDIT, 0]


def test_before_anyone_accepts_the_renter_may_take_its_deposit_back(chain: Chain) -> None:
    """The renter alone, and once."""
    terms = chain.terms()
    chain.renter.open(terms)
    with pytest.raises(Refused, match="renter only"):
        chain.agent.refund(terms)
    chain.renter.refund(terms)
    with pytest.raises(Refused, match="no such lease"):
        chain.renter.refund(terms)
    assert chain.balances() == [10 * CREDIT, 10 * CREDIT, 0]


def test_an_agent_is_paid_without_the_arbiter_after_the_deadline(chain: Chain) -> None:
    """By its voucher, up to the deposit; before the deadline it waits for the verdict."""
    terms = chain.running()
    voucher = chain.renter.voucher(terms.lease, 10**6)
    with pytest.raises(Refused, match="deadline"):
        chain.agent.claim(terms, 10**6, voucher)
    chain.pass_time(DAY_S)
    with pytest.raises(Refused, match="agent only"):
        chain.stranger.claim(terms, 10**6, voucher)
    with pytest.raises(Refused, match="voucher"):
        chain.agent.claim(terms, 10**6 + 1, voucher)
    chain.agent.claim(terms, 10**6, voucher)
    assert chain.balances() == [8 * CREDIT, 12 * CREDIT, 0]


def test_money_that_nobody_claims_goes_back(chain: Chain) -> None:
    """A week after the deadline deposit and bond go back to who brought them, for either to send."""
    terms = chain.running()
    chain.pass_time(DAY_S + CLAIM_S - 1)
    with pytest.raises(Refused, match="deadline"):
        chain.renter.refund(terms)
    with pytest.raises(Refused, match="renter or agent"):
        chain.stranger.refund(terms)
    chain.pass_time(1)
    chain.agent.refund(terms)
    assert chain.balances() == [10 * CREDIT, 10 * CREDIT, 0]


def test_roots_follow_each_other(chain: Chain) -> None:
    """Each event is under one root, which the arbiter brings, and none is replaced."""
    chain.arbiter.anchor(7, 20, "ab" * 32)
    for first, last in ((1, 6), (21, 20), (20, 30), (22, 30)):
        with pytest.raises(Refused, match="does not follow"):
            chain.arbiter.anchor(first, last, "cd" * 32)
    with pytest.raises(Refused, match="arbiter only"):
        chain.agent.anchor(21, 30, "cd" * 32)
    chain.arbiter.anchor(21, 30, "cd" * 32)
    assert (chain.arbiter.root(20), chain.arbiter.root(30), chain.arbiter.anchored()) == ("ab" * 32, "cd" * 32, 30)


def test_internal_credits_stay_inside(chain: Chain) -> None:
    """The arbiter alone makes them, and without a token there is nothing to bring or to take out."""
    with pytest.raises(Refused, match="arbiter only"):
        chain.renter.grant(address(chain.renter), 1)
    for act in (chain.renter.deposit, chain.renter.withdraw):
        with pytest.raises(Refused, match=r"balance|internal credits"):
            act(1)


def test_random_calls_neither_make_nor_lose_money() -> None:
    """200 calls by anybody with any arguments: the sum stays, and what is taken is what a model of it says."""
    drive(200, seed=1)


def drive(num_calls: int, seed: int) -> Counter[str]:
    """Random calls; counts of those that were taken and refused, by name."""
    chain, draw, found = Chain(), random.Random(seed), Counter[str]()
    parties = [chain.renter, chain.agent, chain.verifier, chain.stranger]
    granted, leases = 20 * CREDIT, dict[bytes, tuple[Terms, str]]()

    def expect(name: str, is_legal: bool, call: object, then: str = "", terms: Terms | None = None) -> bool:
        try:
            call()  # type: ignore[operator]
        except Refused:
            assert not is_legal, f"{name} was refused"
            found[f"{name} refused"] += 1
            return False
        assert is_legal, f"{name} was taken"
        found[name] += 1
        if terms is not None:
            leases[terms.lease] = terms, then
        return True

    for number in range(num_calls):
        if draw.random() < 0.1:
            chain.pass_time(draw.choice((60, DAY_S // 4, DAY_S, CLAIM_S)))
        by, kind = draw.choice(parties), draw.choice(("grant", "open", "accept", "accept", "settle", "claim", "refund"))
        known = [lease for lease in leases.values() if lease[1] != "settled" or draw.random() < 0.05]
        if kind == "grant":
            amount = draw.choice((0, 1, CREDIT))
            judge = draw.choice((chain.arbiter, by))
            granted += amount * expect(kind, judge is chain.arbiter, lambda: judge.grant(address(by), amount))  # noqa: B023
            continue
        if kind == "open" or not known:
            renter, agent = draw.choice(parties), draw.choice(parties)
            terms = chain.terms(
                f"job{number}",
                renter=address(renter),
                agent=address(agent),
                cosigner=address(renter),
                deposit=draw.choice((0, 1, 3599, CREDIT)),
                bond=draw.choice((0, 1, CREDIT)),
                rate_per_hour=draw.choice((0, 1, 3601, CREDIT // 3)),
                deadline_s=chain.now_s + draw.choice((0, 60, DAY_S)),
            )
            is_legal = by is renter and renter is not agent and terms.deadline_s > chain.now_s
            is_legal = is_legal and chain.arbiter.balance(address(by)) >= terms.deposit
            expect("open", is_legal, lambda: by.open(terms), "funded", terms)  # noqa: B023
            continue
        terms, state = draw.choice(known)
        assert chain.arbiter.state(terms.lease) == state
        of = {address(one): one for one in parties}
        renter, agent = of[terms.renter], of[terms.agent]
        by = draw.choice((by, renter, agent))
        is_late, is_lost = chain.now_s >= terms.deadline_s, chain.now_s >= terms.deadline_s + CLAIM_S
        seconds = draw.choice((0, 1, 3599, 3600, 10**6))
        signer = draw.choice((renter, renter, renter, by))
        voucher, is_agreed = signer.voucher(terms.lease, seconds), signer is renter
        agreed = seconds * terms.rate_per_hour // 3600
        if kind == "accept":
            is_legal = by is agent and state == "funded" and not is_late
            is_legal = is_legal and chain.arbiter.balance(terms.agent) >= terms.bond
            expect(kind, is_legal, lambda: by.accept(terms), "running", terms)  # noqa: B023
        elif kind == "claim":
            is_legal = by is agent and state == "running" and is_late and is_agreed
            before = chain.arbiter.balance(terms.agent)
            if expect(kind, is_legal, lambda: by.claim(terms, seconds, voucher), "settled", terms):  # noqa: B023
                assert chain.arbiter.balance(terms.agent) == before + min(agreed, terms.deposit) + terms.bond
        elif kind == "refund":
            is_legal = (state == "funded" and by is renter) or (
                state == "running" and by in (renter, agent) and is_lost
            )
            expect(kind, is_legal, lambda: by.refund(terms), "settled", terms)  # noqa: B023
        else:
            pay = draw.choice((0, min(agreed, terms.deposit), agreed + draw.randrange(2), terms.deposit))
            slashed = draw.choice((0, 0, 1, terms.bond))
            fees = [(address(draw.choice(parties)), draw.choice((0, 1, CREDIT))) for _ in range(draw.randrange(3))]
            judge = draw.choice((chain.arbiter, chain.arbiter, chain.arbiter, by))
            verdict = judge.verdict(terms.lease, pay=pay, slashed=slashed, fees=fees)
            bond = terms.bond if state == "running" else 0
            is_legal = (
                judge is chain.arbiter
                and state in ("funded", "running")
                and slashed <= bond
                and (not pay or (is_agreed and pay <= agreed and not slashed))
                and pay + sum(fee for _, fee in fees) <= terms.deposit
            )
            expect(
                kind,
                is_legal,
                lambda: by.settle(  # noqa: B023
                    terms,  # noqa: B023
                    pay=pay,  # noqa: B023
                    slashed=slashed,  # noqa: B023
                    fees=fees,  # noqa: B023
                    verdict=verdict,  # noqa: B023
                    running_s=seconds,  # noqa: B023
                    voucher=voucher,  # noqa: B023
                ),
                "settled",
                terms,
            )
        held = sum(
            one.deposit * (at in ("funded", "running")) + one.bond * (at == "running") for one, at in leases.values()
        )
        assert sum(chain.arbiter.balance(address(one)) for one in parties) + held == granted, f"call {number}"
    return found


# ------------------------------------------------------------------------------------------------------ ways to a chain


def test_what_is_no_contract_of_ours_is_refused() -> None:
    """An address without code, and one with other code."""
    web3, (arbiter, *_) = connected("memory"), signers(2)
    with pytest.raises(BadRun, match="no contract"):
        EscrowContract(web3, "0x" + "12" * 20, arbiter)
    with pytest.raises(BadRun, match="no contract"):
        EscrowContract(web3, arbiter.address, arbiter)


def test_an_away_node_is_a_sentence() -> None:
    """As is a URL that is none."""
    with pytest.raises(PlaceUnreachable, match="cannot be reached"):
        connected("http://127.0.0.1:9")
    with pytest.raises(BadJob, match="memory"):
        connected("ftp://127.0.0.1")


def test_keys_of_a_chain(tmp_path) -> None:
    """Hexadecimal digits or a keystore with its passphrase, which others cannot read; other words are a sentence."""
    (key,) = signers(1)
    plain, store = tmp_path / "plain", tmp_path / "store"
    plain.write_text(f"0x{1:064x}\n")
    with pytest.raises(BadRun, match="others may read"):
        signer_of(str(plain))
    plain.chmod(0o600)
    assert signer_of(str(plain)).address == key.address
    from eth_account import Account

    store.write_text(json.dumps(Account.encrypt(f"0x{1:064x}", "secret", kdf="pbkdf2", iterations=2)))
    store.chmod(0o600)
    assert signer_of(str(store), {"STOKER_CHAIN_PASSPHRASE": "secret"}).address == key.address
    with pytest.raises(BadRun, match="holds no key"):
        signer_of(str(store), {"STOKER_CHAIN_PASSPHRASE": "wrong"})
    with pytest.raises(BadRun, match="cannot be read"):
        signer_of(str(tmp_path / "none"))
    with pytest.raises(BadJob, match="names no account"):
        signer_of("http://127.0.0.1:1")
    assert f"{1:064x}" not in repr(signer_of(str(plain)))
