"""An agent's link to the pool, measured: a small and a larger blob of random bytes are sent, and fetched again.

What: the rate is the difference of the two sizes by the difference of their times, so that what a request takes by
itself (a connection, TLS, a sync of the pool's disk) does not count. Costs: 4.25 MiB each way, which the pool deletes
after an hour. Does not measure: direct paths to renters, or what the line gives at another time of the day.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from stoker.units import MIB

SIZES = (MIB // 4, 4 * MIB)
"""Of the two blobs [bytes]."""


class Blobs(Protocol):
    """What of `PoolClient` is asked."""

    def put_blob(self, source: bytes | Path, *, through_pool: bool = False) -> str:
        """Send a blob; its SHA-256."""
        ...

    def get_blob(self, digest: str, target: Path, *, most_bytes: int | None = None) -> None:
        """Fetch a blob into a file."""
        ...


@dataclass(frozen=True, kw_only=True)
class MeasuredLink:
    """Rates between an agent and the pool [bytes/s]; 0: not measured."""

    upload_bytes_per_s: float = 0.0
    download_bytes_per_s: float = 0.0


def measured_link(client: Blobs, folder: Path, clock: Callable[[], float] = time.monotonic) -> MeasuredLink:
    """Measure the link to a pool.

    Args:
        client: of the pool, with a key that has credits.
        folder: for what is fetched.
        clock: time [s].

    Raises:
        StokerError: the pool does not answer, or takes no blobs of this key.
    """
    sent_s, fetched_s = [], []
    target = folder / f"link-{os.getpid()}"
    for num_bytes in SIZES:
        content, began = os.urandom(num_bytes), clock()
        digest = client.put_blob(content, through_pool=True)
        sent_s.append(clock() - began)
        began = clock()
        try:
            client.get_blob(digest, target, most_bytes=num_bytes)
        finally:
            target.unlink(missing_ok=True)
        fetched_s.append(clock() - began)
    return MeasuredLink(upload_bytes_per_s=measured_rate(*sent_s), download_bytes_per_s=measured_rate(*fetched_s))


def measured_rate(small_s: float, large_s: float) -> float:
    """Bytes a second; where the larger one took no longer, by its own time: a lower bound [bytes/s].

    >>> measured_rate(0.5, 1.5) == 3.75 * MIB, measured_rate(0.5, 0.4) == 10 * MIB
    (True, True)
    """
    if large_s > small_s:
        return (SIZES[1] - SIZES[0]) / (large_s - small_s)
    return SIZES[1] / large_s if large_s > 0 else 0.0
