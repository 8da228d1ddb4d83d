"""The scheduler: admits requests, forms the next batch, finds what is late. No clock, no threads: times are arguments.

What: a batch always has the most urgent part. The others are chosen to lose least time: a batch's predicted seconds,
including padding, minus the seconds of its rows in the best batches of their own sizes (with no more rows than wait).
So samples of different sizes share a batch as long as that is faster than separate batches; for fixed shapes the rule
finds the number of rows worth taking at once. If fewer rows have nearly the same throughput, they are taken, since they
answer sooner; unless more than a batch waits.
With `max_delay_s` an idle instance may wait to fill a batch, unless as many rows wait or are computed as were ever in
flight together in the last seconds: then no caller is left that could send more.
Use when: an instance becomes free.
Costs: microseconds per shape in the queue.
Does not combine with: models whose answers depend on the other samples of a batch (an export refuses those).
Source: least loss instead of best ratio: Dinkelbach 1967, On Nonlinear Fractional Programming, at a ratio of 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.artifacts.dtypes import Arrays
from stoker.records import ServiceSettings
from stoker.serving.batching.queue import (
    GONE,
    IDLE,
    STALE_S,
    Arrival,
    Lane,
    LatencyTable,
    Margin,
    Queue,
    RequestPart,
    ShapeQueue,
    Shapes,
    Standing,
    refusal,
    urgency_of,
)

FULL_EVERY = 16
"""One batch in this many is full if enough rows wait, to measure its time."""

_STALE_ANSWERS = 10


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Parts to compute together, padded to `sizes`; `late` are to be refused.

    `elements` are the positions of each padded sample, `taken` is the time at which the instance took the batch, and
    `expected_s` its predicted time; 0: not measured yet.
    """

    taken: float
    parts: list[RequestPart]
    late: list[RequestPart]
    rows: int
    sizes: tuple[int, ...]
    elements: int
    reason: CutReason
    expected_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wait:
    """Compute nothing before this point in time, unless a request arrives."""

    until: float


