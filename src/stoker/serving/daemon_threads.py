"""Calls on daemon threads: for what may never return, such as a read from a stalled disk, or a library that hangs.

The process ends without them. It would wait for those of `asyncio.to_thread` and of `ThreadPoolExecutor`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def begin(call: Callable[[], T], *, name: str) -> Future[T]:
    """Start a call on a thread of that name; it cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


async def to_daemon_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like `asyncio.to_thread`; a cancelled caller leaves the thread behind."""
    return await asyncio.wrap_future(begin(lambda: call(*args, **kwargs), name="stoker-call"))
