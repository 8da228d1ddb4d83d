"""What waits: parts of requests, the most urgent first, counted by rows, bytes and caller.

What: earliest deadline first inside classes of priority. A part's urgency is a point in time that never changes: its
deadline, or `AGEING_S` after it came if that is sooner, and `AGEING_S` later for each class below the first.
Whatever comes after that point in time lies behind it, however urgent; so nothing starves.
Costs: a binary search and a move in a list for every part; the first of a queue is found among its shapes.
Source: earliest deadline first: Liu and Layland 1973, Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
Environment, section 7; ageing by a fixed offset, so that no order is ever computed again, is ours.

Which samples may share a batch: sizes of named dimensions, and what they are padded to.

Whether a request is let in: its predicted finish against its deadline, the queue's bounds, and its caller's share.

What: a request that would be late is refused when it comes, at no cost, instead of when its deadline has passed. Its
finish is predicted from the table of measured seconds: what runs, what waits, and itself, over all instances. How far
such predictions were off is tracked as TCP tracks round trips, and a deadline must be farther away than that; but an
idle instance takes whatever it can finish in time.
Use when: a request comes with a deadline, or the queue may be full.
Costs: some microseconds for each shelf of the queue, for requests with a deadline alone.
Does not combine with: priorities, as far as a more urgent request may still come in ahead; then the answer is late.
Source: the margin: Jacobson 1988, Congestion Avoidance and Control, appendix A (mean and mean deviation, 1/8 and 1/4).
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.artifacts.dtypes import Arrays
from stoker.records import BATCH, Manifest, ServiceSettings
from stoker.serving.batching.latency import LatencyTable
from stoker.serving.refusals import DeadlineUnreachable, QueueFull, Refusal, TooLarge
from stoker.units import format_bytes, format_seconds

AGEING_S = 1.0
"""After so long a request is as urgent as a new one of the next higher class."""

DEFAULT_CLASS, LAST_CLASS = 2, 8
"""The class of priority 0, and the last one: a higher number counts as this."""


@dataclass(slots=True, eq=False)
class RequestPart:
    """Rows of a request that are computed together: all of them, unless they are more than a batch may have.

    `owner` is whoever asked, and means nothing here. Times are points on the batcher's clock [s].
    `predicted_s` is how long its answer was predicted to take when it came; 0: not predicted.
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
    """The point in time from which on nothing that comes can be ahead of a part of this priority."""
    level = min(priority, LAST_CLASS) if priority > 0 else DEFAULT_CLASS
    return min(deadline, arrived + AGEING_S) + (level - 1) * AGEING_S


@dataclass(slots=True)
class ShapeQueue:
    """Parts of one shape, the most urgent first."""

    shape: SampleShape
    entries: list[tuple[float, int, RequestPart]] = field(default_factory=list)
    rows: int = 0


Lane = dict[tuple[int, ...], ShapeQueue]
"""Shelves whose samples can share a batch, by the sizes they are rounded up to."""


class Queue:
    """Parts that wait, on shelves by their shape."""

    def __init__(self) -> None:
        self.num_parts = 0
        self.rows = 0
        self.num_bytes = 0
        self.rows_of: Counter[str] = Counter()
        self.bytes_of: Counter[str] = Counter()
        self.lanes: dict[tuple[int, ...], Lane] = {}
        self._sequence = itertools.count()

    def put(self, part: RequestPart) -> None:
        """Take in a part."""
        part.sequence = next(self._sequence)
        self.put_back(part)

    def put_back(self, part: RequestPart) -> None:
        """Take in a part that was here before, at its old place."""
        shape = part.shape
        lane = self.lanes.setdefault(shape.lane, {})
        shelf = lane.get(shape.shelf)
        if shelf is None:
            shelf = lane[shape.shelf] = ShapeQueue(shape)
        bisect.insort(shelf.entries, (part.urgency, part.sequence, part))
        shelf.rows += part.rows
        self._count(part, 1)

    def remove(self, part: RequestPart) -> bool:
        """Take out a part, wherever it stands; False if it is not here."""
        lane = self.lanes.get(part.shape.lane, {})
        shelf = lane.get(part.shape.shelf)
        if shelf is None:
            return False
        at = bisect.bisect_left(shelf.entries, (part.urgency, part.sequence))
        if at == len(shelf.entries) or shelf.entries[at][2] is not part:
            return False
        del shelf.entries[at]
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
        """All that wait, shelf by shelf."""
        for lane in self.lanes.values():
            for shelf in lane.values():
                for entry in shelf.entries:
                    yield entry[2]

    def shelves(self) -> Iterator[ShapeQueue]:
        """All shelves."""
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
"""Without buckets of the user's, sizes are told apart in so many steps between a power of two and the next."""

