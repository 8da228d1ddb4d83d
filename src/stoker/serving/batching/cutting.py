"""Which of what waits goes into the next batch.

What: the most urgent part goes always. What goes with it is chosen so that least time is lost: a batch's predicted
seconds, with all its padding, less what each of its rows would take in the best batch of its own size (of no more rows
than wait now). So samples share a batch as long as that is faster than apart; and on fixed shapes the same rule finds
how many rows are worth taking at once. If fewer rows get nearly as much done in a second, they answer sooner, unless
more than a batch waits: then that many batches would only cost more threads' turns.
Use when: an instance becomes free.
Costs: microseconds for each shelf; nothing is looked at part by part but what goes.
Does not combine with: models whose answers depend on what shares their batch (an export refuses those).
Source: the least loss instead of the best ratio: Dinkelbach 1967, On Nonlinear Fractional Programming, at a ratio of 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from stoker.serving.batching.admission import STALE_S
from stoker.serving.batching.executed import CutReason
from stoker.serving.batching.latency import LatencyTable
from stoker.serving.batching.queue import Lane, Part, Queue, Shelf

AS_GOOD = 0.97
"""What gets this share of the most done in a second is as good: of such numbers of rows the least is taken, so that the
next batch is already waiting when answers lead to questions; with more than a batch waiting anyway, the most."""

BESIDE_S = 0.5e-3
"""What a batch costs beside its run: threads that hand over, a cut, a delivery. The table has an engine's seconds
alone, by which one row at a time may look as good as many."""

_MOST_TOPS = 6


@dataclass(frozen=True, slots=True)
class Choice:
    """What to take beside the head: up to `rows` in all, from `shelves` in this order.

    `seconds` are what the batch is predicted to take, `value` what its rows would take in the best batches of their own
    sizes; the difference is lost.
    """

    rows: int
    shelves: Sequence[Shelf]
    seconds: float
    value: float


@dataclass(frozen=True, slots=True)
class Cut:
    """Parts that go together, and those whose deadline passed while they waited; all have left the queue."""

    parts: list[Part]
    late: list[Part]
    reason: CutReason


def cut(queue: Queue, table: LatencyTable, max_rows: int, now: float, *, tries_full: bool = False) -> Cut | None:
    """Take the next batch out of the queue; None if nothing waits.

    With `tries_full` it is a full one if there are samples of one size for it, whatever the table says: a number of
    rows that was slow once, as at warm-up beside other work, would else never be measured again.
    """
    late: list[Part] = []
    while (head := queue.head()) is not None and head.deadline <= now + _least_s(queue, head, table, max_rows, now):
        queue.remove(head)
        late.append(head)
    if head is None:
        return Cut([], late, "idle") if late else None
    if queue.num_parts == 1:
        queue.remove(head)
        return Cut([head], late, "idle")
    lane = queue.lanes[head.shape.lane]
    own = lane[head.shape.shelf]
    if tries_full and own.rows >= max_rows:
        choice = Choice(max_rows, (own,), table.seconds(max_rows, own.shape.elements), 0.0)
    else:
        choice = choose(lane, head, table, max_rows)
    parts, missed = _take(queue, head, choice, now)
    is_shortened = False
    if limit := _tightest(parts, table, now, choice.seconds):
        parts, is_shortened = _shorten(queue, parts, table, limit - now)
    reason = _reason(queue, parts, choice, max_rows, is_shortened=is_shortened)
    return Cut(parts, late + missed, reason)


def _least_s(queue: Queue, head: Part, table: LatencyTable, max_rows: int, now: float) -> float:
    """Seconds to the head's answer at least: of a full batch where others wait to fill it, else of its own.

    What cannot be met is not computed, nor are batches cut short for it: under overload the most urgent are always
    about to be late, and answering them in vain makes the next ones late as well. 0 where nothing was measured lately.
    """
    if table.age(head.shape.elements, now) > STALE_S:
        return 0.0
    return table.seconds(max_rows if queue.rows > max_rows else head.rows, head.shape.elements)


def choose(lane: Lane, head: Part, table: LatencyTable, max_rows: int) -> Choice:
    """How much to take, and from which shelves."""
    own = lane[head.shape.shelf]
    if table.is_empty:
        return Choice(max_rows, (own,), 0.0, 0.0)
    waiting = min(max_rows, sum(shelf.rows for shelf in lane.values()))
    worth = {sizes: table.seconds_a_row(shelf.shape.elements, waiting, BESIDE_S) for sizes, shelf in lane.items()}
    best: tuple[float, Sequence[Shelf], list[_Stop]] | None = None
    for elements, shelves in _walks(lane, own):
        stops = list(_stops(shelves, head, worth, elements, table, max_rows))
        loss = min(seconds - value for _, seconds, value in stops)
        if best is None or loss < best[0]:
            best = loss, shelves, stops
    assert best is not None  # the head's own shelf is always walked
    return _chosen(*best, max_rows)


_Stop = tuple[int, float, float]
"""Rows of a batch, its predicted seconds, and its value."""


def _chosen(loss: float, shelves: Sequence[Shelf], stops: Sequence[_Stop], max_rows: int) -> Choice:
    """Of the stops of the best walk that get nearly as much done in a second as the best, the one of fewest rows.

    Where more waits than a batch may have, the one of most rows.
    """
    _, seconds, value = next(stop for stop in stops if stop[1] - stop[2] == loss)
    enough = AS_GOOD * value / (seconds + BESIDE_S)
    as_good = [stop for stop in stops if stop[2] / (stop[1] + BESIDE_S) >= enough]
    rows, seconds, value = as_good[-1 if sum(shelf.rows for shelf in shelves) > max_rows else 0]
    return Choice(rows, shelves, seconds, value)


def _walks(lane: Lane, own: Shelf) -> Iterator[tuple[int, Sequence[Shelf]]]:
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


def _tops(lane: Lane, own: Shelf) -> list[tuple[int, ...]]:
    """Sizes up to which samples may be taken: those of the head, and some that are larger."""
    least = own.shape.shelf
    tops = sorted({tuple(map(max, least, sizes)) for sizes in lane}, key=lambda sizes: (math.prod(sizes), sizes))
    if len(tops) > _MOST_TOPS:  # the nearest ones and the largest
        return [*tops[: _MOST_TOPS - 1], tops[-1]]
    return tops


def _stops(
    shelves: Sequence[Shelf],
    head: Part,
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
