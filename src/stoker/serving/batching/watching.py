"""Whether an instance hangs: at one run for longer than any run takes, as far as somebody was awake to see it.

What: an engine that neither answers nor raises keeps those who asked waiting for ever. Whoever looks again and again
tells what each instance is at; one that is seen at the same run for long enough counts as hanging.
Use when: anything is being computed.
Costs: one look a second while there is work, of a microsecond for each instance.
Does not combine with: models whose runs rightly take a hundred times what was measured of them, and half a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_LOOKS = 2
"""The time between two looks counts as at most so many of their intervals: a process that was stopped for an hour, and
its engines with it, has not watched them for an hour."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """An instance hangs once a run takes `times` what was expected of it, and `least_s`; looks are `every_s` apart."""

    least_s: float = 30.0
    times: float = 100.0
    every_s: float = 1.0

    def limit_s(self, expected_s: float) -> float:
        """Seconds that a run may take which was expected to take so many; 0 stands for no expectation."""
        return max(self.least_s, self.times * expected_s)


DEFAULT_PATIENCE = Patience()


@dataclass(frozen=True, slots=True)
class Run:
    """What an instance is at: its runs are numbered, so that the next one is told from this."""

    number: int
    expected_s: float


class Watch:
    """For how long each instance was seen at its run. Times are handed in."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._looked_at: float | None = None
        self._seen: dict[int, tuple[int, float]] = {}

    def look(self, runs: Mapping[int, Run], now: float) -> dict[int, float]:
        """Take in what those instances are at that are not idle; which hang, and how long they were seen to [s]."""
        most_s = MOST_LOOKS * self._patience.every_s
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, most_s)
        self._looked_at = now
        before, self._seen = self._seen, {}
        for instance, run in runs.items():
            number, seconds = before.get(instance, (-1, 0.0))
            self._seen[instance] = (run.number, seconds + passed_s if number == run.number else 0.0)
        return {
            instance: self._seen[instance][1]
            for instance, run in runs.items()
            if self._seen[instance][1] >= self._patience.limit_s(run.expected_s)
        }
