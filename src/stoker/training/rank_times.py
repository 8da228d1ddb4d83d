"""Where the time of each update goes on one of several processes: its own work, and its waits for the others.

What: a few clock readings an update. A process's own work is done when its last gradient is ready (`computed`); until
losses and gradients are summed (`agreed`) it is blocked, as in every wait before and after (`CommTimer`). How much of
that is waiting for the slowest process, and how much is communication, follows from the records of all processes, whose
clocks `align_clocks` makes comparable.
Use when: more than one process trains. Costs: under 50 µs an update, and a file now and then.
Does not see: communication hidden behind compute that nothing waited for; a pipeline's bubble, which counts as blocked;
on GPUs, where timestamps are events of the stream, the waits of FSDP2, tensor parallel and pipelines within their
passes, which count as compute (`--profile` shows them).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # missing from the stubs

from stoker.errors import StokerError
from stoker.records.bottleneck import FIRST_IN_FULL, PARTS, RankTimes, SampledUpdates
from stoker.stepping.world import World
from stoker.training.rank_messages import process_group_store


class CommTimer:
    """Counts the seconds that the thread which starts it spends waiting for other processes.

    What: `Work.wait` and `wait_tensor` of PyTorch are timed. The collectives of FSDP2, tensor parallel and pipelines on
    a CPU go through them, and all blocking calls of `torch.distributed`.
    Costs: two clock readings a wait. Does not see: waits in C++ (the end of DistributedDataParallel's backward pass,
    see `noted` in `stepping/layouts/base.py`), and NCCL, where the stream waits and the host goes on. If PyTorch
    refuses the replacement, `is_watching` stays False and all waits are 0.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_s = 0.0
        self._clock = clock
        self.is_watching = False
        self._thread = 0
        self._functional: Any = None
        self._wait: Any = None
        self._wait_tensor: Any = None

    def start(self) -> None:
        """Replace PyTorch's functions; one timer at a time."""
        if self.is_watching or not dist.is_available():
            return
        from torch.distributed import _functional_collectives as functional  # noqa: PLC0415 - slow to import

        self._thread, self._functional = threading.get_ident(), functional
        self._wait, self._wait_tensor = dist.Work.wait, functional.wait_tensor
        try:
            dist.Work.wait = self._timed(self._wait)  # type: ignore[method-assign]  # until `stop`
        except (TypeError, AttributeError):
            return
        functional.wait_tensor = self._timed(self._wait_tensor)
        self.is_watching = True

    def stop(self) -> None:
        """Restore PyTorch's functions."""
        if self.is_watching:
            dist.Work.wait = self._wait  # type: ignore[method-assign]  # see `start`
            self._functional.wait_tensor = self._wait_tensor
            self.is_watching = False

    def _timed(self, wait: Any) -> Any:
        clock, thread_of = self._clock, threading.get_ident

        def timed(*arguments: Any, **settings: Any) -> Any:
            began = clock()
            try:
                return wait(*arguments, **settings)
            finally:
                if thread_of() == self._thread:
                    self.total_s += clock() - began

        return timed


class HostTimestamps:
    """Readings of the host's monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock

    def seconds(self, moments: list[Any]) -> list[float]:
        """Timestamps on the host's monotonic clock [s]."""
        return moments


class StreamTimestamps:
    """Events in the current stream of a GPU: when it reaches the work submitted so far."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def now(self) -> Any:
        """A timestamp of this moment; does not wait for the GPU."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, moments: list[Any]) -> list[float]:
        """Timestamps on the host's monotonic clock [s], which are not used again; waits for the GPU."""
        anchor = self.now()
        anchor.synchronize()
        anchor_s = time.monotonic()
        times_s = [anchor_s - event.elapsed_time(anchor) / 1e3 for event in moments]
        self._free += [*moments, anchor]
        return times_s


Timestamps = HostTimestamps | StreamTimestamps


PINGS = 8
"""Number of pings from each process on another host."""


@dataclass(frozen=True)
class ClockAlignment:
    """Offset to add to a process's monotonic clock for that of rank 0 [s], with its uncertainty [s].

    `began_at` is when the processes met, by the wall clock of rank 0 [seconds since 1970]: the same in all of them.
    """

    offset_s: float = 0.0
    uncertainty_s: float = 0.0
    began_at: float = 0.0


