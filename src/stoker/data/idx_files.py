"""Published idx files of unsigned bytes: where they are, how they are downloaded, verified and read.

An idx file is four bytes 0, 0, 8 (unsigned byte), number of dimensions; each dimension as a big-endian 32-bit integer;
then the values, last dimension fastest. A file is identified by the SHA-256 of its *uncompressed* content, because
packagers compress it again or unpack it.

Source: Y. LeCun, C. Cortes, C. Burges, "The MNIST database of handwritten digits", section "File formats".
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import os
import struct
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import BadJob
from stoker.store import cache_root, write_atomic
from stoker.units import format_bytes

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
        """Size of the file, uncompressed [bytes]."""
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
    at_most = expected.num_bytes + 1  # one byte more shows that a file is too long
    try:
        if stored.startswith(_GZIP_MAGIC):
            with gzip.GzipFile(fileobj=io.BytesIO(stored)) as stream:
                content = stream.read(at_most)
        else:
            content = stored[:at_most]
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


def _difference(content: bytes, expected: IdxFile) -> str | None:
    """How the content differs from the expected file, the plainest reason first; None if it does not."""
    header = expected.header
    if content[:4] != header[:4]:
        return f"is no idx file of its kind: it starts with {content[:4].hex(' ')!r}, wanted {header[:4].hex(' ')!r}"
    if len(content) != expected.num_bytes:
        size = f"{len(content):,}" if len(content) < expected.num_bytes else f"more than {expected.num_bytes:,}"
        return f"has {size} bytes uncompressed, wanted {expected.num_bytes:,}"
    if content[: len(header)] != header:
        shape = struct.unpack(f">{len(expected.shape)}I", content[4 : len(header)])
        return f"holds an array of {_times(shape)}, wanted {_times(expected.shape)}"
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != expected.sha256:
        return f"has another content: its SHA-256 uncompressed is {sha256}, wanted {expected.sha256}"
    return None


def _times(shape: tuple[int, ...]) -> str:
    return " × ".join(f"{size:,}" for size in shape)


_TOLERANCE_BYTES = 2**16
"""A download may be this much larger than the uncompressed content [bytes], for the header of gzip."""


@dataclass(frozen=True)
class DownloadPatience:
    """Longest pause, and longest duration, of a download [s]."""

    silence_s: float = 30.0
    total_s: float = 900.0


@dataclass(frozen=True)
class DatasetFolders:
    """Folders that may hold a data set's files, in order of preference; downloads from `home` go to `cache`.

    A folder counts if it holds all requested files, each gzipped or not. `home` is a URL without a final slash; the
    files there are gzipped. `remedy` says how a user gets the files otherwise.
    """

    folders: tuple[Path, ...]
    cache: Path
    home: str
    remedy: str

    def find(self, names: Sequence[str]) -> tuple[Path, ...] | None:
        """The files `names`, all from the first folder that holds them all; None if none does."""
        for folder in self.folders:
            files = [_present(folder, name) for name in names]
            if all(files):
                return tuple(path for path in files if path is not None)
        return None

    def download(self, files: Sequence[IdxFile], patience: DownloadPatience) -> None:
        """Download the files that the cache lacks; each appears there complete and verified, or not at all.

        Raises:
            BadJob: the home cannot be reached in time, sends something else, or the cache cannot be written.
        """
        for file in files:
            if _present(self.cache, file.name) is None:
                url = f"{self.home}/{file.name}.gz"
                at_most = file.num_bytes + _TOLERANCE_BYTES
                try:
                    stored = fetch(url, at_most_bytes=at_most, silence_s=patience.silence_s, total_s=patience.total_s)
                except OSError as problem:
                    looked = ", ".join(str(folder) for folder in self.folders)
                    raise BadJob(
                        f"{file.name} (or .gz) is in none of {looked}; and {url} gave {problem}", remedy=self.remedy
                    ) from problem
                verified(stored, file, where=f"what {url} sent", remedy=f"Nothing of it was kept. {self.remedy}")
                path = self.cache / f"{file.name}.gz"
                try:
                    self.cache.mkdir(parents=True, exist_ok=True)
                except OSError as problem:
                    raise BadJob(
                        f"the folder {self.cache} for downloads cannot be made: {problem.strerror or problem}",
                        remedy=f"Set STOKER_CACHE to a folder that can be written. {self.remedy}",
                    ) from problem
                write_atomic(path, stored, what=f"the download {path.name}", error=BadJob)


def dataset_folders(
    dataset: str,
    *,
    root: Path | None,
    below: Sequence[str],
    installed: Path,
    home: str,
    remedy: str,
    environ: Mapping[str, str] = os.environ,
) -> DatasetFolders:
    """Folders that may hold `dataset`: `root`, `$STOKER_DATA` (itself, or `below` it), Stoker's cache, `installed`.

    Reads the environment but no disk.
    """
    cache = cache_root(environ) / dataset
    given = environ.get("STOKER_DATA")
    shared = Path(given).expanduser() if given else None
    in_shared = () if shared is None else (shared, *(shared / folder for folder in below))
    # Absolute from the start: a job may be made in one folder and its data be read in another.
    in_root = () if root is None else (root.expanduser().absolute(),)
    return DatasetFolders((*in_root, *in_shared, cache, installed), cache, home, remedy)


def _present(folder: Path, name: str) -> Path | None:
    """The file in the folder, unpacked rather than gzipped if both exist."""
    try:
        return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)
    except OSError:  # a folder one may not look into holds nothing for us
        return None


_CHUNK_BYTES = 2**18


def fetch(url: str, *, at_most_bytes: int, silence_s: float, total_s: float) -> bytes:
    """The content of `url`, over HTTP. The operating system's host name lookup may outlast `silence_s`.

    Args:
        url: where the file is; a scheme that urllib knows.
        at_most_bytes: more than this is an error.
        silence_s: longest pause of the server [s].
        total_s: longest duration of the whole [s].

    Raises:
        OSError: the file is missing, the server does not answer, sends too much, or is too slow; the text says which.
    """
    import http.client  # these take longer to import than all the rest here
    import urllib.error
    import urllib.request

    try:
        deadline_s = time.monotonic() + total_s
        content = bytearray()
        with urllib.request.urlopen(url, timeout=silence_s) as response:  # noqa: S310 - the URL is written in Stoker
            while chunk := response.read1(_CHUNK_BYTES):
                content += chunk
                if len(content) > at_most_bytes:
                    raise OSError(f"more than {format_bytes(at_most_bytes)}, which is more than the file has")
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"only {format_bytes(len(content))} within {total_s:g} s")
        announced = response.headers.get("Content-Length")  # `read1` does not report an early end
        if announced is not None and announced.isdigit() and int(announced) != len(content):
            raise OSError(f"{len(content):,} of {int(announced):,} bytes, then broke off")
        return bytes(content)
    except urllib.error.HTTPError as problem:
        problem.close()
        raise OSError(f"HTTP status {problem.code} ({problem.reason})") from problem
    except urllib.error.URLError as problem:
        raise OSError(f"no answer ({problem.reason})") from problem
    except http.client.HTTPException as problem:
        raise OSError(f"an answer broken off ({problem})") from problem
