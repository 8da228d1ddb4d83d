"""What the batcher decides: who is let in, what goes next, what is late. No clock, no threads: times are handed in."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from stoker.artifacts.elements import Arrays
from stoker.records import ServiceSettings
from stoker.serving.batching.admission import GONE, IDLE, STALE_S, Arrival, Margin, Standing, refusal
from stoker.serving.batching.company import Company
from stoker.serving.batching.cutting import cut
from stoker.serving.batching.executed import CutReason
from stoker.serving.batching.latency import LatencyTable
from stoker.serving.batching.queue import Part, Queue, urgency_of
from stoker.serving.batching.shapes import Shapes

FULL_EVERY = 16
"""One batch in so many is full if enough waits, to measure what that takes."""

_STALE_ANSWERS = 10


@dataclass(frozen=True, slots=True)
class Batch:
    """Parts that an instance shall compute together, padded to `sizes`; `late` are to be refused.

    `elements` are the positions of each padded sample, `taken` the point in time at which the instance took it, and
    `expected_s` what it is predicted to take; 0: nothing was measured.
    """

    taken: float
    parts: list[Part]
    late: list[Part]
    rows: int
    sizes: tuple[int, ...]
    elements: int
    reason: CutReason
    expected_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing is to be computed before this point in time, unless something comes."""

    until: float


