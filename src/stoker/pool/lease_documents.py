"""What the documents of a run's leases say, as the log gives them to its renter: what was paid, checked, lost, wrong.

Nothing here asks a pool or changes anything: `renting.py` acts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from stoker.pool.escrow import pay_for
from stoker.pool.job_box import PoolOrder
from stoker.pool.lease import LIVE, STALLED, USED_UP
from stoker.units import format_bytes

_REST_S, _MOST_REST_S = 60.0, 6 * 3600.0
"""An offer rests so long after a lease that came to nothing, twice as long after each further one [s]."""
AWAY = "its agent was away before it accepted"
"""Reason of a lease that its renter closed for that."""
_FAILED = ("lost", STALLED)
"""Reasons of leases that the pool closed for what their agent did not do."""
_LOST_S = 1800.0
"""So long after an agent was lost, others are asked before it [s]."""


def described(lease: Mapping[str, Any]) -> str:
    """A lease in a line: where, its state, how far it came, its replays and transfers."""
    words = f"lease {lease['lease_id']} at {str(lease['agent'])[:12]}: {lease['state']}"
    if lease["commitments"]:
        words += f", committed to update {lease['commitments'][-1]['update']:,}"
    if replays := whole_replays(lease):
        words += f", {sum(one['equal'] is True for one in replays)} of {len(replays)} replays equal"
    if direct_bytes := lease.get("bulk", {}).get("direct_bytes"):
        words += f", {format_bytes(direct_bytes)} not through the pool"
    if lease.get("forwarded"):
        words += (
            f", {format_bytes(lease['forwarded_bytes'])} through it for {lease['forwarded_credits'] / 1e6:g} credits"
        )
    return words


def most_spent(lease: Mapping[str, Any]) -> int:
    """What a lease costs its renter at most [micro-credits]: before it is final, replays may still be paid."""
    fees = sum(int(asked["fee"]) for asked in lease["challenges"])
    spent = fees + int(lease.get("forwarded_credits", 0))
    if lease["outcome"]:
        return spent
    rate = int(lease["rate_per_hour"])
    if lease["state"] == "final":
        return spent + int(lease["settlement"]["pay"])
    pay = pay_for(payable_s(lease), rate)
    drawn = math.ceil(float(lease["check_fraction"]) * pay) if lease["commitments"] else 0
    return spent + pay + max(0, drawn - fees)


def payable_s(lease: Mapping[str, Any]) -> int:
    """Seconds of a lease that are paid at most [s]; see `Lease.most_payable_s`. Of one that goes on, all of them."""
    running_s = int(lease["running_s"])
    if not float(lease["check_fraction"]) or lease["state"] in LIVE:
        return running_s
    committed_s = int(lease["commitments"][-1]["running_s"]) if lease["commitments"] else 0
    return min(running_s, committed_s + int(lease["uncommitted_s"]))


def counted_s(lease: Mapping[str, Any]) -> int:
    """Seconds of the run's time that a lease has used [s]: those that are paid; all, where its deposit was used up.

    Else a run whose time is too short for a block would open one lease after the other, and pay for none.
    """
    is_used_up = lease["reason"] == USED_UP and lease["closed_by"] == lease["delegate"]
    return int(lease["running_s"]) if is_used_up else payable_s(lease)


def verdicts(lease: Mapping[str, Any], block: int) -> tuple[int, int]:
    """Replays that found a block equal, and unequal."""
    found = [one["equal"] for one in whole_replays(lease) if int(one["block"]) == block]
    return found.count(True), found.count(False)


def whole_replays(lease: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Replays of whole blocks whose verdicts count, as `Challenge.judges` has it for a document."""
    return [one for one in lease["challenges"] if not (one.get("update") or one.get("dismissed"))]


def is_wrong(lease: Mapping[str, Any]) -> bool:
    """Whether it was settled against its agent, or, before that, more replays speak against a block than for it."""
    counts = (verdicts(lease, int(one["block"])) for one in lease["challenges"])
    return bool(lease["outcome"]) or (not is_judged(lease) and any(unequal > equal for equal, unequal in counts))


