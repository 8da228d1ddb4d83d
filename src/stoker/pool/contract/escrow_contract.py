"""The pool's contract (`escrow.vy`) on a chain: calls, transactions, and what is signed for it.

What: one class for an EVM in this process, a local node and any chain behind a JSON-RPC URL; web3.py does the talking.
Use when: money is to be held by rules that the pool's operator cannot change.
Costs: three transactions a job (`open`, `accept`, `settle`), one an hour for a root; figures in docs/pool-contract.md.
Does not do: tokens with other than 6 decimals, signatures of contract wallets (EIP-1271), chains before EIP-1559.
Source: EIP-712 (typed data), EIP-155 and CAIP-10 (names of chains and contracts).
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from eth_abi.abi import encode
from requests.exceptions import RequestException
from web3 import EthereumTesterProvider, Web3
from web3.exceptions import ContractLogicError, TimeExhausted, Web3Exception
from web3.types import BlockIdentifier, RPCEndpoint, RPCResponse, TxParams, Wei

from stoker.errors import BadJob, BadRun, PlaceUnreachable
from stoker.pool.contract.signers import Signer, Typed
from stoker.pool.events import Refused, canonical

IN_PROCESS = "memory"
"""The URL of an EVM in this process: gone with it."""
LeaseOnChain = Literal["none", "funded", "running", "settled"]
_STATES: tuple[LeaseOnChain, ...] = ("none", "funded", "running", "settled")
_RECEIPT_S = 180.0
_ZERO_ADDRESS = "0x" + "0" * 40
_TERMS = "(address,address,address,bytes32,uint256,uint256,uint256,uint256)"
_DOMAIN_TYPE = [
    {"name": "name", "type": "string"},
    {"name": "version", "type": "string"},
    {"name": "chainId", "type": "uint256"},
    {"name": "verifyingContract", "type": "address"},
]
_VOUCHER_TYPE = [{"name": "lease", "type": "bytes32"}, {"name": "runningSeconds", "type": "uint256"}]
_VERDICT_TYPE = [
    {"name": "lease", "type": "bytes32"},
    {"name": "pay", "type": "uint256"},
    {"name": "slashed", "type": "uint256"},
    {"name": "verifiers", "type": "address[]"},
    {"name": "fees", "type": "uint256[]"},
]
_TOKEN_ABI = [
    {
        "type": "function",
        "name": "approve",
        "stateMutability": "nonpayable",
        "inputs": [{"name": "spender", "type": "address"}, {"name": "amount", "type": "uint256"}],
        "outputs": [{"name": "", "type": "bool"}],
    },
]


@dataclass(frozen=True, kw_only=True)
class Terms:
    """A lease as the contract sees it; addresses in lower case, money in micro-credits.

    Attributes:
        name: 32 bytes, see `lease_name`.
        deadline_s: until when only the arbiter's verdict settles [s since 1970].
    """

    renter: str
    agent: str
    cosigner: str
    name: bytes
    rate_per_hour: int
    deposit: int
    bond: int
    deadline_s: int

    @property
    def argument(self) -> tuple[Any, ...]:
        """As calls take them."""
        renter, agent, cosigner, *rest = astuple(self)
        return (*(Web3.to_checksum_address(one) for one in (renter, agent, cosigner)), *rest)

    @property
    def lease(self) -> bytes:
        """What the contract knows the lease by: the hash of its terms, 32 bytes."""
        return bytes(Web3.keccak(encode([_TERMS], [self.argument])))


class _InProcess(EthereumTesterProvider):
    """An EVM in this process that threads may share."""

    def __init__(self) -> None:
        super().__init__()
        self._one_at_a_time = threading.RLock()

    def make_request(self, method: RPCEndpoint, params: Any) -> RPCResponse:
        """As its base, one after another."""
        with self._one_at_a_time:
            return super().make_request(method, params)


@dataclass(frozen=True)
class Sent:
    """A transaction that took effect: its hash and what it used."""

    transaction: str
    gas: int


def lease_name(pool: str, renter: str, lease_id: str) -> bytes:
    """A lease's name on the chain, 32 bytes: no other renter can open the pool's lease with this deposit.

    Args:
        pool: the control plane's public key.
        renter: the renter's key in the pool.
        lease_id: as in the pool.
    """
    said = canonical({"pool": pool, "renter": renter, "lease_id": lease_id})
    return hashlib.sha256(b"stoker pool lease 1\n" + said).digest()


@cache
def compiled() -> dict[str, Any]:
    """ABI and bytecode, as `python -m tests.pool.contract_compiler` wrote them."""
    document: dict[str, Any] = json.loads((Path(__file__).parent / "escrow.json").read_text())
    return document


def connected(url: str) -> Web3:
    """A chain that answers.

    Args:
        url: of a node's JSON-RPC (`http://127.0.0.1:8545`), or `memory`: an EVM in this process.

    Raises:
        PlaceUnreachable: nothing answers there.
        BadJob: it is no such URL.
    """
    if url == IN_PROCESS:
        limit = sys.getrecursionlimit()
        try:
            return Web3(_InProcess())
        except ModuleNotFoundError as problem:
            raise BadJob(
                f"--chain {IN_PROCESS} needs {problem.name}, which is not installed here",
                remedy="pip install 'eth-tester[py-evm]'",
            ) from problem
        finally:  # py-evm raises it beyond what parsers in C have stack for: a pool reads JSON of strangers
            sys.setrecursionlimit(limit)
    if not url.startswith(("http://", "https://")):
        raise BadJob(f"--chain {url}: wanted the http:// or https:// URL of a node, or {IN_PROCESS}")
    web3 = Web3(Web3.HTTPProvider(url, request_kwargs={"timeout": 30}))
    with _sentences(f"the chain at {url}"):
        _ = web3.eth.chain_id
    return web3


class EscrowContract:
    """One contract of one chain.

    Args:
        web3: the chain.
        address: of the contract.
        signer: who acts; None: looking is all that is done.
        confirmations: blocks that have to lie above what is believed; 0: the newest block counts.

    Raises:
        BadRun: there is another contract, or none.
    """

    def __init__(self, web3: Web3, address: str, signer: Signer | None = None, *, confirmations: int = 0) -> None:
        self.web3, self.signer, self.confirmations = web3, signer, confirmations
        self.address = address.lower()
        self._turn = threading.Lock()
        shown = Web3.to_checksum_address(self.address)
        self._contract = web3.eth.contract(address=shown, abi=compiled()["abi"])
        with _sentences("the chain"):
            self.chain_id = int(web3.eth.chain_id)
            code = bytes(web3.eth.get_code(shown))
            if not code.startswith(bytes.fromhex(compiled()["runtime"].removeprefix("0x"))):
                raise BadRun(
                    f"{address} on chain {self.chain_id} is {'another contract' if code else 'no contract'}: wanted "
                    f"Stoker's escrow, {compiled()['compiler']}",
                    remedy="stoker pool deploy makes one. Is it the right chain?",
                )
            self.arbiter = str(self._contract.functions.arbiter().call()).lower()
            token = str(self._contract.functions.token().call()).lower()
        self.token = "" if token == _ZERO_ADDRESS else token

    @classmethod
    def deployed(cls, web3: Web3, signer: Signer, *, token: str = "") -> EscrowContract:
        """A new contract whose arbiter is the signer.

        Args:
            web3: the chain.
            signer: who pays for it, and judges.
            token: address of an ERC-20 token with 6 decimals; "": internal credits.

        Raises:
            Refused: the token is none of that kind.
            PlaceUnreachable: the chain does not answer.
        """
        factory = web3.eth.contract(abi=compiled()["abi"], bytecode=compiled()["bytecode"])
        arguments = [Web3.to_checksum_address(one) for one in (signer.address, token or _ZERO_ADDRESS)]
        with _sentences("the new contract"):
            transaction = factory.constructor(*arguments).build_transaction(_sender(web3, signer))
            receipt = web3.eth.wait_for_transaction_receipt(
                cast("Any", signer.send(web3, transaction)), timeout=_RECEIPT_S
            )
        if receipt["status"] != 1 or receipt["contractAddress"] is None:
            raise Refused("the chain refuses the new contract")
        return cls(web3, str(receipt["contractAddress"]), signer)

    @property
    def account(self) -> str:
        """The contract's name among all chains (CAIP-10), in lower case."""
        return f"eip155:{self.chain_id}:{self.address}"

    # --------------------------------------------------------------------------------------------------------- looking

    def state(self, lease: bytes, *, is_confirmed: bool = True) -> LeaseOnChain:
        """Where a lease stands; with `is_confirmed` as of so many blocks ago as are to lie above."""
        return _STATES[int(self._call("states", lease, is_confirmed=is_confirmed))]

    def balance(self, address: str) -> int:
        """What an address has in the contract, leases left out [micro-credits]."""
        return int(self._call("balances", Web3.to_checksum_address(address)))

    def anchored(self) -> int:
        """Number of the last event under a root; 0: none."""
        return int(self._call("anchored"))

    def root(self, last: int) -> str:
        """The root of events up to `last`, 64 hexadecimal digits; zeros: none ends there."""
        return bytes(self._call("roots", last)).hex()

    def now_s(self) -> int:
        """The chain's clock: time of its newest block [s since 1970]."""
        with _sentences("the chain"):
            return int(self.web3.eth.get_block("latest")["timestamp"])

    def leases(self, *, renter: str | None = None, agent: str | None = None, since: int = 0) -> list[Terms]:
        """Terms of all leases of a renter, or of an agent, in their order.

        Args:
            renter: its address; None: any renter's.
            agent: likewise.
            since: first block to look at; nodes bound how many they search.
        """
        filters = {name: Web3.to_checksum_address(one) for name, one in (("renter", renter), ("agent", agent)) if one}
        with _sentences("the chain"):
            logs = self._contract.events.Opened().get_logs(from_block=cast("Any", since), argument_filters=filters)
        found = []
        for log in logs:
            own = log["args"]["terms"]
            found.append(
                Terms(
                    renter=own["renter"].lower(),
                    agent=own["agent"].lower(),
                    cosigner=own["cosigner"].lower(),
                    name=bytes(own["name"]),
                    rate_per_hour=own["rate_per_hour"],
                    deposit=own["deposit"],
                    bond=own["bond"],
                    deadline_s=own["deadline"],
                )
            )
        return found

    def _call(self, name: str, *arguments: Any, is_confirmed: bool = False) -> Any:
        with _sentences("the chain"):
            block: BlockIdentifier = "latest"
            if is_confirmed and self.confirmations:
                block = cast("Any", max(0, self.web3.eth.block_number - self.confirmations))
            return self._contract.functions[name](*arguments).call(block_identifier=block)

    # ---------------------------------------------------------------------------------------------------- transactions

    def grant(self, account: str, amount: int) -> Sent:
        """Arbiter: make internal credits for an address."""
        return self._send("grant", Web3.to_checksum_address(account), amount)

    def deposit(self, amount: int) -> Sent:
        """Bring tokens, approved before."""
        return self._send("deposit", amount)

    def withdraw(self, amount: int) -> Sent:
        """Take tokens out."""
        return self._send("withdraw", amount)

    def approve(self, amount: int) -> Sent:
        """Let the contract take tokens, as leases need them."""
        if not self.token:
            raise Refused("this contract has internal credits: there is nothing to approve")
        token = self.web3.eth.contract(address=Web3.to_checksum_address(self.token), abi=_TOKEN_ABI)
        return self._sent("approve", token.functions.approve(Web3.to_checksum_address(self.address), amount))

    def open(self, terms: Terms) -> Sent:
        """Renter: the deposit."""
        return self._send("open", terms.argument)

    def accept(self, terms: Terms) -> Sent:
        """Agent: the bond."""
        return self._send("accept", terms.argument)

    def settle(
        self,
        terms: Terms,
        *,
        pay: int,
        slashed: int,
        fees: Sequence[tuple[str, int]],
        verdict: bytes,
        running_s: int = 0,
        voucher: bytes = b"",
    ) -> Sent:
        """Anybody: what the arbiter signed, with the voucher of `running_s` if there is pay."""
        verifiers = [Web3.to_checksum_address(address) for address, _ in fees]
        return self._send(
            "settle", terms.argument, pay, slashed, verifiers, [fee for _, fee in fees], verdict, running_s, voucher
        )

    def claim(self, terms: Terms, running_s: int, voucher: bytes) -> Sent:
        """Agent, after the deadline: what the voucher says."""
        return self._send("claim", terms.argument, running_s, voucher)

    def refund(self, terms: Terms) -> Sent:
        """Renter before the agent accepted; both a week after the deadline."""
        return self._send("refund", terms.argument)

    def anchor(self, first: int, last: int, root: str) -> Sent:
        """Arbiter: the root of events `first` to `last`."""
        return self._send("anchor", first, last, bytes.fromhex(root))

    def _send(self, name: str, *arguments: Any) -> Sent:
        return self._sent(name, self._contract.functions[name](*arguments))

    def _sent(self, name: str, function: Any) -> Sent:
        signer = self._signer(repr(name))
        with _sentences(name), self._turn:  # one at a time: transactions of an account are numbered
            transaction = function.build_transaction(_sender(self.web3, signer))
            digest = signer.send(self.web3, transaction)
            try:
                receipt = self.web3.eth.wait_for_transaction_receipt(cast("Any", digest), timeout=_RECEIPT_S)
            except TimeExhausted as problem:
                raise PlaceUnreachable(
                    f"the chain has not taken {name!r} in {_RECEIPT_S:.0f} s: transaction 0x{digest.hex()}",
                    remedy="It may still come; what is done already is not done twice.",
                ) from problem
        if receipt["status"] != 1:
            raise Refused(f"the contract refused {name!r}: transaction 0x{digest.hex()}")
        return Sent(f"0x{digest.hex()}", int(receipt["gasUsed"]))

    # --------------------------------------------------------------------------------------------------------- signing

    def voucher(self, lease: bytes, running_s: int) -> bytes:
        """The signer's voucher: it agrees to seconds of a lease, all so far; 65 bytes."""
        with _sentences("the signer"):
            typed = self._typed("Voucher", _VOUCHER_TYPE, {"lease": lease, "runningSeconds": running_s})
            return self._signer().sign(typed)

    def verdict(self, lease: bytes, *, pay: int, slashed: int, fees: Sequence[tuple[str, int]]) -> bytes:
        """The signer's verdict: what a lease comes to; 65 bytes."""
        typed = self._typed(
            "Verdict",
            _VERDICT_TYPE,
            {
                "lease": lease,
                "pay": pay,
                "slashed": slashed,
                "verifiers": [Web3.to_checksum_address(address) for address, _ in fees],
                "fees": [fee for _, fee in fees],
            },
        )
        with _sentences("the signer"):
            return self._signer().sign(typed)

    def voucher_signer(self, lease: bytes, running_s: int, voucher: bytes) -> str:
        """The address that signed a voucher; "": none."""
        from eth_account import Account  # noqa: PLC0415
        from eth_account.messages import encode_typed_data  # noqa: PLC0415

        typed = self._typed("Voucher", _VOUCHER_TYPE, {"lease": lease, "runningSeconds": running_s})
        try:
            found = Account.recover_message(encode_typed_data(full_message=typed), signature=voucher)
        except Exception:  # noqa: BLE001 - eth_keys has errors of its own for each way to be no signature
            return ""
        return str(found).lower()

    def _signer(self, what: str = "signing") -> Signer:
        """The signer; raises BadJob where `what` needs one and there is none."""
        if self.signer is None:
            raise BadJob(
                f"{what} needs a key of the chain", remedy="STOKER_CHAIN_KEY=FILE, or URL#ADDRESS of a signer."
            )
        return self.signer

    def _typed(self, name: str, fields: list[dict[str, str]], message: dict[str, Any]) -> Typed:
        return {
            "types": {"EIP712Domain": _DOMAIN_TYPE, name: fields},
            "primaryType": name,
            "message": message,
            "domain": {
                "name": "Stoker escrow",
                "version": "1",
                "chainId": self.chain_id,
                "verifyingContract": Web3.to_checksum_address(self.address),
            },
        }


def _sender(web3: Web3, signer: Signer) -> TxParams:
    address = Web3.to_checksum_address(signer.address)
    return {"from": address, "nonce": web3.eth.get_transaction_count(address, "pending"), "value": Wei(0)}


def _refusals() -> tuple[type[Exception], ...]:
    """What a contract's refusal is raised as: by web3, and by the EVM in this process where that is used."""
    module = sys.modules.get("eth_tester.exceptions")
    return (ContractLogicError,) if module is None else (ContractLogicError, module.TransactionFailed)


@contextmanager
def _sentences(what: str) -> Iterator[None]:
    """What the chain, or the way to it, says is wrong, as an error with a sentence."""
    try:
        yield
    except _refusals() as problem:
        reason = str(problem).partition("reverted: ")[2].split("'")[0].strip()
        raise Refused(f"the contract refuses {what!r}: {reason or 'no reason given'}") from problem
    except (RequestException, OSError) as problem:
        raise PlaceUnreachable(
            f"{what} cannot be reached: {problem}", remedy="Is the node up? --chain URL."
        ) from problem
    except Web3Exception as problem:
        raise PlaceUnreachable(f"{what}: the chain's node answers {problem}") from problem
