"""Engine workers: one thread per engine that takes batches, assembles inputs, runs the engine and splits its outputs.

What: a batch that fails is halved and run again, until the failing request is alone (`attempts`); requests with NaN or
infinities, which are found without a run, are rejected at once. An engine that neither answers nor raises counts as
hanging once it was seen at the same run for long enough (`HangWatch`).
Use when: anything is computed.
Costs: for the watch one check per second while there is work, of a microsecond per instance.
Does not combine with: models whose runs may take half a minute and a hundred times their measured time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.dtypes import Arrays, dtype_of
from stoker.engines.base import BadValue, Engine
from stoker.records import Manifest, TensorSpec
from stoker.serving.batching.queue import RequestPart
from stoker.serving.batching.scheduler import CutReason, Executed, RequestBatch, Scheduler

FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})
_FEW = 65_536


class Assembler:
    """Assembles inputs in buffers that are reused for the next batch; one for each instance.

    A part that is a whole batch and needs no padding is passed on without a copy. Answers are views of their batch's
    outputs, which stay in memory as long as one of them does.
    """

    def __init__(self, manifest: Manifest, padded_dims: tuple[str, ...], *, allow_nan: bool = True) -> None:
        self._inputs, self._name = manifest.inputs, manifest.name
        self._finite = () if allow_nan else tuple(spec.name for spec in manifest.inputs if spec.datatype in FLOATS)
        self._is_batched = manifest.is_batched
        # Padded axes of each tensor, with the index of their dimension among a sample shape's sizes.
        self._padded = {
            spec.name: [
                (axis, padded_dims.index(str(dim))) for axis, dim in enumerate(spec.shape) if dim in padded_dims
            ]
            for spec in (*manifest.inputs, *manifest.outputs)
        }
        self._buffers = {spec.name: np.empty(0, dtype_of(spec.datatype)) for spec in manifest.inputs}

    def inputs(self, parts: list[RequestPart], sizes: tuple[int, ...]) -> Arrays:
        """The inputs of a batch, padded to these sizes."""
        if len(parts) == 1 and parts[0].shape.sizes == sizes:
            # Not every engine reads views that are unaligned, as from the middle of a body.
            return {
                name: array
                if array.flags.c_contiguous and array.flags.aligned
                else np.require(array, requirements=("C", "A"))
                for name, array in parts[0].inputs.items()
            }
        if all(part.shape.sizes == sizes for part in parts):
            return {spec.name: self._stacked(spec.name, parts) for spec in self._inputs}
        return {spec.name: self._filled(spec, parts, sizes) for spec in self._inputs}

    def require_finite(self, inputs: Arrays) -> None:
        """Refuse NaN and infinities, as JSON does, unless the model takes them.

        Checked per batch on the engine's thread: on the event loop NumPy releases the interpreter lock for it, and
        getting the lock back took 13 µs of an answer's 50.

        Raises:
            BadValue: an input of any request of the batch has some.
        """
        if (name := self._not_finite(inputs)) is not None:
            raise BadValue(
                f"input {name!r} of {self._name!r} has NaN or infinities; only the setting allow_nan takes them"
            )

    def groups(self, parts: list[RequestPart]) -> list[list[RequestPart]]:
        """Groups in which a failed batch is run again: finite parts, and each other one alone; else halves."""
        finite = [part for part in parts if self._not_finite(part.inputs) is None]
        if len(finite) == len(parts):
            return [parts[len(parts) // 2 :], parts[: len(parts) // 2]]
        alone = [[part] for part in parts if self._not_finite(part.inputs) is not None]
        return [finite, *alone] if finite else alone

    def answers(self, outputs: Arrays, parts: list[RequestPart], sizes: tuple[int, ...]) -> list[Arrays]:
        """Each part's rows of the outputs, cut back to its own sizes.

        Raises:
            ValueError: an output has another number of rows than the batch.
        """
        if not self._is_batched:
            return [outputs]
        rows = sum(part.rows for part in parts)
        for name, array in outputs.items():
            if array.shape[:1] != (rows,):
                raise ValueError(f"output {name!r} has the shape {list(array.shape)}, for a batch of {rows} rows")
        answers, start = [], 0
        for part in parts:
            end = start + part.rows
            own = part.shape.sizes
            if own == sizes:
                answers.append({name: array[start:end] for name, array in outputs.items()})
            else:
                answers.append({name: array[start:end][self._cut(name, own)] for name, array in outputs.items()})
            start = end
        return answers

    def _not_finite(self, inputs: Arrays) -> str | None:
        """The first input that must be finite and is not."""
        return next((name for name in self._finite if not is_finite(inputs[name])), None)

    def _stacked(self, name: str, parts: list[RequestPart]) -> NDArray[Any]:
        """Parts of equal shapes, concatenated."""
        arrays = [part.inputs[name] for part in parts]
        rows = sum(part.rows for part in parts)
        if arrays[0].dtype.hasobject:
            return np.concatenate(arrays)
        return np.concatenate(arrays, out=self._buffer(name, (rows, *arrays[0].shape[1:])))

    def _filled(self, spec: TensorSpec, parts: list[RequestPart], sizes: tuple[int, ...]) -> NDArray[Any]:
        """Parts of several shapes, with padding after each."""
        axes = self._padded[spec.name]
        shape = list(parts[0].inputs[spec.name].shape)
        shape[0] = sum(part.rows for part in parts)
        for axis, dim in axes:
            shape[axis] = sizes[dim]
        batch = self._buffer(spec.name, tuple(shape))
        if axes:
            batch.fill(spec.pad)
        start = 0
        for part in parts:
            end = start + part.rows
            batch[start:end][self._cut(spec.name, part.shape.sizes)] = part.inputs[spec.name]
            start = end
        return batch

    def _cut(self, name: str, sizes: tuple[int, ...]) -> tuple[slice, ...]:
        """The slices of a padded tensor that belong to a part of these sizes."""
        axes = self._padded[name]
        if not axes:
            return ()
        slices = [slice(None)] * (axes[-1][0] + 1)
        for axis, dim in axes:
            slices[axis] = slice(sizes[dim])
        return tuple(slices)

    def _buffer(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """Reused memory for an input of this shape."""
        size = math.prod(shape)
        if self._buffers[name].size < size:
            self._buffers[name] = np.empty(size, self._buffers[name].dtype)
        return self._buffers[name][:size].reshape(shape)


def join_answers(answers: list[Arrays]) -> Arrays:
    """The answer to a request from the answers to its parts."""
    if len(answers) == 1:
        return answers[0]
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


def is_finite(array: NDArray[Any]) -> bool:
    """Whether every number of an array of floats is finite."""
    if array.dtype.itemsize == 2:  # NumPy is slow in these: a number is not finite if its exponent is all ones
        bits = array.view(np.uint16) & np.uint16(0x7FFF)
        return array.size == 0 or int(bits.max()) < (0x7C00 if array.dtype == np.float16 else 0x7F80)
    if array.size <= _FEW:  # 0.7 µs for a sample of 64
        return int(np.count_nonzero(np.isfinite(array))) == array.size
    return math.isfinite(array.min()) and math.isfinite(array.max())  # without a temporary array; NaN is both


MOST_RUNS = 24
"""Limit on the runs of a failed batch, in halves, quarters, …; parts that still fail then, fail together.

