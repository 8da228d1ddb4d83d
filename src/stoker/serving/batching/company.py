"""How many rows were asked for at the same time lately: whether it can pay to wait for more.

What: a delay is there to fill a batch. Where as much waits, or is being computed, as was ever under way together in the
last seconds, nobody is left who could ask, and an idle instance need not wait its delay out: a lone caller never does,
and four callers wait until the fourth has asked.
Use when: `max_delay_s` is above 0.
Costs: a comparison for each request.
Does not combine with: nothing; a crowd that grows is met with smaller batches for as long as it grows.
"""

from __future__ import annotations

MEMORY_S = 1.0
"""What was seen is forgotten after this long at the earliest, and after twice as long at the latest."""


class Company:
    """The most rows that were under way together lately. Times are handed in."""

    def __init__(self) -> None:
        self._since = 0.0
        self._before = 0
        self._now = 0

    @property
    def most(self) -> int:
        """The most rows under way at once, of the last one to two seconds."""
        return max(self._before, self._now)

    def see(self, rows: int, now: float) -> None:
        """Take in that so many rows are under way."""
        passed_s = now - self._since
        if passed_s >= MEMORY_S:
            self._before = self._now if passed_s < 2 * MEMORY_S else 0
            self._now, self._since = 0, now
        self._now = max(self._now, rows)
