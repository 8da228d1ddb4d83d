"""How long a job is: updates and samples, and where an update lies in the data. Pure arithmetic.

Batches never cross epochs: an epoch of `num_train` samples is ceil(num_train / batch) updates, the last one ragged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.records import Position
from stoker.units import Duration


@dataclass(frozen=True)
class Extent:
    """The shape of a training run: `num_train` samples an epoch, `batch` samples an update."""

    num_train: int
    batch: int

    @property
    def updates_per_epoch(self) -> int:
        """Updates in one pass over the data, the ragged one included."""
        return math.ceil(self.num_train / self.batch)

    def updates_in(self, duration: Duration) -> int:
        """Whole updates that reach `duration`; at least one. Seconds must have been turned into samples before."""
        if duration.unit == "updates":
            return max(1, math.ceil(duration.value))
        samples = duration.value * (self.num_train if duration.unit == "epochs" else 1)
        if duration.unit not in ("epochs", "samples"):
            raise ValueError(f"{duration} is no number of samples")
        whole, rest = divmod(round(samples), self.num_train)
        return max(1, whole * self.updates_per_epoch + math.ceil(rest / self.batch))

    def position(self, updates: int) -> Position:
        """Where training is after `updates` updates."""
        epoch, within = divmod(updates, self.updates_per_epoch)
        cursor = within * self.batch
        return Position(epoch=epoch, cursor=cursor, samples=epoch * self.num_train + cursor, updates=updates)

    def batch_at(self, position: Position) -> int:
        """Samples of the batch that starts at `position`."""
        return min(self.batch, self.num_train - position.cursor)

    def intervals(self, every: Duration, position: Position) -> int:
        """Whole intervals of `every` (epochs, samples or updates) up to `position`."""
        if every.unit == "updates":
            return int(position.updates // every.value)
        return int(position.samples // (every.value * (self.num_train if every.unit == "epochs" else 1)))

    def evaluations(self, every: Duration, total_updates: int) -> int:
        """Evaluations in a run: where an interval ends, and at the end."""
        before_last = self.position(total_updates - 1)
        return min(self.intervals(every, before_last), total_updates - 1) + 1