One failing request among 32 is found in 11 runs, two in at most 19.
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of an engine: answers in the order of the parts, or an error.

    `is_final` is False if the parts are run again. The times are for assembling inputs, the engine, and splitting
    outputs [s].
    """

    parts: list[RequestPart]
    reason: CutReason
    answers: list[Arrays] | None
    error: Exception | None
    is_final: bool
    started: float
    input_s: float
    infer_s: float
    output_s: float

    @property
    def ended(self) -> float:
        """Time when the answers were complete, on the batcher's clock [s]."""
        return self.started + self.input_s + self.infer_s + self.output_s


def attempts(
    engine: Engine,
    assembler: Assembler,
    parts: list[RequestPart],
    sizes: tuple[int, ...],
    reason: CutReason,
    clock: Callable[[], float],
) -> Iterator[Attempt]:
    """Run a batch, and its halves if it fails; every part is in exactly one final attempt."""
    waiting, runs = [parts], 0
    while waiting:
        some = waiting.pop()
        started = assembled = ran = clock()
        answers, failure = None, None
        try:
            inputs = assembler.inputs(some, sizes)
            assembler.require_finite(inputs)
            assembled = ran = clock()
            outputs = engine.run(inputs)
            ran = clock()
            answers = assembler.answers(outputs, some, sizes)
        except Exception as error:  # noqa: BLE001 - whatever a library raises, the others of the batch are answered
            failure = error
        ended = clock()
        if failure is not None:
            ran = ended
        is_bad_value = isinstance(failure, BadValue)  # then the engine did not run
        runs += not is_bad_value
        is_over = not is_bad_value and runs + len(waiting) + 2 > MOST_RUNS
        is_final = failure is None or len(some) == 1 or is_over
        yield Attempt(
            some, reason, answers, failure, is_final, started, assembled - started, ran - assembled, ended - ran
        )
        reason = "bisect"
        if not is_final:
            waiting += assembler.groups(some)


def executed(instance: int, batch: RequestBatch, attempt: Attempt) -> Executed:
    """The record of an attempt at a batch, or at a part of one."""
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


MOST_LOOKS = 2
"""Limit on the time counted between two checks, in intervals: while a process is stopped, its engines are too."""


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """An instance hangs once a run takes `times` its expected time, and `least_s`; it is checked every `every_s`."""

    least_s: float = 30.0
    times: float = 100.0
    every_s: float = 1.0

    def limit_s(self, expected_s: float) -> float:
        """Longest time of a run that was expected to take `expected_s` (0: unknown) [s]."""
        return max(self.least_s, self.times * expected_s)


