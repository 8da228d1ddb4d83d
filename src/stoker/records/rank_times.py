"""Where the time of updates went on one process of several, as that process noted it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

PARTS = ("compute", "blocked", "optimiser", "data", "evaluation", "checkpoint", "other")
"""What a process does in its time; `blocked` is all time in which it could not go on without the others."""


FIRST_IN_FULL = 20
"""The first updates after processes met, all of which are kept in full; they are the slow ones."""


@dataclass(frozen=True, kw_only=True)
class SampledUpdates:
    """Some updates in full, one entry of each column for each of them; all but `update` in seconds.

    `began_s` is by the clock of the first process (see `RankTimes.uncertainty_s`), `data_s` the wait for the batch
    before it. Where a layout communicates within its passes, `compute_s` is without that: the process would have been
    done at `began_s + compute_s`, had it never waited.
    """

    schema: ClassVar[int] = 1
    update: tuple[int, ...] = ()
    began_s: tuple[float, ...] = ()
    data_s: tuple[float, ...] = ()
    compute_s: tuple[float, ...] = ()
    blocked_s: tuple[float, ...] = ()
    optimiser_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        columns = (self.began_s, self.data_s, self.compute_s, self.blocked_s, self.optimiser_s)
        if any(len(column) != len(self.update) for column in columns):
            raise ValueError(f"every column must have {len(self.update)} entries, as `update` has")


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Times of process number `rank` of `size` that trained together from update `first_update` on.

    Processes that met have the same `began_at` [seconds since 1970]; after one was lost, or came back, those that are
    left meet anew. `worker` is the process by the number that it keeps meanwhile. `parts_s` sums over all `updates`, by
    the names PARTS; `sample` has the first ones and then every so many. Clocks of different hosts are compared once:
    `uncertainty_s` is how far this one may be off the first process's [s], 0 on the same host.
    """

    schema: ClassVar[int] = 1
    rank: int
    size: int
    worker: int
    host: str
    began_at: float
    first_update: int
    updates: int
    uncertainty_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    sample: SampledUpdates = SampledUpdates()

    @property
    def file_name(self) -> str:
        """The file for it, among those of all processes and all meetings of a run."""
        return f"{self.first_update:09}-{self.rank}.json"
