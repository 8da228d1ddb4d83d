"""A service in a process of its own, so that who measures shares no interpreter lock with it; it ends with this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any, TypeVar

from stoker.devices.cpu import ticks_of
from stoker.errors import ServiceError, StokerError

O = TypeVar("O")  # noqa: E741 - options
S = TypeVar("S")

Run = Callable[[O, Callable[[S], None]], None]
"""Serves with options until the process is told to stop, and announces what it serves once it is up."""

_START_S = 120.0
_STOP_S = 15.0


@contextmanager
def served_in_child(run: Run[O, S], options: O) -> Iterator[tuple[S, int]]:
    """What `run` announced, and the number of its process, which is told to stop when the block ends.

    Args:
        run: a function that can be imported, for the process imports it anew.
        options: what it is called with; pickled.

    Raises:
        StokerError: what it raised instead of announcing.
        ServiceError: it ended, or was silent for two minutes.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(run, options, there), name="stoker-service", daemon=True)
    process.start()
    there.close()
    try:
        yield _announced(here), process.pid or 0
    finally:
        here.close()
        process.terminate()
        process.join(_STOP_S)
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used so far [s]; 0 where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    return ticks_of(stat) / os.sysconf("SC_CLK_TCK")


def _announced(pipe: connection.Connection) -> Any:
    if not pipe.poll(_START_S):
        raise ServiceError(f"the service was not up after {_START_S:g} s")
    try:
        said = pipe.recv()
    except EOFError:
        raise ServiceError(
            "the service ended before it was up", remedy="`stoker serve` with the same models shows why."
        ) from None
    if isinstance(said, StokerError):
        raise said
    return said


def _child(run: Run[O, S], options: O, pipe: connection.Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run(options, pipe.send)
    except StokerError as error:
        pipe.send(_plain(error))


def _plain(error: StokerError) -> StokerError:
    """The same in a form that surely travels: subclasses may take other arguments than they keep."""
    return ServiceError(error.message, remedy=error.remedy)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
