"""How much of requests and answers there may be in memory at a time, of all connections together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from stoker.serving.problems import Crowded
from stoker.units import GIB, format_bytes

RETRY_S = 1.0


class InFlight:
    """Bytes held for requests that come in, wait or are computed, and for answers until their clients have read them.

    Each body has a limit of its own; this bounds what many of them take together, and how many connections there are.
    It belongs to one event loop.
    """

    def __init__(self, most_bytes: int = GIB) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self.connections: Counter[str] = Counter()
        """Open connections of HTTP by the peer's address."""

    def connect(self, peer: str, *, most: int, most_of_peer: int) -> None:
        """Count a connection in.

        Raises:
            Crowded: there are as many as there may be, of all peers or of this one; it was not counted.
        """
        if self.connections.total() >= most or self.connections[peer] >= most_of_peer:
            raise Crowded(
                f"the server has {self.connections.total()} connections, {self.connections[peer]} of them yours; it "
                f"takes {most} and {most_of_peer} of one address: keep connections and use them again"
            )
        self.connections[peer] += 1

    def disconnect(self, peer: str) -> None:
        """Count one out."""
        self.connections[peer] -= 1
        if not self.connections[peer]:
            del self.connections[peer]

    def take(self, num_bytes: int) -> None:
        """Count some in, which are to be given back.

        Raises:
            Crowded: they would be more than there may be; they were not counted.
        """
        if self.num_bytes + num_bytes > self.most_bytes:
            raise Crowded(
                f"the server holds {format_bytes(self.num_bytes)} of requests, of {format_bytes(self.most_bytes)} that "
                "it may; ask again when others have been answered, or with fewer rows",
                retry_after_s=RETRY_S,
            )
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Count some out that were taken."""
        self.num_bytes -= num_bytes

    @contextmanager
    def taken(self, num_bytes: int) -> Iterator[None]:
        """Count some in for a while.

        Raises:
            Crowded: see `take`.
        """
        self.take(num_bytes)
        try:
            yield
        finally:
            self.give_back(num_bytes)
