"""How long to wait before trying again what keeps failing."""

from __future__ import annotations

FIRST_S, LONGEST_S = 1.0, 60.0


class Backoff:
    """Pauses before attempts: none at first, then 1 s, twice as long after each, to a minute.

    What went well for longer than the longest pause starts from none again.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._due_at_s = float("-inf")

    def pause_s(self, now_s: float) -> float:
        """Seconds to wait from now until the next attempt, which this call announces."""
        if now_s - self._due_at_s > LONGEST_S:
            self._pause_s = 0.0
        else:
            self._pause_s = min(LONGEST_S, 2 * self._pause_s or FIRST_S)
        self._due_at_s = now_s + self._pause_s
        return self._pause_s
