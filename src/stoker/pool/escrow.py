"""Money: accounts, escrow and bonds in whole micro-credits, and what moves at each turn of a lease.

Every change is a list of transfers between accounts; only a deposit by the operator makes credits. So the sum of all
accounts equals all deposits after every event, and `require_conserved` says so with the numbers if it ever does not.
Accounts: a key (64 hexadecimal digits), `escrow/LEASE`, `bond/LEASE`, and `chain/ADDRESS` where a contract holds the
money: those have what the contract paid an address through leases, less what it took from it.

What a lease comes to is decided here alone (`settlement_of`, `refund_of`), wherever the money is held. The contract
(`contract/escrow.vy`) carries it out within bounds of its own: `chain.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from stoker.pool.events import CREDIT, Refused
from stoker.pool.lease import ACCEPT_S, CHAIN_PREFIX, Lease, Settlement

FIRST_JOBS = 10
"""Jobs of a provider of which every block is replayed."""
MOST_VERIFIERS = 64
"""Verifiers of one lease whose fees a contract pays, at most."""
MOST_BOND = 10
"""Largest bond, in deposits: a renter holds no bond for nothing."""
REPLAYS_S = 2 * 24 * 3600.0
"""Time that replays may take after the time to dispute, before a contract settles without the pool [s]."""
LEAST_CHECKED = 0.02
"""Least share of blocks that is replayed, of a provider with a long record."""


@dataclass(frozen=True)
class Transfer:
    """`amount` micro-credits from one account to another; source None: made by a deposit."""

    source: str | None
    target: str
    amount: int


class Accounts:
    """Balances by account [micro-credits]."""

    def __init__(self) -> None:
        self.balances: dict[str, int] = {}
        self.deposited = 0
        self._held = 0

    def balance(self, account: str) -> int:
        """What an account has [micro-credits]; 0 for one that is not known."""
        return self.balances.get(account, 0)

    def require_covered(self, transfers: Iterable[Transfer]) -> None:
        """Refuse transfers that would take more than is there.

        Raises:
            Refused: an account has too little; with what is missing.
        """
        after: dict[str, int] = {}
        for move in transfers:
            if move.amount < 0:
                raise Refused(f"a transfer of {move.amount} micro-credits is less than nothing")
            if move.source is not None:
                left = after.get(move.source, self.balance(move.source)) - move.amount
                if left < 0 and not move.source.startswith(CHAIN_PREFIX):
                    has = left + move.amount
                    raise Refused(
                        f"account {short(move.source)} has {credits_text(has)}, and {credits_text(move.amount)} are "
                        f"needed: {credits_text(-left)} are missing",
                        remedy="The operator grants credits: stoker pool wallet --grant KEY=AMOUNT.",
                    )
                after[move.source] = left
            after[move.target] = after.get(move.target, self.balance(move.target)) + move.amount

    def move(self, transfers: Iterable[Transfer]) -> None:
        """Make transfers that `require_covered` allowed."""
        for move in transfers:
            if move.source is None:
                self.deposited += move.amount
            else:
                self._add(move.source, -move.amount)
            self._add(move.target, move.amount)

    def _add(self, account: str, amount: int) -> None:
        left = self.balance(account) + amount
        self._held += amount
        if left == 0 and "/" in account:
            self.balances.pop(account, None)
        else:
            self.balances[account] = left

    def require_conserved(self, *, is_thorough: bool = False) -> None:
        """Check that the accounts hold what was deposited.

        Args:
            is_thorough: add up all accounts, and look for one below zero; else compare the running sum.

        Raises:
            Refused: they do not: a fault of this program.
        """
        held = sum(self.balances.values()) if is_thorough else self._held
        if held != self.deposited:
            raise Refused(f"the accounts hold {held} micro-credits, and {self.deposited} were deposited")
        for name, amount in self.balances.items() if is_thorough else ():
            if amount < 0 and not name.startswith(CHAIN_PREFIX):
                raise Refused(f"account {short(name)} has {amount} micro-credits")


def escrow_of(lease_id: str) -> str:
    """The account that holds the renter's money."""
    return f"escrow/{lease_id}"


def bond_of(lease_id: str) -> str:
    """The account that holds the agent's."""
    return f"bond/{lease_id}"


def pay_for(running_s: float, rate_per_hour: int) -> int:
    """What seconds of the meter cost [micro-credits], rounded down to whole ones."""
    return int(running_s) * rate_per_hour // 3600


def checked_fraction(asked: float, num_passed: int) -> float:
    """Share of blocks that is replayed, where the renter asked for a share of `asked` [0 to 1].

    The first ten jobs of a provider are replayed whole, then max(1/N, 2 %) after N that passed; a renter who asks for
    none gets none, and the job adds nothing to the provider's record.

    Source: adaptive replication of BOINC (sched/sched_send.cpp), which trusts after ten results and goes on with 1/N.

    >>> [checked_fraction(0.05, passed) for passed in (0, 9, 10, 19, 99)]
    [1.0, 1.0, 0.1, 0.05263157894736842, 0.05]
    """
    if asked == 0:
        return 0.0
    return max(asked, 1.0 if num_passed < FIRST_JOBS else max(1 / num_passed, LEAST_CHECKED))


def is_used_up(lease: Lease, held: int) -> bool:
    """Whether an escrow that has `held` micro-credits lasts no longer: what is left is for replays."""
    return required_deposit(pay_for(lease.running_s, lease.rate_per_hour), lease.check_fraction) >= held


def required_deposit(forecast_credits: int, check_fraction: float) -> int:
    """Least deposit for a forecast [micro-credits]: the run, and replaying its share of blocks."""
    return forecast_credits + math.ceil(forecast_credits * check_fraction)


