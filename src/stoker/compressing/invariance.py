"""Does a model answer a row alike whatever shares its batch, and however far it is filled up?

A service stacks requests, so a model whose answer depends on its neighbours answers at random. Quantised models do so
to some extent: kernels of other batch sizes round elsewhere, and scales that are taken from the batch itself
("dynamic" quantisation) change with every neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.artifacts.answers import filled_in
from stoker.artifacts.elements import Arrays
from stoker.compressing.answers import answers
from stoker.compressing.rows import Rows, cut_to, row_lengths
from stoker.engines import Engine
from stoker.records import Manifest, Tolerance
from stoker.records.compression import Gate

ROWS = 8
"""Rows that are asked alone."""

MARGIN = 4.0
"""The manifest's tolerance is so many times the deviation found: some rows of many deviate more than ROWS showed."""

FLOOR = 1e-5
"""The tolerance is at least so much of the outputs' scale: rounding of fp32 sums in another order."""

CEILING = 0.05
"""The most that an answer may deviate, of the outputs' scale (their root mean square)."""


@dataclass(frozen=True)
class Steadiness:
    """The largest deviation of an answer in company from the same answer alone, and the outputs' scale, by output."""

    deviation: dict[str, float]
    scale: dict[str, float]
    is_finite: bool

    @property
    def share(self) -> float:
        """The largest deviation of any output, in its scale."""
        return max((self.deviation[name] / (self.scale[name] or 1.0) for name in self.deviation), default=0.0)

    @property
    def tolerance(self) -> Tolerance:
        """What two answers to one request may differ by."""
        largest = max(self.deviation.values(), default=0.0)
        scale = max(self.scale.values(), default=0.0)
        return Tolerance(absolute=max(MARGIN * largest, FLOOR * scale), relative=1e-4)

    def gates(self) -> tuple[Gate, ...]:
        """Finite, and steady enough."""
        infinite = 0.0 if self.is_finite else 1.0
        what = "an answer in a batch from the answer alone, of the outputs' root mean square"
        return (
            Gate(what="answers that are not finite", passed=self.is_finite, found=infinite, limit=0.0),
            Gate(what=what, passed=self.share <= CEILING, found=self.share, limit=CEILING),
        )


def steadiness(engine: Engine, rows: Rows, manifest: Manifest, sizes: Sequence[int]) -> Steadiness:
    """Ask some rows alone, each cut to its own length, and the same in batches, filled up to the longest.

    Args:
        engine: loaded as a service would.
        rows: the first `ROWS` of them are asked, repeated where a batch has more.
        manifest: what the model takes.
        sizes: of batches [rows]; those that are served (`artifacts.served_sizes`).

    Raises:
        ServiceError: the engine could not.
    """
    few = rows.take(np.arange(min(ROWS, len(rows))))
    alone = [_alone(engine, few, manifest, row) for row in range(len(few))]
    deviation = dict.fromkeys(alone[0], 0.0)
    for size in sizes:
        repeated = few.take(np.arange(max(size, len(few))) % len(few))
        forms = [answers(engine, repeated, manifest, batch=size)]
        if size == max(sizes):
            forms.append(_at_full_length(engine, repeated))
        for row in range(len(repeated)):
            for name, one in alone[row % len(few)].items():
                region = (slice(row, row + 1), *(slice(0, length) for length in one.shape[1:]))
                for other in forms:
                    deviation[name] = max(deviation[name], _apart(other[name][region], one))
    stacked = {name: np.concatenate([one[name].ravel() for one in alone]).astype(np.float64) for name in deviation}
    scale = {name: _root_mean_square(values) for name, values in stacked.items()}
    finite = all(np.isfinite(values).all() for values in stacked.values()) and all(map(np.isfinite, deviation.values()))
    return Steadiness(deviation, scale, bool(finite))


def _root_mean_square(values: NDArray[np.float64]) -> float:
    """The scale of an output's values; what the model fills in does not count."""
    told = values[~filled_in(np.abs(values))]
    return float(np.sqrt(np.mean(np.square(told)))) if len(told) else 0.0


def _apart(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest difference; infinite where one of them alone is not finite."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where(a == b, 0.0, np.abs(a - b))
    return float(np.max(np.nan_to_num(apart, nan=np.inf), initial=0.0))


def _alone(engine: Engine, rows: Rows, manifest: Manifest, row: int) -> Arrays:
    one = rows.take(np.array([row]))
    return engine.run(cut_to(one.inputs, manifest, int(row_lengths(one, manifest)[0])))


def _at_full_length(engine: Engine, rows: Rows) -> Arrays:
    """Answers in one batch, in the rows' order, without cutting what they are filled up with."""
    return engine.run({name: np.ascontiguousarray(array) for name, array in rows.inputs.items()})
