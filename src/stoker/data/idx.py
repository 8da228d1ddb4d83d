"""Reading idx files of unsigned bytes, gzipped or not, and only if their content is the one published.

An idx file is four bytes 0, 0, 8 (unsigned byte), number of dimensions; each dimension as a big-endian 32-bit integer;
then the values, last dimension fastest. A file is identified by the SHA-256 of all that *uncompressed*: packagers
compress anew, and some keep the files unpacked.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section "File formats".
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import BadJob

if TYPE_CHECKING:
    import torch

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class IdxFile:
    """A published idx file of unsigned bytes: name without ".gz", dimensions, and SHA-256 (hex), uncompressed."""

    name: str
    shape: tuple[int, ...]
    sha256: str

    @property
    def header(self) -> bytes:
        """The bytes the file starts with."""
        return struct.pack(f">HBB{len(self.shape)}I", 0, 8, len(self.shape), *self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole file, uncompressed."""
        return len(self.header) + math.prod(self.shape)


def read_idx(path: Path, expected: IdxFile, *, remedy: str) -> torch.Tensor:
    """The values of an idx file, uint8 of shape `expected.shape`.

    Raises:
        BadJob: the file cannot be read or is not the one expected; with what differs, and `remedy`.
    """
    import torch

    try:
        stored = path.read_bytes()
    except OSError as problem:
        raise BadJob(f"{path} cannot be read: {problem.strerror or problem}", remedy=remedy) from problem
    content = verified(stored, expected, where=str(path), remedy=remedy)
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=len(expected.header))
    return values.view(expected.shape)


def verified(stored: bytes, expected: IdxFile, *, where: str, remedy: str) -> bytes:
    """The uncompressed content of `stored`, if it is the file expected; `where` names it in errors.

    Raises:
        BadJob: it is truncated, damaged, of another kind or shape, or of another content.
    """
    try:
        content = _uncompressed(stored, at_most=expected.num_bytes)
    except EOFError as problem:
        raise BadJob(
            f"{where} is truncated: its gzip stream stops after {len(stored):,} bytes of file", remedy=remedy
        ) from problem
    except (gzip.BadGzipFile, zlib.error) as problem:
        raise BadJob(f"{where} is damaged: {problem}", remedy=remedy) from problem
    difference = _difference(content, expected)
    if difference is not None:
        raise BadJob(f"{where} {difference}", remedy=remedy)
    return content


def _uncompressed(stored: bytes, *, at_most: int) -> bytes:
    """The content, one byte over `at_most` bytes at most: enough to see that a file is too long."""
    if not stored.startswith(_GZIP_MAGIC):
        return stored[: at_most + 1]
    with gzip.GzipFile(fileobj=io.BytesIO(stored)) as stream:
        return stream.read(at_most + 1)


def _difference(content: bytes, expected: IdxFile) -> str | None:
    """In what the content is not the one expected, the most telling first; None if it is."""
    header = expected.header
    if content[:4] != header[:4]:
        return f"is no idx file of its kind: it starts with {content[:4].hex(' ')!r}, wanted {header[:4].hex(' ')!r}"
    if len(content) != expected.num_bytes:
        found = f"{len(content):,}" if len(content) < expected.num_bytes else f"more than {expected.num_bytes:,}"
        return f"has {found} bytes uncompressed, wanted {expected.num_bytes:,}"
    if content[: len(header)] != header:
        shape = struct.unpack(f">{len(expected.shape)}I", content[4 : len(header)])
        return f"holds an array of {_times(shape)}, wanted {_times(expected.shape)}"
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != expected.sha256:
        return f"has another content: its SHA-256 uncompressed is {sha256}, wanted {expected.sha256}"
    return None


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in shape)