def deterrence_text(pay: int, bond: int, check_fraction: float, num_blocks: int) -> str:
    """What it would save and cost an agent to cheat in one block of a lease, as words.

    One block is where cheating is found least: further ones save as much each. It does not pay where
    p (pay + bond) > (1 - p) pay / n, with p the chance that a block of n is drawn. Since one is drawn at least, p is
    1/n or more, so that the pay of the lease is enough, and the implied bond is 0.

    >>> print(deterrence_text(1_000_000, 500_000, 0.05, 40))
    cheating in one of 40 blocks saves 0.025 credits, and loses 1.50 credits with a chance of 5 %
    >>> print(deterrence_text(1_000_000, 0, 0.0, 40))
    nothing is replayed: no bond keeps the agent from cheating
    """
    if not check_fraction:
        return "nothing is replayed: no bond keeps the agent from cheating"
    blocks = max(1, num_blocks)
    chance = math.ceil(check_fraction * blocks) / blocks
    return (
        f"cheating in one of {blocks:,} blocks saves {credits_text(pay // blocks)}, and loses "
        f"{credits_text(pay + bond)} with a chance of {100 * chance:.0f} %"
    )


def least_deposit(min_s: float, rate_per_hour: int) -> int:
    """Least deposit whatever the forecast [micro-credits]: the shortest lease, and the time that an offer is held."""
    return max(pay_for(math.ceil(max(min_s, ACCEPT_S)), rate_per_hour), 1 if rate_per_hour else 0)


def least_deadline_s(opened_s: float, most_s: float, window_s: float) -> float:
    """Earliest deadline of a contract for a lease [s since 1970]: when it is over at the latest, replays included."""
    return opened_s + ACCEPT_S + most_s + window_s + REPLAYS_S


# ------------------------------------------------------------------------------------------- what moves, event by event


def fund(lease: Lease) -> list[Transfer]:
    """The renter's deposit goes into escrow."""
    return [Transfer(lease.renter_account, escrow_of(lease.lease_id), lease.deposit)]


def put_up(lease: Lease) -> list[Transfer]:
    """The agent's bond is put up."""
    return [Transfer(lease.agent_account, bond_of(lease.lease_id), lease.bond)]


def end(lease: Lease, held: int) -> list[Transfer]:
    """The meter has stopped: what neither pay nor replays can need goes back to the renter.

    Args:
        lease: as it ends.
        held: what its escrow has [micro-credits].
    """
    most = required_deposit(pay_for(lease.most_payable_s, lease.rate_per_hour), lease.check_fraction)
    return _some(Transfer(escrow_of(lease.lease_id), lease.renter_account, max(0, held - most)))


def settlement_of(lease: Lease, held: int) -> Settlement:
    """The seconds that are paid go to the agent, with its bond; the rest of what the escrow has to the renter."""
    return Settlement(pay=min(held, pay_for(lease.payable_s, lease.rate_per_hour)), fees=_fees(lease))


def refund_of(lease: Lease, bond: int, slashed: int = 0) -> Settlement:
    """All that the escrow holds to the renter, with `slashed` of the bond; the rest of the bond to the agent.

    Raises:
        Refused: the bond is smaller than what is to be cut.
    """
    if slashed > bond:
        raise Refused(
            f"lease {lease.lease_id} has a bond of {credits_text(bond)}: {credits_text(slashed)} cannot be cut"
        )
    return Settlement(slashed=slashed, fees=_fees(lease))


def carry_out(lease: Lease, settlement: Settlement, held: int, bond: int) -> list[Transfer]:
    """A settlement in transfers, out of what escrow and bond still have; fees were paid as verdicts came."""
    escrow, account = escrow_of(lease.lease_id), bond_of(lease.lease_id)
    return _some(
        Transfer(escrow, lease.agent_account, settlement.pay),
        Transfer(escrow, lease.renter_account, held - settlement.pay),
        Transfer(account, lease.renter_account, settlement.slashed),
        Transfer(account, lease.agent_account, bond - settlement.slashed),
    )


def _fees(lease: Lease) -> tuple[tuple[str, int], ...]:
    """Fees that verifiers got, by account."""
    fees = Counter[str]()
    for challenge in lease.challenges:
        if challenge.equal is not None:
            fees[challenge.account] += challenge.fee
    return tuple((account, fee) for account, fee in sorted(fees.items()) if fee)


def replay_fee(lease: Lease) -> int:
    """What replaying one block is worth: the block's share of the pay [micro-credits]."""
    return pay_for(lease.payable_s, lease.rate_per_hour) // max(1, len(lease.commitments))


def free_for_fees(lease: Lease, held: int, now_s: float) -> int:
    """What the escrow holds beyond the agent's pay and fees that are promised [micro-credits].

    A verifier whose time is over is promised nothing any more.
    """
    promised = sum(challenge.fee for challenge in lease.challenges if lease.is_in_time(challenge, now_s))
    return max(0, held - pay_for(lease.payable_s, lease.rate_per_hour) - promised)


def _some(*transfers: Transfer) -> list[Transfer]:
    return [move for move in transfers if move.amount]


# ----------------------------------------------------------------------------------------------------------------- text


def credits_text(amount: int) -> str:
    """Micro-credits as people read them.

    >>> [credits_text(amount) for amount in (1_500_000, 12_345, 0)]
    ['1.50 credits', '0.012345 credits', '0 credits']
    """
    if amount == 0:
        return "0 credits"
    text = (
        f"{amount / CREDIT:.2f}"
        if abs(amount) >= CREDIT or amount % 10_000 == 0
        else f"{amount / CREDIT:.6f}".rstrip("0")
    )
    return f"{text} credits"


def short(account: str) -> str:
    """An account in its short form: the first digits of a key."""
    return f"{account[:12]}…" if len(account) == 64 else account
