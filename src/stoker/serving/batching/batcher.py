"""The batcher: `await batcher.ask(inputs)`, and the answer comes out of a batch shared with others.

Filling the table of latencies before the first request: golden inputs at several rows and sizes.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts import Golden
from stoker.artifacts.dtypes import Arrays
from stoker.engines.base import BadInput, Engine
from stoker.records import BATCH, Manifest, ServiceSettings, TensorSpec
from stoker.serving.batching.latency import LatencyTable
from stoker.serving.batching.queue import RequestPart, Shapes
from stoker.serving.batching.scheduler import Executed, RequestBatch, Scheduler
from stoker.serving.batching.workers import (
    DEFAULT_HANG_LIMITS,
    Assembler,
    Attempt,
    EngineRun,
    EngineWorker,
    HangLimits,
    HangWatch,
    WorkerState,
    executed,
    join_answers,
)
from stoker.serving.refusals import BadRequest, DeadlinePassed, Failed, Refusal, Unavailable
from stoker.units import format_seconds

_ALARM_EVERY_S = 0.005
"""Those who wait beyond their deadline are told within so long."""


class _PendingRequest:
    """A request that was let in, and what came of its parts so far."""

    __slots__ = ("answers", "future", "missing", "parts")

    def __init__(self, future: asyncio.Future[Arrays]) -> None:
        self.future = future
        self.parts: list[RequestPart] = []
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
        patience: HangLimits = DEFAULT_HANG_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._manifest = manifest
        self._observe = observe
        self._on_broken = on_broken
        self._patience = patience
        self._clock = clock
        self._shapes = Shapes(manifest, settings.buckets)
        self._scheduler = Scheduler(self._shapes, settings, len(engines))
        self._room = WorkerState(self._scheduler, clock)
        self._workers = [
            EngineWorker(
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
        self._watch = HangWatch(patience)
        self._next_look: asyncio.TimerHandle | None = None
        self._lost: set[int] = set()
        self._refused = ""
        self._open: set[_PendingRequest] = set()
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
        asked = _PendingRequest(loop.create_future())
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

    def _post(self, worker: EngineWorker, batch: RequestBatch, attempt: Attempt | None) -> None:
        """From a worker's thread: have the loop give out answers."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, worker, batch, attempt)
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # with a closed loop, nobody is left who asked

    def _deliver(self, worker: EngineWorker, batch: RequestBatch, attempt: Attempt | None) -> None:
        if attempt is None:
            for part in batch.late:
                self._fail(part.owner, _deadline_passed(part))
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

    def _record(self, instance: int, batch: RequestBatch, attempt: Attempt) -> None:
        if attempt.error is None and attempt.parts is batch.parts:
            with self._room.lock:
                self._scheduler.learn(batch, attempt.ended)
        self._observe(executed(instance, batch, attempt))

    def _answer(self, part: RequestPart, answer: Arrays) -> None:
        asked: _PendingRequest = part.owner
        if asked.future.done():
            return
        asked.missing -= 1
        if len(asked.parts) > 1:
            asked.answers = asked.answers or [{}] * len(asked.parts)
            asked.answers[part.index] = answer
            if asked.missing:
                return
            try:
                answer = join_answers(asked.answers)
            except ValueError as error:
                self._fail(asked, Failed(f"the answers to parts of this request do not fit together: {error}"))
                return
        asked.future.set_result(answer)
        self._close_off(asked)

    def _fail(self, asked: _PendingRequest, refusal: Refusal) -> None:
        if not asked.future.done():
            asked.future.set_exception(refusal)
        self._end(asked)

    def _end(self, asked: _PendingRequest) -> None:
        """Take what still waits of a request out of the queue."""
        with self._room.lock:
            for part in asked.parts:
                self._scheduler.withdraw(part)
        self._close_off(asked)

    def _close_off(self, asked: _PendingRequest) -> None:
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
        runs = {index: EngineRun(at[0], at[1].expected_s) for index, at in stints.items() if at is not None}
        for index, seconds in self._watch.look(runs, self._clock()).items():
            self._abandon(self._workers[index], runs[index], seconds)
        if self._open or runs:
            self._look_later()

    def _abandon(self, worker: EngineWorker, run: EngineRun, seconds: float) -> None:
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

    def _lose(self, worker: EngineWorker) -> None:
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
            self._fail(part.owner, _deadline_passed(part))
        if following < math.inf:
            self._set_alarm(max(following, now + _ALARM_EVERY_S))


