"""Files that hold many samples: which they are, where in them things lie, and reading at a place."""

from __future__ import annotations

import glob
import hashlib
import io
import itertools
import math
import os
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from stoker.data.files.mending import Version, version_of
from stoker.errors import BadJob, StokerError
from stoker.store import cache_root, write_atomic
from stoker.store.files import make_directories

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)
_MOST_NAMES = 1_000_000
"""What a pattern of braces may stand for."""

Arrays = dict[str, npt.NDArray[Any]]

Paths = str | Path | Sequence[str | Path]


def shard_paths(given: Paths) -> tuple[Path, ...]:
    """The files that are meant, absolute: braces expanded as a shell does, `*` by what is there, in order.

    Raises:
        BadJob: there are none, one is missing, meant twice, or compressed and so cannot be read at a place.
    """
    words = [given] if isinstance(given, str | Path) else list(given)
    paths: list[Path] = []
    for word in words:  # absolute from the start: a job may be made in one folder and its data be read in another
        for name in expanded(str(Path(word).expanduser().absolute())):
            found = sorted(glob.glob(name, recursive=True)) if "*" in name else [name]  # noqa: PTH207 - may be absolute
            if not found:
                raise BadJob(f"no file is called {name}", remedy="Mend the pattern.")
            paths += map(Path, found)
    if not paths:
        raise BadJob("no shards are given", remedy="Give a path, or a list of them.")
    require_once(paths)
    for path in paths:
        _require_seekable(path)
    return tuple(paths)


def require_once(paths: Sequence[Path]) -> None:
    """Refuse a file that is meant twice, as by a name and a pattern: an epoch would have its samples twice.

    Raises:
        BadJob: there is one.
    """
    counts = Counter(path.resolve() for path in paths)
    if twice := next((path for path, count in counts.items() if count > 1), None):
        raise BadJob(
            f"{twice} is given twice", remedy="Name each file once; Job(sampling=…) draws some samples more often."
        )


def expanded(pattern: str) -> Iterator[str]:
    """The names that braces stand for, zeros before numbers kept.

    >>> list(expanded("train-{08..10}.{tar,idx}"))[:3]
    ['train-08.tar', 'train-08.idx', 'train-09.tar']

    Raises:
        BadJob: they stand for more than a million names.
    """
    pieces = _BRACES.split(pattern)
    count = math.prod(_num_choices(piece) for piece in pieces[1::2])
    if not count <= _MOST_NAMES:  # of numbers too large for a float it is nan
        raise BadJob(f"{pattern[:200]} stands for {count:.3g} files", remedy=f"At most {_MOST_NAMES:,} are read.")
    choices = [_choices(piece) if at % 2 else [piece] for at, piece in enumerate(pieces)]
    yield from ("".join(chosen) for chosen in itertools.product(*choices))


def _num_choices(inside: str) -> float:
    """How many names one pair of braces stands for."""
    found = _RANGE.fullmatch(inside)
    return inside.count(",") + 1 if found is None else abs(float(found[1]) - float(found[2])) + 1


def _choices(inside: str) -> list[str]:
    found = _RANGE.fullmatch(inside)
    if found is None:
        return inside.split(",")
    first, last = int(found[1]), int(found[2])
    width = len(found[1]) if found[1].startswith("0") else 0
    step = 1 if first <= last else -1
    return [str(number).zfill(width) for number in range(first, last + step, step)]


def _require_seekable(path: Path) -> None:
    if not path.is_file():
        raise BadJob(f"{path} is no file", remedy="Mend the name, or fetch the shard that is missing.")
    with path.open("rb") as file:
        start = file.read(6)
    compressed = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstandard"}
    kind = next((kind for magic, kind in compressed.items() if start.startswith(magic)), None)
    if kind is not None:
        raise BadJob(
            f"{path} is compressed ({kind}), so that nothing in it can be found without reading all before",
            remedy="Unpack it once; images in it are compressed already.",
        )


def indexed(path: Path, kind: str, look_through: Callable[[Path], Arrays]) -> Arrays:
    """Where things lie in a file: from the cache, if the file has not changed since, else by looking through it."""
    version = version_of(path)
    digest = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    place = cache_root() / "data" / "indices" / f"{kind}-{digest[:32]}.npz"
    found = _read_index(place, version)
    if found is not None:
        return found
    arrays = look_through(path)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, version=np.array(version, np.int64), **arrays)
    with suppress(OSError, StokerError):  # without it, the file is looked through at every start
        make_directories(place.parent)
        write_atomic(place, buffer.getvalue(), what="the index of a shard")
    return arrays


def _read_index(place: Path, version: Version) -> Arrays | None:
    try:
        with np.load(io.BytesIO(place.read_bytes()), allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None
    if tuple(arrays.pop("version", np.zeros(2)).tolist()) != version:
        return None
    return arrays


class OpenFiles:
    """Files read at places; opened when first read, in each process, and the least used closed beyond 64.

    Reading names its place each time, so that processes forked later do not move each other's.
    """

    most_open: ClassVar[int] = 64

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes of file number `shard`, from `offset` on.

        Raises:
            OSError: the file is gone, or ends before.
        """
        content = os.pread(self._descriptor(shard), size, offset)
        while len(content) < size:  # Linux gives at most 2 GiB at once
            more = os.pread(self._descriptor(shard), size - len(content), offset + len(content))
            if not more:
                raise OSError(f"it ends {size - len(content):,} bytes before the end of the sample")
            content += more
        return content

    def close(self) -> None:
        """Close what is open."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, shard: int) -> int:
        if shard in self._open:
            self._open.move_to_end(shard)
        else:
            self._open[shard] = os.open(self.paths[shard], os.O_RDONLY | os.O_CLOEXEC)
            if len(self._open) > self.most_open:
                os.close(self._open.popitem(last=False)[1])
        return self._open[shard]

    def __getstate__(self) -> dict[str, Any]:
        return {"paths": self.paths, "_open": OrderedDict()}

    def __del__(self) -> None:
        self.close()