def wrong_agents(leases: list[dict[str, Any]]) -> set[str]:
    """Agents whose work was found wrong."""
    return {str(lease["agent"]) for lease in leases if is_wrong(lease)}


def num_good_blocks(lease: Mapping[str, Any]) -> int:
    """Leading blocks that can be gone on from: of an agent that was wrong only those that were replayed, one by one."""
    if not is_wrong(lease):
        return len(lease["commitments"])
    for block in range(len(lease["commitments"])):
        equal, unequal = verdicts(lease, block)
        if equal <= unequal:
            return block
    return len(lease["commitments"])


def is_run_stopped(lease: Mapping[str, Any]) -> bool:
    """Whether the renter has stopped the run of a lease, on whichever machine: no other lease of it is opened."""
    return bool(lease.get("is_run_stopped"))


def is_stopped(lease: Mapping[str, Any]) -> bool:
    """Whether the renter stopped it: an agent may give any reason."""
    return str(lease["reason"]).startswith("stopped") and lease["closed_by"] == lease["renter"]


def is_left_alone(lease: Mapping[str, Any]) -> bool:
    """Whether a lease waits to be accepted by an agent that is away; not one that may be waiting for a chain."""
    return lease["state"] == "funded" and bool(lease.get("is_agent_away")) and lease.get("contract") is None


def is_judged(lease: Mapping[str, Any]) -> bool:
    """Whether a lease with an unequal replay is settled one way or the other."""
    return bool(lease["outcome"]) or lease["state"] == "final"


def waits_for_replays(lease: Mapping[str, Any]) -> bool:
    """Whether blocks of a lease are still to be replayed before its states can be relied on."""
    if is_judged(lease) or not lease["commitments"]:
        return False
    expected = math.ceil(float(lease["check_fraction"]) * len(lease["commitments"]))
    return len({one["block"] for one in whole_replays(lease) if one["equal"] is True}) < expected


def checks_described(leases: list[dict[str, Any]]) -> str:
    """How much of a finished run was replayed."""
    leases = [lease for lease in leases if not is_wrong(lease)]
    drawn = sum(math.ceil(float(lease["check_fraction"]) * len(lease["commitments"])) for lease in leases)
    equal = sum(len({one["block"] for one in whole_replays(lease) if one["equal"] is True}) for lease in leases)
    if not drawn:
        return "trained to its end; nothing was replayed"
    if equal < drawn:
        return f"trained to its end; of {drawn} blocks that were drawn {drawn - equal} could not be replayed"
    return "trained to its end, and checked"


def wrong_blocks(leases: list[dict[str, Any]], order: Callable[[dict[str, Any]], PoolOrder]) -> set[str]:
    """Blocks that are wrong, or go back to a wrong one, by their blobs."""
    found: set[str] = set()
    for lease in leases:
        num_good = 0 if found and order(lease).resume in found else num_good_blocks(lease)
        found |= {str(one["blob"]) for one in lease["commitments"][num_good:]}
    return found


def recently_lost(leases: list[dict[str, Any]]) -> set[str]:
    """Agents that were lost so recently that others are asked before them."""
    now_s = time.time()
    return {
        str(lease["agent"])
        for lease in leases
        if lease["reason"] in _FAILED and now_s - float(lease["closed_s"]) < _LOST_S
    }


def resting_offers(leases: list[dict[str, Any]], now_s: float) -> set[str]:
    """Offers that are not asked yet: a minute after a lease, twice as long after each one in a row without a block."""
    until_s, rest_s = dict[str, float](), dict[str, float]()
    for lease in leases:
        offer = str(lease["offer_id"])
        rest_s[offer] = _REST_S if lease["commitments"] else min(_MOST_REST_S, 2 * rest_s.get(offer, _REST_S / 2))
        is_over = lease["closed_by"] == lease["delegate"] and lease["commitments"]  # deposit or time, and no failure
        until_s[offer] = 0.0 if is_over and lease["reason"] not in _FAILED else float(lease["closed_s"]) + rest_s[offer]
    return {offer for offer, rested_s in until_s.items() if now_s < rested_s}
