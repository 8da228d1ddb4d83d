"""Ctrl-C and SIGTERM: finish the update, save, leave.

Ctrl-C and SIGTERM on their way to somebody else.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from stoker.errors import StokerError


class StopRequest:
    """Whether somebody asked training to stop, and how: `reason` is the signal's name, None so far.

    `verdict` is what the next SIGINT raises in place of asking: another thread sets it to end a main thread that hangs.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.verdict: StokerError | None = None

    def ask(self, reason: str) -> None:
        """Ask to stop after the update under way."""
        self.reason = reason


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn SIGINT and SIGTERM into a StopRequest; a second SIGINT interrupts at once, as usual.

    Signals reach only the main thread of a program: elsewhere nothing is changed.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, _frame: FrameType | None) -> None:
        if request.verdict is not None:
            verdict, request.verdict = request.verdict, None
            raise verdict
        if request.reason is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        request.ask(signal.Signals(number).name)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def forward_signals(stop: Callable[[int], None]) -> Iterator[None]:
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
