"""The batcher: `await batcher.ask(inputs)` answers from a batch shared with other requests; and its warm-up.

The event loop admits requests and delivers answers, one thread per engine takes batches from the scheduler. Warm-up
fills the table of latencies with golden inputs at several rows and sizes before the first request.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from stoker.artifacts import Golden
from stoker.artifacts.dtypes import Arrays
from stoker.engines.base import BadInput, Engine
from stoker.errors import ServiceError
from stoker.records import BATCH, Manifest, ServiceSettings
from stoker.serving.batching.queue import LatencyTable, RequestPart, Shapes
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
from stoker.serving.daemon_threads import to_daemon_thread
from stoker.serving.refusals import BadRequest, DeadlinePassed, Failed, Refusal, Unavailable
from stoker.units import format_seconds

_ALARM_EVERY_S = 0.005
"""Least time between two checks for passed deadlines [s]."""


class _PendingRequest:
    """An admitted request, and the answers to its parts so far."""

    __slots__ = ("answers", "future", "missing", "parts")

    def __init__(self, future: asyncio.Future[Arrays]) -> None:
        self.future = future
        self.parts: list[RequestPart] = []
        self.answers: list[Arrays] = []
        self.missing = 0


class Batcher:
    """Answers requests to one model, in batches that form while its engines are busy.

    Requests and answers pass through one event loop; each engine has a thread. An idle engine never waits, unless
    `max_delay_s` is set. Without `allow_nan` inputs must be finite. Deadlines are points on `clock`.
    `observe` is called on the loop for every run of an engine, after its answers were delivered; `on_broken` for every
    engine that takes no more batches, because it fails on its golden inputs or hangs longer than `patience` allows.
    The caller owns the engines, and closes those that `join` returns.
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
        """Number of rows in the queue, without those being computed [rows]."""
        return self._scheduler.queue.rows

    @property
    def queue_bytes(self) -> int:
        """Size of the requests in the queue [bytes]."""
        return self._scheduler.queue.num_bytes

    @property
    def problem(self) -> str:
        """Why an engine takes no more batches; empty while all of them work."""
        return next((worker.problem for worker in self._workers if worker.problem), "")

    @property
    def is_broken(self) -> bool:
        """Whether an engine has died, or hangs."""
        return any(worker.problem for worker in self._workers)

    async def warm(self, golden: Golden, *, budget_s: float = 5.0) -> None:
        """Measure the times of batches, before the first request.

        Raises:
            ServiceError: an engine cannot compute the golden inputs.
        """
        inputs = golden.inputs

        def measure() -> None:
            for worker in self._workers:
                worker.engine.run(inputs)
                worker.golden = inputs
            engine, table = self._workers[0].engine, self._scheduler.table
            warm_up(engine, inputs, self._manifest, self._shapes, table, clock=self._clock, budget_s=budget_s)

        await to_daemon_thread(measure)

    async def ask(
        self, inputs: Arrays, *, deadline: float | None = None, priority: int = 0, caller: str = "", num_bytes: int = 0
    ) -> Arrays:
        """Every output for these inputs, which fit the manifest (not checked) and must not change until it returns.

        Cancelling removes from the queue what was not yet computed.

        Args:
            inputs: all inputs, samples stacked along their first dimension.
            deadline: latest time of the answer, on the batcher's clock.
            priority: 1 for the most urgent, 0 for the default, which is 2.
            caller: whose share of the queue counts.
            num_bytes: bytes that count in the queue; 0: those of the inputs.

        Raises:
            Refusal: QueueFull, TooLarge, DeadlineUnreachable, Unavailable (at once), DeadlinePassed or Failed.
        """
        loop = asyncio.get_running_loop()
        if self._refused:
            raise Unavailable(self._refused)
        if self._loop is not loop:
            if self._loop is None:  # the first request
                for worker in self._workers:
                    worker.start()
            self._loop = loop
        asked = _PendingRequest(loop.create_future())
        room = self._room
        with room.lock:
            asked.parts = self._scheduler.admit(
                asked,
                inputs,
                now=self._clock(),
                deadline=math.inf if deadline is None else deadline,
                priority=priority,
                caller=caller,
                num_bytes=num_bytes,
            )
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
        """Answer the accepted requests, and accept no more."""
        self._refused = self._refused or "the model is being unloaded, or the server is shutting down"
        if self._open:
            self._drained = self._drained or asyncio.Event()
            await self._drained.wait()
            await asyncio.sleep(0)  # so that the last batch has been observed

    def close(self) -> None:
        """Take no more batches and refuse all requests that are not answered yet; `drain` answers them instead."""
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
        """Wait for the running batches after `close`, for at most `within_s` in all; the engines that have finished.

        Blocks. The other engines still compute, or hang, and must not be closed.
        """
        ends = time.monotonic() + within_s
        return tuple(
            worker.engine
            for worker in self._workers
            if worker.join(0.0 if worker.hangs else max(0.0, ends - time.monotonic()))
        )

    def _post(self, worker: EngineWorker, batch: RequestBatch, attempt: Attempt | None) -> None:
        """Have the loop deliver answers; called on a worker's thread."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(self._deliver, worker, batch, attempt)
        except RuntimeError:
            if not self._loop.is_closed():
                raise  # with a closed loop, no request is left

    def _deliver(self, worker: EngineWorker, batch: RequestBatch, attempt: Attempt | None) -> None:
        if attempt is None:
            for part in batch.late:
                self._fail(part.owner, _deadline_passed(part))
            return
        if attempt.answers is not None:
            for part, answer in zip(attempt.parts, attempt.answers, strict=True):
                self._answer(part, answer)
        elif attempt.is_final:
            # Computed alone: the engine cannot take its inputs.
            kind = BadRequest if isinstance(attempt.error, BadInput) and len(attempt.parts) == 1 else Failed
            for part in attempt.parts:
                self._fail(part.owner, kind(f"the model could not compute this request: {attempt.error}"))
        if worker.problem:
            self._lose(worker)
        assert self._loop is not None
        self._loop.call_soon(self._record, worker.index, batch, attempt)  # answered tasks run first

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
        """Remove the parts of a request that still wait from the queue."""
        with self._room.lock:
            for part in asked.parts:
                self._scheduler.queue.remove(part)
        self._close_off(asked)

    def _close_off(self, asked: _PendingRequest) -> None:
        asked.parts = []  # they point back: such a cycle would stay in memory until the garbage collector runs
        self._open.discard(asked)
        if self._drained is not None and not self._open:
            self._drained.set()

    def _look_later(self) -> None:
        assert self._loop is not None
        self._next_look = self._loop.call_later(self._patience.every_s, self._look)

    def _look(self) -> None:
        """Check for hanging instances, and schedule the next check while there is work.

        A hanging instance is abandoned: its thread stays where it is, with all that it holds.
        """
        self._next_look = None
        stints = {worker.index: worker.at for worker in self._workers if not worker.hangs}
        runs = {index: EngineRun(stint[0], stint[1].expected_s) for index, stint in stints.items() if stint is not None}
        for index, seconds in self._watch.look(runs, self._clock()).items():
            worker, run = self._workers[index], runs[index]
            problem = f"it has been at one run for {format_seconds(seconds)}, and hangs"
            if run.expected_s:
                problem += f"; {format_seconds(run.expected_s)} were expected"
            with self._room.lock:
                parts = worker.abandon(run.number, problem)
            for part in parts:
                self._fail(part.owner, Failed(f"the model's engine did not answer this request: {problem}"))
            if worker.hangs:
                self._lose(worker)
        if self._open or runs:
            self._look_later()

    def _lose(self, worker: EngineWorker) -> None:
        """Stop counting on an engine. Without any left, all requests are refused."""
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

    def _set_alarm(self, due: float) -> None:
        """Check for passed deadlines at this point in time."""
        assert self._loop is not None
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = due
        self._alarm = self._loop.call_later(max(0.0, due - self._clock()), self._ring)

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
"""Largest size measured of a dimension without a limit, unless the golden inputs' is larger."""

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
    """Time golden inputs, repeated or cut to each of the table's rows and sizes, and fill the table.

    Each batch is run once for one-time work, then twice for the clock; the shorter time counts. Times beyond the
    budget are extrapolated by the table. The manifest may not know a limit of a dimension, such as the positions of an
    embedding: a size above that of the golden inputs that cannot be computed is left out, and larger ones with it.

    Raises:
        ServiceError: a batch of no more than the golden inputs' sizes cannot be computed.
    """
    started, own = clock(), shapes.measure(inputs)[1].sizes
    too_large: list[tuple[int, ...]] = []
    for rows, sizes in warm_up_points(manifest, shapes, inputs, table.grid):
        if clock() - started > budget_s:
            return
        if any(_reaches(sizes, limit) for limit in too_large):
            continue
        batch = resized(inputs, manifest, shapes, rows, sizes)
        try:
            engine.run(batch)
        except ServiceError:
            if not sizes or _reaches(own, sizes):
                raise
            too_large.append(sizes)
            continue
        times = []
        for _ in range(_REPEATS):
            before = clock()
            engine.run(batch)
            times.append(clock() - before)
        _, shape = shapes.measure(batch)
        elements = shape.elements if not sizes else math.prod(shape.lane) * math.prod(sizes)
        table.learn(rows, elements, max(min(times), 1e-9), clock())


