"""How a generation comes apart."""

from __future__ import annotations

import time
from dataclasses import dataclass

CALLED = "called"
"""Why a generation is over that nobody left, but somebody is to join."""


@dataclass
class Breakup:
    """What is known of the end of a generation: since when, why, and whether anything explains it.

    Times are of the monotonic clock [s]; `heard_at` is when the first member reported.
    """

    began_at: float | None = None
    heard_at: float | None = None
    why: str = ""
    is_explained: bool = False

    def explain(self, why: str) -> None:
        """Somebody was lost, or is to join: what members say of it is only what follows from that."""
        self._begin(why)
        if not self.is_explained or self.why == CALLED:
            self.why, self.is_explained = why, True

    def report(self, why: str) -> None:
        """A member says that it is over."""
        self._begin(why)
        if self.heard_at is None:
            self.heard_at = time.monotonic()

    def heard_s(self) -> float:
        """Time since the first member reported [s]."""
        return 0.0 if self.heard_at is None else time.monotonic() - self.heard_at

    def seconds(self) -> float:
        """Time since it began [s]."""
        return 0.0 if self.began_at is None else time.monotonic() - self.began_at

    def _begin(self, why: str) -> None:
        if self.began_at is None:
            self.began_at, self.why = time.monotonic(), why
