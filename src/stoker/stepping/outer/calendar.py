"""After which updates each fragment is sent: pure arithmetic, the same on every site."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.jobs.sync import Sync


@dataclass(frozen=True)
class Calendar:
    """Fragments take turns within an interval [updates], and within a shorter one for the first updates of a run."""

    fragments: int
    interval: int
    early_interval: int
    early_updates: int

    @classmethod
    def of(cls, sync: Sync, batch: int) -> Calendar:
        """As a job says, whose updates are of `batch` samples.

        Raises:
            BadJob: an interval is too short for its fragments or overlap.
        """
        return cls(sync.fragments, sync.interval(batch), *sync.early_interval(batch))

    def is_due(self, fragment: int, updates: int) -> bool:
        """Whether an interval of the fragment ends when so many updates are made.

        >>> calendar = Calendar(fragments=2, interval=8, early_interval=4, early_updates=8)
        >>> [updates for updates in range(1, 30) if calendar.is_due(0, updates)]
        [4, 8, 16, 24]
        >>> [updates for updates in range(1, 30) if calendar.is_due(1, updates)]
        [2, 6, 12, 20, 28]
        """
        if updates <= 0:
            return False
        if updates <= self.early_updates:
            return (updates - self._turn(fragment, self.early_interval)) % self.early_interval == 0
        return (updates - self.early_updates - self._turn(fragment, self.interval)) % self.interval == 0

    def _turn(self, fragment: int, interval: int) -> int:
        """How far into an interval the fragment has its turn."""
        return fragment * interval // self.fragments
