"""Sources of rows in files, and the sources that a user's names of files, folders and patterns mean.

Text (CSV, JSON Lines) and NumPy files are read from the offset of a part, Parquet a batch at a time (row groups may be
larger than memory). An image file is a row. A row that cannot be read is broken; the rows after it are read. NumPy
files are never unpickled.
"""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import IO, Any, BinaryIO, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.data.reading.array_files import npy_header
from stoker.data.reading.file_listing import SUFFIXES, files_below
from stoker.data.reading.table_readers import (
    BadTable,
    CsvFile,
    Lines,
    batches_of,
    is_utf8,
    object_in,
    opened,
    parquet_file,
    rows_in,
)
from stoker.errors import BadJob, RunFailed, first_line
from stoker.predicting.row_source import Column, RowSource, SourceColumn, SourceExtent, SourceRows, cut_evenly
from stoker.records.codec import printable
from stoker.records.prediction import PredictionPart, SourceFormat

_LOOKED_AT = 100
"""Number of objects at the beginning whose keys are the columns."""


class FileSource:
    """A source that is one file."""

    format: SourceFormat

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> Sequence[Path]:
        """The file."""
        return (self.path,)


class TextSource(FileSource, ABC):
    """A text file, whose parts begin at offsets [bytes] that are found by reading all of it."""

    @abstractmethod
    def fields(self) -> tuple[SourceColumn, ...]:
        """The columns; see `Source.fields`."""

    @abstractmethod
    def starts(self, file: BinaryIO) -> Iterator[int]:
        """Offset of each row of the open file [bytes]."""

    @abstractmethod
    def values(self, file: BinaryIO, offset: int, columns: Sequence[str]) -> Iterator[tuple[list[Any], str]]:
        """The rows from `offset` on [bytes]: the values of these columns, or what is wrong with the row."""

    def extent(self, part_rows: int) -> SourceExtent:
        """Number of rows and the parts' offsets, by reading the whole file."""
        offsets: list[int] = []
        num_rows = 0
        with opened(self.path) as file:
            for start in self.starts(file):
                if num_rows % part_rows == 0:
                    offsets.append(start)
                num_rows += 1
        return SourceExtent(num_rows, tuple(offsets))

    def open(self, columns: Sequence[str]) -> TextReader:
        """Begin reading these columns."""
        return TextReader(self, columns)


@final
class TextReader:
    """Reads parts of a text file in order."""

    def __init__(self, source: TextSource, columns: Sequence[str]) -> None:
        self._source = source
        self._columns = tuple(columns)
        self._file = opened(source.path)

    def read(self, part: PredictionPart) -> SourceRows:
        """The rows of a part."""
        broken: dict[int, str] = {}
        columns: dict[str, list[Any]] = {name: [] for name in self._columns}
        rows = self._source.values(self._file, part.offset, self._columns)
        for row in range(part.num_rows):
            values, problem = next(rows, ([], "is after the end of the file"))
            if problem:
                broken[row] = problem
            for index, column in enumerate(columns.values()):
                column.append(None if problem else values[index])
        return SourceRows(str(self._source.path), part.first_row, part.num_rows, columns, broken)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class CsvSource(TextSource):
    """A CSV file, or one with tabs between the fields."""

    def __init__(self, path: Path, *, delimiter: str = ",") -> None:
        super().__init__(path)
        self.format = "tsv" if delimiter == "\t" else "csv"
        self._csv = CsvFile(path, delimiter)

    def fields(self) -> tuple[SourceColumn, ...]:
        """The columns in the header."""
        return tuple(SourceColumn(name, pa.string(), is_text=True) for name in self._csv.header)

    def starts(self, file: BinaryIO) -> Iterator[int]:
        """Offset of every record [bytes]."""
        return (record.start for record in self._csv.records(file))

    def values(self, file: BinaryIO, offset: int, columns: Sequence[str]) -> Iterator[tuple[list[Any], str]]:
        """Fields as text."""
        places = [self._csv.header.index(name) for name in columns]
        for record in self._csv.records(file, offset):
            if record.fault is not None:
                yield [], record.fault.words
            else:
                chosen = [record.fields[place] for place in places]
                yield chosen, "" if all(map(is_utf8, chosen)) else "is not UTF-8"