class Scheduler:
    """A model's queue, latency table, and the work of its instances."""

    def __init__(self, shapes: Shapes, settings: ServiceSettings, instances: int) -> None:
        self.queue = Queue()
        self.max_rows = settings.max_batch_rows if shapes.is_batched else 1
        self.table = LatencyTable(self.max_rows)
        self.margin = Margin()
        self._shapes = shapes
        self._settings = settings
        self._busy_until = [IDLE] * instances
        self._busy_rows = [0] * instances
        self._concurrency = PeakConcurrency()
        self._num_cut = 0
        self._standing = Standing(self.queue, self.table, self._busy_until)

    def admit(
        self, owner: Any, inputs: Arrays, *, now: float, deadline: float, priority: int, caller: str, num_bytes: int
    ) -> list[RequestPart]:
        """Queue a request, in parts of at most the rows of a batch.

        Raises:
            Refusal: TooLarge, QueueFull or DeadlineUnreachable.
        """
        rows, shape = self._shapes.measure(inputs)
        arrival = Arrival(rows, num_bytes or sum(array.nbytes for array in inputs.values()), shape, caller, deadline)
        predicted_s = allowed_s = 0.0  # without a deadline or measurements
        if deadline != math.inf and not self.table.is_empty:
            predicted_s = self._standing.seconds_to_answer(rows, shape, now)
            if self.table.age(shape.elements, now) > max(STALE_S, _STALE_ANSWERS * predicted_s):
                self.table.touch(shape.elements, now)  # too old to refuse by: this request measures again
            else:
                allowed_s = predicted_s if self._standing.is_idle else self.margin.allowed_s(predicted_s)
        refused = refusal(arrival, self._standing, self._settings, now=now, allowed_s=allowed_s)
        if refused is not None:
            raise refused
        urgency = urgency_of(priority, now, deadline)
        parts = [
            RequestPart(owner, index, piece, num_rows, size, shape, caller, now, deadline, urgency, predicted_s)
            for index, (piece, num_rows, size) in enumerate(_pieces(inputs, arrival, self.max_rows))
        ]
        for part in parts:
            self.queue.put(part)
        self._concurrency.see(self._rows_under_way(), now)
        return parts

    def take(self, instance: int, now: float) -> RequestBatch | Wait | None:
        """The next work of an idle instance: a batch, waiting for one to fill, or (None) waiting for a request."""
        self._busy_until[instance], self._busy_rows[instance] = IDLE, 0
        is_delayed = False
        if self._settings.max_delay_s > 0 and self.queue.rows < self.max_rows:
            under_way = self._rows_under_way()
            self._concurrency.see(under_way, now)
            is_delayed = under_way < self._concurrency.most  # others may still ask
        if is_delayed and (until := self._delayed_until()) > now:
            return Wait(until)
        selection = select_batch(self.queue, self.table, self.max_rows, now, tries_full=self._num_cut % FULL_EVERY == 0)
        if selection is None:
            return None
        self._num_cut += 1
        self._judge(selection.late, now)
        reason: CutReason = "delay" if is_delayed and selection.reason == "idle" else selection.reason
        parts = selection.parts
        if not parts:
            return RequestBatch(now, parts, selection.late, 0, (), 0, reason)
        sizes = self._shapes.padded([part.shape for part in parts])
        rows = sum(part.rows for part in parts)
        elements = math.prod(parts[0].shape.lane) * math.prod(sizes)
        expected_s = self.table.seconds(rows, elements)
        self._busy_until[instance], self._busy_rows[instance] = now + expected_s, rows
        return RequestBatch(now, parts, selection.late, rows, sizes, elements, reason, expected_s)

    def learn(self, batch: RequestBatch, ended: float) -> None:
        """Learn from the time of a batch in which nothing failed."""
        self.table.learn(batch.rows, batch.elements, ended - batch.taken, ended)
        self._judge(batch.parts, ended)

    def lose(self, instance: int) -> None:
        """Stop counting on an instance: it takes no more batches."""
        self._busy_until[instance], self._busy_rows[instance] = GONE, 0

    def expire(self, now: float) -> tuple[list[RequestPart], float]:
        """Remove parts past their deadline; they, and the next deadline in the queue (infinite: none)."""
        late = [part for part in self.queue.parts() if part.deadline <= now]
        for part in late:
            self.queue.remove(part)
        self._judge(late, now)
        return late, min((part.deadline for part in self.queue.parts()), default=math.inf)

    def _judge(self, parts: list[RequestPart], ended: float) -> None:
        """Learn the errors of predictions, from answers and from parts that passed their deadline."""
        for part in parts:
            if part.predicted_s:
                self.margin.learn(part.predicted_s, ended - part.arrived)

    def _rows_under_way(self) -> int:
        """Rows that wait or are being computed."""
        return self.queue.rows + sum(self._busy_rows)

    def _delayed_until(self) -> float:
        """Point in time until which the next batch may wait for more: its delay, or earlier for a deadline."""
        first = min((part.arrived for part in self.queue.parts()), default=math.inf)
        pressing = min(
            (part.deadline - self.table.seconds(self.max_rows, part.shape.elements) for part in self.queue.parts()),
            default=math.inf,
        )
        return min(first + self._settings.max_delay_s, pressing) if first < math.inf else -math.inf


def _pieces(inputs: Arrays, arrival: Arrival, max_rows: int) -> Iterator[tuple[Arrays, int, int]]:
    """A request in pieces of at most `max_rows`: inputs, rows, and share of its bytes."""
    if arrival.rows <= max_rows:
        yield inputs, arrival.rows, arrival.num_bytes
        return
    for start in range(0, arrival.rows, max_rows):
        end = min(start + max_rows, arrival.rows)
        share = arrival.num_bytes * end // arrival.rows - arrival.num_bytes * start // arrival.rows
        yield {name: array[start:end] for name, array in inputs.items()}, end - start, share


AS_GOOD = 0.97
"""Share of the best throughput that counts as equal. The least of such numbers of rows is taken, so that the next batch
already waits when answers lead to new requests; if more than a batch waits, the most."""

BATCH_OVERHEAD_S = 0.5e-3
"""Cost of a batch besides its run [s]: thread switches, selection, delivery. The table has only the engine's times, by
which single rows may look as good as many."""

_MOST_TOPS = 6


@dataclass(frozen=True, slots=True)
class BatchComposition:
    """The rows to take with the head: up to `rows` in all, from `shelves` in this order.

    `seconds` is the predicted time of the batch, `value` that of its rows in the best batches of their own sizes; the
    difference is the loss.
    """

    rows: int
    shelves: Sequence[ShapeQueue]
    seconds: float
    value: float


@dataclass(frozen=True, slots=True)
class BatchSelection:
    """Parts of the next batch, and those whose deadline passed; all have left the queue."""

    parts: list[RequestPart]
    late: list[RequestPart]
    reason: CutReason