def this_host() -> str:
    """The host's name and its boot: processes with equal ones share a monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}".strip()


def align_clocks(
    store: Store,
    rank: int,
    size: int,
    *,
    patience_s: float = 20.0,
    host: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ClockAlignment:
    """Compare this process's clock with that of rank 0; all `size` processes that met have to call this.

    On one host all processes read the same monotonic clock. Between hosts, pings go through the store that they share,
    and the quickest answer counts (Cristian 1989, "Probabilistic clock synchronization", section 3).

    Args:
        store: shared by all, with keys that were not used before (such as a PrefixStore of the meeting).
        rank: of this process.
        size: number of processes.
        patience_s: longest wait for an answer [s].
        host: see `this_host`.
        clock: monotonic [s].

    Raises:
        torch.distributed.DistStoreError: another process does not answer in time.
    """
    here = this_host() if host is None else host

    def receive(key: str) -> str:
        store.wait([key], timedelta(seconds=patience_s))
        return store.get(key).decode()

    if rank == 0:
        began_at = time.time()
        store.set("clock/first", f"{began_at!r} {here}")
        for other in range(1, size):
            for number in range(int(receive(f"clock/{other}/asks"))):
                receive(f"clock/{other}/ping/{number}")
                store.set(f"clock/{other}/pong/{number}", repr(clock()))
        return ClockAlignment(began_at=began_at)
    began, _, first = receive("clock/first").partition(" ")
    num_pings = 0 if first == here else PINGS
    store.set(f"clock/{rank}/asks", str(num_pings))
    offset, uncertainty = 0.0, float("inf") if num_pings else 0.0
    for number in range(num_pings):
        sent = clock()
        store.set(f"clock/{rank}/ping/{number}", "?")
        theirs = float(receive(f"clock/{rank}/pong/{number}"))
        half = (clock() - sent) / 2
        if half < uncertainty:
            offset, uncertainty = theirs - (sent + half), half
    return ClockAlignment(offset, uncertainty, float(began))


MOST_SAMPLED = 3000
"""Updates kept in full; of more, every second one is dropped. A file of them has 0.2 MB."""

_MOST_PENDING = 256
_FIRST_WRITE_S, _LONGEST_S = 1.0, 300.0
_BEFORE = "before"  # the time before the first lap is not booked


class _Lap(NamedTuple):
    """A stretch of time that begins at the end of the one before.

    For an update, also its number, its marks, each with the seconds waited by then, and those at the lap's two ends.
    """

    part: str
    stop: Any
    number: int | None
    marks: dict[str, tuple[Any, float]]
    waited: tuple[float, float]


class _Row(NamedTuple):
    """An update as in `SampledUpdates`."""

    update: int
    began_s: float
    data_s: float
    compute_s: float
    blocked_s: float
    optimiser_s: float


@dataclass
class RankClock:
    """Books the time of one process, from one meeting to the next.

    Args:
        rank, size: of this process, and the number of processes.
        worker: see `RankTimes`.
        first_update: number of the next update; set it before `running`.
        alignment: of this process's clock with that of rank 0.
        moments: takes timestamps.
        write: receives the times now and then, and at the end.
        host: the host's name.
        waits: counts waits within passes.
    """

    rank: int
    size: int
    worker: int
    first_update: int
    alignment: ClockAlignment = field(default_factory=ClockAlignment)
    moments: Timestamps = field(default_factory=HostTimestamps)
    write: Callable[[RankTimes], None] | None = None
    host: str = field(default_factory=lambda: this_host().split(" ")[0])
    waits: CommTimer = field(default_factory=CommTimer)
    problem: str | None = field(default=None, init=False)
    """Why the times cannot be written, if they cannot."""

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
        """Mark how far the present update has come (see `stepping.world.Moment`); the last mark of a name counts."""
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
        """Within the block waits are counted; at its end, also after an error, the times are written."""
        self.waits.start()
        self.lap(_BEFORE)
        try:
            yield self
        finally:
            self.waits.stop()
            if self.write is not None:
                self._write_now()

    def times(self) -> RankTimes:
        """The times so far; waits for a GPU."""
        self._reckon()
        columns = zip(*self._rows, strict=True) if self._rows else [()] * len(_Row._fields)
        return RankTimes(
            rank=self.rank,
            size=self.size,
            worker=self.worker,
            host=self.host,
            began_at=self.alignment.began_at,
            first_update=self.first_update,
            updates=self._num_updates,
            uncertainty_s=self.alignment.uncertainty_s,
            parts_s={name: round(seconds, 6) for name, seconds in self._parts.items()},
            sample=SampledUpdates(**dict(zip(_Row._fields, map(tuple, columns), strict=True))),
        )

    def _write_now(self) -> None:
        """Write the times so far; a disk error does not end training."""
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
        moments = [moment for lap in laps for moment in (lap.stop, *(mark for mark, _ in lap.marks.values()))]
        times_s = iter(self.moments.seconds(moments))
        for lap in laps:
            stop = next(times_s)
            marks = {name: (next(times_s), waited) for name, (_, waited) in lap.marks.items()}
            began, self._before_s = self._before_s, stop
            if began is None or lap.part == _BEFORE:
                continue
            if lap.number is None:
                self._parts[lap.part] = self._parts.get(lap.part, 0.0) + stop - began
                self._data_s = stop - began if lap.part == "data" else 0.0
            else:
                self._book(_split_update(lap.number, began, stop, marks, lap.waited))

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
            self._rows = [row for row in self._rows if self._is_kept(row.update)]

    def _is_kept(self, update: int) -> bool:
        """Whether an update belongs to the sample, which is the same in all processes."""
        return update < self.first_update + FIRST_IN_FULL or update % self._stride == 0


def rank_clock(
    world: World, *, worker: int, device: torch.device, write: Callable[[RankTimes], None] | None = None
) -> RankClock:
    """A clock for this process of a world that it has just joined; every process has to call this.

    Set its `first_update`, and give its `mark` to the world before the Step is built.

    Args:
        world: of several processes.
        worker: see `RankTimes`.
        device: of this process.
        write: see RankClock; such as `RunDirectory.write_rank_times`.

    Raises:
        torch.distributed.DistStoreError: another process does not answer in time.
    """
    return RankClock(
        rank=world.rank,
        size=world.layout.world_size,
        worker=worker,
        first_update=0,
        alignment=align_clocks(process_group_store(), world.rank, world.layout.world_size),
        moments=StreamTimestamps(device) if device.type == "cuda" else HostTimestamps(),
        write=write,
    )


def _split_update(
    number: int, began: float, ended: float, marks: dict[str, tuple[float, float]], waited: tuple[float, float]
) -> _Row:
    """An update in compute, blocked and optimiser time [s], from its marks and the waits counted at each of them.

    Compute ends at `computed`, or at `summing` where a layout's passes are not seen, or else at the update's end.
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