def _deadline_passed(part: RequestPart) -> DeadlinePassed:
    allowed = format_seconds(max(0.0, part.deadline - part.arrived))
    return DeadlinePassed(
        f"the deadline, {allowed} after the request came, passed while it waited, or could no longer be met"
    )


LONGEST_WITHOUT_LIMIT = 512
"""Dimensions that the manifest sets no limit are measured up to this size, or that of the golden inputs."""

_REPEATS = 2


def warm_up(
    engine: Engine,
    inputs: Arrays,
    manifest: Manifest,
    shapes: Shapes,
    table: LatencyTable,
    *,
    clock: Callable[[], float],
    budget_s: float,
) -> None:
    """Run golden inputs, repeated or cut to each of the table's rows and sizes, and learn what they take.

    Each is run once for what engines do at the first time, then up to twice for the clock, of which the shorter
    counts. What the budget does not suffice for is extrapolated.
    """
    started = clock()
    for rows, sizes in warm_up_points(manifest, shapes, inputs, table.grid):
        if clock() - started > budget_s:
            return
        batch = resized(inputs, manifest, shapes, rows, sizes)
        engine.run(batch)
        times = []
        for _ in range(_REPEATS):
            before = clock()
            engine.run(batch)
            times.append(clock() - before)
        _, shape = shapes.measure(batch)
        elements = shape.elements if not sizes else _product(shape.lane) * _product(sizes)
        table.learn(rows, elements, max(min(times), 1e-9), clock())


def warm_up_points(
    manifest: Manifest, shapes: Shapes, inputs: Arrays, grid: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Rows and sizes of padded dimensions to measure, those of few elements first."""
    if not shapes.is_batched:
        yield 1, ()
        return
    own = shapes.measure(inputs)[1].sizes
    ladders = [_ladder(manifest, dim, size) for dim, size in zip(shapes.padded_dims, own, strict=True)]
    longest = max((len(ladder) for ladder in ladders), default=1)
    sizes = [tuple(ladder[min(step, len(ladder) - 1)] for ladder in ladders) for step in range(longest)]
    yield from sorted(((rows, each) for each in sizes for rows in grid), key=lambda one: one[0] * _product(one[1]))


def resized(inputs: Arrays, manifest: Manifest, shapes: Shapes, rows: int, sizes: tuple[int, ...]) -> Arrays:
    """Golden inputs with so many rows and such sizes, by taking what is there again and again."""
    wanted = dict(zip(shapes.padded_dims, sizes, strict=True)) | ({BATCH: rows} if shapes.is_batched else {})
    return {spec.name: _resized(inputs[spec.name], spec, wanted) for spec in manifest.inputs}


def _resized(array: NDArray[Any], spec: TensorSpec, wanted: dict[str, int]) -> NDArray[Any]:
    for axis, dim in enumerate(spec.shape):
        if (size := wanted.get(str(dim))) is not None and isinstance(dim, str):
            array = np.take(array, np.arange(size) % array.shape[axis], axis=axis)
    return np.asarray(array, order="C")  # of a single number `ascontiguousarray` makes a row of one


def _ladder(manifest: Manifest, dim: str, golden: int) -> list[int]:
    """Powers of two between the limits of a dimension, and the upper limit."""
    limits = next((one for one in manifest.dims if one.name == dim), None)
    low = limits.low if limits else 1
    high = limits.high if limits and limits.high is not None else max(golden, LONGEST_WITHOUT_LIMIT)
    low = max(low, 8) if high >= 8 else low
    powers = [1 << power for power in range(high.bit_length() + 1)]
    return [*(power for power in powers if low <= power < high), high]


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
