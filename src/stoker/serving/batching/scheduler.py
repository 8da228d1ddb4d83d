"""What the batcher decides: who is let in, what goes next, what is late. No clock, no threads: times are handed in.

Which of what waits goes into the next batch.

What: the most urgent part goes always. What goes with it is chosen so that least time is lost: a batch's predicted
seconds, with all its padding, less what each of its rows would take in the best batch of its own size (of no more rows
than wait now). So samples share a batch as long as that is faster than apart; and on fixed shapes the same rule finds
how many rows are worth taking at once. If fewer rows get nearly as much done in a second, they answer sooner, unless
more than a batch waits: then that many batches would only cost more threads' turns.
Use when: an instance becomes free.
Costs: microseconds for each shelf; nothing is looked at part by part but what goes.
Does not combine with: models whose answers depend on what shares their batch (an export refuses those).
Source: the least loss instead of the best ratio: Dinkelbach 1967, On Nonlinear Fractional Programming, at a ratio of 1.

How many rows were asked for at the same time lately: whether it can pay to wait for more.

What: a delay is there to fill a batch. Where as much waits, or is being computed, as was ever under way together in the
last seconds, nobody is left who could ask, and an idle instance need not wait its delay out: a lone caller never does,
and four callers wait until the fourth has asked.
Use when: `max_delay_s` is above 0.
Costs: a comparison for each request.
Does not combine with: nothing; a crowd that grows is met with smaller batches for as long as it grows.

What became of a batch: a record for the metrics, one for every time an engine ran.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.artifacts.dtypes import Arrays
from stoker.records import ServiceSettings
from stoker.serving.batching.latency import LatencyTable
from stoker.serving.batching.queue import (
    GONE,
    IDLE,
    STALE_S,
    Arrival,
    Lane,
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
"""One batch in so many is full if enough waits, to measure what that takes."""

_STALE_ANSWERS = 10


@dataclass(frozen=True, slots=True)
class RequestBatch:
    """Parts that an instance shall compute together, padded to `sizes`; `late` are to be refused.

    `elements` are the positions of each padded sample, `taken` the point in time at which the instance took it, and
    `expected_s` what it is predicted to take; 0: nothing was measured.
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
        self._company = PeakConcurrency()
        self._num_cut = 0
        self._standing = Standing(self.queue, self.table, self._busy_until)

    def admit(
        self, owner: Any, inputs: Arrays, *, now: float, deadline: float, priority: int, caller: str, num_bytes: int
    ) -> list[RequestPart]:
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
            RequestPart(owner, index, piece, num_rows, size, shape, caller, now, deadline, urgency, predicted_s)
            for index, (piece, num_rows, size) in enumerate(_pieces(inputs, arrival, self.max_rows))
        ]
        for part in parts:
            self.queue.put(part)
        self._company.see(self._rows_under_way(), now)
        return parts

    def take(self, instance: int, now: float) -> RequestBatch | Wait | None:
        """What an idle instance shall do: compute a batch, wait for one to fill, or (None) wait for anything."""
        self._busy_until[instance], self._busy_rows[instance] = IDLE, 0
        is_delayed = self._settings.max_delay_s > 0 and self.queue.rows < self.max_rows and self._may_grow(now)
        if is_delayed and (until := self._delayed_until()) > now:
            return Wait(until)
        found = select_batch(self.queue, self.table, self.max_rows, now, tries_full=self._num_cut % FULL_EVERY == 0)
        if found is None:
            return None
        self._num_cut += 1
        self._judge(found.late, now)
        reason: CutReason = "delay" if is_delayed and found.reason == "idle" else found.reason
        parts = found.parts
        if not parts:
            return RequestBatch(now, parts, found.late, 0, (), 0, reason)
        sizes = self._shapes.padded([part.shape for part in parts])
        rows = sum(part.rows for part in parts)
        elements = math.prod(parts[0].shape.lane) * math.prod(sizes)
        expected_s = self.table.seconds(rows, elements)
        self._busy_until[instance], self._busy_rows[instance] = now + expected_s, rows
        return RequestBatch(now, parts, found.late, rows, sizes, elements, reason, expected_s)

    def learn(self, batch: RequestBatch, ended: float) -> None:
        """Take in how long a batch took, of which nothing failed."""
        self.table.learn(batch.rows, batch.elements, ended - batch.taken, ended)
        self._judge(batch.parts, ended)

    def lose(self, instance: int) -> None:
        """Count on an instance no more: it takes no further batches."""
        self._busy_until[instance], self._busy_rows[instance] = GONE, 0

    def withdraw(self, part: RequestPart) -> None:
        """Take a part out, if it still waits."""
        self.queue.remove(part)

    def expire(self, now: float) -> tuple[list[RequestPart], float]:
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

    def _judge(self, parts: list[RequestPart], ended: float) -> None:
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


