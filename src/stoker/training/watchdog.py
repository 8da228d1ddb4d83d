"""A watchdog: notices that training hangs, reports where, and mends or ends it.

What: a thread watches the number of laps, and the place in a stream. Without a change for long, the stacks of all
threads and of the loader's workers go into the run's directory. If training waits for its workers, they are killed, and
replaced as if they had died. Otherwise, after the same time again, the main thread is interrupted with an error; if
that has no effect, the process ends.
Use when: always. Costs: a thread that wakes once a second. Does not see: a call that holds Python's interpreter lock.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol, Self

from stoker.errors import BadJob, RunFailed
from stoker.loading.streams import place_reached
from stoker.loading.workers import WorkerWatch
from stoker.records import Forecast
from stoker.training.signals import StopRequest
from stoker.units import format_seconds

PATIENCE_VARIABLE = "STOKER_WATCHDOG"
"""Environment variable: least time without progress that counts as a hang [s]; 0 switches the watchdog off."""

LEAST_PATIENCE_S = 60.0
LEAST_PATIENCE_TOGETHER_S = 300.0
"""The same for several processes, each of which may stall: on a cold disk, or stopped and continued. A process that has
ended is noticed at once. NCCL's own patience is 600 s."""

PATIENCE_FACTOR = 10.0
"""A hang is this factor of the longest lap so far, or of the forecast time of the slowest phase; at least the floor."""

ANSWER_S = 20.0
"""Least time that a process may go on after others have lost touch with it [s]."""

NEVER_S = 7 * 24 * 3600.0
"""An unlimited patience: a week [s]."""

UNSEEN_PATIENCE_FACTOR = 20.0
"""Factor on the floor until two updates were made, and while a checkpoint is written: the time of compilation, first
batches and slow disks does not follow from earlier laps."""

_LAPS_SEEN = 4
_DEBUGGERS = frozenset({"bdb", "pdb", "IPython.core.debugger"})


class Laps(Protocol):
    """Signs of life of training."""

    num_laps: int
    longest_s: float


def patience_s(environ: dict[str, str] | os._Environ[str] = os.environ, *, processes: int = 1) -> float:
    """Least time without progress that counts as a hang [s]; 0 for no watchdog.

    It is `$STOKER_WATCHDOG`, and by default 60 s, or 300 s with several processes.

    Raises:
        BadJob: the variable is not a number of seconds.
    """
    default = LEAST_PATIENCE_S if processes == 1 else LEAST_PATIENCE_TOGETHER_S
    given = environ.get(PATIENCE_VARIABLE)
    if not given:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise BadJob(
            f"{PATIENCE_VARIABLE}={given} is no number of seconds",
            remedy="Give the seconds without progress that count as a hang; 0 switches that off.",
        )
    return seconds


@dataclass(frozen=True, kw_only=True)
class WatchdogPatience:
    """Patience of processes with each other [s].

    `others_s` is the longest wait for the others within one call, and the longest silence; `answer_s` the longest time
    that a process may go on after others have lost touch with it. A shorter stall costs its own time and no more.
    """

    others_s: float
    answer_s: float

    @classmethod
    def of(cls, slowest_s: float, environ: dict[str, str] | os._Environ[str] = os.environ) -> WatchdogPatience:
        """The patience for a run whose slowest phase takes `slowest_s` by forecast [s]."""
        least_s, longest_s = patience_s(environ, processes=2) or NEVER_S, PATIENCE_FACTOR * slowest_s
        return cls(others_s=max(least_s, longest_s), answer_s=max(min(least_s, ANSWER_S), longest_s))


def slowest_phase_s(forecast: Forecast, sync_interval: int = 1) -> float:
    """Forecast time of the slowest phase of a run [s]: an update with loading, an evaluation, a checkpoint's copy.

    Replicas that exchange every `sync_interval` updates wait for each other that long.
    """
    return max(sync_interval * forecast.step_s.value, forecast.evaluate_s.value, forecast.checkpoint_s.value)


