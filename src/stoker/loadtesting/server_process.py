"""A service in a child process, so that measuring shares no interpreter lock with it; it ends with this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import TypeVar

from stoker.devices.cpu import ticks_of
from stoker.errors import ServiceError, StokerError

O = TypeVar("O")  # noqa: E741 - options
S = TypeVar("S")

Run = Callable[[O, Callable[[S], None]], None]
"""Serves with options until the process gets SIGTERM, and announces what it serves once it is up."""

_START_S = 120.0
_STOP_S = 15.0


@contextmanager
def served_in_child(run: Run[O, S], options: O) -> Iterator[tuple[S, int]]:
    """What `run` announced, and the id of its process, which is stopped when the block ends.

    Args:
        run: a function that the child process can import.
        options: its argument; pickled.

    Raises:
        StokerError: what `run` raised instead of announcing.
        ServiceError: the process ended, or was silent for two minutes.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(run, options, there), name="stoker-service", daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(_START_S):
            raise ServiceError(f"the service was not up after {_START_S:g} s")
        try:
            announced = here.recv()
        except EOFError:
            raise ServiceError(
                "the service ended before it was up", remedy="`stoker serve` with the same models shows why."
            ) from None
        if isinstance(announced, StokerError):
            raise announced
        yield announced, process.pid or 0
    finally:
        here.close()
        process.terminate()
        process.join(_STOP_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far [s]; 0 if the system does not report it."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    return ticks_of(stat) / os.sysconf("SC_CLK_TCK")


def _child(run: Run[O, S], options: O, pipe: connection.Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run(options, pipe.send)
    except StokerError as error:
        # Not the error itself: a subclass may take other arguments than it keeps, and then cannot be unpickled.
        pipe.send(ServiceError(error.message, remedy=error.remedy))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
