"""A service in a child process, so that measuring shares no interpreter lock with it; it ends with this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import TypeVar

from stoker.errors import ServiceError, StokerError
from stoker.store.child_process import ChildProcess, Raised

O = TypeVar("O")  # noqa: E741 - options
S = TypeVar("S")

Run = Callable[[O, Callable[[S], None]], None]
"""Serves with options until the process gets SIGTERM, and announces what it serves once it is up."""

_START_S = 120.0
_STOP_S = 15.0


@contextmanager
def served_in_child(run: Run[O, S], options: O) -> Iterator[tuple[S, int]]:
    """The announcement of `run`, and the id of its process, which is stopped when the block ends.

    Args:
        run: a function that the child process can import.
        options: its argument; pickled.

    Raises:
        StokerError: what `run` raised instead of announcing.
        ServiceError: the process ended, or was silent for two minutes.
    """
    process = ChildProcess(_serve, run, options, name="stoker-service", talks=True)
    try:
        if not process.pipe.poll(_START_S):
            raise ServiceError(f"the service was not up after {_START_S:g} s")
        announced = process.receive()
        if announced is None:
            raise ServiceError(
                "the service ended before it was up", remedy="`stoker serve` with the same models shows why."
            )
        if isinstance(announced, StokerError):
            raise ServiceError(announced.message, remedy=announced.remedy)
        if isinstance(announced, Raised):
            raise ServiceError(f"the service raised {announced.words}")
        yield announced, process.pid
    finally:
        process.stop()
        process.close(_STOP_S)


def _serve(run: Run[O, S], options: O, pipe: connection.Connection) -> None:
    run(options, pipe.send)