def select_batch(
    queue: Queue, table: LatencyTable, max_rows: int, now: float, *, tries_full: bool = False
) -> BatchSelection | None:
    """Take the next batch out of the queue; None if nothing waits.

    With `tries_full` it is a full one if enough samples of one size wait, whatever the table says: a number of rows
    that was slow once, as at warm-up under load, would otherwise never be measured again.
    """
    late: list[RequestPart] = []
    while (head := queue.head()) is not None and head.deadline <= now + _least_s(queue, head, table, max_rows, now):
        queue.remove(head)
        late.append(head)
    if head is None:
        return BatchSelection([], late, "idle") if late else None
    if queue.num_parts == 1:
        queue.remove(head)
        return BatchSelection([head], late, "idle")
    lane = queue.lanes[head.shape.lane]
    own = lane[head.shape.shelf]
    if tries_full and own.rows >= max_rows:
        choice = BatchComposition(max_rows, (own,), table.seconds(max_rows, own.shape.elements), 0.0)
    else:
        choice = choose_composition(lane, head, table, max_rows)
    parts, missed = _take(queue, head, choice, now)
    is_shortened = False
    if limit := _tightest(parts, table, now, choice.seconds):
        parts, is_shortened = _shorten(queue, parts, table, limit - now)
    rows = sum(part.rows for part in parts)
    reason: CutReason
    if is_shortened:
        reason = "deadline"
    elif not queue.rows:
        reason = "idle"
    elif rows >= max_rows or rows < choice.rows:
        reason = "full"
    else:
        reason = "pace" if any(shelf.entries for shelf in choice.shelves) else "shape"
    return BatchSelection(parts, late + missed, reason)


def _least_s(queue: Queue, head: RequestPart, table: LatencyTable, max_rows: int, now: float) -> float:
    """Least seconds to the head's answer: of a full batch if enough rows wait to fill it, else of its own rows.

    A deadline that cannot be met is not computed, and no batch is shortened for it: under overload the most urgent
    parts are always about to be late, and computing them makes the next ones late as well. 0 without recent
    measurements.
    """
    if table.age(head.shape.elements, now) > STALE_S:
        return 0.0
    return table.seconds(max_rows if queue.rows > max_rows else head.rows, head.shape.elements)


def choose_composition(lane: Lane, head: RequestPart, table: LatencyTable, max_rows: int) -> BatchComposition:
    """The rows to take, and the shapes to take them from: the candidate with the least loss.

    Among its stops with nearly the best throughput, the one with fewest rows; with most, if more than a batch waits.
    """
    own = lane[head.shape.shelf]
    if table.is_empty:
        return BatchComposition(max_rows, (own,), 0.0, 0.0)
    waiting = min(max_rows, sum(shelf.rows for shelf in lane.values()))
    worth = {
        sizes: table.seconds_a_row(shelf.shape.elements, waiting, BATCH_OVERHEAD_S) for sizes, shelf in lane.items()
    }
    least = math.inf
    shelves: Sequence[ShapeQueue] = ()
    stops: list[_Stop] = []
    for elements, candidates in _walks(lane, own):
        ends = list(_stops(candidates, head, worth, elements, table, max_rows))
        loss = min(seconds - value for _, seconds, value in ends)
        if not stops or loss < least:
            least, shelves, stops = loss, candidates, ends
    _, seconds, value = next(stop for stop in stops if stop[1] - stop[2] == least)
    enough = AS_GOOD * value / (seconds + BATCH_OVERHEAD_S)
    as_good = [stop for stop in stops if stop[2] / (stop[1] + BATCH_OVERHEAD_S) >= enough]
    rows, seconds, value = as_good[-1 if sum(shelf.rows for shelf in shelves) > max_rows else 0]
    return BatchComposition(rows, shelves, seconds, value)


_Stop = tuple[int, float, float]
"""Rows of a batch, its predicted seconds, and its value."""


def _walks(lane: Lane, own: ShapeQueue) -> Iterator[tuple[int, Sequence[ShapeQueue]]]:
    """Candidates: padded positions of a sample, and the shapes to take from, largest first since they waste least.

    One candidate for each of some largest sizes, from the head's own on; larger samples stay in the queue.
    """
    if len(lane) == 1:
        yield own.shape.elements, (own,)
        return
    descending = sorted(lane.items(), key=lambda item: item[1].shape.elements, reverse=True)
    fixed, least = math.prod(own.shape.lane), own.shape.shelf
    limits = sorted({tuple(map(max, least, sizes)) for sizes in lane}, key=lambda sizes: (math.prod(sizes), sizes))
    if len(limits) > _MOST_TOPS:  # the nearest ones and the largest
        limits = [*limits[: _MOST_TOPS - 1], limits[-1]]
    for tops in limits:
        within = [shelf for sizes, shelf in descending if all(map(operator.le, sizes, tops))]
        yield fixed * math.prod(tops), within


