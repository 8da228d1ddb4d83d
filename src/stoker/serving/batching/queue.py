"""The queue of requests: its order (`Queue`), which samples may share a batch (`Shapes`), and admission (`refusal`).

What: earliest deadline first within priority classes. A part's urgency is a fixed point in time: its deadline, or
`AGEING_S` after its arrival if that is sooner, plus `AGEING_S` for each class below the first. Whatever arrives after
that time is less urgent; so nothing starves. A request that would be late is refused on arrival instead of after its
deadline: its finish is predicted from the latency table (running batches, the queue and itself, over all instances),
with a margin from earlier errors, tracked as TCP tracks round trips. An idle instance takes what it can finish in time.
Use when: always; predictions are for requests with a deadline only.
Costs: a binary search and a list insertion per part; for a deadline some microseconds per shape in the queue.
Does not combine with: a deadline together with later, more urgent requests; the answer is then late.
Source: earliest deadline first: Liu and Layland 1973, Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
Environment, section 7 (ageing by a fixed offset, which never reorders, is ours); the margin: Jacobson 1988, Congestion
Avoidance and Control, appendix A (mean and mean deviation, 1/8 and 1/4).

`LatencyTable` predicts the seconds of a batch by rows and size: measured at a grid of rows (1, 2, 4, … up to the limit
of a batch) and of sizes (powers of two of a sample's positions), linear in between, updated by every batch. `pace`
multiplies all cells, so that a change of the whole machine (other load, a lower clock) seen in one cell applies to all.
A lookup takes microseconds; a model whose time depends on the values of its inputs is predicted badly.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.artifacts.dtypes import Arrays
from stoker.records import BATCH, Manifest, ServiceSettings
from stoker.serving.refusals import DeadlineUnreachable, QueueFull, Refusal, TooLarge
from stoker.units import format_bytes, format_seconds

AGEING_S = 1.0
"""Waiting time after which a request is as urgent as a new one of the next higher class [s]."""

DEFAULT_CLASS, LAST_CLASS = 2, 8
"""The class of priority 0, and the last one; higher numbers count as the last."""


@dataclass(slots=True, eq=False)
class RequestPart:
    """Rows of a request that are computed together: all of them, unless they exceed a batch.

    `owner` is the request, opaque here. Times are points on the batcher's clock [s]. `predicted_s` is the time to its
    answer as predicted on arrival; 0: not predicted.
    """

    owner: Any
    index: int
    inputs: Arrays
    rows: int
    num_bytes: int
    shape: SampleShape
    caller: str
    arrived: float
    deadline: float
    urgency: float
    predicted_s: float = 0.0
    sequence: int = -1


def urgency_of(priority: int, arrived: float, deadline: float) -> float:
    """Point in time [s] after which no new arrival can be ahead of a part of this priority."""
    level = min(priority, LAST_CLASS) if priority > 0 else DEFAULT_CLASS
    return min(deadline, arrived + AGEING_S) + (level - 1) * AGEING_S


@dataclass(slots=True)
class ShapeQueue:
    """Parts of one shape, the most urgent first."""

    shape: SampleShape
    entries: list[tuple[float, int, RequestPart]] = field(default_factory=list)
    rows: int = 0


Lane = dict[tuple[int, ...], ShapeQueue]
"""Queues whose samples can share a batch, by their rounded sizes (`SampleShape.shelf`)."""


class Queue:
    """Waiting parts, by shape; counted by rows, bytes and caller."""

    def __init__(self) -> None:
        self.num_parts = 0
        self.rows = 0
        self.num_bytes = 0
        self.rows_of: Counter[str] = Counter()
        self.bytes_of: Counter[str] = Counter()
        self.lanes: dict[tuple[int, ...], Lane] = {}
        self._sequence = itertools.count()

    def put(self, part: RequestPart) -> None:
        """Add a new part."""
        part.sequence = next(self._sequence)
        self.put_back(part)

    def put_back(self, part: RequestPart) -> None:
        """Add a part that was removed, at its old place."""
        shape = part.shape
        lane = self.lanes.setdefault(shape.lane, {})
        shelf = lane.get(shape.shelf)
        if shelf is None:
            shelf = lane[shape.shelf] = ShapeQueue(shape)
        bisect.insort(shelf.entries, (part.urgency, part.sequence, part))
        shelf.rows += part.rows
        self._count(part, 1)

    def remove(self, part: RequestPart) -> bool:
        """Remove a part; False if it is not in the queue."""
        lane = self.lanes.get(part.shape.lane, {})
        shelf = lane.get(part.shape.shelf)
        if shelf is None:
            return False
        index = bisect.bisect_left(shelf.entries, (part.urgency, part.sequence))
        if index == len(shelf.entries) or shelf.entries[index][2] is not part:
            return False
        del shelf.entries[index]
        shelf.rows -= part.rows
        if not shelf.entries:
            del lane[part.shape.shelf]
            if not lane:
                del self.lanes[part.shape.lane]
        self._count(part, -1)
        return True

    def head(self) -> RequestPart | None:
        """The most urgent part of all."""
        firsts = [shelf.entries[0] for lane in self.lanes.values() for shelf in lane.values()]
        return min(firsts)[2] if firsts else None

    def parts(self) -> Iterator[RequestPart]:
        """All parts, shape by shape."""
        for shelf in self.shelves():
            for entry in shelf.entries:
                yield entry[2]

    def shelves(self) -> Iterator[ShapeQueue]:
        """The queues of all shapes."""
        for lane in self.lanes.values():
            yield from lane.values()

    def _count(self, part: RequestPart, sign: int) -> None:
        self.num_parts += sign
        self.rows += sign * part.rows
        self.num_bytes += sign * part.num_bytes
        if part.caller:
            self.rows_of[part.caller] += sign * part.rows
            self.bytes_of[part.caller] += sign * part.num_bytes
            if sign < 0 and not self.rows_of[part.caller]:
                del self.rows_of[part.caller], self.bytes_of[part.caller]


STEPS_PER_DOUBLING = 4
"""Steps between two powers of two to which sizes are rounded, if the user gives no buckets."""

_MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class SampleShape:
    """Sizes of a sample's named dimensions.

    `lane` has the dimensions that cannot be padded, which must be equal in a batch. `sizes` are those of the others,
    and `shelf` the same rounded up, by which the queue is sorted. `elements` is the number of positions of a sample of
    that shelf.
    """

    lane: tuple[int, ...]
    sizes: tuple[int, ...]
    shelf: tuple[int, ...]
    elements: int


class Shapes:
    """Reads the rows and the sample shape of requests to one model.

    A dimension can be padded if every input that has it gives a `pad` value. A model without a batch dimension takes
    one request at a time, which counts as a row.
    """

    def __init__(self, manifest: Manifest, buckets: tuple[int, ...] = ()) -> None:
        self.is_batched = manifest.is_batched
        can_pad: dict[str, bool] = {}
        places: dict[str, tuple[str, int]] = {}  # an input and axis with each named dimension
        for spec in manifest.inputs:
            for axis, dim in enumerate(spec.shape):
                if isinstance(dim, str) and dim != BATCH:
                    can_pad[dim] = can_pad.get(dim, True) and spec.pad is not None
                    places.setdefault(dim, (spec.name, axis))
        self.padded_dims = tuple(dim for dim in can_pad if can_pad[dim] and self.is_batched)
        self._buckets = tuple(sorted(buckets))
        self._highs = {dim.name: dim.high for dim in manifest.dims if dim.high is not None}
        self._batch = manifest.inputs[0].name
        self._lane_places = [place for dim, place in places.items() if dim not in self.padded_dims]
        self._size_places = [places[dim] for dim in self.padded_dims]
        self._known: dict[tuple[int, ...], SampleShape] = {}

    def measure(self, inputs: Arrays) -> tuple[int, SampleShape]:
        """The rows of a request, and the shape of its samples; inputs must fit the manifest (not checked)."""
        rows = inputs[self._batch].shape[0] if self.is_batched else 1
        sizes = tuple([inputs[name].shape[axis] for name, axis in self._size_places])
        lane = tuple([inputs[name].shape[axis] for name, axis in self._lane_places])
        shape = self._known.get(lane + sizes)
        if shape is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            shape = self._known[lane + sizes] = self.sample(lane, sizes)
        return rows, shape

    def sample(self, lane: tuple[int, ...], sizes: tuple[int, ...]) -> SampleShape:
        """The shape of samples with these sizes."""
        shelf = []
        for dim, size in zip(self.padded_dims, sizes, strict=True):
            rounded = round_up(size)
            if self._buckets:  # beyond the largest, the size itself
                rounded = next((bucket for bucket in self._buckets if bucket >= size), size)
            shelf.append(max(size, min(rounded, self._highs.get(dim, rounded))))
        return SampleShape(lane, sizes, tuple(shelf), math.prod(lane) * math.prod(shelf))

    def padded(self, shapes: list[SampleShape]) -> tuple[int, ...]:
        """Sizes to which a batch of these samples is padded: their bucket, or the largest among them."""
        if not self.padded_dims:
            return ()
        if self._buckets:
            return tuple(max(each) for each in zip(*(shape.shelf for shape in shapes), strict=True))
        return tuple(max(each) for each in zip(*(shape.sizes for shape in shapes), strict=True))


def round_up(size: int) -> int:
    """Next size [elements] on a scale with `STEPS_PER_DOUBLING` steps between powers of two.

    >>> [round_up(size) for size in (1, 7, 9, 33, 64, 65)]
    [1, 7, 10, 40, 64, 80]
    """
    if size <= 2 * STEPS_PER_DOUBLING:
        return size
    step = (1 << (size - 1).bit_length() - 1) // STEPS_PER_DOUBLING
    return -(-size // step) * step


STALE_S = 1.0
"""Age at which a measurement is too old to refuse a request for lateness [s], or ten times the answer's time if that is
longer; then one request is admitted as a new measurement."""

IDLE, GONE = -math.inf, math.inf
"""In place of the time until which an instance is busy: it is idle, or takes no more batches."""

_MEAN_RATE, _DEVIATION_RATE, _DEVIATIONS = 1 / 8, 1 / 4, 2.0
_MOST_OFF = 2.0


class Arrival(NamedTuple):
    """An arriving request; `deadline` is a point on the batcher's clock, infinite for none."""

    rows: int
    num_bytes: int
    shape: SampleShape
    caller: str
    deadline: float


