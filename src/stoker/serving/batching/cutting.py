"""Which of what waits goes into the next batch.

What: the most urgent part goes always. What goes with it is chosen so that least time is lost: a batch's predicted
seconds, with all its padding, less what each of its rows would take in the best batch of its own size (of no more rows
than wait now). So samples share a batch as long as that is faster than apart; and on fixed shapes the same rule finds
how many rows are worth taking at once. If fewer rows get nearly as much done in a second, they answer sooner.
Use when: an instance becomes free.
Costs: microseconds for each shelf; nothing is looked at part by part but what goes.
Does not combine with: models whose answers depend on what shares their batch (an export refuses those).
Source: the least loss instead of the best ratio: Dinkelbach 1967, On Nonlinear Fractional Programming, at a ratio of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker.serving.batching.executed import CutReason
from stoker.serving.batching.latency import LatencyTable
from stoker.serving.batching.queue import Lane, Part, Queue, Shelf

AS_GOOD = 0.97
"""Fewer rows are preferred if they get this share of the most done in a second."""

_MOST_TOPS = 6


@dataclass(frozen=True, slots=True)
class Choice:
    """What to take beside the head: up to `rows` in all, from `shelves` in this order.

    `tops` are the sizes up to which samples are taken, `seconds` what the batch is predicted to take, and `value` what
    its rows would take in the best batches of their own sizes.
    """

    rows: int
    shelves: tuple[Shelf, ...]
    tops: tuple[int, ...]
    seconds: float
    value: float

    @property
    def loss(self) -> float:
        """Seconds beyond what its rows would take in the best batches of their own sizes."""
        return self.seconds - self.value

    @property
    def efficiency(self) -> float:
        """What gets done in a second of it."""
        return self.value / self.seconds


@dataclass(frozen=True, slots=True)
class Cut:
    """Parts that go together, and those whose deadline passed while they waited; all have left the queue."""

    parts: list[Part]
    late: list[Part]
    reason: CutReason


def cut(queue: Queue, table: LatencyTable, max_rows: int, now: float) -> Cut | None:
    """Take the next batch out of the queue; None if nothing waits."""
    late: list[Part] = []
    while (head := queue.head()) is not None and head.deadline <= now:
        queue.remove(head)
        late.append(head)
    if head is None:
        return Cut([], late, "idle") if late else None
    if queue.num_parts == 1:
        queue.remove(head)
        return Cut([head], late, "idle")
    lane = queue.lanes[head.shape.lane]
    choice = choose(lane, head, table, max_rows)
    parts, missed = _take(queue, head, choice, now)
    is_shortened = False
    if limit := _tightest(parts, table, now, choice.seconds):
        parts, is_shortened = _shorten(queue, parts, table, limit - now)
    reason = _reason(queue, parts, choice, max_rows, is_shortened=is_shortened)
    return Cut(parts, late + missed, reason)


def choose(lane: Lane, head: Part, table: LatencyTable, max_rows: int) -> Choice:
    """How much to take, and from which shelves."""
    own = lane[head.shape.shelf]
    if table.is_empty:
        return Choice(max_rows, (own,), own.shape.shelf, 0.0, 0.0)
    waiting = sum(shelf.rows for shelf in lane.values())
    choices = [
        choice
        for tops in _tops(lane, own)
        for choice in _stops(_walk(lane, own, tops), head, tops, table, max_rows, waiting)
    ]
    best = min(choices, key=lambda choice: choice.loss)
    return min(
        (one for one in choices if one.tops == best.tops and one.efficiency >= AS_GOOD * best.efficiency),
        key=lambda one: one.rows,
    )


def _tops(lane: Lane, own: Shelf) -> list[tuple[int, ...]]:
    """Sizes up to which samples may be taken: those of the head, and some that are larger."""
    if len(lane) == 1:
        return [own.shape.shelf]
    above = sorted(
        {tuple(map(max, own.shape.shelf, shelf.shape.shelf)) for shelf in lane.values()} | {own.shape.shelf},
        key=lambda sizes: (_product(sizes), sizes),
    )
    if len(above) > _MOST_TOPS:  # the nearest ones and the largest
        above = [*above[: _MOST_TOPS - 1], above[-1]]
    return above


def _walk(lane: Lane, own: Shelf, tops: tuple[int, ...]) -> list[Shelf]:
    """The shelves within these sizes, the largest first: what wastes least comes first."""
    if len(lane) == 1:
        return [own]
    within = [shelf for sizes, shelf in lane.items() if all(size <= top for size, top in zip(sizes, tops, strict=True))]
    return sorted(within, key=lambda shelf: shelf.shape.elements, reverse=True)


def _stops(
    walk: Sequence[Shelf], head: Part, tops: tuple[int, ...], table: LatencyTable, max_rows: int, waiting: int
) -> Iterator[Choice]:
    """Choices along a walk: at each number of rows that is measured, and at its end."""
    elements = _product(head.shape.lane) * _product(tops)
    available = sum(shelf.rows for shelf in walk)
    end = max(head.rows, min(available, max_rows))
    waiting = min(waiting, max_rows)
    stops = [rows for rows in table.grid if head.rows <= rows < end]
    shelves = tuple(walk)
    for rows in (*stops, end):
        seconds = table.seconds(rows, elements)
        yield Choice(rows, shelves, tops, seconds, _value(walk, head, rows, table, waiting))


def _value(walk: Sequence[Shelf], head: Part, rows: int, table: LatencyTable, waiting: int) -> float:
    """Seconds that so many rows of a walk, the head's among them, take in the best batches of their own sizes."""
    value = head.rows * table.seconds_a_row(head.shape.elements, waiting)
    left = rows - head.rows
    for shelf in walk:
        others = shelf.rows - head.rows if shelf.shape.shelf == head.shape.shelf else shelf.rows
        taken = min(left, others)
        value += taken * table.seconds_a_row(shelf.shape.elements, waiting)
        left -= taken
        if left <= 0:
            break
    return value


def _take(queue: Queue, head: Part, choice: Choice, now: float) -> tuple[list[Part], list[Part]]:
    """Take the head and what the choice says out of the queue; what is past its deadline apart."""
    queue.remove(head)
    parts, left = [head], choice.rows - head.rows
    late: list[Part] = []
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


def _tightest(parts: list[Part], table: LatencyTable, now: float, seconds: float) -> float | None:
    """The first deadline that the batch would break, and that its part could keep in a batch of its own."""
    ends = now + seconds
    broken = [
        part.deadline
        for part in parts
        if part.deadline < ends and part.deadline >= now + table.seconds(part.rows, part.shape.elements)
    ]
    return min(broken) if len(parts) > 1 and broken else None


def _shorten(queue: Queue, parts: list[Part], table: LatencyTable, limit_s: float) -> tuple[list[Part], bool]:
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


def _reason(queue: Queue, parts: list[Part], choice: Choice, max_rows: int, *, is_shortened: bool) -> CutReason:
    rows = sum(part.rows for part in parts)
    if is_shortened:
        return "deadline"
    if not queue.rows:
        return "idle"
    if rows >= max_rows or rows < choice.rows:
        return "full"
    is_more_within = any(shelf.entries for shelf in choice.shelves)
    return "pace" if is_more_within else "shape"


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
