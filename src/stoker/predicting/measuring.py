"""Choosing the size of a batch by trying it on the data's own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.engines import Engine
from stoker.errors import ServiceError
from stoker.predicting.answering import Model, stacked
from stoker.predicting.choosing import BatchChoice, choose_batch, rows_of_a_part
from stoker.predicting.filling import Filled
from stoker.predicting.sources import Source
from stoker.records.prediction import PredictionPart

HEAD_ROWS = 256
"""Rows looked at before a job is cut up."""

_TEXT = frozenset({"csv", "tsv", "jsonl"})
_REPEATED_BELOW_S = 0.25
_UNMEASURED_ROWS = 32
_UNMEASURED_BATCHES = 64


@dataclass(frozen=True)
class Cut:
    """Rows of a batch and of a part, and how they were chosen."""

    batch_rows: int
    part_rows: int
    basis: str


def head_of(source: Source) -> PredictionPart:
    """The first rows of a source; a text file is not read to its end to find out how many it has."""
    num_rows = HEAD_ROWS if source.format in _TEXT else min(HEAD_ROWS, source.extent(HEAD_ROWS).num_rows)
    return PredictionPart(source=0, first_row=0, num_rows=num_rows)


def choose_cut(
    filled: Filled,
    num_rows: int,
    model: Model,
    engine: Engine,
    clock: Callable[[], float],
    *,
    batch_rows: int | None,
    part_rows: int | None,
    most_rows: int | None,
) -> Cut:
    """How to cut a job up: as asked, and where nothing was asked by what was measured on the head's rows."""
    if batch_rows is not None and part_rows is not None:
        return Cut(batch_rows, part_rows, "as asked")
    trying = _Trying(filled, num_rows, model, engine, clock)
    if trying.row is None:
        rows = batch_rows or min(_UNMEASURED_ROWS, most_rows or _UNMEASURED_ROWS)
        return Cut(rows, part_rows or rows * _UNMEASURED_BATCHES, "not measured: no row of the beginning is good")
    if batch_rows is not None:
        rate = batch_rows / trying.seconds_of(batch_rows)
        choice = BatchChoice(batch_rows, rate, {batch_rows: rate})
    else:
        choice = choose_batch(trying.seconds_of, most_rows)
    tried = ", ".join(f"{rows}: {rate:,.0f}" for rows, rate in choice.tried.items())
    return Cut(
        choice.batch_rows,
        part_rows or rows_of_a_part(choice.batch_rows, choice.rows_per_s, trying.row_bytes),
        f"measured on one instance [rows/s]: {tried}",
    )


class _Trying:
    """Batches of one row over and over: the one of middle size among the good rows of the head."""

    def __init__(self, filled: Filled, num_rows: int, model: Model, engine: Engine, clock: Callable[[], float]) -> None:
        self._filled = filled
        self._model = model
        self._engine = engine
        self._clock = clock
        good = [row for row in range(num_rows) if row not in filled.bad]
        by_size = sorted(good, key=self._size)
        self.row = by_size[len(by_size) // 2] if by_size else None
        self.row_bytes = 0.0

    def seconds_of(self, rows: int) -> float:
        """How long a batch takes [s]: the second try, or the better of two more where they are short."""
        assert self.row is not None
        inputs = stacked(self._filled, [self.row] * rows, self._model)
        seconds = []
        try:
            for _ in range(4):
                start = self._clock()
                outputs = self._engine.run(inputs)
                seconds.append(self._clock() - start)
                if len(seconds) > 1 and seconds[-1] > _REPEATED_BELOW_S:
                    break
        except ServiceError:  # too large a batch for its memory, or a row it cannot compute: told where it happens
            return float("inf")
        size = sum(array.nbytes for array in (*inputs.values(), *outputs.values()))
        self.row_bytes = max(self.row_bytes, size / rows)
        return max(1e-9, min(seconds[1:]))

    def _size(self, row: int) -> int:
        return sum(samples[row].size for samples in self._filled.inputs.values())
