"""Threads that feed engines: one for each instance, asleep until there is something to compute."""

from __future__ import annotations

import threading
from collections.abc import Callable

from stoker.artifacts.elements import Arrays
from stoker.engines.base import Engine
from stoker.serving.batching.assembling import Assembler
from stoker.serving.batching.queue import Part
from stoker.serving.batching.running import Attempt, attempts
from stoker.serving.batching.scheduler import Batch, Scheduler, Wait

SUSPICIOUS_FAILURES = 3
"""After so many requests in a row that failed alone, an engine is asked for its golden inputs."""

Post = Callable[["EngineWorker", Batch, Attempt | None], None]
"""Takes what an attempt gave to whoever asked, or (without one) says which parts are late; called from any thread."""


class Room:
    """What workers share, and the lock that guards it: the scheduler, who is idle, whether work goes on."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.clock = clock
        self.idle: list[Worker] = []
        self.is_open = True

    def roused(self, most: int) -> list[Worker]:
        """Take so many of the idle out, or all there are; each is then to be woken. To be called with the lock held."""
        return [self.idle.pop() for _ in range(min(most, len(self.idle)))]


class Worker:
    """An engine and its thread. Takes a batch as soon as it is idle and there is one, without going through the loop.

    `golden` are inputs that the engine answered at warm-up: what tells an engine that died from bad requests.
    `problem` says why it takes no more batches. `at` is the number of its run, and the batch that this is for.
    """

    def __init__(self, index: int, engine: Engine, assembler: Assembler, room: Room, post: Post) -> None:
        self.index = index
        self.engine = engine
        self.golden: Arrays | None = None
        self.problem = ""
        self.hangs = False
        self.at: tuple[int, Batch] | None = None
        self._num_runs = 0
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

    def abandon(self, number: int, problem: str) -> list[Part]:
        """Count on it no more, if it is still at that run; the parts it was to compute. Call with the lock held."""
        if self.at is None or self.at[0] != number:
            return []
        self.problem, self.hangs = problem, True
        return self.at[1].parts

    def join(self, within_s: float) -> bool:
        """Wait until its thread has ended, after its batch; whether it has, and the engine is free."""
        if self._thread.is_alive():
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            if batch.late:
                self._post(self, batch, None)
            if batch.parts:
                self._run(batch)

    def _next(self) -> Batch | None:
        """The next batch; sleeps until there is one. None: the room is closed, or nobody counts on it any more."""
        room = self._room
        while True:
            with room.lock:
                self.at = None
                if self.problem or not room.is_open:
                    return None
                found = room.scheduler.take(self.index, room.clock())
                if isinstance(found, Batch):
                    self._begin(found)
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
            if self.hangs:  # it did not after all, but those who asked were told so
                return
            if attempt.error is None:
                self._failures = 0
            elif attempt.is_final:
                self._count_failures(len(attempt.parts), batch)
            self._post(self, batch, attempt)
            self._begin(batch)

    def _begin(self, batch: Batch) -> None:
        self._num_runs += 1
        self.at = self._num_runs, batch

    def _count_failures(self, more: int, batch: Batch) -> None:
        self._failures += more
        if self._failures >= SUSPICIOUS_FAILURES and self.golden is not None:
            self._failures = 0
            self._begin(batch)
            if not _answers(self.engine, self.golden):
                self.problem = "it fails on the inputs that it was checked with"


def _answers(engine: Engine, inputs: Arrays) -> bool:
    """Whether an engine can still compute what it once could."""
    try:
        engine.run(inputs)
    except Exception:  # noqa: BLE001 - that it raises is the answer
        return False
    return True
