"""How much of requests there may be in memory at a time, of all connections together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stoker.serving.problems import Crowded
from stoker.units import GIB, format_bytes

RETRY_S = 1.0


class InFlight:
    """Bytes of the bodies that are here: of requests that are coming in, wait, are computed or answered.

    Each body has a limit of its own; this bounds what many of them take together. It belongs to one event loop.
    """

    def __init__(self, most_bytes: int = GIB) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0

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
