"""Computing the parts that are not done: one thread reads ahead, each engine answers parts in a thread of its own.

Who computes a part, and when, has no influence on what it holds.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from stoker.predicting.rows import Rows

EngineT = TypeVar("EngineT")
ResultT = TypeVar("ResultT")

LOOK_AT_S = 0.5
"""How often the caller is given a chance to tell how far it is [s]."""


class Stopped(Exception):
    """Raised within the work when another part has failed, or the user has stopped it."""


class Counter:
    """Rows computed so far, counted by several threads; raises Stopped once the work is to end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.rows = 0

    def add(self, rows: int) -> None:
        """Count the rows of a batch."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self.rows += rows

    def stop(self) -> None:
        """Let every thread end after its batch."""
        self._stop.set()


@dataclass(frozen=True)
class Line(Generic[EngineT, ResultT]):
    """Who does what: `read` in one thread, in the order of the parts; `compute` with one engine each.

    At most `ahead` parts are read or being read beyond those that are computed.
    """

    read: Callable[[int], Rows]
    compute: Callable[[int, Rows, EngineT], ResultT]
    engines: Sequence[EngineT]
    ahead: int = 1

    def results(self, parts: Sequence[int], counter: Counter) -> Generator[ResultT | None, None, None]:
        """What `compute` gave for each part, as they are done; None every half second in which none was.

        The first error of any thread ends the work, and is raised here once every thread has ended.
        """
        waiting, running = deque(parts), set[Future[ResultT]]()
        free: queue.SimpleQueue[EngineT] = queue.SimpleQueue()
        for engine in self.engines:
            free.put(engine)
        with _pools(len(self.engines), counter) as (reader, workers):
            while waiting or running:
                while waiting and len(running) < len(self.engines) + self.ahead:
                    part = waiting.popleft()
                    running.add(workers.submit(self._work, part, reader.submit(self.read, part), free))
                done, running = wait(running, timeout=LOOK_AT_S, return_when=FIRST_COMPLETED)
                if not done:
                    yield None
                for one in done:
                    yield one.result()

    def _work(self, part: int, rows: Future[Rows], free: queue.SimpleQueue[EngineT]) -> ResultT:
        engine = free.get()
        try:
            return self.compute(part, rows.result(), engine)
        finally:
            free.put(engine)


@contextmanager
def _pools(workers: int, counter: Counter) -> Iterator[tuple[ThreadPoolExecutor, ThreadPoolExecutor]]:
    """Threads for reading and for computing; however the block ends, they end."""
    reading = ThreadPoolExecutor(1, "stoker-read")
    computing = ThreadPoolExecutor(workers, "stoker-predict")
    try:
        yield reading, computing
    except BaseException:
        counter.stop()
        raise
    finally:
        for pool in (reading, computing):
            pool.shutdown(wait=True, cancel_futures=True)