@final
class JsonlSource(TextSource):
    """A file of JSON Lines."""

    format: SourceFormat = "jsonl"

    def fields(self) -> tuple[SourceColumn, ...]:
        """The keys of the first hundred objects."""
        with opened(self.path) as file:
            lines = islice(rows_in(Lines(file, self.path)), _LOOKED_AT)
            names = dict.fromkeys(name for line in lines for name in object_in(line.content)[0])
        if not names:
            raise BadJob(f"{self.path} has no JSON object in its first {_LOOKED_AT} lines")
        return tuple(SourceColumn(name, None) for name in names)

    def starts(self, file: BinaryIO) -> Iterator[int]:
        """Offset of every line that is not blank [bytes]."""
        return (line.start for line in rows_in(Lines(file, self.path)))

    def values(self, file: BinaryIO, offset: int, columns: Sequence[str]) -> Iterator[tuple[list[Any], str]]:
        """Values by key; null if a row lacks one."""
        for line in rows_in(Lines(file, self.path, offset)):
            value, fault = object_in(line.content)
            yield [value.get(name) for name in columns], "" if fault is None else fault.words


_BATCH_ROWS = 1024


@final
class ParquetSource(FileSource):
    """One Parquet file."""

    format: SourceFormat = "parquet"

    def fields(self) -> tuple[SourceColumn, ...]:
        """The columns of its schema."""
        with parquet_file(self.path) as file:
            return tuple(SourceColumn(field.name, field.type) for field in file.schema_arrow)

    def extent(self, part_rows: int) -> SourceExtent:
        """Number of rows in its footer."""
        with parquet_file(self.path) as file:
            return cut_evenly(file.metadata.num_rows, part_rows)

    def open(self, columns: Sequence[str]) -> ParquetReader:
        """Begin reading these columns."""
        return ParquetReader(self.path, columns)


@final
class ParquetReader:
    """Reads the file in order; the rest of a batch begins the next part."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._path = path
        self._columns = list(columns)
        self._file = parquet_file(path)
        self._start(0)

    def read(self, part: PredictionPart) -> SourceRows:
        """The rows of a part; rows before it are skipped."""
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
        columns = {}
        for name in self._columns:
            array = table.column(name).combine_chunks()
            if isinstance(array, pa.ChunkedArray):
                array = pa.concat_arrays(array.chunks)
            columns[name] = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        return SourceRows(str(self._path), part.first_row, part.num_rows, columns)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _start(self, row: int) -> None:
        """Go to the beginning of the row group with `row`."""
        self._batches = batches_of(self._file, self._path, _BATCH_ROWS, self._columns, row=row)
        self._at: int
        self._rest: pa.RecordBatch | None
        self._at, self._rest = next(self._batches, (row, None))

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


_SUFFIX = ".npy"


@dataclass(frozen=True)
class _Header:
    """Shape and dtype of an array in a file, and the offset of its elements [bytes]."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


@final
class NumpySource(FileSource):
    """A file with one array, named for the file, or with several of equal length (`numpy.savez`).

    For models without a batch, `ranks` are the numbers of dimensions of a whole request, by array: arrays with these
    are one row, arrays with one more have a row for each index of their first dimension.
    """

    def __init__(self, path: Path, *, ranks: Mapping[str, int] | None = None) -> None:
        super().__init__(path)
        self.ranks = dict(ranks or {})
        self.format = "npy" if path.suffix.lower() == _SUFFIX else "npz"

    def fields(self) -> tuple[SourceColumn, ...]:
        """A column for each array."""
        return tuple(SourceColumn(name, _arrow_type(header)) for name, header in self._headers().items())

    def extent(self, part_rows: int) -> SourceExtent:
        """Number of rows in the arrays' headers."""
        lengths = {header.shape[0] for header in self._headers().values()}
        if len(lengths) != 1:
            raise BadJob(f"{self.path} has arrays of several lengths: {sorted(lengths)}")
        return cut_evenly(lengths.pop(), part_rows)

    def open(self, columns: Sequence[str]) -> NumpyReader:
        """Begin reading these arrays."""
        headers = self._headers()
        return NumpyReader(self.path, {name: headers[name] for name in columns})

    def _headers(self) -> dict[str, _Header]:
        """The arrays' headers, whose first dimension is the rows."""
        try:
            if self.format == "npy":
                with self.path.open("rb") as file:
                    headers = {self.path.stem: _header(file)}
            else:
                with zipfile.ZipFile(self.path) as archive:
                    headers = {name.removesuffix(_SUFFIX): _header_in(archive, name) for name in archive.namelist()}
        except (ValueError, OSError, zipfile.BadZipFile) as error:
            raise BadJob(f"{self.path} cannot be read as a NumPy file: {first_line(error)}") from error
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