AS_GOOD = 0.97
"""What gets this share of the most done in a second is as good: of such numbers of rows the least is taken, so that the
next batch is already waiting when answers lead to questions; with more than a batch waiting anyway, the most."""

BATCH_OVERHEAD_S = 0.5e-3
"""What a batch costs beside its run: threads that hand over, a cut, a delivery. The table has an engine's seconds
alone, by which one row at a time may look as good as many."""

_MOST_TOPS = 6


@dataclass(frozen=True, slots=True)
class BatchComposition:
    """What to take beside the head: up to `rows` in all, from `shelves` in this order.

    `seconds` are what the batch is predicted to take, `value` what its rows would take in the best batches of their own
    sizes; the difference is lost.
    """

    rows: int
    shelves: Sequence[ShapeQueue]
    seconds: float
    value: float


@dataclass(frozen=True, slots=True)
class BatchSelection:
    """Parts that go together, and those whose deadline passed while they waited; all have left the queue."""

    parts: list[RequestPart]
    late: list[RequestPart]
    reason: CutReason


def select_batch(
    queue: Queue, table: LatencyTable, max_rows: int, now: float, *, tries_full: bool = False
) -> BatchSelection | None:
    """Take the next batch out of the queue; None if nothing waits.

    With `tries_full` it is a full one if there are samples of one size for it, whatever the table says: a number of
    rows that was slow once, as at warm-up beside other work, would else never be measured again.
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
    reason = _reason(queue, parts, choice, max_rows, is_shortened=is_shortened)
    return BatchSelection(parts, late + missed, reason)


def _least_s(queue: Queue, head: RequestPart, table: LatencyTable, max_rows: int, now: float) -> float:
    """Seconds to the head's answer at least: of a full batch where others wait to fill it, else of its own.

    What cannot be met is not computed, nor are batches cut short for it: under overload the most urgent are always
    about to be late, and answering them in vain makes the next ones late as well. 0 where nothing was measured lately.
    """
    if table.age(head.shape.elements, now) > STALE_S:
        return 0.0
    return table.seconds(max_rows if queue.rows > max_rows else head.rows, head.shape.elements)


def choose_composition(lane: Lane, head: RequestPart, table: LatencyTable, max_rows: int) -> BatchComposition:
    """How much to take, and from which shelves."""
    own = lane[head.shape.shelf]
    if table.is_empty:
        return BatchComposition(max_rows, (own,), 0.0, 0.0)
    waiting = min(max_rows, sum(shelf.rows for shelf in lane.values()))
    worth = {
        sizes: table.seconds_a_row(shelf.shape.elements, waiting, BATCH_OVERHEAD_S) for sizes, shelf in lane.items()
    }
    best: tuple[float, Sequence[ShapeQueue], list[_Stop]] | None = None
    for elements, shelves in _walks(lane, own):
        stops = list(_stops(shelves, head, worth, elements, table, max_rows))
        loss = min(seconds - value for _, seconds, value in stops)
        if best is None or loss < best[0]:
            best = loss, shelves, stops
    assert best is not None  # the head's own shelf is always walked
    return _chosen(*best, max_rows)


_Stop = tuple[int, float, float]
"""Rows of a batch, its predicted seconds, and its value."""


def _chosen(loss: float, shelves: Sequence[ShapeQueue], stops: Sequence[_Stop], max_rows: int) -> BatchComposition:
    """Of the stops of the best walk that get nearly as much done in a second as the best, the one of fewest rows.

    Where more waits than a batch may have, the one of most rows.
    """
    _, seconds, value = next(stop for stop in stops if stop[1] - stop[2] == loss)
    enough = AS_GOOD * value / (seconds + BATCH_OVERHEAD_S)
    as_good = [stop for stop in stops if stop[2] / (stop[1] + BATCH_OVERHEAD_S) >= enough]
    rows, seconds, value = as_good[-1 if sum(shelf.rows for shelf in shelves) > max_rows else 0]
    return BatchComposition(rows, shelves, seconds, value)


def _walks(lane: Lane, own: ShapeQueue) -> Iterator[tuple[int, Sequence[ShapeQueue]]]:
    """Shelves to take from, the largest first since they waste least, and the positions their samples are padded to.

    One walk for each of some sizes, from the head's own to the largest: what is larger stays behind.
    """
    if len(lane) == 1:
        yield own.shape.elements, (own,)
        return
    descending = sorted(lane.items(), key=lambda item: item[1].shape.elements, reverse=True)
    fixed = math.prod(own.shape.lane)
    for tops in _tops(lane, own):
        within = [shelf for sizes, shelf in descending if all(map(operator.le, sizes, tops))]
        yield fixed * math.prod(tops), within


def _tops(lane: Lane, own: ShapeQueue) -> list[tuple[int, ...]]:
    """Sizes up to which samples may be taken: those of the head, and some that are larger."""
    least = own.shape.shelf
    tops = sorted({tuple(map(max, least, sizes)) for sizes in lane}, key=lambda sizes: (math.prod(sizes), sizes))
    if len(tops) > _MOST_TOPS:  # the nearest ones and the largest
        return [*tops[: _MOST_TOPS - 1], tops[-1]]
    return tops


def _stops(
    shelves: Sequence[ShapeQueue],
    head: RequestPart,
    worth: Mapping[tuple[int, ...], float],
    elements: int,
    table: LatencyTable,
    max_rows: int,
) -> Iterator[_Stop]:
    """Where a walk may end: at each number of rows that is measured, and with all that it finds."""
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
    """Take the head and what the choice says out of the queue; what is past its deadline apart."""
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
    """The first deadline that the batch would break, and that its part could keep in a batch of its own."""
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
    """Put back what would make the batch take longer than the limit, the head and the most urgent last."""
    head, *others = parts
    others.sort(key=lambda part: (part.urgency, part.sequence))
    kept, rows, elements = [head], head.rows, head.shape.elements
    for at, part in enumerate(others):
        elements = max(elements, part.shape.elements)
        if table.seconds(rows + part.rows, elements) > limit_s:
            for back in others[at:]:
                queue.put_back(back)
            return kept, True
        kept.append(part)
        rows += part.rows
    return kept, False


def _reason(
    queue: Queue, parts: list[RequestPart], choice: BatchComposition, max_rows: int, *, is_shortened: bool
) -> CutReason:
    rows = sum(part.rows for part in parts)
    if is_shortened:
        return "deadline"
    if not queue.rows:
        return "idle"
    if rows >= max_rows or rows < choice.rows:
        return "full"
    is_more_within = any(shelf.entries for shelf in choice.shelves)
    return "pace" if is_more_within else "shape"


MEMORY_S = 1.0
"""What was seen is forgotten after this long at the earliest, and after twice as long at the latest."""


class PeakConcurrency:
    """The most rows that were under way together lately. Times are handed in."""

    def __init__(self) -> None:
        self._since = 0.0
        self._before = 0
        self._now = 0

    @property
    def most(self) -> int:
        """The most rows under way at once, of the last one to two seconds."""
        return max(self._before, self._now)

    def see(self, rows: int, now: float) -> None:
        """Take in that so many rows are under way."""
        passed_s = now - self._since
        if passed_s >= MEMORY_S:
            self._before = self._now if passed_s < 2 * MEMORY_S else 0
            self._now, self._since = 0, now
        self._now = max(self._now, rows)


CutReason = Literal["idle", "full", "pace", "shape", "deadline", "delay", "bisect"]
"""Why a batch ended where it did.

- idle: an instance was free and took all that waited
- full: the next request would have gone beyond `max_batch_rows`
- pace: more rows at once were measured to be no faster
- shape: what still waited has other sizes, and padding to them was measured to cost more than it saves
- deadline: with more rows, one of them would have been late
- delay: `max_delay_s` was over before it was full
- bisect: a part of a batch that failed, run again to find the request at fault
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Executed:
    """One run of an engine.

    `sizes` are those that the padded dimensions had. `elements` counts the positions of all samples (tokens, pixels;
    1 for a sample of fixed shape) that were asked for, `padding` those that were added to them. `queue_s` has the
    seconds that each request which this run ended had waited: none where a failed batch is bisected, and run again.
    The three times are those of putting the batch together, of the engine, and of taking its outputs apart.
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
