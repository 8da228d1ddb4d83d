"""Parquet files, read a batch at a time because row groups may be larger than memory. Imports pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.reading.text_tables import BadTable
from stoker.errors import first_line

_BUFFER_BYTES = 1024 * 1024


def parquet_file(path: Path) -> pq.ParquetFile:
    """The open file; checksums of pages are verified when they are read.

    Raises:
        BadTable: it is no Parquet file, or is cut off.
    """
    try:
        return pq.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True)
    except (pa.ArrowException, OSError) as error:
        raise BadTable(
            path,
            f"cannot be read as Parquet: {first_line(error)}",
            remedy="A file that was not copied or written to its end has no footer: copy it again.",
        ) from error


def batches_of(
    file: pq.ParquetFile, path: Path, size: int, columns: Sequence[str] | None = None, *, row: int = 0
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches of at most `size` rows in order, each with the number of its first row.

    Args:
        file: the open file.
        path: what it is called in errors.
        size: the most rows of a batch.
        columns: those to read; None: all.
        row: where to begin: at the start of the row group that holds this row.

    Raises:
        BadTable: it is damaged, with the row after which.
    """
    groups, first = list(range(file.metadata.num_row_groups)), 0
    while groups and first + file.metadata.row_group(groups[0]).num_rows <= row:
        first += file.metadata.row_group(groups.pop(0)).num_rows
    try:
        for batch in file.iter_batches(size, row_groups=groups, columns=columns, use_threads=False):
            yield first, batch
            first += batch.num_rows
    except (pa.ArrowException, OSError, ValueError) as error:
        what = f"cannot be read after row {first:,}: {first_line(error)}"
        raise BadTable(path, what, remedy="Copy the file again; it is damaged.") from error
