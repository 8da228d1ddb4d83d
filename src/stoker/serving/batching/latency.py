"""How long batches take: a table of measured seconds by rows and size, filled at warm-up and kept up to date.

What: seconds at a grid of rows (1, 2, 4, … up to the most a batch may have) and of sizes (powers of two of a sample's
positions), linear in between. `pace` multiplies all of it, so that what one cell shows of the machine as a whole (a
neighbour, a lower clock) holds for the cells that were not visited since.
Use when: a batch is cut or a request is admitted.
Costs: a few microseconds a look; each batch updates at most four cells.
Does not combine with: models whose time depends on the values they are given.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

RATE = 0.1
"""Weight of a new measurement beside what is known; the first ones of a cell weigh more."""

PACE_RATE = 0.2
"""Weight of a new measurement for all cells at once."""

FIXED_SHARE = 0.5
"""Before a second number of rows was measured, such a share of a batch's time is taken to be the same for all rows."""

_MOST_OFF = 3.0
_LEAST_S = 1e-7


@dataclass(slots=True)
class _Column:
    """Seconds at each number of rows in the grid, for one size; how much was measured of each, and when last."""

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
        """Whether nothing was measured yet."""
        return not self._columns

    def seconds(self, rows: int, elements: int) -> float:
        """What a batch is predicted to take; 0 if nothing was measured."""
        if not self._columns:
            return 0.0
        column = self._column(elements)
        grid = self.grid
        if rows >= grid[-1]:
            return self.pace * column[-1] * rows / grid[-1]
        at = bisect.bisect_right(grid, rows) - 1
        low, high = grid[at], grid[at + 1]
        return self.pace * (column[at] + (column[at + 1] - column[at]) * (rows - low) / (high - low))

    def seconds_a_row(self, elements: int, most_rows: int | None = None, beside_s: float = 0.0) -> float:
        """What a row takes in a batch of the rows that are fastest, of at most so many; 0 if nothing was measured.

        `beside_s` is what a batch costs besides, which its rows share.
        """
        if not self._columns:
            return 0.0
        stops = bisect.bisect_right(self.grid, most_rows) if most_rows else len(self.grid)
        best = self._best.get((elements, stops, beside_s))
        if best is None:
            column = zip(self._column(elements), self.grid[:stops], strict=False)
            best = min((self.pace * seconds + beside_s) / rows for seconds, rows in column)
            self._best[elements, stops, beside_s] = best
        return best

    def seconds_for(self, rows: int, elements: int) -> float:
        """What so many rows take in one batch, or in as many of the fastest as they need."""
        if rows < self.grid[-1]:
            return min(self.seconds(rows, elements), rows * self.seconds(1, elements))
        return rows * self.seconds_a_row(elements)

    def age(self, elements: int, now: float) -> float:
        """Seconds since a batch of about this size was measured."""
        measured = [self._columns[size].measured_at for size in _around(elements) if size in self._columns]
        return now - max(measured) if measured else float("inf")

    def touch(self, elements: int, now: float) -> None:
        """Count a size as measured now: a batch of it is on its way."""
        for size in _around(elements):
            if size in self._columns:
                self._columns[size].measured_at = now

    def learn(self, rows: int, elements: int, seconds: float, now: float) -> None:
        """Take in what a batch took."""
        corners = self._corners(rows, elements)
        for size in {size for size, _, _ in corners}:
            if size not in self._columns:
                self._columns[size] = self._guessed(rows, elements, max(seconds, _LEAST_S), size)
            self._columns[size].measured_at = now
        self._cache.clear()
        ratio = max(seconds, _LEAST_S) / self.seconds(rows, elements)
        if all(self._columns[size].weights[at] >= 1.0 for size, at, _ in corners):
            ratio = min(max(ratio, 1 / _MOST_OFF), _MOST_OFF)
            self.pace *= ratio**PACE_RATE
        whole = sum(share * share for _, _, share in corners)
        for size, at, share in corners:
            column = self._columns[size]
            rate = max(RATE, 1.0 / (1.0 + column.weights[at]))
            column.seconds[at] *= ratio ** (rate * share / whole)
            column.weights[at] += share
        self._cache.clear()
        self._best.clear()

    def _corners(self, rows: int, elements: int) -> list[tuple[int, int, float]]:
        """The cells around a point, (size, place in the grid of rows) and their shares, which add up to one."""
        low, high = _around(elements)
        upper = (elements - low) / (high - low) if high > low else 0.0
        at = min(bisect.bisect_right(self.grid, rows) - 1, len(self.grid) - 1)
        beyond = 0.0
        if at + 1 < len(self.grid):
            beyond = (rows - self.grid[at]) / (self.grid[at + 1] - self.grid[at])
        shares = [
            (low, at, (1 - upper) * (1 - beyond)),
            (low, at + 1, (1 - upper) * beyond),
            (high, at, upper * (1 - beyond)),
            (high, at + 1, upper * beyond),
        ]
        return [corner for corner in shares if corner[2] > 0.0]

    def _guessed(self, rows: int, elements: int, seconds: float, size: int) -> _Column:
        """A column of a size that was not measured: like the nearest one, or like this one batch."""
        if self._columns:
            guess = list(self._column(size))
        else:
            guess = [seconds * (size / elements) * (FIXED_SHARE + (1 - FIXED_SHARE) * one / rows) for one in self.grid]
        return _Column(guess, [0.0] * len(self.grid))

    def _column(self, elements: int) -> list[float]:
        """Seconds at the grid of rows for any size: between two columns, or in proportion to the nearest."""
        column = self._cache.get(elements)
        if column is None:
            column = self._cache[elements] = self._between(elements)
        return column

    def _between(self, elements: int) -> list[float]:
        low, high = _around(elements)
        below, above = self._columns.get(low), self._columns.get(high)
        if below is not None and above is not None:
            share = (elements - low) / (high - low) if high > low else 0.0
            return [a + (b - a) * share for a, b in zip(below.seconds, above.seconds, strict=True)]
        nearest = min(self._columns, key=lambda size: max(size / elements, elements / size))
        return [value * elements / nearest for value in self._columns[nearest].seconds]


def row_grid(max_rows: int) -> tuple[int, ...]:
    """Numbers of rows that are measured: powers of two, and the most that a batch may have.

    >>> row_grid(24)
    (1, 2, 4, 8, 16, 24)
    """
    powers = [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows]
    return (*powers, max_rows)


def _around(elements: int) -> tuple[int, int]:
    """The powers of two on both sides of a size; twice the same if it is one."""
    high = 1 << max(0, elements - 1).bit_length()
    return (high, high) if high == elements else (high // 2, high)
