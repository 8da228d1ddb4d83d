"""How long a thread is held up by messages of other processes, wherever in a pass it waits for them.

What: PyTorch's two doors to waiting, `Work.wait` and `wait_tensor`, are timed while somebody watches. Through them go
the collectives of FSDP2, tensor parallel and pipelines on a CPU, and all blocking calls of `torch.distributed`.
Use when: processes talk over gloo. Costs: two clock readings a wait. Does not see: waits in C++ (the end of
DistributedDataParallel's backward pass: see `noted` in `stepping/layouts/base.py`), and nothing under NCCL, where the
stream waits and the host goes on. If PyTorch ever refuses the exchange, `is_watching` stays False and all is 0.

Moments of a training process: readings of the host's clock, or events in the stream of a GPU.

Clocks of several processes made comparable, once, when they have met.

On one host all processes read the same monotonic clock. Between hosts, questions go back and forth through the store
that they share; the quickest answer says most (Cristian 1989, "Probabilistic clock synchronization", section 3).

Where an update's time goes on this process of several: its own work, and all that it waits for.

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
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from stoker.errors import StokerError
from stoker.records.bottleneck import FIRST_IN_FULL, PARTS, RankTimes, SampledUpdates
from stoker.stepping.world import World
from stoker.training.rank_messages import process_group_store


class CommTimer:
    """Counts the seconds that the thread which starts it spends in waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.total_s = 0.0
        self._clock = clock
        self.is_watching = False
        self._thread = 0
        self._wait: Any = None
        self._wait_tensor: Any = None

    def start(self) -> None:
        """Watch from now on; one watcher at a time."""
        if self.is_watching or not dist.is_available():
            return
        self._thread = threading.get_ident()
        self._wait, self._wait_tensor = dist.Work.wait, functional.wait_tensor
        try:
            dist.Work.wait = self._timed(self._wait)  # type: ignore[method-assign]  # as long as somebody watches
        except (TypeError, AttributeError):
            return
        functional.wait_tensor = self._timed(self._wait_tensor)
        self.is_watching = True

    def stop(self) -> None:
        """Leave PyTorch as it was found."""
        if self.is_watching:
            dist.Work.wait = self._wait  # type: ignore[method-assign]  # see `start`
            functional.wait_tensor = self._wait_tensor
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


class Timestamps(Protocol):
    """Notes moments, and says later when they were."""

    def now(self) -> Any:
        """This moment."""
        ...

    def seconds(self, moments: list[Any]) -> list[float]:
        """When they were, by the host's monotonic clock [s]; they are not used again."""
        ...


class HostTimestamps:
    """Moments of the host's monotonic clock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock

    def seconds(self, moments: list[Any]) -> list[float]:
        """As `Moments.seconds`."""
        return moments


class StreamTimestamps:
    """Moments at which a GPU comes to what was given to it: events of the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def now(self) -> Any:
        """As `Moments.now`; the GPU is not waited for."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, moments: list[Any]) -> list[float]:
        """As `Moments.seconds`; waits for the GPU."""
        anchor = self.now()
        anchor.synchronize()
        at = time.monotonic()
        found = [at - event.elapsed_time(anchor) / 1e3 for event in moments]
        self._free += [*moments, anchor]
        return found


def timestamps_on(device: torch.device) -> Timestamps:
    """How moments are noted for work on `device`."""
    return StreamTimestamps(device) if device.type == "cuda" else HostTimestamps()


PINGS = 8
"""Questions that each process on another host asks."""


class ClockStore(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str) -> None:
        """Leave a value for everybody."""
        ...

    def get(self, key: str) -> bytes:
        """A value that is there."""
        ...

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Return when all keys are there."""
        ...


@dataclass(frozen=True)
class ClockAlignment:
    """What to add to a process's monotonic clock to have the first one's [s], and by how much that may be wrong [s].

    `began_at` is when they met, by the first one's calendar [seconds since 1970]: the same in all of them.
    """

    offset_s: float = 0.0
    uncertainty_s: float = 0.0
    began_at: float = 0.0


def this_host() -> str:
    """The host's name and its boot, so that equal ones share a monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text(encoding='ascii').strip() if boot.exists() else ''}".strip()


def align_clocks(
    store: ClockStore,
    rank: int,
    size: int,
    *,
    patience_s: float = 20.0,
    host: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ClockAlignment:
    """Compare this process's clock with the first one's; all `size` processes that met have to call it.

    Args:
        store: where all find each other, with names that were not used before (such as a PrefixStore of the meeting).
        rank: of this process.
        size: how many there are.
        patience_s: longest wait for an answer.
        host: see `this_host`.
        clock: monotonic [s].

    Raises:
        torch.distributed.DistStoreError: another process does not answer in time.
    """
    here = this_host() if host is None else host
    talk = _StoreMessages(store, timedelta(seconds=patience_s))
    if rank == 0:
        began_at = time.time()
        talk.say("clock/first", f"{began_at!r} {here}")
        for other in range(1, size):
            _answer_pings(talk, other, clock)
        return ClockAlignment(began_at=began_at)
    said, _, first = talk.hear("clock/first").partition(" ")
    is_same = first == here
    talk.say(f"clock/{rank}/asks", "0" if is_same else str(PINGS))
    offset, uncertainty = (0.0, 0.0) if is_same else _measured_offset(talk, rank, clock)
    return ClockAlignment(offset, uncertainty, float(said))


def _answer_pings(talk: _StoreMessages, other: int, clock: Callable[[], float]) -> None:
    """The first process's side: the time, as often as another one asks."""
    for number in range(int(talk.hear(f"clock/{other}/asks"))):
        talk.hear(f"clock/{other}/ping/{number}")
        talk.say(f"clock/{other}/pong/{number}", repr(clock()))


def _measured_offset(talk: _StoreMessages, rank: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Offset and uncertainty by the quickest answer [s]."""
    best = (0.0, float("inf"))
    for number in range(PINGS):
        sent = clock()
        talk.say(f"clock/{rank}/ping/{number}", "?")
        theirs = float(talk.hear(f"clock/{rank}/pong/{number}"))
        half = (clock() - sent) / 2
        if half < best[1]:
            best = (theirs - (sent + half), half)
    return best


@dataclass(frozen=True)
class _StoreMessages:
    """Saying and hearing through a store, with an end to patience."""

    store: ClockStore
    patience: timedelta

    def say(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def hear(self, key: str) -> str:
        self.store.wait([key], self.patience)
        return self.store.get(key).decode()


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
    alignment: ClockAlignment = field(default_factory=ClockAlignment)
    moments: Timestamps = field(default_factory=HostTimestamps)
    write: Callable[[RankTimes], None] | None = None
    host: str = field(default_factory=lambda: this_host().split(" ")[0])
    waits: CommTimer = field(default_factory=CommTimer)
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
        alignment=align_clocks(process_group_store(), world.rank, world.layout.world_size),
        moments=timestamps_on(device),
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
