"""Readers of arrays in files: IDX, .npy and .npz. Nothing is unpickled.

Sources: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section "File formats" (IDX);
NumPy enhancement proposal 1, "A Simple File Format for NumPy Arrays".
"""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib import format as npy_format

from stoker.errors import first_line


class BadArrayFile(ValueError):
    """A file that is truncated, damaged or of another kind; the text follows the file's name."""


class NpyHeader(NamedTuple):
    """Shape, order and dtype of the array in a .npy file, and the offset of its elements [bytes]."""

    shape: tuple[int, ...]
    is_fortran: bool
    dtype: np.dtype[Any]
    offset: int


def npy_header(file: IO[bytes]) -> NpyHeader:
    """The header of an open .npy file, which is then positioned at its elements.

    Raises:
        BadArrayFile: it has none, or one that cannot be parsed.
    """
    try:
        major, _ = npy_format.read_magic(file)
        read = npy_format.read_array_header_1_0 if major == 1 else npy_format.read_array_header_2_0
        shape, is_fortran, dtype = read(file)
        return NpyHeader(tuple(shape), is_fortran, dtype, file.tell())
    except Exception as error:  # NumPy parses headers as Python text, and raises whatever its parser does
        raise BadArrayFile(first_line(error)) from error


def numpy_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a .npy (memory-mapped, named for the file) or .npz file.

    Raises:
        BadArrayFile: it cannot be read.
    """
    if path.suffix.lower() != ".npy":
        return npz_arrays(path)
    try:
        return {path.stem: np.load(path, mmap_mode="r", allow_pickle=False)}
    except (OSError, ValueError, EOFError) as error:
        raise BadArrayFile(f"cannot be read: {first_line(error)}") from error


def npz_arrays(path: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a .npz file by name.

    Raises:
        BadArrayFile: it cannot be read, is damaged, or is no such file.
    """
    try:
        with path.open("rb") as file:  # NumPy leaves a damaged one open
            archive = np.load(file, allow_pickle=False)
            if not hasattr(archive, "files"):
                raise ValueError("it holds one array without a name, as .npy files do")
            return {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise BadArrayFile(f"cannot be read: {first_line(error)}") from error


def idx_array(path: Path) -> npt.NDArray[np.uint8]:
    """The array of an IDX file of unsigned bytes, memory-mapped unless it is gzipped.

    Raises:
        BadArrayFile: it is truncated, or of another kind.
    """
    is_zipped = path.suffix == ".gz"
    try:
        with gzip.open(path) if is_zipped else path.open("rb") as file:
            head = file.read(4)
            if len(head) < 4 or head[:3] != b"\x00\x00\x08":
                raise BadArrayFile(f"is no IDX file of unsigned bytes: it starts with {head.hex(' ')}")
            shape = struct.unpack(f">{head[3]}I", file.read(4 * head[3]))
            start, size = 4 + 4 * head[3], math.prod(shape)
            if not is_zipped:
                if path.stat().st_size != start + size:
                    raise BadArrayFile(f"has {path.stat().st_size - start:,} bytes of values, its header says {size:,}")
                return np.memmap(path, np.uint8, "r", start, shape)
            content = file.read(size + 1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise BadArrayFile(f"cannot be read: {first_line(error)}") from error
    if len(content) != size:
        raise BadArrayFile(f"has {len(content):,} bytes of values, its header says {size:,}")
    return np.frombuffer(content, np.uint8).reshape(shape)
