"""How many rows to compute at once, and how many make a part: a short measurement, written down and kept to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.units import MIB

CANDIDATES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sizes of a batch that are tried [rows]."""

_CLOSE = 0.97
"""A smaller batch is taken if it has this share of the best rate: it needs less memory and pads less."""
_HOPELESS = 0.8
"""Larger batches are no longer tried once two in a row have less than this share of the best rate."""
_LONG_S = 2.0
"""Nor once one took so long [s]: what a call costs beside its rows is then long paid for."""
_PART_S, _LEAST_PART_S = 5.0, 0.25
_PARTS_OF_AN_INSTANCE = 8
"""At least so many, so that no instance is idle for long at the end."""
_PART_BYTES = 64 * MIB
_MOST_PART_ROWS = 65_536


@dataclass(frozen=True)
class BatchChoice:
    """A size of batch [rows], the rate it reached [rows/s], and that of each size tried."""

    batch_rows: int
    rows_per_s: float
    tried: dict[int, float]


def choose_batch(seconds_of: Callable[[int], float], most_rows: int | None) -> BatchChoice:
    """The smallest batch that is about as fast as any.

    `seconds_of(rows)` measures one batch; sizes are tried from small to large until it is clear that they get slower.
    """
    tried: dict[int, float] = {}
    for rows in CANDIDATES:
        if most_rows is not None and rows > most_rows:
            break
        seconds = seconds_of(rows)
        tried[rows] = rows / seconds
        best = max(tried.values())
        if seconds > _LONG_S or max(list(tried.values())[-2:]) < _HOPELESS * best:
            break
    best = max(tried.values())
    chosen = next(rows for rows, rate in tried.items() if rate >= _CLOSE * best)
    return BatchChoice(chosen, tried[chosen], tried)


def rows_of_a_part(choice: BatchChoice, *, row_bytes: float, num_rows: float, instances: int) -> int:
    """Rows that make about five seconds of work and little memory, a whole number of batches.

    Fewer where a job is short, for every instance to have several parts.

    Args:
        choice: rows of a batch, and how fast an instance is.
        row_bytes: of a row's inputs and outputs.
        num_rows: of the whole job, about.
        instances: that compute parts at the same time.
    """
    shared = max(num_rows / (_PARTS_OF_AN_INSTANCE * instances), choice.rows_per_s * _LEAST_PART_S)
    most = min(_MOST_PART_ROWS, choice.rows_per_s * _PART_S, shared, _PART_BYTES / max(1.0, row_bytes))
    return max(1, round(most / choice.batch_rows)) * choice.batch_rows
