"""The size of a batch and of a part, by a short measurement on the data's own rows that the job then keeps to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.engines import Engine
from stoker.errors import ServiceError
from stoker.predicting.batched_inference import PredictionModel, stacked
from stoker.predicting.column_mapping import most_rows
from stoker.predicting.input_conversion import Filled
from stoker.predicting.job_identity import RequestedSettings
from stoker.predicting.row_source import RowSource
from stoker.records.prediction import PredictionPart
from stoker.units import MIB

CANDIDATES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sizes of a batch to try [rows]."""

_CLOSE = 0.97
"""The smallest batch with this share of the best rate is chosen [0 to 1]: it needs less memory and pads less."""
_HOPELESS = 0.8
"""Larger batches are not tried once two in a row have less than this share of the best rate [0 to 1]."""
_LONG_S = 2.0
"""Nor once one took so long [s]: the fixed cost of a call is then negligible."""
_PART_S, _LEAST_PART_S = 5.0, 0.25
_PARTS_OF_AN_INSTANCE = 8
"""Least number of parts for each instance, so that none is idle for long at the end."""
_PART_BYTES = 64 * MIB
_MOST_PART_ROWS = 65_536


@dataclass(frozen=True)
class BatchSizeChoice:
    """A batch size [rows], its rate [rows/s], and the rate of each size tried."""

    batch_rows: int
    rows_per_s: float
    tried: dict[int, float]


def choose_batch(seconds_of: Callable[[int], float], most_rows: int | None) -> BatchSizeChoice:
    """The smallest batch that is about as fast as any.

    `seconds_of(rows)` measures one batch [s]; sizes are tried from small to large until they clearly get slower.
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
    return BatchSizeChoice(chosen, tried[chosen], tried)


def rows_of_a_part(choice: BatchSizeChoice, *, row_bytes: float, num_rows: float, instances: int) -> int:
    """Rows of about five seconds of work and little memory [rows], a whole number of batches.

    A short job has fewer, so that every instance has several parts.

    Args:
        choice: the batch size, and the rate of an instance.
        row_bytes: size of a row's inputs and outputs [bytes].
        num_rows: estimated number of rows of the job.
        instances: number of engines that compute parts at the same time.
    """
    shared = max(num_rows / (_PARTS_OF_AN_INSTANCE * instances), choice.rows_per_s * _LEAST_PART_S)
    most = min(_MOST_PART_ROWS, choice.rows_per_s * _PART_S, shared, _PART_BYTES / max(1.0, row_bytes))
    return max(1, round(most / choice.batch_rows)) * choice.batch_rows


HEAD_ROWS = 256
"""Rows read before a job is cut into parts."""

_TEXT = frozenset({"csv", "tsv", "jsonl"})
_TRIED_FOR_S, _MOST_TRIES = 0.15, 20
_BEGINNING_BYTES = 64 * 1024
_UNMEASURED_ROWS = 32
_UNMEASURED_BATCHES = 64


@dataclass(frozen=True)
class BatchAndPartSize:
    """Rows of a batch and of a part, and how they were chosen, as text."""

    batch_rows: int
    part_rows: int
    basis: str


def head_of(source: RowSource) -> PredictionPart:
    """The first rows of a source; a text file is not read to its end to count them."""
    num_rows = HEAD_ROWS if source.format in _TEXT else min(HEAD_ROWS, source.extent(HEAD_ROWS).num_rows)
    return PredictionPart(source=0, first_row=0, num_rows=num_rows)


def about_rows(source: RowSource) -> float:
    """Number of rows of a source [rows]; for text an estimate by the lines of its beginning."""
    if source.format not in _TEXT:
        return source.extent(HEAD_ROWS).num_rows
    with source.path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
    return beginning.count(b"\n") * source.path.stat().st_size / max(1, len(beginning))


def choose_sizes(
    filled: Filled,
    num_rows: int,
    model: PredictionModel,
    engine: Engine,
    clock: Callable[[], float],
    asked: RequestedSettings,
    *,
    total_rows: float,
    instances: int,
) -> BatchAndPartSize:
    """The sizes of batches and parts: as asked, else measured on the head's rows.

    `total_rows` are those of the whole job, as estimated [rows]; `instances` engines compute at the same time.
    """
    batch_rows, part_rows, limit = asked.batch_rows, asked.part_rows, most_rows(model.manifest)
    if batch_rows is not None and part_rows is not None:
        return BatchAndPartSize(batch_rows, part_rows, "as asked")
    trying = _Trying(filled, num_rows, model, engine, clock)
    if trying.row is None:
        rows = batch_rows or min(_UNMEASURED_ROWS, limit or _UNMEASURED_ROWS)
        return BatchAndPartSize(
            rows, part_rows or rows * _UNMEASURED_BATCHES, "not measured: no row of the beginning is good"
        )
    if batch_rows is not None:
        rate = batch_rows / trying.seconds_of(batch_rows)
        choice = BatchSizeChoice(batch_rows, rate, {batch_rows: rate})
    else:
        choice = choose_batch(trying.seconds_of, limit)
    tried = ", ".join(f"{rows}: {rate:,.0f}" for rows, rate in choice.tried.items())
    return BatchAndPartSize(
        choice.batch_rows,
        part_rows or rows_of_a_part(choice, row_bytes=trying.row_bytes, num_rows=total_rows, instances=instances),
        f"measured on one instance [rows/s]: {tried}",
    )


class _Trying:
    """Batches of one repeated row: the one of median size among the good rows of the head."""

    def __init__(
        self, filled: Filled, num_rows: int, model: PredictionModel, engine: Engine, clock: Callable[[], float]
    ) -> None:
        self._filled = filled
        self._model = model
        self._engine = engine
        self._clock = clock
        good = [row for row in range(num_rows) if row not in filled.bad]
        by_size = sorted(good, key=lambda row: sum(samples[row].size for samples in filled.inputs.values()))
        self.row = by_size[len(by_size) // 2] if by_size else None
        self.row_bytes = 0.0

    def seconds_of(self, rows: int) -> float:
        """Time of a batch [s]: the best of several short tries, without the first, which may still allocate."""
        assert self.row is not None
        inputs = stacked(self._filled, [self.row] * rows, self._model)
        seconds: list[float] = []
        try:
            while len(seconds) < _MOST_TRIES and (len(seconds) < 2 or sum(seconds) < _TRIED_FOR_S):
                start = self._clock()
                outputs = self._engine.run(inputs)
                seconds.append(self._clock() - start)
        except ServiceError:  # too large a batch for its memory, or a bad row, which is reported when it is computed
            return float("inf")
        size = sum(array.nbytes for array in (*inputs.values(), *outputs.values()))
        self.row_bytes = max(self.row_bytes, size / rows)
        return max(1e-9, min(seconds[1:]))
