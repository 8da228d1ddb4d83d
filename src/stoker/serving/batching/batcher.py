"""The batcher: `await batcher.ask(inputs)`, and the answer comes out of a batch shared with others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence

from stoker.artifacts import Golden
from stoker.artifacts.elements import Arrays
from stoker.engines.base import Engine
from stoker.engines.problems import BadInput
from stoker.records import Manifest, ServiceSettings
from stoker.serving.batching.assembling import Assembler, joined
from stoker.serving.batching.executed import Executed
from stoker.serving.batching.queue import Part
from stoker.serving.batching.running import Attempt, executed
from stoker.serving.batching.scheduler import Batch, Scheduler
from stoker.serving.batching.shapes import Shapes
from stoker.serving.batching.warming import warm_up
from stoker.serving.batching.watching import DEFAULT_PATIENCE, Patience, Run, Watch
from stoker.serving.batching.workers import Room, Worker
from stoker.serving.problems import BadRequest, DeadlinePassed, Failed, Refusal, Unavailable
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
    `max_delay_s` says so. Without `allow_nan` inputs have to be finite.
    Deadlines are points on `clock`. `observe` is told of every run of an engine, on the loop,
    after the answers have been given, `on_broken` of every engine that takes no more batches: it fails on what it once
    answered, or hangs for longer than `patience` has. Engines stay the caller's, who closes those that `join` gives.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        manifest: Manifest,
        settings: ServiceSettings,
        *,
        allow_nan: bool = True,
        observe: Callable[[Executed], None] = lambda _executed: None,
        on_broken: Callable[[], None] = lambda: None,
        patience: Patience = DEFAULT_PATIENCE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manifest = manifest
        self._observe = observe
        self._on_broken = on_broken
        self._patience = patience
        self._clock = clock
        self._shapes = Shapes(manifest, settings.buckets)
        self._scheduler = Scheduler(self._shapes, settings, len(engines))
        self._room = Room(self._scheduler, clock)
        self._workers = [
            Worker(
                index,
                engine,
                Assembler(manifest, self._shapes.padded_dims, allow_nan=allow_nan),
                self._room,
                self._post,
            )
            for index, engine in enumerate(engines)
        ]
        self._loop: asyncio.AbstractEventLoop | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._watch = Watch(patience)
        self._next_look: asyncio.TimerHandle | None = None
        self._lost: set[int] = set()
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
    def problem(self) -> str:
        """Why an engine takes no more batches, in words; empty as long as all of them do."""
        return next((worker.problem for worker in self._workers if worker.problem), "")

    @property
    def is_broken(self) -> bool:
        """Whether an engine has died, or hangs."""
        return any(worker.problem for worker in self._workers)

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
            roused = room.roused(len(asked.parts))
        for worker in roused:
            worker.wake()
        asked.missing = len(asked.parts)
        self._open.add(asked)
        if self._next_look is None:
            self._look_later()
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
        """Take no batch any more; who still waits, for a batch or for the end of one, is refused. `drain` answers."""
        self._refused = self._refused or "the model was unloaded"
        with self._room.lock:
            self._room.is_open = False
            idle = self._room.roused(len(self._workers))
        for worker in idle:
            worker.wake()
        for asked in list(self._open):
            self._fail(asked, Unavailable("the model was unloaded before this request was computed"))
        for timer in (self._alarm, self._next_look):
            if timer is not None:
                timer.cancel()
        self._alarm, self._next_look, self._alarm_at = None, None, math.inf

    def join(self, within_s: float) -> tuple[Engine, ...]:
        """Wait for the batches under way after `close`, for so long in all; the engines that are done with theirs.

        Blocks. The others compute, or hang: whoever closes them takes away what they stand on.
        """
        ends = time.monotonic() + within_s
        return tuple(
            worker.engine
            for worker in self._workers
            if worker.join(0.0 if worker.hangs else max(0.0, ends - time.monotonic()))
        )

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
            # Where it was computed alone, its own inputs are what the engine cannot take.
            kind = BadRequest if isinstance(attempt.error, BadInput) and len(attempt.parts) == 1 else Failed
            for part in attempt.parts:
                self._fail(part.owner, kind(f"the model could not compute this request: {attempt.error}"))
        if worker.problem:
            self._lose(worker)
        assert self._loop is not None
        self._loop.call_soon(self._record, worker.index, batch, attempt)  # those who were answered go first

    def _record(self, instance: int, batch: Batch, attempt: Attempt) -> None:
        if attempt.error is None and attempt.parts is batch.parts:
            with self._room.lock:
                self._scheduler.learn(batch, attempt.ended)
        self._observe(executed(instance, batch, attempt))

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

    def _look_later(self) -> None:
        assert self._loop is not None
        self._next_look = self._loop.call_later(self._patience.every_s, self._look)

    def _look(self) -> None:
        """See whether an instance hangs; again before long, while there is work."""
        self._next_look = None
        stints = {worker.index: worker.at for worker in self._workers if not worker.hangs}
        runs = {index: Run(at[0], at[1].expected_s) for index, at in stints.items() if at is not None}
        for index, seconds in self._watch.look(runs, self._clock()).items():
            self._abandon(self._workers[index], runs[index], seconds)
        if self._open or runs:
            self._look_later()

    def _abandon(self, worker: Worker, run: Run, seconds: float) -> None:
        """Go on without an instance that hangs; its thread is left where it is, with all that it holds."""
        problem = f"it has been at one run for {format_seconds(seconds)}, and hangs"
        if run.expected_s:
            problem += f"; {format_seconds(run.expected_s)} were expected"
        with self._room.lock:
            parts = worker.abandon(run.number, problem)
        for part in parts:
            self._fail(part.owner, Failed(f"the model's engine did not answer this request: {problem}"))
        if worker.hangs:
            self._lose(worker)

    def _lose(self, worker: Worker) -> None:
        """Count on an engine no more. Without any left, what waits and what comes is refused."""
        if worker.index in self._lost:
            return
        self._lost.add(worker.index)
        with self._room.lock:
            self._scheduler.lose(worker.index)
        if len(self._lost) == len(self._workers):
            self._refused = f"the model's engine has died: {worker.problem}"
            for asked in list(self._open):
                self._fail(asked, Failed(f"the model's engine died before this request was computed: {worker.problem}"))
        self._on_broken()

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
