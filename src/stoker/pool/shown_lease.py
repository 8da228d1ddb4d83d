"""A lease as a pool shows it: what was paid, checked, lost and wrong of it, and of all leases of a run.

Nothing here asks a pool or changes anything: `renting.py` acts.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stoker.pool.escrow import pay_for
from stoker.pool.lease import LIVE, STALLED, USED_UP, Lease
from stoker.units import format_bytes

_REST_S, _MOST_REST_S = 60.0, 6 * 3600.0
"""An offer rests so long after a lease that came to nothing, twice as long after each further one [s]."""
AWAY = "its agent was away before it accepted"
"""Reason of a lease that its renter closed for that."""
_FAILED = ("lost", STALLED)
"""Reasons of leases that the pool closed for what their agent did not do."""
_LOST_S = 1800.0
"""So long after an agent was lost, others are asked before it [s]."""


@dataclass(frozen=True, kw_only=True)
class ShownLease(Lease):
    """A lease, and what its pool alone knows of it.

    Attributes:
        escrow, bond_held: what is held for it [micro-credits].
        verdict: the pool's word to the contract, in hexadecimal digits; "": there is none.
        is_agent_away: the agent does not ask for work.
        is_run_stopped: the renter has stopped its run, on whichever machine: no other lease of it is opened.
        bulk: of its large blobs, `direct_bytes` that are not in the pool, and `pool_bytes` that are.
        gang_leases: of a site, the names of all sites' leases, the oldest first.
        is_gang_begun: the agents of all sites have accepted.
        direct: keys of the agents of other sites to which messages go directly.
        num_blocks, replays: in a list, in place of the blocks and replays themselves; None: these are there.
    """

    escrow: int = 0
    bond_held: int = 0
    verdict: str = ""
    is_agent_away: bool = False
    is_run_stopped: bool = False
    bulk: dict[str, int] = field(default_factory=dict)
    gang_leases: tuple[tuple[str, ...], ...] = ()
    is_gang_begun: bool = False
    direct: tuple[str, ...] = ()
    num_blocks: int | None = None
    replays: dict[str, int] | None = None

    def in_words(self) -> str:
        """In a line: where, its state, how far it came, its replays and transfers."""
        words = f"lease {self.lease_id} at {self.agent[:12]}: {self.state}"
        if self.commitments:
            words += f", committed to update {self.commitments[-1].update:,}"
        if replays := [one for one in self.challenges if not (one.update or one.dismissed)]:
            words += f", {sum(one.equal is True for one in replays)} of {len(replays)} replays equal"
        if direct_bytes := self.bulk.get("direct_bytes"):
            words += f", {format_bytes(direct_bytes)} not through the pool"
        if self.forwarded:
            words += f", {format_bytes(self.forwarded_bytes)} through it for {self.forwarded_credits / 1e6:g} credits"
        return words

    @property
    def most_spent(self) -> int:
        """What it costs its renter at most [micro-credits]: before it is final, replays may still be paid."""
        fees = sum(asked.fee for asked in self.challenges)
        spent = fees + self.forwarded_credits
        if self.outcome:
            return spent
        if self.state == "final" and self.settlement is not None:
            return spent + self.settlement.pay
        pay = pay_for(self.running_s if self.state in LIVE else self.most_payable_s, self.rate_per_hour)
        drawn = math.ceil(self.check_fraction * pay) if self.commitments else 0
        return spent + pay + max(0, drawn - fees)

    @property
    def counted_s(self) -> int:
        """Seconds of the run's time that it has used [s]: those that are paid; all, where its deposit was used up.

        Else a run whose time is too short for a block would open one lease after the other, and pay for none.
        """
        is_used_up = self.reason == USED_UP and self.closed_by == self.delegate
        return self.running_s if is_used_up or self.state in LIVE else self.most_payable_s

    @property
    def num_replayed(self) -> int:
        """Blocks that a replay found equal."""
        return len({one.block for one in self.challenges if one.judges is True})

    @property
    def num_drawn(self) -> int:
        """Blocks that are to be replayed."""
        return math.ceil(self.check_fraction * len(self.commitments))

    @property
    def is_judged(self) -> bool:
        """Whether it is settled one way or the other, where a replay was unequal."""
        return bool(self.outcome) or self.state == "final"

    @property
    def is_wrong(self) -> bool:
        """Whether it was settled against its agent, or, before that, more replays speak against a block than for it."""
        return bool(self.outcome) or (not self.is_judged and min(self._balances().values(), default=0) < 0)

    @property
    def num_good_blocks(self) -> int:
        """Leading blocks to go on from: of an agent that was wrong only those that were replayed, one by one."""
        num_blocks, balances = len(self.commitments), self._balances()
        if not self.is_wrong:
            return num_blocks
        return next((block for block in range(num_blocks) if balances[block] <= 0), num_blocks)

    def _balances(self) -> Counter[int]:
        """By block, replays that found it equal, less those that found it unequal."""
        balances = Counter[int]()
        for one in self.challenges:
            balances[one.block] += 0 if one.judges is None else 1 if one.judges else -1
        return balances

    @property
    def is_stopped(self) -> bool:
        """Whether the renter stopped it: an agent may give any reason."""
        return self.reason.startswith("stopped") and self.closed_by == self.renter

    @property
    def is_left_alone(self) -> bool:
        """Whether it waits to be accepted by an agent that is away; not one that may be waiting for a chain."""
        return self.state == "funded" and self.is_agent_away and self.contract is None

    @property
    def waits_for_replays(self) -> bool:
        """Whether blocks are still to be replayed before its states can be relied on."""
        return not self.is_judged and self.num_replayed < self.num_drawn


def wrong_agents(leases: Sequence[ShownLease]) -> set[str]:
    """Agents whose work was found wrong."""
    return {lease.agent for lease in leases if lease.is_wrong}


def checks_described(leases: Sequence[ShownLease]) -> str:
    """How much of a finished run was replayed."""
    leases = [lease for lease in leases if not lease.is_wrong]
    drawn, equal = sum(lease.num_drawn for lease in leases), sum(lease.num_replayed for lease in leases)
    if not drawn:
        return "trained to its end; nothing was replayed"
    if equal < drawn:
        return f"trained to its end; of {drawn} blocks that were drawn {drawn - equal} could not be replayed"
    return "trained to its end, and checked"


def wrong_blocks(leases: Sequence[ShownLease], resumes_from: Callable[[ShownLease], str]) -> set[str]:
    """Blocks that are wrong, or go back to a wrong one, by their blobs."""
    found: set[str] = set()
    for lease in leases:
        num_good = 0 if found and resumes_from(lease) in found else lease.num_good_blocks
        found |= {one.blob for one in lease.commitments[num_good:]}
    return found


def recently_lost(leases: Sequence[ShownLease]) -> set[str]:
    """Agents that were lost so recently that others are asked before them."""
    now_s = time.time()
    return {lease.agent for lease in leases if lease.reason in _FAILED and now_s - lease.closed_s < _LOST_S}


def resting_offers(leases: Sequence[ShownLease], now_s: float) -> set[str]:
    """Offers that are not asked yet: a minute after a lease, twice as long after each one in a row without a block."""
    until_s, rest_s = dict[str, float](), dict[str, float]()
    for lease in leases:
        offer = lease.offer_id
        rest_s[offer] = _REST_S if lease.commitments else min(_MOST_REST_S, 2 * rest_s.get(offer, _REST_S / 2))
        is_over = lease.closed_by == lease.delegate and lease.commitments  # deposit or time, and no failure
        until_s[offer] = 0.0 if is_over and lease.reason not in _FAILED else lease.closed_s + rest_s[offer]
    return {offer for offer, rested_s in until_s.items() if now_s < rested_s}
