"""A batcher in a loop of its own, and an engine that computes when it is let: so that a test decides the moment."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from stoker.artifacts.dtypes import Arrays
from stoker.records import ServiceSettings
from stoker.serving.batching.batcher import Batcher
from stoker.serving.batching.workers import DEFAULT_HANG_LIMITS, HangLimits
from tests.serving.batching.models import FIXED, FixedEngine

LONGEST_S = 60.0


class Gated(FixedEngine):
    """Computes a batch only when it is let; signals when it has begun one."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.allowed = threading.Semaphore(0)

    def run(self, inputs: Arrays) -> Arrays:
        self.begun.release()
        assert self.allowed.acquire(timeout=LONGEST_S)
        return super().run(inputs)

    async def is_busy(self) -> None:
        assert await asyncio.to_thread(self.begun.acquire, timeout=LONGEST_S)

    def open(self) -> None:
        self.allowed.release(10_000)


def row(value: float = 1.0, rows: int = 1) -> Arrays:
    """A request of equal rows of one value."""
    return {"x": np.full((rows, 4), value, np.float32)}


def run(
    test: Callable[[Batcher], Awaitable[Any]],
    *engines: Any,
    model: Any = FIXED,
    observe: Any = None,
    patience: HangLimits = DEFAULT_HANG_LIMITS,
    on_broken: Callable[[], None] = lambda: None,
    **settings: Any,
) -> Any:
    """Run a test with a batcher, and close it; engines that are gated are opened at the end."""

    async def main() -> Any:
        batcher = Batcher(
            engines,
            model,
            ServiceSettings(**settings),
            observe=observe or (lambda _executed: None),
            patience=patience,
            on_broken=on_broken,
        )
        try:
            return await asyncio.wait_for(test(batcher), LONGEST_S)
        finally:
            for engine in engines:
                if isinstance(engine, Gated):
                    engine.open()
            batcher.close()
            assert len(batcher.join(LONGEST_S)) == len(engines) or batcher.is_broken

    return asyncio.run(main())


async def waiting(batcher: Batcher, engine: Gated, asks: list[Arrays], **options: Any) -> list[asyncio.Task[Arrays]]:
    """The first is being computed, the others wait; in this order."""
    first = asyncio.create_task(batcher.ask(asks[0], **options))
    await asyncio.sleep(0)
    await engine.is_busy()
    others = [asyncio.create_task(batcher.ask(inputs, **options)) for inputs in asks[1:]]
    await asyncio.sleep(0)
    return [first, *others]