DEFAULT_HANG_LIMITS = HangLimits()


@dataclass(frozen=True, slots=True)
class EngineRun:
    """The current run of an instance; runs are numbered."""

    number: int
    expected_s: float


class HangWatch:
    """How long each instance was seen at its current run. Times are arguments."""

    def __init__(self, patience: HangLimits) -> None:
        self._patience = patience
        self._looked_at: float | None = None
        self._seen: dict[int, tuple[int, float]] = {}

    def look(self, runs: Mapping[int, EngineRun], now: float) -> dict[int, float]:
        """Record the runs of busy instances; those that hang, and the time they were seen at their run [s]."""
        most_s = MOST_LOOKS * self._patience.every_s
        passed_s = 0.0 if self._looked_at is None else min(now - self._looked_at, most_s)
        self._looked_at = now
        before, self._seen = self._seen, {}
        for instance, run in runs.items():
            number, seconds = before.get(instance, (-1, 0.0))
            self._seen[instance] = (run.number, seconds + passed_s if number == run.number else 0.0)
        return {
            instance: self._seen[instance][1]
            for instance, run in runs.items()
            if self._seen[instance][1] >= self._patience.limit_s(run.expected_s)
        }


SUSPICIOUS_FAILURES = 3
"""Number of failed requests in a row after which an engine is run on its golden inputs."""

Post = Callable[["EngineWorker", RequestBatch, Attempt | None], None]
"""Delivers an attempt's outcome, or (without one) refuses the late parts; called on a worker's thread."""


class WorkerState:
    """State shared by the workers, and its lock: the scheduler, the idle workers, whether work continues."""

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float]) -> None:
        self.lock = threading.Lock()
        self.scheduler = scheduler
        self.clock = clock
        self.idle: list[EngineWorker] = []
        self.is_open = True

    def roused(self, most: int) -> list[EngineWorker]:
        """Remove up to `most` idle workers, each of which must then be woken. Call with the lock held."""
        return [self.idle.pop() for _ in range(min(most, len(self.idle)))]


class EngineWorker:
    """An engine and its thread, which takes a batch as soon as it is idle, without going through the loop.

    `golden` are inputs that the engine answered at warm-up, to distinguish a dead engine from bad requests. `problem`
    says why it takes no more batches. `at` is the number of its current run and its batch.
    """

    def __init__(self, index: int, engine: Engine, assembler: Assembler, room: WorkerState, post: Post) -> None:
        self.index = index
        self.engine = engine
        self.golden: Arrays | None = None
        self.problem = ""
        self.hangs = False
        self.at: tuple[int, RequestBatch] | None = None
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
        """Wake the thread; call once each time it was removed from `WorkerState.idle`."""
        self._bell.release()

    def abandon(self, number: int, problem: str) -> list[RequestPart]:
        """Give the worker up if it is still at that run; the parts of that run. Call with the lock held."""
        if self.at is None or self.at[0] != number:
            return []
        self.problem, self.hangs = problem, True
        return self.at[1].parts

    def join(self, within_s: float) -> bool:
        """Wait until its thread has ended after its batch; whether it has, and the engine is free."""
        if self._thread.is_alive():
            self._thread.join(within_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            if batch.late:
                self._post(self, batch, None)
            if not batch.parts:
                continue
            clock = self._room.clock
            for attempt in attempts(self.engine, self._assembler, batch.parts, batch.sizes, batch.reason, clock):
                if self.hangs:  # it did not, but its requests were refused by now
                    break
                if attempt.error is None:
                    self._failures = 0
                elif attempt.is_final and not isinstance(attempt.error, BadValue):
                    self._count_failures(len(attempt.parts), batch)
                self._post(self, batch, attempt)
                self._begin(batch)

    def _next(self) -> RequestBatch | None:
        """The next batch; sleeps until there is one. None: work has ended, or this worker was given up."""
        room = self._room
        while True:
            with room.lock:
                self.at = None
                if self.problem or not room.is_open:
                    return None
                work = room.scheduler.take(self.index, room.clock())
                if isinstance(work, RequestBatch):
                    self._begin(work)
                    return work
                room.idle.append(self)
            timeout = -1.0 if work is None else max(0.0, work.until - room.clock())
            if self._bell.acquire(timeout=timeout):
                continue
            with room.lock:
                is_still_idle = self in room.idle
                if is_still_idle:
                    room.idle.remove(self)
            if not is_still_idle:  # it is about to be woken
                self._bell.acquire()

    def _begin(self, batch: RequestBatch) -> None:
        self._num_runs += 1
        self.at = self._num_runs, batch

    def _count_failures(self, more: int, batch: RequestBatch) -> None:
        self._failures += more
        if self._failures >= SUSPICIOUS_FAILURES and self.golden is not None:
            self._failures = 0
            self._begin(batch)
            try:
                self.engine.run(self.golden)
            except Exception:  # noqa: BLE001 - any error means that it is broken
                self.problem = "it fails on the inputs that it was checked with"
