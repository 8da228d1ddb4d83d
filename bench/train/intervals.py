"""Ratios of rates measured side by side, with intervals.

A ratio is of two contenders in one round of one set of processes. Rounds of a set share their processes, whose luck
with memory is theirs together, so that the bootstrap draws sets first, then rounds within each. Of one set alone the
interval tells what would come of more rounds, and nothing of other processes.

Source: A. Davison and D. Hinkley, Bootstrap Methods and their Application (1997), sections 3.8 (hierarchical data) and
5.3 (percentile intervals).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

CONFIDENCE = 0.95
_DRAWS = 2000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The median over all rounds, an interval of 95 % about it, and how many rounds and sets it comes of."""

    schema: ClassVar[int] = 1
    median: float
    low: float
    high: float
    rounds: int
    sets: int


def ratio_of(ours: Sequence[Sequence[float | None]], theirs: Sequence[Sequence[float | None]]) -> Interval | None:
    """Our rate over theirs: for each set of processes a sequence of rounds, None where a round did not count.

    None if no round counts for both.

    >>> ratio_of([[2.0, 2.2, None]], [[1.0, 1.0, 1.0]])
    Interval(median=2.1, low=2.0, high=2.2, rounds=2, sets=1)
    """
    return interval_of(
        [
            [mine / other for mine, other in zip(one, another, strict=True) if mine is not None and other]
            for one, another in zip(ours, theirs, strict=True)
        ]
    )


def interval_of(sets: Sequence[Sequence[float]]) -> Interval | None:
    """The median of all values, of sets of rounds, and its interval; None if there are no values.

    The draws are the same at each call.
    """
    filled = [np.asarray(values, np.float64) for values in sets if len(values)]
    if not filled:
        return None
    medians = _drawn_medians(filled, np.random.default_rng(0))
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(np.quantile(medians, share, method="nearest")) for share in (tail, 1 - tail))
    everything = np.concatenate(filled)
    return Interval(median=float(np.median(everything)), low=low, high=high, rounds=len(everything), sets=len(filled))


def _drawn_medians(sets: Sequence[np.ndarray], generator: np.random.Generator) -> np.ndarray:
    """Medians [draws] of what is drawn: as many sets as there are, and of each as many values as it has."""
    chosen = generator.integers(len(sets), size=(_DRAWS, len(sets)))
    drawn = np.full((_DRAWS, len(sets), max(map(len, sets))), np.nan)
    for number, values in enumerate(sets):
        draws, places = np.nonzero(chosen == number)
        drawn[draws, places, : len(values)] = values[generator.integers(len(values), size=(len(draws), len(values)))]
    drawn = np.sort(drawn.reshape(_DRAWS, -1), axis=1)  # what no shorter set filled comes last
    counts, rows = np.isfinite(drawn).sum(axis=1), np.arange(_DRAWS)
    medians: np.ndarray = (drawn[rows, (counts - 1) // 2] + drawn[rows, counts // 2]) / 2
    return medians
