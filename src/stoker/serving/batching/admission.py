"""Whether a request is let in: its predicted finish against its deadline, the queue's bounds, and its caller's share.

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

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from stoker.records import ServiceSettings
from stoker.serving.batching.latency import LatencyTable
from stoker.serving.batching.queue import Queue
from stoker.serving.batching.shapes import SampleShape
from stoker.serving.problems import QueueFull, Refusal, TooLarge, WouldBeLate
from stoker.units import format_bytes, format_seconds

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
    return WouldBeLate(
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
