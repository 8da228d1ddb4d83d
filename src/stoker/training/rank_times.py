"""Where an update's time goes on this process of several: its own work, and all that it waits for.

What: a few clock readings an update. The process's own work is done when its last gradient is ready (`computed`); until
losses and gradients are summed (`agreed`) it is blocked, as it is in every wait before and after (see `waits.py`). How
much of that is waiting for the slowest, and how much is communication, only all processes' records together tell.
Use when: more than one process trains. Costs: under 50 µs an update, and a file now and then.
What it cannot tell: which communication was hidden behind compute, unless it was waited for; a pipeline's bubble, which
is time blocked like any other; on GPUs, where moments are events of the stream, what FSDP2, tensor parallel and
pipelines wait for within their passes, which counts as compute there (`--profile` shows it).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from stoker.errors import StokerError
from stoker.records.rank_times import FIRST_IN_FULL, PARTS, RankTimes, SampledUpdates
from stoker.stepping.world import World
from stoker.training.alignment import Alignment, align, this_host
from stoker.training.mailbox import meeting_store
from stoker.training.moments import HostMoments, Moments, moments_on
from stoker.training.waits import Waits

MOST_SAMPLED = 3000
"""Updates kept in full; when there are more, every second one is dropped. A file of them has 0.2 MB."""

_MOST_PENDING = 256
_FIRST_WRITE_S, _LONGEST_S = 1.0, 300.0
_BEFORE = "before"  # what was before anybody looked is not booked


class _Lap(NamedTuple):
    """A stretch of time that begins where the one before stops.

    Of an update, also its number, its marks, each with the seconds waited by then, and those at the lap's ends.
    """

    part: str
    stop: Any
    number: int | None
    marks: dict[str, tuple[Any, float]]
    waited: tuple[float, float]


class _Row(NamedTuple):
    """An update as `SampledUpdates` has it."""

    update: int
    began_s: float
    data_s: float
    compute_s: float
    blocked_s: float
    optimiser_s: float


@dataclass
class RankClock:
    """Notes where time goes in one process, from one meeting to the next.

    Args:
        rank, size: of this process, and how many they are.
        worker: see `RankTimes`.
        first_update: the number of the first update to come; set it before `running`.
        alignment: of this process's clock with the first one's.
        moments: how moments are noted; see `training.moments`.
        write: called with what is known, now and then and at the end.
        host: its name.
        waits: counts waits within passes.
    """

    rank: int
    size: int
    worker: int
    first_update: int
    alignment: Alignment = field(default_factory=Alignment)
    moments: Moments = field(default_factory=HostMoments)
    write: Callable[[RankTimes], None] | None = None
    host: str = field(default_factory=lambda: this_host().split(" ")[0])
    waits: Waits = field(default_factory=Waits)
    problem: str | None = field(default=None, init=False)
    """Why nothing more is written, if it cannot be."""

    def __post_init__(self) -> None:
        self._now = self.moments.now
        self._marks: dict[str, tuple[Any, float]] = {}
        self._pending: list[_Lap] = []
        self._rows: list[_Row] = []
        self._stride = 1
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._num_updates = 0
        self._is_fed = False
        self._data_s = 0.0
        self._waited_before = 0.0
        self._before_s: float | None = None
        self._write_every_s, self._written_at = _FIRST_WRITE_S, time.monotonic()

    def mark(self, moment: str) -> None:
        """Note how far the update under way has come (see `stepping.world.Moment`); the last one of a name counts."""
        self._marks[moment] = (self._now(), self.waits.total_s)

    def lap(self, part: str) -> None:
        """Book the time since the last lap under `part`, as `Telemetry.lap` does.

        After `data` comes an `update`; further ones before the next `data` are `other`.
        """
        waited = self.waits.total_s
        is_update = part == "update" and self._is_fed
        number = self.first_update + self._num_updates if is_update else None
        name = "other" if part == "update" and not is_update else part
        self._pending.append(_Lap(name, self._now(), number, self._marks, (self._waited_before, waited)))
        self._num_updates += is_update
        self._is_fed = part == "data"
        self._marks, self._waited_before = {}, waited
        if len(self._pending) >= _MOST_PENDING:
            self._reckon()
        if is_update and self.write is not None and time.monotonic() - self._written_at >= self._write_every_s:
            self._write_now()

    @contextlib.contextmanager
    def running(self) -> Iterator[Self]:
        """Within the block waits are counted; at its end, also by an error, all is written."""
        self.waits.start()
        self.lap(_BEFORE)
        try:
            yield self
        finally:
            self.waits.stop()
            if self.write is not None:
                self._write_now()

    def times(self) -> RankTimes:
        """All that was noted so far; a GPU is waited for."""
        self._reckon()
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(_Row._fields)
        return RankTimes(
            rank=self.rank, size=self.size, worker=self.worker, host=self.host, began_at=self.alignment.began_at,
            first_update=self.first_update, updates=self._num_updates, uncertainty_s=self.alignment.uncertainty_s,
            parts_s={name: round(seconds, 6) for name, seconds in self._parts.items()},
            sample=SampledUpdates(**dict(zip(_Row._fields, map(tuple, columns), strict=True))),
        )  # fmt: skip

    def _write_now(self) -> None:
        """Write what is known; a disk that does not take it is no reason to end a training."""
        if self.write is None or self.problem is not None:
            return
        try:
            self.write(self.times())
        except StokerError as problem:
            self.problem = problem.message
        self._write_every_s, self._written_at = min(2 * self._write_every_s, _LONGEST_S), time.monotonic()

    def _reckon(self) -> None:
        """Turn pending laps into seconds."""
        laps, self._pending = self._pending, []
        noted = [moment for lap in laps for moment in (lap.stop, *(at for at, _ in lap.marks.values()))]
        found = iter(self.moments.seconds(noted))
        for lap in laps:
            stop = next(found)
            marks = {name: (next(found), waited) for name, (_, waited) in lap.marks.items()}
            began, self._before_s = self._before_s, stop
            if began is None or lap.part == _BEFORE:
                continue
            if lap.number is None:
                self._parts[lap.part] = self._parts.get(lap.part, 0.0) + stop - began
                self._data_s = stop - began if lap.part == "data" else 0.0
            else:
                self._book(_reckoned(lap.number, began, stop, marks, lap.waited))

    def _book(self, row: _Row) -> None:
        """Add an update to the sums, and to the sample if it is its turn."""
        for part, seconds in (("compute", row.compute_s), ("blocked", row.blocked_s), ("optimiser", row.optimiser_s)):
            self._parts[part] += seconds
        if not self._is_kept(row.update):
            return
        began_s = round(row.began_s + self.alignment.offset_s, 6)
        self._rows.append(row._replace(began_s=began_s, data_s=round(self._data_s, 6)))
        if len(self._rows) > MOST_SAMPLED:
            self._stride *= 2
            self._rows = [one for one in self._rows if self._is_kept(one.update)]

    def _is_kept(self, update: int) -> bool:
        """The same in all processes, so that they keep the same updates."""
        return update < self.first_update + FIRST_IN_FULL or update % self._stride == 0


def rank_clock(
    world: World, *, worker: int, device: torch.device, write: Callable[[RankTimes], None] | None = None
) -> RankClock:
    """A clock for this process of a world that has just been joined; every process of it has to ask.

    Its `first_update` is to be set once it is known, and its `mark` given to the world, before a Step is made.

    Args:
        world: of several processes.
        worker: see `RankTimes`.
        device: this process's.
        write: see RankClock; such as `RunDirectory.write_rank_times`.

    Raises:
        torch.distributed.DistStoreError: another process does not answer in time.
    """
    return RankClock(
        rank=world.rank,
        size=world.layout.world_size,
        worker=worker,
        first_update=0,
        alignment=align(meeting_store(), world.rank, world.layout.world_size),
        moments=moments_on(device),
        write=write,
    )


def _reckoned(
    number: int, began: float, ended: float, marks: dict[str, tuple[float, float]], waited: tuple[float, float]
) -> _Row:
    """An update in seconds, from its moments and the waits counted at each of them; the wait for its data is 0 here.

    Own work ends at `computed`; where a layout's passes are not seen, at `summing`; without either, at the end.
    """
    before, after = waited
    computed, waited_computed = marks.get("computed") or marks.get("summing") or (ended, after)
    agreed, waited_agreed = marks.get("agreed") or (computed, waited_computed)
    within, later = waited_computed - before, after - waited_agreed
    return _Row(
        update=number,
        began_s=began,
        data_s=0.0,
        compute_s=round(max(0.0, computed - began - within), 6),
        blocked_s=round(max(0.0, within + (agreed - computed) + later), 6),
        optimiser_s=round(max(0.0, ended - agreed - later), 6),
    )
