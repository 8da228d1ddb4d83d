"""Ctrl-C and SIGTERM: training finishes the update, saves and leaves; a supervisor passes them on to its workers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from stoker.errors import StokerError


class StopRequest:
    """A request to stop training: `reason` is the signal's name, or None without a request.

    `verdict` is an error that the next SIGINT raises: another thread sets it to end a main thread that hangs.
    `is_ended` once it was raised.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.verdict: StokerError | None = None
        self.is_ended = False

    def ask(self, reason: str) -> None:
        """Ask to stop after the update under way."""
        self.reason = reason


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a StopRequest; a second SIGINT interrupts at once, as usual."""
    request = StopRequest()

    def ask(number: int) -> None:
        if request.verdict is not None:
            verdict, request.verdict, request.is_ended = request.verdict, None, True
            raise verdict
        if request.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.ask(signal.Signals(number).name)

    with forward_signals(ask):
        yield request


@contextmanager
def forward_signals(act: Callable[[int], None]) -> Iterator[None]:
    """Within the block, call `act` with each SIGINT and SIGTERM.

    Signals reach only the main thread of a program: in another thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        act(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
