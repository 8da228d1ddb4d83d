"""Blocks of a lease, made again on this machine by any agent, or by hand (`stoker pool verify`).

What: what a block needs (`Making`) is fetched from the pool by its lease: order, states, messages of a gang. How it is
made and compared is `replay_check`. An arbiter makes one update of it again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.errors import BadJob, StokerError
from stoker.pool import events as on
from stoker.pool.blob_tree import TreeLimits
from stoker.pool.client import PoolClient
from stoker.pool.commitment import Block
from stoker.pool.isolation import Host
from stoker.pool.job_box import JobBox, PoolOrder, read_order
from stoker.pool.lease import MOST_EVIDENCE_BYTES
from stoker.pool.leased_job import INDEX_BYTES, BlobCache
from stoker.pool.message_carrier import known_messages
from stoker.pool.replay_check import Making, ReplayVerdict, check_block, check_update
from stoker.pool.shown_lease import ShownLease
from stoker.records.codec import parsed, printable


def blocks_of(lease: ShownLease, order: PoolOrder) -> list[Block]:
    """The blocks of a lease in order, each with the head before it."""
    blocks, head = list[Block](), order.resume_head
    for one in lease.commitments:
        blocks.append(
            Block(block=one.block, update=one.update, state=one.state, blob=one.blob, previous=head, seal=one.seal)
        )
        head = blocks[-1].state
    return blocks


def evidence_of(client: PoolClient, lease: ShownLease, number: int, folder: Path) -> list[dict[str, Any]]:
    """What verifiers of block `number` of a lease recorded, as far as it is there.

    Each has `verifier`, `equal`, `why`, `made`, and of an arbiter the `update`. Their words are theirs: only that they
    were recorded for this verdict is checked.
    """
    found, cache = [], BlobCache(client, folder / "evidence", MOST_EVIDENCE_BYTES)
    for one in lease.challenges:
        if one.block != number or not one.evidence:
            continue
        with suppress(StokerError, ValueError, TypeError, LookupError):  # it was not kept, or is not JSON
            record = parsed(cache.whole(one.evidence, MOST_EVIDENCE_BYTES))
            found.append(
                {
                    "verifier": one.verifier,
                    "equal": bool(one.equal),
                    "why": printable(str(record["why"]))[:1000],
                    "made": one.made,
                    **({"update": one.update} if one.update else {}),
                }
            )
    cache.clear()
    return found


@contextmanager
def made_again(
    client: PoolClient,
    lease_id: str,
    number: int,
    *,
    folder: Path,
    host: Host,
    own_class: str = "",
    box_type: type[JobBox] = JobBox,
) -> Iterator[tuple[ShownLease, Making]]:
    """A lease, and what making its block `number` again on this machine needs, which is fetched when it is used.

    Raises:
        BadJob: the lease has no such block.
        PlaceFailed: its order cannot be run here.
    """
    lease = client.lease(lease_id)
    cache = BlobCache(client, folder / f"blobs-{lease_id}-{number}", 2 * host.limits.disk_bytes + INDEX_BYTES)
    try:
        order = read_order(cache.whole(lease.order, 4 << 20))
        blocks = blocks_of(lease, order)
        if not 0 <= number < len(blocks):
            raise BadJob(f"lease {lease_id} has {len(blocks)} blocks, and no block {number}")
        before = blocks[number - 1] if number else None
        if number == 0 and order.resume:
            before = Block(
                block=-1,
                update=order.resume_update,
                state=order.resume_head,
                blob=order.resume,
                previous="",
                seal=order.resume_seal,
            )
        # A verdict counts for so long: what takes longer is of no use, and may be malice.
        host = replace(host, limits=replace(host.limits, time_s=min(host.limits.time_s, lease.verdict_s)))
        box = box_type.make(
            folder / lease.order[:32],
            order,
            cache.fetch,
            TreeLimits(num_bytes=host.limits.disk_bytes, has_links=True),
        )
        yield (
            lease,
            Making(
                box=box,
                before=before,
                block=blocks[number],
                fetch=cache.fetch,
                host=host,
                messages=tuple(known_messages(client, lease)) if order.sites else (),
                agent=lease.agent,
                is_same_class=own_class == lease.determinism_class,
            ),
        )
    finally:
        cache.clear()
        shutil.rmtree(folder / f"blobs-{lease_id}-{number}", ignore_errors=True)


def replay_lease(
    client: PoolClient,
    lease_id: str,
    number: int,
    *,
    against: str = "",
    folder: Path,
    host: Host,
    own_class: str,
    box_type: type[JobBox] = JobBox,
) -> ReplayVerdict:
    """Make block `number` of a lease again on this machine.

    Args:
        client: of the pool.
        lease_id: of the lease.
        number: of the block.
        against: a verifier: as an arbiter, only the one update is made on which it and the agent differ first.
        folder: for what that needs.
        host: where it is made.
        own_class: determinism class of this machine.
        box_type: in which it is made.

    Raises:
        BadJob: the lease has no such block.
        Refused: no such update was found.
        PlaceFailed: it cannot be made or compared here, for a reason that says nothing about the block.
    """
    with made_again(client, lease_id, number, folder=folder, host=host, own_class=own_class, box_type=box_type) as (
        lease,
        making,
    ):
        if not against:
            return replace(check_block(making), begins=making.begin if number == 0 else 0)
        _, search = lease.searched(number, against)
        if not search.is_ready:
            raise on.Refused(f"agent and verifier of block {number} of lease {lease_id} have not supplied their states")
        return check_update(making, search)