class Watchdog:
    """Within its block, watches the thread that entered it.

    Args:
        laps: the signs of life.
        workers: the loader's workers.
        stop: carries the error that ends the main thread.
        tell: receives messages, in the watchdog's thread.
        dumps: directory for stacks; None: they are not written.
        slowest_s: forecast time of the slowest phase [s].
        is_busy: whether something is under way that takes long: training may wait for a checkpoint that is being
            written, or for a compiler.
        least_s: least time without progress that counts as a hang [s]; 0: no watchdog.
        leave: ends the process.

    Attributes:
        hangs: called before a hang ends the main thread.
    """

    def __init__(  # noqa: PLR0913 - what it watches, and what it may do
        self,
        laps: Laps,
        workers: WorkerWatch,
        stop: StopRequest,
        *,
        tell: Callable[[str], None],
        dumps: Path | None = None,
        slowest_s: float = 0.0,
        is_busy: Callable[[], bool] = lambda: False,
        least_s: float | None = None,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._laps, self._workers, self._stop, self._tell, self._dumps = laps, workers, stop, tell, dumps
        self._slowest_s, self._is_busy, self._leave = slowest_s, is_busy, leave
        self._least_s = patience_s() if least_s is None else least_s
        self.hangs: Callable[[], None] = lambda: None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._main = threading.main_thread().ident
        self._is_main = False

    def __enter__(self) -> Self:
        """Start the watch."""
        if self._least_s > 0:
            self._main = threading.get_ident()
            self._is_main = threading.current_thread() is threading.main_thread()
            self._thread = threading.Thread(target=self._watch, name="stoker-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the watch."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def patience_s(self) -> float:
        """Longest time without a sign of life, at present [s]."""
        is_known = self._laps.num_laps >= _LAPS_SEEN and not self._is_busy()
        floor = self._least_s if is_known else self._least_s * UNSEEN_PATIENCE_FACTOR
        return max(floor, PATIENCE_FACTOR * max(self._laps.longest_s, self._slowest_s))

    def _watch(self) -> None:
        pause_s = min(1.0, self._least_s / 10)
        seen, quiet_s, times = self._signs_of_life(), 0.0, 0
        mark = time.monotonic()
        while not self._is_over.wait(pause_s):
            now = time.monotonic()
            # At most two pauses: a process that was stopped itself, and goes on, did not hang.
            quiet_s, mark = quiet_s + min(now - mark, 2 * pause_s), now
            if (signs := self._signs_of_life()) != seen:
                seen, quiet_s, times = signs, 0.0, 0
            elif quiet_s > self.patience_s() * (times + 1) and not _is_debugged(self._main):
                times += 1
                if self._act(quiet_s, times):
                    quiet_s, times = 0.0, 0

    def _signs_of_life(self) -> tuple[int, int]:
        """Counters that change while the run moves; a stream that is read again to the run's position makes no laps."""
        return self._laps.num_laps, place_reached()

    def _act(self, quiet_s: float, times: int) -> bool:
        """Act on a silence, for the `times`-th time; returns whether that should mend it."""
        is_waiting = self._workers.is_waiting
        doing = "a batch from the loader's workers" if is_waiting else "an update, an evaluation or a batch"
        message = f"nothing has moved for {format_seconds(quiet_s)}: training waits for {doing}"
        if times == 1:
            message += f"; {self._dump(message)}"
            if not is_waiting:
                with suppress(Exception):  # a sink that fails must not end the watch
                    self._tell(message)
                return False
        if is_waiting:
            with suppress(Exception):
                self._tell(f"{message}; the workers are replaced")
            self._workers.kill(f"no batch came for {format_seconds(quiet_s)}")
            return True
        self._end(message, times)
        return False

    def _end(self, message: str, times: int) -> None:
        """Interrupt the main thread, or end the process where that had no effect."""
        verdict = RunFailed(
            f"training hangs: {message}",
            remedy=f"The stacks of all threads are in the run's directory. The same command continues from the last "
            f"checkpoint. {PATIENCE_VARIABLE}=SECONDS sets how long nothing may move, 0 switches this off.",
        )
        if not self._is_main:
            return  # no signal reaches another thread; the caller was warned
        if times == 2:
            with suppress(Exception):  # the hang itself is to be reported
                self.hangs()
            self._stop.verdict = verdict
            signal.pthread_kill(self._main or 0, signal.SIGINT)
        elif times == 3:
            sys.stderr.write(f"error: {verdict}\n")
            sys.stderr.flush()
            self._leave(RunFailed.exit_code)

    def _dump(self, message: str) -> str:
        """Write the stacks; returns a text with their place."""
        theirs = self._workers.stacks()
        header = f"{datetime.now(UTC).isoformat(timespec='seconds')} {message}\n"
        if self._dumps is None:
            return "there is no directory to write the stacks to"
        path = self._dumps / "stacks.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(header)
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
                file.write(f"\nworkers of the loader:\n{theirs or 'nothing was heard of them'}\n\n")
        except OSError as problem:
            return f"the stacks could not be written: {problem}"
        return f"the stacks are in {path}"


def _is_debugged(thread: int | None) -> bool:
    """Whether a debugger has stopped that thread."""
    frame = sys._current_frames().get(thread or 0)  # noqa: SLF001 - the documented way to another thread's stack
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False