@final
class NumpyReader:
    """Reads rows of each array; parts of an archive's members are read in order."""

    def __init__(self, path: Path, headers: Mapping[str, _Header]) -> None:
        self._path = path
        self._headers = headers
        self._archive = zipfile.ZipFile(path) if path.suffix.lower() != _SUFFIX else None
        self._files: dict[str, IO[bytes]] = {
            name: path.open("rb") if self._archive is None else self._archive.open(name + _SUFFIX) for name in headers
        }

    def read(self, part: PredictionPart) -> SourceRows:
        """The rows of a part."""
        try:
            columns = {name: _as_column(self._slice(name, part)) for name in self._headers}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise RunFailed(f"{self._path} is damaged: {first_line(error)}", remedy="Copy it again.") from error
        return SourceRows(str(self._path), part.first_row, part.num_rows, columns)

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
    shape, is_fortran, dtype, offset = npy_header(file)
    if is_fortran and len(shape) > 1:
        raise ValueError("an array in it is stored by columns (Fortran order); save numpy.ascontiguousarray of it")
    if dtype.kind not in "biuf":
        raise ValueError(f"it holds {dtype}, wanted numbers")
    return _Header(shape, dtype, offset)


def _arrow_type(header: _Header) -> pa.DataType:
    kind = pa.from_numpy_dtype(header.dtype.newbyteorder("="))
    for size in reversed(header.shape[1:]):
        kind = pa.list_(kind, size)
    return kind


def _as_column(rows: NDArray[Any]) -> Column:
    """The rows as an Arrow array of nested lists of fixed size."""
    flat = rows.astype(rows.dtype.newbyteorder("="), copy=False).reshape(-1)
    column = pa.array(flat)
    for size in reversed(rows.shape[1:]):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


IMAGE, PATH = "image", "path"
"""The columns of such a source: the image, and the file's path below the folder."""


@final
class ImageSource:
    """An image file, or a folder with images, sorted by path."""

    format: SourceFormat = "images"

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _paths(self) -> tuple[Path, ...]:
        if self.path.is_file():
            return (self.path,)
        names = (name for name in files_below(self.path) if Path(name).suffix.lower() in SUFFIXES)
        return tuple(self.path / name for name in sorted(names))

    def files(self) -> Sequence[Path]:
        """The images."""
        return self._paths

    def fields(self) -> tuple[SourceColumn, ...]:
        """The image and its path."""
        return (SourceColumn(IMAGE, pa.string(), is_image=True), SourceColumn(PATH, pa.string()))

    def extent(self, part_rows: int) -> SourceExtent:
        """A row for each image."""
        return cut_evenly(len(self._paths), part_rows)

    def open(self, columns: Sequence[str]) -> ImageReader:
        """Begin reading."""
        return ImageReader(self.path, self._paths, columns)


@final
class ImageReader:
    """Reads paths only; files are read and decoded when a part is computed."""

    def __init__(self, root: Path, paths: Sequence[Path], columns: Sequence[str]) -> None:
        self._root = root
        self._paths = paths
        self._columns = tuple(columns)

    def read(self, part: PredictionPart) -> SourceRows:
        """The paths of a part."""
        paths = self._paths[part.first_row : part.first_row + part.num_rows]
        relative = [path.name if path == self._root else path.relative_to(self._root).as_posix() for path in paths]
        values = {IMAGE: [str(path) for path in paths], PATH: relative}
        columns = {name: values[name] for name in self._columns}
        return SourceRows(str(self._root), part.first_row, part.num_rows, columns, names=[str(path) for path in paths])

    def close(self) -> None:
        """Nothing is open."""


