"""What another thread may know of the workers that fetch batches, and do to them."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import IO

from stoker.loading.order import Indices

_DYING_S = 2.0
"""A worker whose connection broke is waited for so long, to see whether it died [s]."""

_WRITING_S = 0.5
"""A worker that is able to gets so long to write its stack [s]."""

_SHOWN = 8


@dataclass(frozen=True)
class WorkerDeath:
    """A worker died or was killed, and all were replaced; `why` says how, `asked` how many batches are fetched anew."""

    why: str
    asked: int


def _ignore(_death: WorkerDeath) -> None:
    """Tell nobody."""


class WorkerWatch:
    """The workers of one source of batches.

    Attributes:
        is_waiting: whether the training process waits for a batch from them now.
        tell: called in the training process after workers were replaced.
        death: how a worker died that nobody has replaced yet; None if none did.
    """

    def __init__(self) -> None:
        self.is_waiting = False
        self.tell: Callable[[WorkerDeath], None] = _ignore
        self.death: str | None = None
        self._workers: Sequence[BaseProcess] = ()
        self._killed_for: str | None = None
        self._stacks: IO[bytes] | None = None

    def begin(self, workers: Sequence[BaseProcess]) -> None:
        """Take note of the workers that fetch from now on."""
        self._workers, self.death, self._killed_for = workers, None, None

    def end(self) -> None:
        """There are no workers now."""
        self._workers, self.is_waiting = (), False
        stacks, self._stacks = self._stacks, None
        if stacks is not None:
            stacks.close()

    def stacks_file(self) -> int | None:
        """A descriptor that workers about to be started write their stacks to when asked; None where not forked."""
        if sys.platform != "linux":
            return None
        if self._stacks is None:
            self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as workers may be asked
        return self._stacks.fileno()

    def stacks(self) -> str:
        """Where each worker is, as Python tracebacks; nothing of those that are stopped or hang within a C call."""
        if self._stacks is None:
            return ""
        try:
            begin = os.fstat(self._stacks.fileno()).st_size
            for worker in self._alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker.pid or 0, signal.SIGUSR1)
            time.sleep(_WRITING_S)
            return os.pread(self._stacks.fileno(), 1 << 20, begin).decode(errors="replace")
        except (OSError, ValueError):  # they ended meanwhile, and the file is closed
            return ""

    def kill(self, why: str) -> int:
        """End all workers at once, because of `why`; they are replaced as if they had died. Returns how many."""
        self._killed_for = why
        alive = self._alive()
        for worker in alive:
            worker.kill()
        return len(alive)

    def describe(self, error: BaseException) -> str | None:
        """How a worker died, where `error` comes of that; None where all are well."""
        if self._killed_for is not None:
            return self._killed_for
        if isinstance(error, OSError | EOFError):  # its end of a connection may be gone a moment before it is
            multiprocessing.connection.wait([worker.sentinel for worker in self._workers], _DYING_S)
        dead = [worker for worker in self._workers if not worker.is_alive()]
        if "DataLoader worker" in str(error):
            return str(error).splitlines()[0].strip()
        return f"a loader worker ended with {dead[0].exitcode}" if dead else None

    def _alive(self) -> list[BaseProcess]:
        return [worker for worker in self._workers if worker.pid is not None and worker.is_alive()]


def write_stacks_when_asked(descriptor: int | None) -> None:
    """In a worker: on SIGUSR1 write the stacks of all threads to `descriptor`."""
    if descriptor is not None:
        faulthandler.register(signal.SIGUSR1, file=descriptor, all_threads=True)


def named(indices: Indices) -> str:
    """The first few sample indices, for people: `3, 9, 12 and 61 more`."""
    first = ", ".join(str(int(index)) for index in indices[:_SHOWN])
    return f"{first} and {len(indices) - _SHOWN} more" if len(indices) > _SHOWN else first
