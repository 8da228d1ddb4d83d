"""Counting what a version did, as the protocol's statistics extension tells it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from stoker.serving.batching.executed import Executed
from stoker.serving.service import BatchTotal, Statistics, Total


@dataclass(slots=True)
class _Sum:
    """A number of occurrences, and their seconds together."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        """Count `count` occurrences that took `seconds` together."""
        self.count += count
        self.seconds += seconds

    def total(self) -> Total:
        return Total(count=self.count, ns=round(self.seconds * 1e9))


@dataclass(slots=True)
class _Compute:
    """The three parts of a batch."""

    input: _Sum = field(default_factory=_Sum)
    infer: _Sum = field(default_factory=_Sum)
    output: _Sum = field(default_factory=_Sum)

    def add(self, batch: Executed, count: int) -> None:
        """Count a batch's times `count` times."""
        self.input.add(count * batch.input_s, count)
        self.infer.add(count * batch.infer_s, count)
        self.output.add(count * batch.output_s, count)


class Counters:
    """What one version did since it was loaded. It belongs to the event loop.

    A request counts the times of the batch that answered it in full, as Triton counts them: clients divide by the
    number of requests.
    """

    def __init__(self, name: str, version: str, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self._version = version
        self._wall_clock = wall_clock
        self._last_s = 0.0
        self._rows = 0
        self._success, self._fail, self._queue = _Sum(), _Sum(), _Sum()
        self._requests = _Compute()
        self._batches: dict[int, _Compute] = {}

    def add_request(self, seconds: float, *, succeeded: bool) -> None:
        """Count a request that ended, `seconds` after it came in."""
        if succeeded:
            self._last_s = self._wall_clock()
        (self._success if succeeded else self._fail).add(seconds)

    def add_batch(self, batch: Executed) -> None:
        """Count a run of an engine that gave answers; one that failed shows in the requests that failed by it."""
        if not batch.succeeded:
            return
        self._rows += batch.rows
        self._queue.add(sum(batch.queue_s), len(batch.queue_s))
        self._requests.add(batch, batch.requests)
        self._batches.setdefault(batch.rows, _Compute()).add(batch, 1)

    def statistics(self) -> Statistics:
        """The counts as they are now."""
        batches = tuple(
            BatchTotal(
                batch_size=rows,
                compute_input=one.input.total(),
                compute_infer=one.infer.total(),
                compute_output=one.output.total(),
            )
            for rows, one in sorted(self._batches.items())
        )
        return Statistics(
            name=self._name,
            version=self._version,
            last_inference_ms=round(self._last_s * 1000),
            inference_count=self._rows,
            execution_count=sum(one.count for one in (batch.compute_infer for batch in batches)),
            success=self._success.total(),
            fail=self._fail.total(),
            queue=self._queue.total(),
            compute_input=self._requests.input.total(),
            compute_infer=self._requests.infer.total(),
            compute_output=self._requests.output.total(),
            batches=batches,
        )
