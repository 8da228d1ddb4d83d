"""Choosing the size of a batch by trying it on the data's own rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.engines import Engine
from stoker.errors import ServiceError
from stoker.predicting.answering import Model, stacked
from stoker.predicting.choosing import BatchChoice, choose_batch, rows_of_a_part
from stoker.predicting.filling import Filled
from stoker.predicting.identity import Asked
from stoker.predicting.sources import Source
from stoker.records.prediction import PredictionPart

HEAD_ROWS = 256
"""Rows looked at before a job is cut up."""

_TEXT = frozenset({"csv", "tsv", "jsonl"})
_TRIED_FOR_S, _MOST_TRIES = 0.15, 20
_BEGINNING_BYTES = 64 * 1024
_UNMEASURED_ROWS = 32
_UNMEASURED_BATCHES = 64


@dataclass(frozen=True)
class Cut:
    """Rows of a batch and of a part, and how they were chosen."""

    batch_rows: int
    part_rows: int
    basis: str


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Rows that the model takes at once (None: any number), rows of the job (about), and instances of the engine."""

    most_rows: int | None
    num_rows: float
    instances: int


def head_of(source: Source) -> PredictionPart:
    """The first rows of a source; a text file is not read to its end to find out how many it has."""
    num_rows = HEAD_ROWS if source.format in _TEXT else min(HEAD_ROWS, source.extent(HEAD_ROWS).num_rows)
    return PredictionPart(source=0, first_row=0, num_rows=num_rows)


def about_rows(source: Source) -> float:
    """How many rows a source has; of text about, by the lines of its beginning."""
    if source.format not in _TEXT:
        return source.extent(HEAD_ROWS).num_rows
    with source.path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
    return beginning.count(b"\n") * source.path.stat().st_size / max(1, len(beginning))


def choose_cut(
    filled: Filled,
    num_rows: int,
    model: Model,
    engine: Engine,
    clock: Callable[[], float],
    asked: Asked,
    bounds: Bounds,
) -> Cut:
    """How to cut a job up: as asked, and where nothing was asked by what was measured on the head's rows."""
    batch_rows, part_rows, most_rows = asked.batch_rows, asked.part_rows, bounds.most_rows
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
        part_rows
        or rows_of_a_part(choice, row_bytes=trying.row_bytes, num_rows=bounds.num_rows, instances=bounds.instances),
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
        """How long a batch takes [s]: the best try but the first, which may still allocate, of some that are short."""
        assert self.row is not None
        inputs = stacked(self._filled, [self.row] * rows, self._model)
        seconds: list[float] = []
        try:
            while len(seconds) < _MOST_TRIES and (len(seconds) < 2 or sum(seconds) < _TRIED_FOR_S):
                start = self._clock()
                outputs = self._engine.run(inputs)
                seconds.append(self._clock() - start)
        except ServiceError:  # too large a batch for its memory, or a row it cannot compute: told where it happens
            return float("inf")
        size = sum(array.nbytes for array in (*inputs.values(), *outputs.values()))
        self.row_bytes = max(self.row_bytes, size / rows)
        return max(1e-9, min(seconds[1:]))

    def _size(self, row: int) -> int:
        return sum(samples[row].size for samples in self._filled.inputs.values())