_MOST_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class SampleShape:
    """Sizes of a sample's named dimensions.

    Samples of one `lane` can share a batch: those dimensions cannot be padded. `sizes` are those of the others, and
    `shelf` the same rounded up, by which what waits is sorted. `elements` is how many positions a sample of such a
    shelf has.
    """

    lane: tuple[int, ...]
    sizes: tuple[int, ...]
    shelf: tuple[int, ...]
    elements: int


class Shapes:
    """Reads the rows and the sample shape of requests to one model.

    A dimension can be padded if every input that has it says with what (`pad`). A model without a batch dimension
    takes one request at a time, each of which counts as a row.
    """

    def __init__(self, manifest: Manifest, buckets: tuple[int, ...] = ()) -> None:
        self.is_batched = manifest.is_batched
        self.padded_dims = _padded_dims(manifest)
        self._buckets = tuple(sorted(buckets))
        self._highs = {dim.name: dim.high for dim in manifest.dims if dim.high is not None}
        self._batch = manifest.inputs[0].name
        places = _first_places(manifest)
        self._lane_places = [place for dim, place in places.items() if dim not in self.padded_dims]
        self._size_places = [places[dim] for dim in self.padded_dims]
        self._known: dict[tuple[int, ...], SampleShape] = {}

    def measure(self, inputs: Arrays) -> tuple[int, SampleShape]:
        """The rows of a request, and the shape of its samples; that inputs fit the manifest is not checked."""
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
        """The shape of samples with such sizes."""
        shelf = tuple(self._shelf(dim, size) for dim, size in zip(self.padded_dims, sizes, strict=True))
        return SampleShape(lane, sizes, shelf, math.prod(lane) * math.prod(shelf))

    def padded(self, shapes: list[SampleShape]) -> tuple[int, ...]:
        """What the dimensions of a batch of such samples are padded to: their bucket, or the largest among them."""
        if not self.padded_dims:
            return ()
        if self._buckets:
            return tuple(max(each) for each in zip(*(shape.shelf for shape in shapes), strict=True))
        return tuple(max(each) for each in zip(*(shape.sizes for shape in shapes), strict=True))

    def _shelf(self, dim: str, size: int) -> int:
        rounded = _next_bucket(size, self._buckets) if self._buckets else round_up(size)
        return max(size, min(rounded, self._highs.get(dim, rounded)))