class Margin:
    """Mean and mean deviation of how much later than predicted answers came [s]."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        self.deviation_s = 0.0

    def allowed_s(self, predicted_s: float) -> float:
        """Time [s] that few answers with this prediction exceed."""
        return max(predicted_s, predicted_s + self.mean_s + _DEVIATIONS * self.deviation_s)

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """Learn from an answer; an error counts as at most `_MOST_OFF` times the prediction."""
        error = min(actual_s - predicted_s, _MOST_OFF * predicted_s) - self.mean_s
        self.mean_s += _MEAN_RATE * error
        self.deviation_s += _DEVIATION_RATE * (abs(error) - self.deviation_s)


@dataclass(frozen=True, slots=True)
class Standing:
    """The current work: the queue, the times of batches, and when each instance is predicted to be idle."""

    queue: Queue
    table: LatencyTable
    busy_until: Sequence[float]

    @property
    def is_idle(self) -> bool:
        """Whether an instance would take a new request at once."""
        return not self.queue.num_parts and min(self.busy_until) == IDLE

    def seconds_to_empty(self, now: float) -> float:
        """Seconds until all running and queued work is done."""
        return self.seconds_to_answer(0, None, now)

    def seconds_to_answer(self, rows: int, shape: SampleShape | None, now: float) -> float:
        """Seconds until all running and queued work and `rows` more are done."""
        busy_s = [max(0.0, until - now) for until in self.busy_until if until < GONE] or [GONE]
        own = self.table.seconds(rows, shape.elements) if shape else 0.0
        place = (shape.lane, shape.shelf) if shape else None
        work = 0.0
        for shelf in self.queue.shelves():
            is_own = place == (shelf.shape.lane, shelf.shape.shelf)
            work += self.table.seconds_for(shelf.rows + rows if is_own else shelf.rows, shelf.shape.elements)
            if is_own:
                rows = 0
        if rows and shape:
            work += self.table.seconds_for(rows, shape.elements)
        return max(min(busy_s) + own, (sum(busy_s) + work) / len(busy_s))


def refusal(
    arrival: Arrival, standing: Standing, settings: ServiceSettings, *, now: float, allowed_s: float
) -> Refusal | None:
    """Why a request is not admitted; None if it is.

    `allowed_s` is the predicted time to its answer including the margin; 0: lateness is not judged.
    """
    if arrival.rows > settings.max_queue_rows:
        return TooLarge(
            f"the request has {arrival.rows:,} rows, and the queue holds {settings.max_queue_rows:,} at most; "
            "send it in parts, or raise max_queue_rows"
        )
    if arrival.num_bytes > settings.max_queue_bytes:
        return TooLarge(
            f"the request has {format_bytes(arrival.num_bytes)}, and the queue holds "
            f"{format_bytes(settings.max_queue_bytes)} at most; send it in parts, or raise max_queue_bytes"
        )
    if problem := _full(arrival, standing.queue, settings):
        to_empty_s = standing.seconds_to_empty(now)
        if not to_empty_s:  # nothing was measured yet
            return QueueFull(problem)
        when = f"; it is predicted to be empty in {format_seconds(to_empty_s)}"
        return QueueFull(problem + when, retry_after_s=to_empty_s)
    left_s = max(arrival.deadline - now, 0.0)
    if allowed_s and allowed_s > left_s:
        return DeadlineUnreachable(
            f"the answer would be late: it is predicted in {format_seconds(allowed_s)} ({standing.queue.rows:,} rows "
            f"wait), and its deadline is in {format_seconds(left_s)}",
            retry_after_s=allowed_s - left_s,
        )
    return None


def _full(arrival: Arrival, queue: Queue, settings: ServiceSettings) -> str:
    """Which bound of the queue, or of the caller's share of it, the request would exceed; empty if none."""
    if queue.rows + arrival.rows > settings.max_queue_rows:
        return (
            f"the queue is full: {queue.rows:,} rows wait, and with this request's {arrival.rows:,} they would be more "
            f"than max_queue_rows, {settings.max_queue_rows:,}"
        )
    if queue.num_bytes + arrival.num_bytes > settings.max_queue_bytes:
        return (
            f"the queue is full: {format_bytes(queue.num_bytes)} wait, and with this request's "
            f"{format_bytes(arrival.num_bytes)} they would be more than max_queue_bytes, "
            f"{format_bytes(settings.max_queue_bytes)}"
        )
    share, caller = settings.max_caller_share, arrival.caller
    if not caller or share >= 1.0:
        return ""
    most_rows, most_bytes = math.ceil(share * settings.max_queue_rows), math.ceil(share * settings.max_queue_bytes)
    rows, num_bytes = queue.rows_of[caller] + arrival.rows, queue.bytes_of[caller] + arrival.num_bytes
    if rows <= most_rows and num_bytes <= most_bytes:
        return ""
    return (
        f"the share of {caller!r} in the queue is full: with this request it would hold {rows:,} rows and "
        f"{format_bytes(num_bytes)}, and may hold {most_rows:,} rows and {format_bytes(most_bytes)}"
    )