def _stops(
    shelves: Sequence[ShapeQueue],
    head: RequestPart,
    worth: Mapping[tuple[int, ...], float],
    elements: int,
    table: LatencyTable,
    max_rows: int,
) -> Iterator[_Stop]:
    """Where a candidate's batch may end: at each measured number of rows, and at all that wait."""
    own = head.shape.shelf
    rows, value = head.rows, head.rows * worth[own]
    end = max(rows, min(max_rows, sum(shelf.rows for shelf in shelves)))
    ahead = [*(stop for stop in table.grid if rows <= stop < end), end]
    for shelf in shelves:
        more = shelf.rows - head.rows if shelf.shape.shelf == own else shelf.rows
        while ahead and ahead[0] <= rows + more:
            stop = ahead.pop(0)
            yield stop, table.seconds(stop, elements), value + (stop - rows) * worth[shelf.shape.shelf]
        if not ahead:
            return
        rows += more
        value += more * worth[shelf.shape.shelf]


def _take(
    queue: Queue, head: RequestPart, choice: BatchComposition, now: float
) -> tuple[list[RequestPart], list[RequestPart]]:
    """Take the head and the chosen parts out of the queue; and those past their deadline."""
    queue.remove(head)
    parts, left = [head], choice.rows - head.rows
    late: list[RequestPart] = []
    for shelf in choice.shelves:
        for _, _, part in list(shelf.entries):
            if left <= 0:
                return parts, late
            if part.deadline <= now:
                late.append(part)
            elif part.rows <= left:
                parts.append(part)
                left -= part.rows
            else:
                continue
            queue.remove(part)
    return parts, late


def _tightest(parts: list[RequestPart], table: LatencyTable, now: float, seconds: float) -> float | None:
    """The first deadline that the batch would miss and its part could meet in a batch of its own."""
    ends = now + seconds
    broken = [
        part.deadline
        for part in parts
        if part.deadline < ends and part.deadline >= now + table.seconds(part.rows, part.shape.elements)
    ]
    return min(broken) if len(parts) > 1 and broken else None


def _shorten(
    queue: Queue, parts: list[RequestPart], table: LatencyTable, limit_s: float
) -> tuple[list[RequestPart], bool]:
    """Put back parts that make the batch longer than the limit, the least urgent first."""
    head, *others = parts
    others.sort(key=lambda part: (part.urgency, part.sequence))
    kept, rows, elements = [head], head.rows, head.shape.elements
    for index, part in enumerate(others):
        elements = max(elements, part.shape.elements)
        if table.seconds(rows + part.rows, elements) > limit_s:
            for back in others[index:]:
                queue.put_back(back)
            return kept, True
        kept.append(part)
        rows += part.rows
    return kept, False


MEMORY_S = 1.0
"""Observations count for this long at least, and twice as long at most [s]."""


class PeakConcurrency:
    """The most rows in flight together in the last seconds. Times are arguments."""

    def __init__(self) -> None:
        self._since = 0.0
        self._before = 0
        self._now = 0

    @property
    def most(self) -> int:
        """Peak of the rows in flight over the last one to two seconds [rows]."""
        return max(self._before, self._now)

    def see(self, rows: int, now: float) -> None:
        """Record the current number of rows in flight."""
        passed_s = now - self._since
        if passed_s >= MEMORY_S:
            self._before = self._now if passed_s < 2 * MEMORY_S else 0
            self._now, self._since = 0, now
        self._now = max(self._now, rows)


CutReason = Literal["idle", "full", "pace", "shape", "deadline", "delay", "bisect"]
"""Why a batch has no more rows.

- idle: an instance was free and took all that waited
- full: the next request would exceed `max_batch_rows`
- pace: more rows at once are not faster, as measured
- shape: the other waiting samples have other sizes, and padding costs more than it saves, as measured
- deadline: with more rows, one of them would be late
- delay: `max_delay_s` was over before it was full
- bisect: a part of a failed batch, run again to find the failing request
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Executed:
    """One run of an engine.

    `sizes` are those of the padded dimensions. `elements` counts the requested positions of all samples (tokens,
    pixels; 1 for a sample of fixed shape), `padding` the added ones. `queue_s` has the waiting time of each request
    that this run completed; it is empty if a failed batch is bisected. The three times are for assembling the batch,
    the engine, and splitting its outputs.
    """

    instance: int
    rows: int
    requests: int
    reason: CutReason
    sizes: tuple[int, ...]
    elements: int
    padding: int
    queue_s: tuple[float, ...]
    input_s: float
    infer_s: float
    output_s: float
    succeeded: bool
