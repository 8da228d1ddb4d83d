"""What waits: parts of requests, the most urgent first, counted by rows, bytes and caller.

What: earliest deadline first inside classes of priority. A part's urgency is a point in time that never changes: its
deadline, or `AGEING_S` after it came if that is sooner, and `AGEING_S` later for each class below the first.
Whatever comes after that point in time lies behind it, however urgent; so nothing starves.
Costs: a binary search and a move in a list for every part; the first of a queue is found among its shapes.
Source: earliest deadline first: Liu and Layland 1973, Scheduling Algorithms for Multiprogramming in a Hard-Real-Time
Environment, section 7; ageing by a fixed offset, so that no order is ever computed again, is ours.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stoker.artifacts.elements import Arrays
from stoker.serving.batching.shapes import SampleShape

AGEING_S = 1.0
"""After so long a request is as urgent as a new one of the next higher class."""

DEFAULT_CLASS, LAST_CLASS = 2, 8
"""The class of priority 0, and the last one: a higher number counts as this."""


@dataclass(slots=True, eq=False)
class Part:
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
class Shelf:
    """Parts of one shape, the most urgent first."""

    shape: SampleShape
    entries: list[tuple[float, int, Part]] = field(default_factory=list)
    rows: int = 0


Lane = dict[tuple[int, ...], Shelf]
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

    def put(self, part: Part) -> None:
        """Take in a part."""
        part.sequence = next(self._sequence)
        self.put_back(part)

    def put_back(self, part: Part) -> None:
        """Take in a part that was here before, at its old place."""
        shape = part.shape
        lane = self.lanes.setdefault(shape.lane, {})
        shelf = lane.get(shape.shelf)
        if shelf is None:
            shelf = lane[shape.shelf] = Shelf(shape)
        bisect.insort(shelf.entries, (part.urgency, part.sequence, part))
        shelf.rows += part.rows
        self._count(part, 1)

    def remove(self, part: Part) -> bool:
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

    def head(self) -> Part | None:
        """The most urgent part of all."""
        firsts = [shelf.entries[0] for lane in self.lanes.values() for shelf in lane.values()]
        return min(firsts)[2] if firsts else None

    def parts(self) -> Iterator[Part]:
        """All that wait, shelf by shelf."""
        for lane in self.lanes.values():
            for shelf in lane.values():
                for entry in shelf.entries:
                    yield entry[2]

    def shelves(self) -> Iterator[Shelf]:
        """All shelves."""
        for lane in self.lanes.values():
            yield from lane.values()

    def _count(self, part: Part, sign: int) -> None:
        self.num_parts += sign
        self.rows += sign * part.rows
        self.num_bytes += sign * part.num_bytes
        if part.caller:
            self.rows_of[part.caller] += sign * part.rows
            self.bytes_of[part.caller] += sign * part.num_bytes
            if sign < 0 and not self.rows_of[part.caller]:
                del self.rows_of[part.caller], self.bytes_of[part.caller]