_MAKERS: dict[str, Callable[[Path], RowSource]] = {
    ".parquet": ParquetSource,
    ".pq": ParquetSource,
    ".csv": CsvSource,
    ".tsv": lambda path: CsvSource(path, delimiter="\t"),
    ".jsonl": JsonlSource,
    ".ndjson": JsonlSource,
    ".npy": NumpySource,
    ".npz": NumpySource,
    **dict.fromkeys(SUFFIXES, ImageSource),
}
_MOST_NAMED = 5
_READABLE = "Parquet, CSV, TSV, JSONL, NPY, NPZ, images, or a folder of files of one of these kinds"


def find_sources(names: Sequence[str]) -> tuple[RowSource, ...]:
    """The sources for names of files, folders and patterns (`data/*.parquet`), in the given order.

    A folder means its files with rows, sorted by name, or all images in and below it.

    Raises:
        BadJob: a file is missing, of an unknown kind, or given twice; or a folder holds nothing or several kinds.
    """
    sources = [source for name in names for source in _expanded(name)]
    paths = [source.path.resolve() for source in sources]
    if twice := next((path for path, times in Counter(paths).items() if times > 1), None):
        raise BadJob(f"{twice} is given twice", remedy="Name each file once.")
    for source in sources:
        for path in source.files():
            try:
                with path.open("rb"):
                    pass
            except OSError as error:
                raise BadJob(
                    f"{path} cannot be read: {error.strerror}", remedy="Check that this user may read it."
                ) from error
    return tuple(sources)


def passed_over(names: Sequence[str], sources: Sequence[RowSource], out: Path) -> list[str]:
    """The files in folders among `names` that are not read: of another kind, or below a folder of tables; sentences.

    Args:
        names: as for `find_sources`.
        sources: what it found.
        out: where answers go, which may lie in a folder that is read.
    """
    read, messages = {path for source in sources for path in source.files()}, []
    expanded = [path for name in names for path in ([name] if Path(name).exists() else glob(name, recursive=True))]  # noqa: PTH207 - as above
    for folder in (Path(path) for path in expanded if Path(path).is_dir()):
        left = [
            name
            for name in files_below(folder)
            if folder / name not in read and out.absolute() not in (folder / name).absolute().parents
        ]
        if left:
            more = f" and {len(left) - _MOST_NAMED:,} more" if len(left) > _MOST_NAMED else ""
            messages.append(printable(f"{folder}: not read: {', '.join(left[:_MOST_NAMED])}{more}"))
    return messages


def _expanded(name: str) -> list[RowSource]:
    path = Path(name)
    if not path.exists() and has_magic(name):
        matches = sorted(glob(name, recursive=True))  # noqa: PTH207 - the pattern may be absolute
        if not matches:
            raise BadJob(f"No file matches {name}")
        return [source for match in matches for source in _expanded(match)]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and file.suffix.lower() in _MAKERS)
        tables = [file for file in files if file.suffix.lower() not in SUFFIXES]
        images = ImageSource(path)
        suffixes = sorted({file.suffix.lower() for file in tables})
        if len(suffixes) > 1 or (suffixes and len(files) > len(tables)):
            kinds = sorted({file.suffix.lower() for file in files})
            raise BadJob(
                f"{path} holds files of several kinds: {', '.join(kinds)}", remedy=f"Name one kind: {path}/*{kinds[0]}"
            )
        if tables:
            return [_source_of(file) for file in tables]
        if not images.files():
            raise BadJob(f"{path} holds nothing that can be read", remedy=f"Give {_READABLE}.")
        return [images]
    if not path.exists():
        raise BadJob(f"{name} is not there", remedy=f"Give {_READABLE}.")
    return [_source_of(path)]


def _source_of(path: Path) -> RowSource:
    make = _MAKERS.get(path.suffix.lower())
    if make is None:
        raise BadJob(f"{path} is of a kind that cannot be read ({path.suffix or 'no suffix'})", remedy=_READABLE)
    return make(path)
