"""What it costs to send large blobs through the pool, where its parties have no direct path to each other.

A pool's rules have a price and a quota; a renter says in its lease how much it spends on that at most, and is charged
for each large blob of the lease that the pool keeps, once, by an event. Small blobs and all messages are free.
"""

from __future__ import annotations

from stoker.pool.escrow import credits_text
from stoker.pool.events import Founded, Refused
from stoker.units import GIB, MIB, format_bytes

BULK_BYTES = 16 * MIB
"""From this size on a blob is large: it goes directly where it can, and through the pool at a price [bytes]."""


def forwarding_fee(num_bytes: int, price_per_gib: int) -> int:
    """What it costs to forward so many bytes [micro-credits], rounded up.

    >>> forwarding_fee(3 * 2**29, 50_000)
    75000
    """
    return -(-num_bytes * price_per_gib // GIB)


def forwarding_text(rules: Founded) -> str:
    """What a pool's rules say about forwarding, as words."""
    price = "free" if not rules.forward_price else f"{credits_text(rules.forward_price)} per GiB"
    quota = f", {format_bytes(rules.forward_quota_bytes)} a lease at most" if rules.forward_quota_bytes else ""
    return price + quota


def require_forwardable(
    lease_id: str, num_bytes: int, rules: Founded, *, most: int, sent_bytes: int = 0, spent: int = 0
) -> int:
    """What forwarding so many bytes more for a lease costs [micro-credits].

    Args:
        lease_id: of the lease.
        num_bytes: to be forwarded.
        rules: of the pool.
        most: what its renter spends on that at most [micro-credits].
        sent_bytes: forwarded before.
        spent: on them [micro-credits].

    Raises:
        Refused: it is over the pool's quota, or over what the renter spends; with the numbers.
    """
    fee, quota = forwarding_fee(num_bytes, rules.forward_price), rules.forward_quota_bytes
    if quota and sent_bytes + num_bytes > quota:
        raise Refused(
            f"lease {lease_id}: with {format_bytes(num_bytes)} more, {format_bytes(sent_bytes + num_bytes)} would go "
            f"through the pool, which forwards {format_bytes(quota)} a lease at most",
            remedy="stoker[p2p] on both sides, and networks that let them reach each other; or longer blocks.",
        )
    if spent + fee > most:
        raise Refused(
            f"lease {lease_id}: {format_bytes(num_bytes)} through the pool cost {credits_text(fee)} "
            f"({forwarding_text(rules)}), and its renter spends {credits_text(most)} on that, of which "
            f"{credits_text(spent)} are gone",
            remedy="--place-option forwarding=1usd; or stoker[p2p] on both sides, where a direct path exists.",
        )
    return fee
