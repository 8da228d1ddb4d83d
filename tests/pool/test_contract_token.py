"""The contract with a token: what is real money where it is not made up as here."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("web3", reason="the contract needs web3: pip install 'stoker[chain]'")
pytest.importorskip("eth", reason="an EVM in the process needs py-evm: pip install 'eth-tester[py-evm]'")
pytest.importorskip("vyper", reason="the tests' token is compiled: pip install vyper==0.4.3")

import vyper
from web3 import Web3

from stoker.pool.contract.escrow_contract import EscrowContract, Terms, connected, lease_name
from stoker.pool.events import CREDIT, Refused
from tests.pool.quick_chain import signers

COIN = """
# pragma version 0.4.3
interface Escrow:
    def withdraw(amount: uint256): nonpayable

decimals: public(uint8)
balanceOf: public(HashMap[address, uint256])
allowance: public(HashMap[address, HashMap[address, uint256]])
fee: uint256
victim: address

@deploy
def __init__(decimals: uint8, fee: uint256):
    self.decimals = decimals
    self.fee = fee

@external
def mint(account: address, amount: uint256):
    self.balanceOf[account] += amount

@external
def call_back(victim: address):
    self.victim = victim

@external
def approve(spender: address, amount: uint256) -> bool:
    self.allowance[msg.sender][spender] = amount
    return True

@external
def transfer(to: address, amount: uint256) -> bool:
    self.balanceOf[msg.sender] -= amount
    self.balanceOf[to] += amount
    return True

@external
def transferFrom(account: address, to: address, amount: uint256) -> bool:
    if self.victim != empty(address):
        extcall Escrow(self.victim).withdraw(0)
    self.allowance[account][msg.sender] -= amount
    self.balanceOf[account] -= amount
    self.balanceOf[to] += amount - self.fee
    return True
"""


class Market:
    """A token, a contract with it, and a renter and an agent with ten tokens each."""

    def __init__(self, *, decimals: int = 6, fee: int = 0) -> None:
        self.web3, keys = connected("memory"), signers(3)
        made = vyper.compile_code(COIN, output_formats=["abi", "bytecode"])
        factory = self.web3.eth.contract(abi=made["abi"], bytecode=made["bytecode"])
        receipt = self.web3.eth.wait_for_transaction_receipt(factory.constructor(decimals, fee).transact())
        self.token = self.web3.eth.contract(address=receipt["contractAddress"], abi=made["abi"])
        self.contract = EscrowContract.deployed(self.web3, keys[0], token=receipt["contractAddress"])
        self.renter, self.agent = (EscrowContract(self.web3, self.contract.address, key) for key in keys[1:])
        for one in (self.renter, self.agent):
            self.call("mint", self.address(one), 10 * CREDIT)

    def call(self, name: str, *arguments: Any) -> None:
        """A transaction of the token's."""
        self.token.functions[name](*arguments).transact()

    @staticmethod
    def address(one: EscrowContract) -> str:
        """With its checksum."""
        assert one.signer is not None
        return Web3.to_checksum_address(one.signer.address)

    def has(self, one: EscrowContract) -> int:
        """Tokens outside the contract."""
        return int(self.token.functions.balanceOf(self.address(one)).call())

    def terms(self) -> Terms:
        """Two credits at most."""
        return Terms(
            renter=self.address(self.renter).lower(),
            agent=self.address(self.agent).lower(),
            deposit=2 * CREDIT,
            cosigner=self.address(self.renter).lower(),
            name=lease_name("a" * 64, "b" * 64, "job"),
            bond=CREDIT,
            rate_per_hour=CREDIT // 2,
            deadline_s=self.contract.now_s() + 86400,
        )


def test_a_job_is_paid_in_tokens() -> None:
    """Approved once, taken as leases need them out of balance and tokens, and withdrawn: none is made or lost."""
    market = Market()
    terms = market.terms()
    with pytest.raises(Refused):
        market.renter.open(terms)
    for one in (market.renter, market.agent):
        one.approve(10 * CREDIT)
    market.renter.deposit(CREDIT // 2)
    market.renter.open(terms)
    market.agent.accept(terms)
    assert (market.has(market.renter), market.has(market.agent)) == (8 * CREDIT, 9 * CREDIT)
    verdict = market.contract.verdict(terms.lease, pay=CREDIT, slashed=0, fees=[])
    voucher = market.renter.voucher(terms.lease, 7200)
    market.agent.settle(terms, pay=CREDIT, slashed=0, fees=[], verdict=verdict, running_s=7200, voucher=voucher)
    with pytest.raises(Refused, match="balance"):
        market.agent.withdraw(2 * CREDIT + 1)
    market.agent.withdraw(2 * CREDIT)
    market.renter.withdraw(CREDIT)
    assert (market.has(market.renter), market.has(market.agent)) == (9 * CREDIT, 11 * CREDIT)
    assert (
        int(market.token.functions.balanceOf(market.token.w3.to_checksum_address(market.contract.address)).call()) == 0
    )
    with pytest.raises(Refused, match="a token pays"):
        market.contract.grant(market.address(market.renter), 1)


def test_tokens_that_do_not_fit() -> None:
    """Other decimals are refused at once; a fee, and a call back into the contract, when money comes in."""
    with pytest.raises(Refused, match="decimals"):
        Market(decimals=18)
    taxed = Market(fee=1)
    taxed.renter.approve(10 * CREDIT)
    with pytest.raises(Refused, match="takes a fee"):
        taxed.renter.open(taxed.terms())
    market = Market()
    market.renter.approve(10 * CREDIT)
    market.call("call_back", Web3.to_checksum_address(market.contract.address))
    with pytest.raises(Refused):
        market.renter.open(market.terms())
    market.call("call_back", "0x" + "0" * 40)
    market.renter.open(market.terms())
