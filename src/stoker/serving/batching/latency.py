"""Latency table: predicted seconds of a batch by rows and size, measured at warm-up and updated by every batch.

What: seconds at a grid of rows (1, 2, 4, … up to the limit of a batch) and of sizes (powers of two of a sample's
positions), linear in between. `pace` multiplies all cells, so that a change of the whole machine (other load, a lower
clock) seen in one cell applies to cells not visited since.
Use when: a batch is formed or a request is admitted.
Costs: a few microseconds per lookup; each batch updates at most four cells.
Does not combine with: models whose time depends on the values of their inputs.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

RATE = 0.1
"""Weight of a new measurement in its cell; the first ones of a cell weigh more."""

PACE_RATE = 0.2
"""Weight of a new measurement for all cells at once."""

FIXED_SHARE = 0.5
"""Share of a batch's time assumed to be independent of its rows, until a second number of rows was measured."""

_MOST_OFF = 3.0
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
            ratio = min(max(ratio, 1 / _MOST_OFF), _MOST_OFF)
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