def round_up(size: int) -> int:
    """The next size of a ladder with `STEPS_PER_DOUBLING` steps between powers of two.

    >>> [round_up(size) for size in (1, 7, 9, 33, 64, 65)]
    [1, 7, 10, 40, 64, 80]
    """
    if size <= 2 * STEPS_PER_DOUBLING:
        return size
    step = (1 << (size - 1).bit_length() - 1) // STEPS_PER_DOUBLING
    return -(-size // step) * step


def _next_bucket(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds it; beyond the largest, the size itself."""
    index = bisect.bisect_left(buckets, size)
    return buckets[index] if index < len(buckets) else size


def _padded_dims(manifest: Manifest) -> tuple[str, ...]:
    carriers: dict[str, list[bool]] = {}
    for spec in manifest.inputs:
        for dim in spec.shape:
            if isinstance(dim, str) and dim != BATCH:
                carriers.setdefault(dim, []).append(spec.pad is not None)
    return tuple(dim for dim, padded in carriers.items() if all(padded)) if manifest.is_batched else ()


def _first_places(manifest: Manifest) -> dict[str, tuple[str, int]]:
    """An input and axis from which the size of each named dimension is read."""
    places: dict[str, tuple[str, int]] = {}
    for spec in manifest.inputs:
        for axis, dim in enumerate(spec.shape):
            if isinstance(dim, str) and dim != BATCH:
                places.setdefault(dim, (spec.name, axis))
    return places


STALE_S = 1.0
"""A refusal for lateness rests on what was measured of this size. After so long without, or ten times what the answer
would take, one request is let through."""

IDLE = -math.inf
"""When an instance that has nothing to do will have nothing to do."""

GONE = math.inf
"""When one will that takes no more batches."""

_MEAN_RATE, _DEVIATION_RATE, _DEVIATIONS = 1 / 8, 1 / 4, 2.0
_MOST_OFF = 2.0


class Arrival(NamedTuple):
    """A request as it comes in, in numbers; `deadline` is a point on the batcher's clock, infinite for none."""

    rows: int
    num_bytes: int
    shape: SampleShape
    caller: str
    deadline: float


class Margin:
    """By how much answers came later than predicted [s]: mean and mean deviation."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        self.deviation_s = 0.0

    def allowed_s(self, predicted_s: float) -> float:
        """A time that few answers exceed which are predicted to take so long."""
        return max(predicted_s, predicted_s + self.mean_s + _DEVIATIONS * self.deviation_s)

    def learn(self, predicted_s: float, actual_s: float) -> None:
        """Take in an answer; a stall counts as at most `_MOST_OFF` times what was predicted."""
        error = min(actual_s - predicted_s, _MOST_OFF * predicted_s) - self.mean_s
        self.mean_s += _MEAN_RATE * error
        self.deviation_s += _DEVIATION_RATE * (abs(error) - self.deviation_s)


@dataclass(frozen=True, slots=True)
class Standing:
    """What there is to do already: what waits, what batches take, and when each instance is predicted to be idle."""

    queue: Queue
    table: LatencyTable
    busy_until: Sequence[float]

    @property
    def is_idle(self) -> bool:
        """Whether an instance would take a request at once."""
        return not self.queue.num_parts and min(self.busy_until) == IDLE

    def seconds_to_empty(self, now: float) -> float:
        """Seconds until what runs and waits is done."""
        return self.seconds_to_answer(0, None, now)

    def seconds_to_answer(self, rows: int, shape: SampleShape | None, now: float) -> float:
        """Seconds until what runs, what waits and so many more rows are done."""
        busy_s = [max(0.0, until - now) for until in self.busy_until if until < GONE] or [GONE]
        own = self.table.seconds(rows, shape.elements) if shape else 0.0
        work = sum(_work(self.queue, self.table, rows, shape))
        return max(min(busy_s) + own, (sum(busy_s) + work) / len(busy_s))


def refusal(
    arrival: Arrival, standing: Standing, settings: ServiceSettings, *, now: float, allowed_s: float
) -> Refusal | None:
    """Why a request is not let in; None if it is.

    `allowed_s` is how long its answer may take as predicted, margin included; 0: it is not to be judged by that.
    """
    return (
        _too_large(arrival, settings)
        or _full(arrival, standing, settings, now)
        or _callers_share(arrival, standing, settings, now)
        or _late(arrival, standing.queue, now, allowed_s)
    )


def _work(queue: Queue, table: LatencyTable, rows: int, shape: SampleShape | None) -> Iterable[float]:
    place = (shape.lane, shape.shelf) if shape else None
    for shelf in queue.shelves():
        is_own = place == (shelf.shape.lane, shelf.shape.shelf)
        yield table.seconds_for(shelf.rows + rows if is_own else shelf.rows, shelf.shape.elements)
        if is_own:
            rows = 0
    if rows and shape:
        yield table.seconds_for(rows, shape.elements)


def _too_large(arrival: Arrival, settings: ServiceSettings) -> Refusal | None:
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
    return None


def _full(arrival: Arrival, standing: Standing, settings: ServiceSettings, now: float) -> Refusal | None:
    queue = standing.queue
    if queue.rows + arrival.rows > settings.max_queue_rows:
        limit = (
            f"{queue.rows:,} rows wait, and with this request's {arrival.rows:,} they would be more than "
            f"max_queue_rows, {settings.max_queue_rows:,}"
        )
    elif queue.num_bytes + arrival.num_bytes > settings.max_queue_bytes:
        limit = (
            f"{format_bytes(queue.num_bytes)} wait, and with this request's {format_bytes(arrival.num_bytes)} they "
            f"would be more than max_queue_bytes, {format_bytes(settings.max_queue_bytes)}"
        )
    else:
        return None
    return _queue_full(f"the queue is full: {limit}", standing.seconds_to_empty(now))


def _callers_share(arrival: Arrival, standing: Standing, settings: ServiceSettings, now: float) -> Refusal | None:
    queue = standing.queue
    share, caller = settings.max_caller_share, arrival.caller
    if not caller or share >= 1.0:
        return None
    most_rows, most_bytes = math.ceil(share * settings.max_queue_rows), math.ceil(share * settings.max_queue_bytes)
    rows, num_bytes = queue.rows_of[caller] + arrival.rows, queue.bytes_of[caller] + arrival.num_bytes
    if rows <= most_rows and num_bytes <= most_bytes:
        return None
    return _queue_full(
        f"the share of {caller!r} in the queue is full: with this request it would hold {rows:,} rows and "
        f"{format_bytes(num_bytes)}, and may hold {most_rows:,} rows and {format_bytes(most_bytes)}",
        standing.seconds_to_empty(now),
    )


def _late(arrival: Arrival, queue: Queue, now: float, allowed_s: float) -> Refusal | None:
    left_s = max(arrival.deadline - now, 0.0)
    if not allowed_s or allowed_s <= left_s:
        return None
    return DeadlineUnreachable(
        f"the answer would be late: it is predicted in {format_seconds(allowed_s)} ({queue.rows:,} rows wait), and "
        f"its deadline is in {format_seconds(left_s)}",
        retry_after_s=allowed_s - left_s,
    )


def _queue_full(message: str, to_empty_s: float) -> QueueFull:
    if not to_empty_s:  # nothing was measured yet
        return QueueFull(message)
    return QueueFull(
        f"{message}; it is predicted to be empty in {format_seconds(to_empty_s)}", retry_after_s=to_empty_s
    )