RATE = 0.1
"""Weight of a new measurement in its cell; the first ones of a cell weigh more."""

PACE_RATE = 0.2
"""Weight of a new measurement for all cells at once."""

FIXED_SHARE = 0.5
"""Share of a batch's time assumed to be independent of its rows, until a second number of rows was measured."""

_MOST_RATIO = 3.0
_LEAST_S = 1e-7


@dataclass(slots=True)
class _Column:
    """For one size: seconds at each number of rows in the grid, their weights, and the time of the last measurement."""

    seconds: list[float]
    weights: list[float]
    measured_at: float = field(default=0.0)


class LatencyTable:
    """Predicted seconds of a batch, by its rows and the positions of each of its (padded) samples."""

    def __init__(self, max_rows: int) -> None:
        self.grid = row_grid(max_rows)
        self.pace = 1.0
        self._columns: dict[int, _Column] = {}
        self._cache: dict[int, list[float]] = {}
        self._best: dict[tuple[int, int, float], float] = {}

    @property
    def is_empty(self) -> bool:
        """Whether there is no measurement yet."""
        return not self._columns

    def seconds(self, rows: int, elements: int) -> float:
        """Predicted time of a batch [s]; 0 without measurements."""
        if not self._columns:
            return 0.0
        column = self._column(elements)
        grid = self.grid
        if rows >= grid[-1]:
            return self.pace * column[-1] * rows / grid[-1]
        index = bisect.bisect_right(grid, rows) - 1
        low, high = grid[index], grid[index + 1]
        return self.pace * (column[index] + (column[index + 1] - column[index]) * (rows - low) / (high - low))

    def seconds_a_row(self, elements: int, most_rows: int | None = None, overhead_s: float = 0.0) -> float:
        """Time per row [s] in a batch of the fastest number of rows, at most `most_rows`; 0 without measurements.

        `overhead_s` is a batch's further cost, which its rows share.
        """
        if not self._columns:
            return 0.0
        stops = bisect.bisect_right(self.grid, most_rows) if most_rows else len(self.grid)
        best = self._best.get((elements, stops, overhead_s))
        if best is None:
            column = zip(self._column(elements), self.grid[:stops], strict=False)
            best = min((self.pace * seconds + overhead_s) / rows for seconds, rows in column)
            self._best[elements, stops, overhead_s] = best
        return best

    def seconds_for(self, rows: int, elements: int) -> float:
        """Time [s] of these rows in one batch, or in several of the fastest size."""
        if rows < self.grid[-1]:
            return min(self.seconds(rows, elements), rows * self.seconds(1, elements))
        return rows * self.seconds_a_row(elements)

    def age(self, elements: int, now: float) -> float:
        """Time since a batch of about this size was measured [s]; infinite if none was."""
        measured = [self._columns[size].measured_at for size in _around(elements) if size in self._columns]
        return now - max(measured) if measured else float("inf")

    def touch(self, elements: int, now: float) -> None:
        """Mark a size as measured now: a batch of it is on its way."""
        for size in _around(elements):
            if size in self._columns:
                self._columns[size].measured_at = now

    def learn(self, rows: int, elements: int, seconds: float, now: float) -> None:
        """Update the table with a batch's time."""
        corners = self._corners(rows, elements)
        seconds = max(seconds, _LEAST_S)
        for size in {size for size, _, _ in corners}:
            if size not in self._columns:
                if self._columns:  # as the nearest column
                    guess = list(self._column(size))
                else:  # in proportion to this batch
                    base = seconds * (size / elements)
                    guess = [base * (FIXED_SHARE + (1 - FIXED_SHARE) * each / rows) for each in self.grid]
                self._columns[size] = _Column(guess, [0.0] * len(self.grid))
            self._columns[size].measured_at = now
        self._cache.clear()
        ratio = seconds / self.seconds(rows, elements)
        if all(self._columns[size].weights[index] >= 1.0 for size, index, _ in corners):
            ratio = min(max(ratio, 1 / _MOST_RATIO), _MOST_RATIO)
            self.pace *= ratio**PACE_RATE
        whole = sum(share * share for _, _, share in corners)
        for size, index, share in corners:
            column = self._columns[size]
            rate = max(RATE, 1.0 / (1.0 + column.weights[index]))
            column.seconds[index] *= ratio ** (rate * share / whole)
            column.weights[index] += share
        self._cache.clear()
        self._best.clear()

    def _corners(self, rows: int, elements: int) -> list[tuple[int, int, float]]:
        """The cells around a point (size, index in the grid of rows) with their shares, which add up to one."""
        low, high = _around(elements)
        upper = (elements - low) / (high - low) if high > low else 0.0
        index = min(bisect.bisect_right(self.grid, rows) - 1, len(self.grid) - 1)
        beyond = 0.0
        if index + 1 < len(self.grid):
            beyond = (rows - self.grid[index]) / (self.grid[index + 1] - self.grid[index])
        shares = [
            (low, index, (1 - upper) * (1 - beyond)),
            (low, index + 1, (1 - upper) * beyond),
            (high, index, upper * (1 - beyond)),
            (high, index + 1, upper * beyond),
        ]
        return [corner for corner in shares if corner[2] > 0.0]

    def _column(self, elements: int) -> list[float]:
        """Seconds at the grid of rows for any size: between two columns, or in proportion to the nearest."""
        column = self._cache.get(elements)
        if column is not None:
            return column
        low, high = _around(elements)
        below, above = self._columns.get(low), self._columns.get(high)
        if below is not None and above is not None:
            share = (elements - low) / (high - low) if high > low else 0.0
            column = [a + (b - a) * share for a, b in zip(below.seconds, above.seconds, strict=True)]
        else:
            nearest = min(self._columns, key=lambda size: max(size / elements, elements / size))
            column = [value * elements / nearest for value in self._columns[nearest].seconds]
        self._cache[elements] = column
        return column


def row_grid(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that are measured: powers of two, and the limit of a batch.

    >>> row_grid(24)
    (1, 2, 4, 8, 16, 24)
    """
    powers = [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows]
    return (*powers, max_rows)


def _around(elements: int) -> tuple[int, int]:
    """The powers of two on both sides of a size; equal if the size is one."""
    high = 1 << max(0, elements - 1).bit_length()
    return (high, high) if high == elements else (high // 2, high)
