"""The pool's contract in py-evm without blocks: a thousand calls a second, for tests with many."""

from __future__ import annotations

import sys
from typing import Any

from eth.constants import ZERO_HASH32
from eth.vm.message import Message
from eth_account import Account
from eth_utils import to_canonical_address
from web3 import Web3

from stoker.pool.contract.escrow_contract import EscrowContract, Sent, connected
from stoker.pool.contract.signers import FileSigner
from stoker.pool.events import Refused

sys.setrecursionlimit(1000)
"""As it was: py-evm raises it beyond what parsers in C have stack for."""


def signers(count: int) -> list[FileSigner]:
    """Keys that the in-process chain has given money for gas."""
    return [FileSigner(Account.from_key(f"0x{number:064x}")) for number in range(1, count + 1)]


class QuickChain:
    """An EVM with one contract, and a clock that is set: no blocks, no gas prices.

    Args:
        arbiter: who deploys it.
    """

    def __init__(self, arbiter: FileSigner, token: str = "") -> None:
        self.web3 = connected("memory")
        self.deployed = EscrowContract.deployed(self.web3, arbiter, token=token)
        tester = self.web3.provider.ethereum_tester
        self._vm = tester.backend.chain.get_vm()
        self.now_s = int(self._vm.state.timestamp)

    def contract(self, signer: FileSigner) -> QuickContract:
        """The contract, for one who acts."""
        return QuickContract(self, signer)

    def pass_time(self, seconds: int) -> None:
        """Let the chain's clock go on."""
        self.now_s += seconds
        self._vm.state.execution_context._timestamp = self.now_s

    def execute(self, sender: str, to: str, data: bytes, what: str) -> tuple[bytes, int]:
        """The answer to a call whose effects stay, and its gas; raises Refused with the contract's reason."""
        state, address = self._vm.state, to_canonical_address(to)
        message = Message(
            gas=10_000_000,
            to=address,
            sender=to_canonical_address(sender),
            value=0,
            data=data,
            code=state.get_code(address),
            code_address=address,
        )
        context = state.get_transaction_context_class()(gas_price=0, origin=message.sender)
        state.clear_transient_storage()
        done = state.computation_class.apply_message(state, message, context)
        if done.is_error:
            output = bytes(done.output)
            reason = output[68 : 68 + int.from_bytes(output[36:68])].decode() if len(output) > 68 else str(done.error)
            raise Refused(f"the contract refuses {what!r}: {reason}")
        return bytes(done.output), done.get_gas_used()


class QuickContract(EscrowContract):
    """As its base, against a `QuickChain`."""

    def __init__(self, chain: QuickChain, signer: FileSigner) -> None:
        self._chain = chain
        super().__init__(chain.web3, chain.deployed.address, signer)

    def now_s(self) -> int:
        return self._chain.now_s

    def _call(self, name: str, *arguments: Any, is_confirmed: bool = False) -> Any:
        data = self._contract.functions[name](*arguments)._encode_transaction_data()
        output, _ = self._chain.execute("0x" + "0" * 40, self.address, bytes.fromhex(data[2:]), name)
        return output if name == "roots" else int.from_bytes(output)

    def _sent(self, name: str, function: Any) -> Sent:
        assert self.signer is not None
        data = bytes.fromhex(function._encode_transaction_data()[2:])
        _, gas = self._chain.execute(self.signer.address, function.address, data, name)
        return Sent(Web3.to_hex(ZERO_HASH32), gas)