class Scheduler:
    """The queue of a model, the table of its latencies, and what its instances are busy with."""

    def __init__(self, shapes: Shapes, settings: ServiceSettings, instances: int) -> None:
        self.queue = Queue()
        self.max_rows = settings.max_batch_rows if shapes.is_batched else 1
        self.table = LatencyTable(self.max_rows)
        self.margin = Margin()
        self._shapes = shapes
        self._settings = settings
        self._busy_until = [IDLE] * instances
        self._busy_rows = [0] * instances
        self._company = Company()
        self._num_cut = 0
        self._standing = Standing(self.queue, self.table, self._busy_until)

    def admit(
        self, owner: Any, inputs: Arrays, *, now: float, deadline: float, priority: int, caller: str, num_bytes: int
    ) -> list[Part]:
        """Queue a request, in parts of at most the rows of a batch.

        Raises:
            Refusal: TooLarge, QueueFull or WouldBeLate.
        """
        rows, shape = self._shapes.measure(inputs)
        arrival = Arrival(rows, num_bytes or sum(one.nbytes for one in inputs.values()), shape, caller, deadline)
        predicted_s = self._predicted_s(arrival, now)
        refused = refusal(
            arrival, self._standing, self._settings, now=now, allowed_s=self._allowed_s(predicted_s, arrival, now)
        )
        if refused is not None:
            raise refused
        urgency = urgency_of(priority, now, deadline)
        parts = [
            Part(owner, index, piece, num_rows, size, shape, caller, now, deadline, urgency, predicted_s)
            for index, (piece, num_rows, size) in enumerate(_pieces(inputs, arrival, self.max_rows))
        ]
        for part in parts:
            self.queue.put(part)
        self._company.see(self._rows_under_way(), now)
        return parts

    def take(self, instance: int, now: float) -> Batch | Wait | None:
        """What an idle instance shall do: compute a batch, wait for one to fill, or (None) wait for anything."""
        self._busy_until[instance], self._busy_rows[instance] = IDLE, 0
        is_delayed = self._settings.max_delay_s > 0 and self.queue.rows < self.max_rows and self._may_grow(now)
        if is_delayed and (until := self._delayed_until()) > now:
            return Wait(until)
        found = cut(self.queue, self.table, self.max_rows, now, tries_full=self._num_cut % FULL_EVERY == 0)
        if found is None:
            return None
        self._num_cut += 1
        self._judge(found.late, now)
        reason: CutReason = "delay" if is_delayed and found.reason == "idle" else found.reason
        parts = found.parts
        if not parts:
            return Batch(now, parts, found.late, 0, (), 0, reason)
        sizes = self._shapes.padded([part.shape for part in parts])
        rows = sum(part.rows for part in parts)
        elements = math.prod(parts[0].shape.lane) * math.prod(sizes)
        expected_s = self.table.seconds(rows, elements)
        self._busy_until[instance], self._busy_rows[instance] = now + expected_s, rows
        return Batch(now, parts, found.late, rows, sizes, elements, reason, expected_s)

    def learn(self, batch: Batch, ended: float) -> None:
        """Take in how long a batch took, of which nothing failed."""
        self.table.learn(batch.rows, batch.elements, ended - batch.taken, ended)
        self._judge(batch.parts, ended)

    def lose(self, instance: int) -> None:
        """Count on an instance no more: it takes no further batches."""
        self._busy_until[instance], self._busy_rows[instance] = GONE, 0

    def withdraw(self, part: Part) -> None:
        """Take a part out, if it still waits."""
        self.queue.remove(part)

    def expire(self, now: float) -> tuple[list[Part], float]:
        """Take out what is past its deadline, and tell the next deadline of what waits (infinite: none)."""
        late = [part for part in self.queue.parts() if part.deadline <= now]
        for part in late:
            self.queue.remove(part)
        self._judge(late, now)
        return late, min((part.deadline for part in self.queue.parts()), default=math.inf)

    def _predicted_s(self, arrival: Arrival, now: float) -> float:
        """How long its answer will take; 0 where it has no deadline, or nothing was measured yet."""
        if arrival.deadline == math.inf or self.table.is_empty:
            return 0.0
        return self._standing.seconds_to_answer(arrival.rows, arrival.shape, now)

    def _allowed_s(self, predicted_s: float, arrival: Arrival, now: float) -> float:
        """How long an answer may take by such a prediction; 0: there is none, or it is too old and to be tried."""
        if not predicted_s:
            return 0.0
        if self.table.age(arrival.shape.elements, now) > max(STALE_S, _STALE_ANSWERS * predicted_s):
            self.table.touch(arrival.shape.elements, now)
            return 0.0
        return predicted_s if self._standing.is_idle else self.margin.allowed_s(predicted_s)

    def _judge(self, parts: list[Part], ended: float) -> None:
        """Learn how far predictions were off, from answers and from what waited beyond its deadline."""
        for part in parts:
            if part.predicted_s:
                self.margin.learn(part.predicted_s, ended - part.arrived)

    def _rows_under_way(self) -> int:
        """Rows that wait or are being computed."""
        return self.queue.rows + sum(self._busy_rows)

    def _may_grow(self, now: float) -> bool:
        """Whether more than is under way now was so lately, so that others may still ask."""
        under_way = self._rows_under_way()
        self._company.see(under_way, now)
        return under_way < self._company.most

    def _delayed_until(self) -> float:
        """How long the batch that would be cut now may wait for more: its delay, less if a deadline presses."""
        first = min((part.arrived for part in self.queue.parts()), default=math.inf)
        pressing = min(
            (part.deadline - self.table.seconds(self.max_rows, part.shape.elements) for part in self.queue.parts()),
            default=math.inf,
        )
        return min(first + self._settings.max_delay_s, pressing) if first < math.inf else -math.inf


def _pieces(inputs: Arrays, arrival: Arrival, max_rows: int) -> Iterator[tuple[Arrays, int, int]]:
    """A request in pieces of at most `max_rows`: inputs, rows, and their share of its bytes."""
    if arrival.rows <= max_rows:
        yield inputs, arrival.rows, arrival.num_bytes
        return
    for start in range(0, arrival.rows, max_rows):
        end = min(start + max_rows, arrival.rows)
        share = arrival.num_bytes * end // arrival.rows - arrival.num_bytes * start // arrival.rows
        yield {name: array[start:end] for name, array in inputs.items()}, end - start, share
