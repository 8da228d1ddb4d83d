"""The batcher: `await batcher.ask(inputs)`, and the answer comes out of a batch shared with others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from stoker.artifacts import Golden
from stoker.artifacts.elements import Arrays
from stoker.engines.base import Engine
from stoker.records import Manifest, ServiceSettings
from stoker.serving.batching.assembling import Assembler, joined
from stoker.serving.batching.executed import Executed
from stoker.serving.batching.queue import Part
from stoker.serving.batching.running import Attempt
from stoker.serving.batching.scheduler import Batch, Scheduler
from stoker.serving.batching.shapes import Shapes
from stoker.serving.batching.warming import warm_up
from stoker.serving.batching.workers import Room, Worker
from stoker.serving.problems import DeadlinePassed, Failed, Refusal, Unavailable
from stoker.units import format_seconds

_ALARM_EVERY_S = 0.005
"""Those who wait beyond their deadline are told within so long."""


class _Asked:
    """A request that was let in, and what came of its parts so far."""

    __slots__ = ("answers", "future", "missing", "parts")

    def __init__(self, future: asyncio.Future[Arrays]) -> None:
        self.future = future
        self.parts: list[Part] = []
        self.answers: list[Arrays] = []
        self.missing = 0


class Batcher:
    """Answers requests to one model with the engines it is given, in batches formed while they are busy.

    Requests come in and answers go out on one event loop; each engine has a thread. An idle engine never waits, unless
    `max_delay_s` says so. Deadlines are points on `clock`. `observe` is told of every run of an engine, on the loop,
    after the answers have been given. Engines stay the caller's, who closes them after `close`.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        manifest: Manifest,
        settings: ServiceSettings,
        *,
        observe: Callable[[Executed], None] = lambda _executed: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manifest = manifest
        self._observe = observe
        self._clock = clock
        self._shapes = Shapes(manifest, settings.buckets)
        self._scheduler = Scheduler(self._shapes, settings, len(engines))
        self._room = Room(self._scheduler, clock)
        self._workers = [
            Worker(index, engine, Assembler(manifest, self._shapes.padded_dims), self._room, self._post)
            for index, engine in enumerate(engines)
        ]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._refused = ""
        self._open: set[_Asked] = set()
        self._drained: asyncio.Event | None = None

    @property
    def queue_rows(self) -> int:
        """Rows that wait; those being computed are not counted."""
        return self._scheduler.queue.rows

    @property
    def queue_bytes(self) -> int:
        """Bytes of the requests that wait."""
        return self._scheduler.queue.num_bytes

    @property
    def predicted_wait_s(self) -> float:
        """Seconds until all that runs and waits is predicted to be done; 0 before anything was measured."""
        with self._room.lock:
            return self._scheduler.wait_s(self._clock())

    @property
    def is_broken(self) -> bool:
        """Whether an engine has died: it fails on what it once answered."""
        return any(worker.is_broken for worker in self._workers)

    async def warm(self, golden: Golden, *, budget_s: float = 5.0) -> None:
        """Measure what batches take, before the first request.

        Raises:
            ServiceError: an engine cannot compute the golden inputs.
        """
        await asyncio.to_thread(self._warm, golden.inputs, budget_s)

    async def ask(
        self,
        inputs: Arrays,
        *,
        deadline: float | None = None,
        priority: int = 0,
        caller: str = "",
        num_bytes: int = 0,
    ) -> Arrays:
        """Every output for these inputs, which fit the manifest (not checked) and must not change until it returns.

        Cancelling takes what was not yet computed out of the queue.

        Args:
            inputs: all inputs, samples stacked along their first dimension.
            deadline: when the answer must be there at the latest, on the batcher's clock.
            priority: 1 for the most urgent, 0 for the default, which is 2.
            caller: whose share of the queue it takes.
            num_bytes: what it takes of the queue's bytes; 0: those of the inputs.

        Raises:
            Refusal: QueueFull, TooLarge, WouldBeLate, Unavailable (at once), DeadlinePassed or Failed.
        """
        loop = asyncio.get_running_loop()
        if self._refused:
            raise Unavailable(self._refused)
        if self._loop is not loop:
            self._start(loop)
        asked = _Asked(loop.create_future())
        room = self._room
        with room.lock:
            asked.parts = self._scheduler.admit(
                asked, inputs, now=self._clock(), deadline=math.inf if deadline is None else deadline,
                priority=priority, caller=caller, num_bytes=num_bytes,
            )  # fmt: skip
            woken = room.idle.pop() if room.idle else None
        if woken is not None:
            woken.wake()
        asked.missing = len(asked.parts)
        self._open.add(asked)
        if deadline is not None and deadline < self._alarm_at:
            self._set_alarm(deadline)
        try:
            return await asked.future
        except asyncio.CancelledError:
            self._end(asked)
            raise

    async def drain(self) -> None:
        """Answer what was accepted, and accept nothing more."""
        self._refused = self._refused or "the model is being unloaded, or the server is shutting down"
        if self._open:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()
            await asyncio.sleep(0)  # so that the last batch has been observed

    def close(self) -> None:
        """Stop the threads, after the batches they are at; what still waits is refused. `drain` first, to answer it."""
        self._refused = self._refused or "the model was unloaded"
        with self._room.lock:
            self._room.is_open = False
            idle, self._room.idle = self._room.idle, []
        for worker in idle:
            worker.wake()
        for worker in self._workers:
            worker.join()
        for asked in list(self._open):
            self._fail(asked, Unavailable("the model was unloaded before this request was computed"))
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm, self._alarm_at = None, math.inf

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to work for a loop, with the first request."""
        if self._loop is None:
            for worker in self._workers:
                worker.start()
        self._loop = loop

    def _warm(self, inputs: Arrays, budget_s: float) -> None:
        for worker in self._workers:
            worker.engine.run(inputs)
            worker.golden = inputs
        engine, table = self._workers[0].engine, self._scheduler.table
        warm_up(engine, inputs, self._manifest, self._shapes, table, clock=self._clock, budget_s=budget_s)

    def _post(self, worker: Worker, batch: Batch, attempt: Attempt | None) -> None:
        """From a worker's thread: have the loop give out answers."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, worker, batch, attempt)
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # with a closed loop, nobody is left who asked

    def _deliver(self, worker: Worker, batch: Batch, attempt: Attempt | None) -> None:
        if attempt is None:
            for part in batch.late:
                self._fail(part.owner, _passed(part))
            return
        if attempt.answers is not None:
            for part, answer in zip(attempt.parts, attempt.answers, strict=True):
                self._answer(part, answer)
        elif attempt.is_final:
            for part in attempt.parts:
                self._fail(part.owner, Failed(f"the model could not compute this request: {attempt.error}"))
        if worker.is_broken:
            self._give_up()
        assert self._loop is not None
        self._loop.call_soon(self._record, worker.index, batch, attempt)  # those who were answered go first

    def _record(self, instance: int, batch: Batch, attempt: Attempt) -> None:
        if attempt.error is None and attempt.parts is batch.parts:
            with self._room.lock:
                self._scheduler.learn(batch, attempt.ended)
        self._observe(_executed(instance, batch, attempt))

    def _answer(self, part: Part, answer: Arrays) -> None:
        asked: _Asked = part.owner
        if asked.future.done():
            return
        asked.missing -= 1
        if len(asked.parts) > 1:
            asked.answers = asked.answers or [{}] * len(asked.parts)
            asked.answers[part.index] = answer
            if asked.missing:
                return
            try:
                answer = joined(asked.answers)
            except ValueError as error:
                self._fail(asked, Failed(f"the answers to parts of this request do not fit together: {error}"))
                return
        asked.future.set_result(answer)
        self._close_off(asked)

    def _fail(self, asked: _Asked, refusal: Refusal) -> None:
        if not asked.future.done():
            asked.future.set_exception(refusal)
        self._end(asked)

    def _end(self, asked: _Asked) -> None:
        """Take what still waits of a request out of the queue."""
        with self._room.lock:
            for part in asked.parts:
                self._scheduler.withdraw(part)
        self._close_off(asked)

    def _close_off(self, asked: _Asked) -> None:
        asked.parts = []  # which point back: what came would stay in memory until somebody looked for such circles
        self._open.discard(asked)
        if self._drained is not None and not self._open:
            self._drained.set()

    def _give_up(self) -> None:
        """Without any engine left, refuse what waits and what comes."""
        if not all(one.is_broken for one in self._workers):
            return
        self._refused = "the model's engine has died: it fails on the inputs that it was checked with"
        for asked in list(self._open):
            self._fail(asked, Failed("the model's engine died before this request was computed"))

    def _set_alarm(self, at: float) -> None:
        """Look for parts past their deadline at this point in time, and not before."""
        assert self._loop is not None
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self._loop.call_later(max(0.0, at - self._clock()), self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        now = self._clock()
        with self._room.lock:
            late, following = self._scheduler.expire(now)
        for part in late:
            self._fail(part.owner, _passed(part))
        if following < math.inf:
            self._set_alarm(max(following, now + _ALARM_EVERY_S))


def _passed(part: Part) -> DeadlinePassed:
    allowed = format_seconds(max(0.0, part.deadline - part.arrived))
    return DeadlinePassed(
        f"the deadline, {allowed} after the request came, passed while it waited, or could no longer be met"
    )


def _executed(instance: int, batch: Batch, attempt: Attempt) -> Executed:
    rows = sum(part.rows for part in attempt.parts)
    elements = sum(part.rows * math.prod(part.shape.lane) * math.prod(part.shape.sizes) for part in attempt.parts)
    return Executed(
        instance=instance,
        rows=rows,
        requests=len(attempt.parts),
        reason=attempt.reason,
        sizes=batch.sizes,
        elements=elements,
        padding=rows * batch.elements - elements,
        queue_s=tuple([attempt.started - part.arrived for part in attempt.parts]) if attempt.is_final else (),
        input_s=attempt.input_s,
        infer_s=attempt.infer_s,
        output_s=attempt.output_s,
        succeeded=attempt.error is None,
    )
