"""Waiting for what something else brings about, without guessing how long that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

LONGEST_S = 60.0


async def until(holds: Callable[[], bool]) -> None:
    """Return once it holds, letting the event loop go on until then."""
    ends = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < ends, "it never came to hold"
        await asyncio.sleep(0)


def until_on_threads(holds: Callable[[], bool]) -> None:
    """Return once it holds, letting other threads go on until then."""
    ends = time.monotonic() + LONGEST_S
    while not holds():
        assert time.monotonic() < ends, "it never came to hold"
        time.sleep(0.002)
