"""What the log and the contract owe each other: money in before a lease counts, and out as the log decided.

The log decides (`escrow.settlement_of`, `refund_of`), the contract holds and bounds. A lease of a pool whose rules
name a contract is taken once its deposit is there, and accepted once its bond is; each co-signed beat has a voucher;
what a lease came to is signed as a verdict, which anyone may bring to the contract. `keep_up` does so, and brings the
roots.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from stoker.errors import BadJob, BadRun, StokerError, first_line
from stoker.pool import events as on
from stoker.pool.contract.escrow_contract import EscrowContract, Sent, Terms, connected, lease_name
from stoker.pool.contract.signers import signer_of
from stoker.pool.escrow import least_deadline_s
from stoker.pool.events import Draft, Refused
from stoker.pool.lease import CHAIN_PREFIX, Lease, Settlement
from stoker.pool.state import State

if TYPE_CHECKING:
    from stoker.pool.client import PoolClient

_log = logging.getLogger(__name__)
CLAIM_S = 7 * 24 * 3600
"""Time after the deadline that an agent has to claim [s], as in the contract."""
_CONFIRM_S = 900.0
_SPARE_S = 6 * 3600
"""Time beyond the least deadline [s]: chains' clocks and the pool's differ."""
CHAIN, CHAIN_KEY = "STOKER_CHAIN", "STOKER_CHAIN_KEY"
"""Variables: URL of a node of the chain; `FILE` or `URL#ADDRESS` of a key (`signers.py`)."""


class _Unconfirmed(Refused):
    """The chain may still change its mind: clients ask again."""

    http_status = 503


@dataclass(frozen=True, kw_only=True)
class ChainSettings:
    """Which contract, through which node, by which key.

    Attributes:
        url: of the node, see `connected`.
        contract: its address.
        key: see `signer_of`; "": looking is all that is done.
        confirmations: blocks that have to lie above what is believed.
        has_money: a pool that is founded now has its money there.
    """

    url: str
    contract: str
    key: str = ""
    confirmations: int = 0
    has_money: bool = False

    def connected(self) -> EscrowContract:
        """The contract.

        Raises:
            PlaceUnreachable: the node does not answer.
            BadRun: it has no such contract, or the key cannot be used.
        """
        signer = signer_of(self.key) if self.key else None
        return EscrowContract(connected(self.url), self.contract, signer, confirmations=self.confirmations)


class Custody:
    """A pool's money in a contract, for the control plane, renters and agents.

    Args:
        contract: with the key of who acts.
        pool: the control plane's public key.

    Attributes:
        verdicts: that were signed in this process, by lease.
        is_over: set when the process is to end: `keep_up` brings nothing more.
    """

    checked_kinds = frozenset({"opened", "accepted", "cosigned"})
    """Events for which `check_of` may have something to look up."""

    def __init__(self, contract: EscrowContract, pool: str) -> None:
        self.contract, self.pool = contract, pool
        self.verdicts: dict[str, bytes] = {}
        self.is_over = threading.Event()
        self._done: set[str] = set()

    @classmethod
    def of_member(cls, rules: on.Founded, pool: str, environ: Mapping[str, str] = os.environ) -> Custody:
        """What a renter or an agent needs in a pool whose rules name a contract.

        Raises:
            BadJob: the chain or the key is not named.
            BadRun: the chain is another one, or has no such contract.
        """
        url, key = environ.get(CHAIN, ""), environ.get(CHAIN_KEY, "")
        if not url or not key:
            raise BadJob(
                f"the money of this pool is in the contract {rules.contract}",
                remedy=f"{CHAIN}=URL of a node that you trust, {CHAIN_KEY}=FILE (or URL#ADDRESS of a signer).",
            )
        custody = cls(ChainSettings(url=url, contract=rules.contract.rpartition(":")[2], key=key).connected(), pool)
        custody.require_rules(rules)
        return custody

    @property
    def address(self) -> str:
        """Who acts, in lower case."""
        if self.contract.signer is None:
            raise BadJob("no key of the chain is named", remedy=f"{CHAIN_KEY}=FILE, or URL#ADDRESS of a signer.")
        return self.contract.signer.address

    def require_rules(self, rules: on.Founded) -> None:
        """Raises BadRun if the pool's money is in another contract than this one."""
        if rules.contract and rules.contract != self.contract.account:
            raise BadRun(
                f"the money of this pool is in {rules.contract}, and this is {self.contract.account}",
                remedy="Name a node of that chain.",
            )

    def require_arbiter(self) -> None:
        """Raises BadRun unless the key is the contract's arbiter."""
        if self.address != self.contract.arbiter:
            raise BadRun(
                f"the arbiter of {self.contract.account} is {self.contract.arbiter}, and not {self.address}",
                remedy="Give the key that deployed it: --chain-key.",
            )

    # ---------------------------------------------------------------------------------------------------------- leases

    def terms(self, lease: Lease) -> Terms:
        """What the contract has of a lease."""
        return self.terms_of(lease.renter, lease)

    def terms_of(self, renter: str, body: on.Opened | Lease) -> Terms:
        """What the contract has of a lease that `renter`, a key of the pool, opens."""
        if (contract := body.contract) is None:
            raise Refused(f"lease {body.lease_id} has no escrow in a contract")
        return Terms(
            renter=contract.payer,
            agent=contract.payee,
            cosigner=contract.cosigner,
            rate_per_hour=body.rate_per_hour,
            deposit=body.deposit,
            bond=body.bond,
            name=lease_name(self.pool, renter, body.lease_id),
            deadline_s=contract.deadline_s,
        )

    def check_of(self, state: State, draft: Draft) -> Callable[[], None] | None:
        """What has to be looked up on the chain before an event is taken: raises Refused. None: nothing."""
        if state.rules is None or not state.rules.contract:
            return None
        body = draft.read_body()
        if isinstance(body, on.Opened) and body.contract is not None:
            terms = self.terms_of(draft.actor, body)
            return lambda: self.require_state(terms, "funded", body.lease_id)
        if isinstance(body, on.Accepted) and body.lease_id in state.leases:
            terms = self.terms(state.leases[body.lease_id])
            return lambda: self.require_state(terms, "running", body.lease_id)
        if isinstance(body, on.Cosigned) and body.lease_id in state.leases:
            lease = state.leases[body.lease_id]
            return lambda: self._require_voucher(lease, body)
        return None

    def require_state(self, terms: Terms, expected: str, lease_id: str) -> None:
        """Raises Refused if the contract has not got what a lease needs: `funded`, or `running` with the bond."""
        if (found := self.contract.state(terms.lease)) != expected:
            if self.contract.confirmations and self.contract.state(terms.lease, is_confirmed=False) == expected:
                raise _Unconfirmed(f"lease {lease_id} has fewer than {self.contract.confirmations} confirmations yet")
            missing = "deposit" if expected == "funded" else "bond"
            raise Refused(
                f"the contract {self.contract.account} has no {missing} for lease {lease_id} on these terms: it is "
                f"{found!r} there, not {expected!r}",
                remedy="Send the transaction first.",
            )

    def _require_voucher(self, lease: Lease, body: on.Cosigned) -> None:
        seconds = lease.seconds_of(body.index)
        if seconds is None or lease.contract is None:
            return  # the state says what is wrong
        found = self.contract.voucher_signer(self.terms(lease).lease, seconds, bytes.fromhex(body.voucher))
        if found != lease.contract.cosigner:
            raise Refused(
                f"the voucher of {seconds} s for lease {lease.lease_id} is signed by {found or 'no key'}, "
                f"and not by {lease.contract.cosigner}"
            )

    def cosigned(self, lease: Lease, body: on.Cosigned) -> on.Cosigned:
        """The event with its voucher."""
        seconds = lease.seconds_of(body.index)
        if lease.contract is None or seconds is None:
            return body
        return replace(body, voucher=self.contract.voucher(self.terms(lease).lease, seconds).hex())

    # ----------------------------------------------------------------------------------------------- renters and agents

    def open(self, client: PoolClient, body: on.Opened, offer: on.Offer) -> None:
        """As a renter, put a lease's deposit into the contract, and open it in the pool; back if the pool refuses.

        A lease whose deposit is there from an earlier try is opened with it.

        Raises:
            Refused: the deposit is not covered, or another renter was faster.
        """
        assert client.key is not None
        earliest_s = least_deadline_s(self.contract.now_s(), offer.max_s, body.window_s)
        deadline_s = math.ceil(earliest_s / _SPARE_S + 1) * _SPARE_S  # equal in a second try soon after
        contract = on.ContractTerms(
            payer=self.address, payee=offer.payee, cosigner=self.contract.arbiter, deadline_s=deadline_s
        )
        body = replace(body, contract=contract)
        terms = self.terms_of(client.key.public, body)
        if self.contract.state(terms.lease) != "funded":
            self.contract.open(terms)
        try:
            client.post(body, patience_s=_CONFIRM_S)
        except Refused:
            self.contract.refund(terms)
            raise

    def put_up(self, lease: Lease) -> None:
        """As an agent, put up the bond of a lease whose deposit is there, on terms that pay this address.

        Raises:
            Refused: there is no such deposit, or the bond is not covered.
            BadJob: its terms would not pay.
        """
        terms, now_s = self.terms(lease), self.contract.now_s()
        if terms.agent != self.address or terms.cosigner != self.contract.arbiter:
            raise BadJob(f"it pays {terms.agent} by vouchers of {terms.cosigner}, and not {self.address} by the pool's")
        earliest_s = least_deadline_s(now_s, lease.most_s, lease.window_s)
        if terms.deadline_s < earliest_s:
            raise BadJob(
                f"its deadline on the chain is {earliest_s - terms.deadline_s:.0f} s early by the chain's clock"
            )
        if self.contract.state(terms.lease) != "running":  # else from an earlier try
            self.require_state(terms, "funded", lease.lease_id)
            self.contract.accept(terms)

    # ------------------------------------------------------------------------------------------------ what is due there

    def keep_up(self, roots: Sequence[on.Anchored], leases: Iterable[Lease]) -> None:
        """Bring to the contract what it lacks: roots, in their order, and verdicts of leases that are settled.

        The first root is the newest: each event has the hash of the one before, so that it stands for all earlier ones.
        What fails is logged and tried again the next time.
        """
        try:
            last = self.contract.anchored() if roots else 0
            for root in roots if last else roots[-1:]:
                if root.last > last:
                    self.contract.anchor(root.first, root.last, root.root)
        except StokerError as problem:
            _log.warning("a root is not anchored yet: %s", first_line(problem))
        for lease in leases:
            if self.is_over.is_set():
                return
            try:
                self.settle(lease)
            except StokerError as problem:
                _log.warning("lease %s is not settled on the chain yet: %s", lease.lease_id, first_line(problem))

    def settle(self, lease: Lease) -> Sent | None:
        """Sign what a lease came to, as the arbiter, and bring it to the contract; None: it has it already."""
        if lease.lease_id in self._done or lease.settlement is None or lease.contract is None:
            return None
        terms, sent = self.terms(lease), None
        if (found := self.contract.state(terms.lease)) in ("funded", "running"):
            pay, slashed, fees = parts_of(lease.settlement)
            verdict = self.contract.verdict(terms.lease, pay=pay, slashed=slashed, fees=fees)
            self.verdicts[lease.lease_id] = verdict
            sent = self.bring(lease, verdict)
        if sent is not None or found == "settled":
            self._done.add(lease.lease_id)
        return sent

    def bring(self, lease: Lease, verdict: bytes) -> Sent | None:
        """Bring a verdict to the contract, with the lease's last voucher; None: it is settled there."""
        terms = self.terms(lease)
        if lease.settlement is None or self.contract.state(terms.lease) not in ("funded", "running"):
            return None
        pay, slashed, fees = parts_of(lease.settlement)
        return self.contract.settle(
            terms,
            pay=pay,
            slashed=slashed,
            fees=fees,
            verdict=verdict,
            running_s=lease.paid_s,
            voucher=bytes.fromhex(lease.voucher),
        )

    def get_back(self, lease: Lease) -> Sent | None:
        """What this key may do for a lease that has no verdict: claim as its agent, or refund; None: nothing yet."""
        terms = self.terms(lease)
        found, now_s = self.contract.state(terms.lease), self.contract.now_s()
        if found == "funded" and self.address == terms.renter:
            return self.contract.refund(terms)
        if found != "running" or now_s < terms.deadline_s:
            return None
        if self.address == terms.agent and lease.voucher:
            return self.contract.claim(terms, lease.paid_s, bytes.fromhex(lease.voucher))
        return self.contract.refund(terms) if now_s >= terms.deadline_s + CLAIM_S else None


def parts_of(settlement: Settlement) -> tuple[int, int, list[tuple[str, int]]]:
    """Pay, what is cut of the bond, and fees by address."""
    fees = [(account.removeprefix(CHAIN_PREFIX), fee) for account, fee in settlement.fees]
    return settlement.pay, settlement.slashed, fees


def differing_roots(contract: EscrowContract, roots: Iterable[on.Anchored]) -> tuple[int, str]:
    """Hold a log's roots against those in the contract.

    Returns:
        How many are in both, and what is wrong with the first that differs; "": nothing.
    """
    last, count = contract.anchored(), 0
    for one in roots:
        found = contract.root(one.last)
        if one.last > last or (not count and not int(found, 16)):  # not there yet, or before the first that is
            continue
        if found != one.root:
            return count, f"the contract's root up to event {one.last} is {found[:12]}…, the log's {one.root[:12]}…"
        count += 1
        reached = one.last
    if last and (not count or reached != last):
        return count, f"the contract has a root up to event {last}, which the log does not have: it was cut short"
    return count, ""