def _reaches(sizes: tuple[int, ...], limit: tuple[int, ...]) -> bool:
    """Whether no size is below its limit."""
    return all(size >= least for size, least in zip(sizes, limit, strict=True))


def warm_up_points(
    manifest: Manifest, shapes: Shapes, inputs: Arrays, grid: tuple[int, ...]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Rows and sizes of padded dimensions to measure, ascending in elements."""
    if not shapes.is_batched:
        yield 1, ()
        return
    own = shapes.measure(inputs)[1].sizes
    ladders = [_ladder(manifest, dim, size) for dim, size in zip(shapes.padded_dims, own, strict=True)]
    longest = max((len(ladder) for ladder in ladders), default=1)
    sizes = [tuple(ladder[min(step, len(ladder) - 1)] for ladder in ladders) for step in range(longest)]
    points = [(rows, each) for each in sizes for rows in grid]
    yield from sorted(points, key=lambda point: point[0] * math.prod(point[1]))


def resized(inputs: Arrays, manifest: Manifest, shapes: Shapes, rows: int, sizes: tuple[int, ...]) -> Arrays:
    """Golden inputs cut or repeated to these rows and sizes."""
    targets = dict(zip(shapes.padded_dims, sizes, strict=True)) | ({BATCH: rows} if shapes.is_batched else {})
    result: Arrays = {}
    for spec in manifest.inputs:
        array = inputs[spec.name]
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str) and dim in targets:
                array = np.take(array, np.arange(targets[dim]) % array.shape[axis], axis=axis)
        result[spec.name] = np.asarray(array, order="C")  # `ascontiguousarray` would give a scalar a dimension
    return result


def _ladder(manifest: Manifest, dim: str, golden: int) -> list[int]:
    """Powers of two between the limits of a dimension, and the upper limit."""
    limits = next((limit for limit in manifest.dims if limit.name == dim), None)
    low = limits.low if limits else 1
    high = limits.high if limits and limits.high is not None else max(golden, LONGEST_WITHOUT_LIMIT)
    low = max(low, 8) if high >= 8 else low
    powers = [1 << power for power in range(high.bit_length() + 1)]
    return [*(power for power in powers if low <= power < high), high]
