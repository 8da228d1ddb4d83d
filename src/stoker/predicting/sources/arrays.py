"""Rows from NumPy files: read from where a part begins, and never unpickled."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, final

import numpy as np
import pyarrow as pa
from numpy.lib import format as npy
from numpy.typing import NDArray

from stoker.errors import BadJob, RunFailed, first_line
from stoker.predicting.rows import Column, Field, Rows
from stoker.predicting.sources.base import Extent, cut_evenly
from stoker.records.prediction import PredictionPart, SourceFormat

_SUFFIX = ".npy"


@dataclass(frozen=True)
class _Header:
    """Shape and dtype of an array in a file, and where its elements begin [bytes]."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


@final
class ArraySource:
    """A file with one array, named for the file, or with several of equal length (`numpy.savez`).

    `ranks` are the numbers of dimensions of a whole request, by array, for models without a batch: arrays of exactly
    these are one row together, arrays of one more are a row for each of their first dimension.
    """

    def __init__(self, path: Path, *, ranks: Mapping[str, int] | None = None) -> None:
        self.path = path
        self.ranks = dict(ranks or {})
        self.format: SourceFormat = "npy" if path.suffix.lower() == _SUFFIX else "npz"

    def files(self) -> Sequence[Path]:
        """The file."""
        return (self.path,)

    def fields(self) -> tuple[Field, ...]:
        """An array each."""
        return tuple(Field(name, _arrow_type(one)) for name, one in self._headers().items())

    def extent(self, part_rows: int) -> Extent:
        """As the arrays' headers say."""
        lengths = {one.shape[0] for one in self._headers().values()}
        if len(lengths) != 1:
            raise BadJob(f"{self.path} has arrays of several lengths: {sorted(lengths)}")
        return cut_evenly(lengths.pop(), part_rows)

    def open(self, columns: Sequence[str]) -> ArrayReader:
        """Begin reading these arrays."""
        headers = self._headers()
        return ArrayReader(self.path, {name: headers[name] for name in columns})

    def _headers(self) -> dict[str, _Header]:
        """The arrays' headers, whose first dimension is the rows."""
        headers = self._stored_headers()
        ranks = {name: self.ranks[name] for name in headers if name in self.ranks}
        if ranks and all(len(headers[name].shape) == rank for name, rank in ranks.items()):
            return {name: replace(headers[name], shape=(1, *headers[name].shape)) for name in ranks}
        if single := next((name for name, header in headers.items() if not header.shape), None):
            raise BadJob(
                f"{self.path} cannot be read as a NumPy file: {single} holds a single number, wanted rows",
                remedy="Give every array its rows as the first dimension; of a model without a batch, the whole inputs "
                "of one request.",
            )
        return headers

    def _stored_headers(self) -> dict[str, _Header]:
        try:
            if self.format == "npy":
                with self.path.open("rb") as file:
                    return {self.path.stem: _header(file)}
            with zipfile.ZipFile(self.path) as archive:
                return {name.removesuffix(_SUFFIX): _header_in(archive, name) for name in archive.namelist()}
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise BadJob(f"{self.path} cannot be read as a NumPy file: {first_line(error)}") from error


@final
class ArrayReader:
    """Reads rows of each array; members of an archive are read on from where the last part ended."""

    def __init__(self, path: Path, headers: Mapping[str, _Header]) -> None:
        self._path = path
        self._headers = headers
        self._archive = zipfile.ZipFile(path) if path.suffix.lower() != _SUFFIX else None
        self._files: dict[str, IO[bytes]] = {
            name: path.open("rb") if self._archive is None else self._archive.open(name + _SUFFIX) for name in headers
        }

    def read(self, part: PredictionPart) -> Rows:
        """The rows of a part."""
        try:
            columns = {name: _as_column(self._slice(name, part)) for name in self._headers}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise RunFailed(f"{self._path} is damaged: {first_line(error)}", remedy="Copy it again.") from error
        return Rows(str(self._path), part.first_row, part.num_rows, columns)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        if self._archive is not None:
            self._archive.close()

    def _slice(self, name: str, part: PredictionPart) -> NDArray[Any]:
        header = self._headers[name]
        shape = (part.num_rows, *header.shape[1:])
        row_bytes = int(np.prod(header.shape[1:], dtype=np.int64)) * header.dtype.itemsize
        file = self._files[name]
        file.seek(header.offset + part.first_row * row_bytes)
        content = file.read(part.num_rows * row_bytes)
        if len(content) != part.num_rows * row_bytes:
            raise EOFError(f"{name} ends before row {part.first_row + part.num_rows}")
        return np.frombuffer(content, header.dtype).reshape(shape)


def _header_in(archive: zipfile.ZipFile, name: str) -> _Header:
    if not name.endswith(_SUFFIX):
        raise ValueError(f"{name} in it is no array")
    with archive.open(name) as file:
        return _header(file)


def _header(file: IO[bytes]) -> _Header:
    major, _ = npy.read_magic(file)
    read = npy.read_array_header_1_0 if major == 1 else npy.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if is_fortran and len(shape) > 1:
        raise ValueError("an array in it is stored by columns (Fortran order); save numpy.ascontiguousarray of it")
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds {dtype}, wanted numbers")
    return _Header(tuple(shape), dtype, file.tell())


def _arrow_type(header: _Header) -> pa.DataType:
    kind = pa.from_numpy_dtype(header.dtype.newbyteorder("="))
    for size in reversed(header.shape[1:]):
        kind = pa.list_(kind, size)
    return kind


def _as_column(rows: NDArray[Any]) -> Column:
    """The rows as Arrow has them."""
    flat = rows.astype(rows.dtype.newbyteorder("="), copy=False).reshape(-1)
    column = pa.array(flat)
    for size in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column
