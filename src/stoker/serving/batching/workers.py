"""Threads that feed engines: one for each instance, asleep until there is something to compute."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stoker.artifacts.elements import Arrays
from stoker.engines.base import Engine
from stoker.serving.batching.assembling import Assembler
from stoker.serving.batching.running import Attempt, attempts
from stoker.serving.batching.scheduler import Batch, Scheduler, Wait

SUSPICIOUS_FAILURES = 3
"""After so many requests in a row that failed alone, an engine is asked for its golden inputs."""

Post = Callable[["Worker", Batch, Attempt | None], None]
"""Takes what an attempt gave to whoever asked, or (without one) says which parts are late; called from any thread."""


class Room:
    """What workers share, and the lock that guards it: the scheduler, who is idle, whether work goes on."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.clock = clock
        self.idle: list[Worker] = []
        self.is_open = True


class Worker:
    """An engine and its thread. Takes a batch as soon as it is idle and there is one, without going through the loop.

    `golden` are inputs that the engine answered at warm-up: what tells an engine that died from bad requests.
    """

    def __init__(self, index: int, engine: Engine, assembler: Assembler, room: Room, post: Post) -> None:
        self.index = index
        self.engine = engine
        self.golden: Arrays | None = None
        self.is_broken = False
        self._assembler = assembler
        self._room = room
        self._post = post
        self._failures = 0
        self._bell = threading.Lock()
        self._bell.acquire()
        self._thread = threading.Thread(target=self._work, name=f"stoker-batch-{index}", daemon=True)

    def start(self) -> None:
        """Begin to take batches."""
        self._thread.start()

    def wake(self) -> None:
        """Have it look again; to be called once for each time it was taken from `Room.idle`."""
        self._bell.release()

    def join(self) -> None:
        """Wait until its thread has ended: at once if it is idle and was woken, else after its batch."""
        if self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            if batch.late:
                self._post(self, batch, None)
            if batch.parts:
                self._run(batch)
            if self.is_broken:
                return

    def _next(self) -> Batch | None:
        """The next batch; sleeps until there is one. None: the room is closed."""
        room = self._room
        while True:
            with room.lock:
                if not room.is_open:
                    return None
                found = room.scheduler.take(self.index, room.clock())
                if isinstance(found, Batch):
                    return found
                room.idle.append(self)
            self._sleep(found)

    def _sleep(self, wait: Wait | None) -> None:
        if wait is None:
            self._bell.acquire()
            return
        if self._bell.acquire(timeout=max(0.0, wait.until - self._room.clock())):
            return
        with self._room.lock:
            is_still_idle = self in self._room.idle
            if is_still_idle:
                self._room.idle.remove(self)
        if not is_still_idle:  # someone is about to wake it
            self._bell.acquire()

    def _run(self, batch: Batch) -> None:
        clock = self._room.clock
        for attempt in attempts(self.engine, self._assembler, batch.parts, batch.sizes, batch.reason, clock):
            if attempt.error is None:
                self._failures = 0
            elif attempt.is_final:
                self._count_failures(len(attempt.parts))
            self._post(self, batch, attempt)

    def _count_failures(self, more: int) -> None:
        self._failures += more
        if self._failures >= SUSPICIOUS_FAILURES and self.golden is not None:
            self._failures = 0
            self.is_broken = not _answers(self.engine, self.golden)


def _answers(engine: Engine, inputs: Arrays) -> bool:
    """Whether an engine can still compute what it once could."""
    try:
        engine.run(inputs)
    except Exception:  # noqa: BLE001 - that it raises is the answer
        return False
    return True
