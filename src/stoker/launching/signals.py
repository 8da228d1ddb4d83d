"""Ctrl-C and SIGTERM on their way to somebody else."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def passed_on(stop: Callable[[int], None]) -> Iterator[None]:
    """Within the block, call `stop` with each SIGINT and SIGTERM.

    Signals reach only the main thread of a program: elsewhere nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, _frame: FrameType | None) -> None:
        stop(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
