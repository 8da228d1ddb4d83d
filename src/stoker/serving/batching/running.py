"""A batch in an engine; one that fails is halved and run again, until the request at fault is alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stoker.artifacts.elements import Arrays
from stoker.engines.base import Engine
from stoker.serving.batching.assembling import Assembler
from stoker.serving.batching.executed import CutReason, Executed
from stoker.serving.batching.queue import Part
from stoker.serving.batching.scheduler import Batch

MOST_RUNS = 24
"""A batch that fails is run at most so often, in halves, quarters, …; what then still failed, fails together.

One request at fault among 32 is found in 11 runs, two in at most 19.
"""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of an engine: answers in the order of the parts, or an error.

    `is_final` is False where the parts are run again. The times are those of putting inputs together, of the engine
    and of taking outputs apart [s].
    """

    parts: list[Part]
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
        """When answers were there, on the batcher's clock."""
        return self.started + self.input_s + self.infer_s + self.output_s


def attempts(
    engine: Engine,
    assembler: Assembler,
    parts: list[Part],
    sizes: tuple[int, ...],
    reason: CutReason,
    clock: Callable[[], float],
) -> Iterator[Attempt]:
    """Run a batch, and its halves if it fails; every part is in exactly one final attempt."""
    waiting, runs = [parts], 0
    while waiting:
        some = waiting.pop()
        runs += 1
        may_halve = len(some) > 1 and runs + len(waiting) + 2 <= MOST_RUNS
        attempt = _attempt(engine, assembler, some, sizes, reason, clock, may_halve=may_halve)
        reason = "bisect"
        yield attempt
        if not attempt.is_final:
            half = len(some) // 2
            waiting += [some[half:], some[:half]]


def _attempt(
    engine: Engine,
    assembler: Assembler,
    parts: list[Part],
    sizes: tuple[int, ...],
    reason: CutReason,
    clock: Callable[[], float],
    *,
    may_halve: bool,
) -> Attempt:
    started = assembled = ran = clock()
    answers, failure = None, None
    try:
        inputs = assembler.inputs(parts, sizes)
        assembler.require_finite(inputs)
        assembled = ran = clock()
        outputs = engine.run(inputs)
        ran = clock()
        answers = assembler.answers(outputs, parts, sizes)
    except Exception as error:  # noqa: BLE001 - whatever a library raises, the others of the batch are to be answered
        failure = error
    ended = clock()
    if failure is not None:
        ran = ended
    is_final = failure is None or not may_halve
    return Attempt(
        parts, reason, answers, failure, is_final, started, assembled - started, ran - assembled, ended - ran
    )


def executed(instance: int, batch: Batch, attempt: Attempt) -> Executed:
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
