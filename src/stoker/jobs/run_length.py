"""The length of a job in updates and samples, and the position of an update in the data. Pure arithmetic.

Batches never cross epochs: an epoch of `num_train` samples is ceil(num_train / batch) updates, the last one ragged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from stoker.records import Position
from stoker.units import Duration

_DECIMALS = 6
"""A length in samples is rounded to this, so that 1.1 epochs of 10 are 11 samples, not 11.000000000000002."""

_ROUNDING = 1e-9
"""Intervals are whole to within this: ten tenths of an epoch end with the epoch, though 54 / 5.4 < 10 in floats."""


@dataclass(frozen=True)
class Extent:
    """The shape of a training run: `num_train` samples an epoch, `batch` samples an update; both at least 1."""

    num_train: int
    batch: int

    @cached_property
    def updates_per_epoch(self) -> int:
        """Number of updates in an epoch, the ragged one included [updates]."""
        return math.ceil(self.num_train / self.batch)

    def updates_in(self, duration: Duration) -> int:
        """Fewest whole updates that reach `duration`, at least one [updates].

        Raises:
            ValueError: a duration in seconds, which must have been converted to samples before.
        """
        if duration.unit == "updates":
            return math.ceil(duration.value)
        samples = max(1, math.ceil(round(self._samples_in(duration), _DECIMALS)))
        epochs, rest = divmod(samples, self.num_train)
        return epochs * self.updates_per_epoch + self._updates_within(epochs, rest)

    def position(self, updates: int) -> Position:
        """Position of training after `updates` updates."""
        epoch, within = divmod(updates, self.updates_per_epoch)
        cursor = within * self.batch
        return Position(epoch=epoch, cursor=cursor, samples=epoch * self.num_train + cursor, updates=updates)

    def batch_at(self, position: Position) -> int:
        """Size of the batch that starts at `position` [samples]."""
        return min(self.batch, self.num_train - position.cursor)

    def evaluated_at_once(self, micro_batch: int) -> int:
        """Number of samples evaluated at once under a plan with this micro-batch [samples]."""
        return micro_batch

    def intervals(self, every: Duration, position: Position) -> int:
        """Number of whole intervals of `every` (epochs, samples or updates) up to `position`."""
        if every.unit == "updates":
            return math.floor(position.updates / every.value + _ROUNDING)
        return math.floor(position.samples / self._samples_in(every) + _ROUNDING)

    def evaluations(self, every: Duration, total_updates: int) -> int:
        """Number of evaluations in a run of `total_updates`: after updates that end an interval, and at the end."""
        return self.evaluations_before(every, total_updates) + 1

    def evaluations_before(self, every: Duration, total_updates: int) -> int:
        """Number of evaluations in a run of `total_updates` before the one at its end."""
        updates = total_updates - 1
        if every.unit == "updates" or self._samples_in(every) >= self.batch:
            # No update is longer than an interval, unless an interval is shorter than any update.
            return min(self.intervals(every, self.position(updates)), updates)
        # Every full batch ends an interval; the ragged one of an epoch may not.
        for epoch in range(1, (total_updates - 1) // self.updates_per_epoch + 1):
            after = epoch * self.updates_per_epoch
            if self.intervals(every, self.position(after - 1)) == self.intervals(every, self.position(after)):
                updates -= 1
        return updates

    def _updates_within(self, epoch: int, samples: int) -> int:
        """Smallest number of updates of `epoch` that have `samples` samples together; batches in tokens override it."""
        del epoch  # they have the same shape
        return math.ceil(samples / self.batch)

    def _samples_in(self, duration: Duration) -> float:
        if duration.unit not in ("epochs", "samples"):
            raise ValueError(f"{duration} is no number of samples")
        return duration.value * (self.num_train if duration.unit == "epochs" else 1)
