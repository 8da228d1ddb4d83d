"""Rows from Parquet, a batch at a time: row groups may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

import pyarrow as pa

from stoker.data.reading.faults import BadTable
from stoker.data.reading.parquet import batches_of, parquet_file
from stoker.errors import RunFailed
from stoker.predicting.rows import Field, Rows
from stoker.predicting.sources.base import Extent, cut_evenly
from stoker.records.prediction import PredictionPart, SourceFormat

_BATCH_ROWS = 1024


@final
class ParquetSource:
    """One Parquet file."""

    format: SourceFormat = "parquet"

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> Sequence[Path]:
        """The file."""
        return (self.path,)

    def fields(self) -> tuple[Field, ...]:
        """The columns of its schema."""
        with parquet_file(self.path) as file:
            return tuple(Field(one.name, one.type) for one in file.schema_arrow)

    def extent(self, part_rows: int) -> Extent:
        """As its footer says."""
        with parquet_file(self.path) as file:
            return cut_evenly(file.metadata.num_rows, part_rows)

    def open(self, columns: Sequence[str]) -> ParquetReader:
        """Begin reading these columns."""
        return ParquetReader(self.path, columns)


@final
class ParquetReader:
    """Goes through the file; what a part leaves of a batch begins the next."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = list(columns)
        self._file = parquet_file(path)
        self._start(0)

    def read(self, part: PredictionPart) -> Rows:
        """The rows of a part; rows before it are passed over."""
        if part.first_row < self._at:
            self._start(part.first_row)
        try:
            self._take(part.first_row - self._at)
            pieces = self._take(part.num_rows)
        except BadTable as error:
            last = part.first_row + part.num_rows - 1
            raise RunFailed(
                f"{self._path} is damaged at rows {part.first_row} to {last}: it {error.what}",
                remedy="Copy the file again; parts that are done are kept only if its content is the same.",
            ) from error
        schema = pieces[0].schema if pieces else self._file.schema_arrow
        table = pa.Table.from_batches(pieces, schema)
        columns = {name: _whole(table.column(name)) for name in self._columns}
        return Rows(str(self._path), part.first_row, part.num_rows, columns)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _start(self, row: int) -> None:
        """Go to the beginning of the row group that holds `row`."""
        batches = batches_of(self._file, self._path, _BATCH_ROWS, self._columns, row=row)
        self._batches: Iterator[tuple[int, pa.RecordBatch]] = batches
        first, rest = next(batches, (row, None))
        self._at = first
        self._rest: pa.RecordBatch | None = rest

    def _take(self, num_rows: int) -> list[pa.RecordBatch]:
        """The next rows, in pieces."""
        pieces = []
        while num_rows > 0:
            batch = self._rest if self._rest is not None else next(self._batches, (0, None))[1]
            if batch is None:
                raise BadTable(self._path, f"ends at row {self._at:,}", remedy="Copy the file again.")
            piece = batch.slice(0, num_rows)
            self._rest = batch.slice(num_rows) if len(batch) > num_rows else None
            self._at += len(piece)
            num_rows -= len(piece)
            pieces.append(piece)
        return pieces


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece, decoded if it was stored as a dictionary."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
