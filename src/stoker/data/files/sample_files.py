"""Files that hold many samples: which they are, where in them things lie, and reading at a place.

Files that a run could not read, so that it goes on under the same identity once they are mended.

A source of files is identified by their names, sizes and times. A file that cannot be read ends a run before anything
of it was learned, so another version in its place changes nothing that was: it goes on counting as what it was. Which
file that is, and what it was, is noted in the cache, and taken once: a second change is a change of the data.

Leaving out what a clean list says: which of its names mean samples of a source.
"""

from __future__ import annotations

import glob
import hashlib
import io
import itertools
import json
import math
import os
import re
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from stoker.errors import BadJob, StokerError, first_line
from stoker.records import CleanList, loads
from stoker.records.codec import printable
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


Version = tuple[int, int]
"""A file's size [bytes] and time of change [ns]."""


def version_of(path: Path) -> Version:
    """The file as it is now; raises OSError."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


def note_unreadable(root: Path, name: str, counts_as: Sequence[int]) -> None:
    """Remember that the file `name` below `root` cannot be read, and as which version the run that met it counts it.

    Without a cache that can be written nothing is remembered, and the mended file makes another job.
    """
    with suppress(OSError, StokerError):
        notes = _read_notes(root)
        now = version_of(root / name)
        if name in notes and list(now) == notes[name]["mended"]:
            notes[name]["mended"] = None  # the mended one was no better: wait for the next
        elif name not in notes:
            notes[name] = {"was": [int(part) for part in counts_as], "mended": None}
        make_directories(_notes_path(root).parent)
        write_atomic(_notes_path(root), json.dumps(notes), what="the note of an unreadable file")


def as_first_seen(root: Path, names: Sequence[str], versions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The versions [N, 2] of the files `names`, with those of mended ones as they were when they could not be read."""
    notes = _read_notes(root)
    if not notes:
        return versions
    seen, is_new = versions.copy(), False
    for index, name in enumerate(names):
        note, now = notes.get(name), versions[index].tolist()
        if note is None or now == note["was"]:
            continue
        if note["mended"] is None:
            note["mended"], is_new = now, True
        if now == note["mended"]:
            seen[index] = np.array(note["was"])
    if is_new:
        with suppress(StokerError):
            write_atomic(_notes_path(root), json.dumps(notes), what="the note of a mended file")
    return seen


def _notes_path(root: Path) -> Path:
    digest = hashlib.sha256(str(root.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    return cache_root() / "data" / "unreadable" / f"{digest[:32]}.json"


def _read_notes(root: Path) -> dict[str, dict[str, list[int] | None]]:
    """The notes about files below `root`; none where there are none, or they cannot be read."""
    try:
        found = json.loads(_notes_path(root).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


Clean: TypeAlias = "CleanList | str | Path | None"
"""A clean list, or the file that `stoker data check -o DIR` wrote it to."""


def left_out(clean: Clean, root: Path) -> frozenset[str]:
    """The names of the samples to leave out, relative to `root`, as they are printable (see `stoker.records.codec`).

    A list made of a folder above `root` names its samples from there; those elsewhere are left aside.

    Raises:
        BadJob: the file holds no clean list, or one of another place.
    """
    if clean is None:
        return frozenset()
    found = clean if isinstance(clean, CleanList) else _read_clean_list(Path(clean))
    prefix = _prefix(Path(found.source), root)
    ids = map(printable, found.dropped_ids())
    if prefix is None:
        return frozenset(ids)
    return frozenset(name.removeprefix(printable(prefix)) for name in ids if name.startswith(printable(prefix)))


def left_out_of_files(clean: Clean, paths: Sequence[Path]) -> tuple[frozenset[str], ...]:
    """For each file of many samples, what follows its name in the names of the samples to leave out.

    A list made of a folder above names each file by its path from there, and may be of other files in it alone. For one
    made elsewhere, as before the files were moved, they are called by their paths below the folder that holds them all.

    Raises:
        BadJob: the file holds no clean list, or one of another place, with none of these names.
    """
    if clean is None:
        return (frozenset(),) * len(paths)
    found = clean if isinstance(clean, CleanList) else _read_clean_list(Path(clean))
    ids = frozenset(map(printable, found.dropped_ids()))
    source = Path(found.source).expanduser().resolve()
    above = source.parent if source.is_file() else source
    places = [path.expanduser().parent.resolve() / path.name for path in paths]
    if not any(place.is_relative_to(above) for place in places):
        above = Path(os.path.commonpath([place.parent for place in places]))
    names = [place.relative_to(above).as_posix() if place.is_relative_to(above) else None for place in places]
    names = [None if name is None else printable(name) for name in names]
    by_file = _by_file(ids, {name for name in names if name is not None})
    if source.is_file() or not any((above / sample.rpartition(":")[0]).is_file() for sample in ids):
        require_known(ids, sum(map(len, by_file.values())), paths[0].name)
    return tuple(frozenset() if name is None else frozenset(by_file[name]) for name in names)


def _by_file(ids: frozenset[str], files: set[str]) -> dict[str, set[str]]:
    """For each of `files`, what follows its name and a colon in `ids`; keys may have colons as well."""
    by_file: dict[str, set[str]] = {file: set() for file in files}
    for sample in ids:
        for at, letter in enumerate(sample):
            if letter == ":" and sample[:at] in by_file:
                by_file[sample[:at]].add(sample[at + 1 :])
    return by_file


def require_known(dropped: frozenset[str], num_found: int, name: str) -> None:
    """Refuse a clean list none of whose names mean a sample here.

    Raises:
        BadJob: it is of other data.
    """
    if dropped and not num_found:
        example = min(dropped)
        raise BadJob(
            f"the clean list leaves out {len(dropped):,} samples, as {example!r}, and {name} has none of these names",
            remedy="Give the list that `stoker data check` made of these files.",
        )


def _read_clean_list(path: Path) -> CleanList:
    try:
        return loads(path.read_text(encoding="utf-8"), CleanList)
    except (OSError, ValueError) as error:
        raise BadJob(
            f"{path} is no clean list: {first_line(error)}",
            remedy="Give the clean.json that `stoker data check PATH -o DIR` writes.",
        ) from error


def _prefix(source: Path, root: Path) -> str | None:
    """What names in a list of `source` have before those below `root`; None where one is not below the other."""
    above, below = source.expanduser().resolve(), root.expanduser().resolve()
    if above.is_file():
        above = above.parent
    if not below.is_relative_to(above):
        return None
    between: PurePath = below.relative_to(above)
    return "" if between == PurePath() else f"{between.as_posix()}/"
