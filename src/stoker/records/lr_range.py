"""What a learning-rate range test found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One seed's sweep: `losses[i]` is the mean loss of the batch after the update at `LrRange.rates[i]`.

    There are fewer losses than rates where the sweep ended early, because the loss ran away. `edge` is the largest rate
    at which the smoothed loss was still falling; None where it never ran away.
    """

    seed: int
    losses: tuple[float, ...]
    edge: float | None


@dataclass(frozen=True, kw_only=True)
class LrRange:
    """A suggestion for the learning rate, what it rests on, and how far it can be relied on.

    `lr` is always one to begin with: where `is_clear` is false, `why` says what was not found and what `lr` is instead.
    `low` to `high` are the rates between which training made good progress: from where the loss had fallen by a tenth
    of its whole fall, to the edge. `edge` is the geometric mean of the seeds' edges (None: no edge was found);
    `spread` is the largest edge over the smallest. `batch` is the optimiser batch [samples] it holds for, `stated_lr`
    what the job says.
    """

    schema: ClassVar[int] = 1
    lr: float
    low: float
    high: float
    is_clear: bool
    why: str
    edge: float | None
    spread: float | None
    stated_lr: float
    batch: int
    rates: tuple[float, ...]
    sweeps: tuple[Sweep, ...]
    num_updates: int
    took_s: float

    def mean_losses(self) -> tuple[float, ...]:
        """The loss after each rate, averaged over the seeds that got that far."""
        longest = max((len(sweep.losses) for sweep in self.sweeps), default=0)
        columns = [[sweep.losses[i] for sweep in self.sweeps if i < len(sweep.losses)] for i in range(longest)]
        return tuple(sum(column) / len(column) for column in columns)
