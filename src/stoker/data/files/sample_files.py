"""Files of samples: shard patterns, indices and reads at an offset; repaired files; samples a clean list leaves out.

A source of files is identified by their names, sizes and times. An unreadable file ends a run before anything of it was
learned, so its repaired version keeps the identity: the cache notes the file and its version, and the first change
after that counts as no change. A second one is a change of the data.
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
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from stoker.errors import BadJob, StokerError, first_line
from stoker.records import CleanList, loads
from stoker.records.codec import printable, read_object
from stoker.store import cache_root, write_atomic
from stoker.store.files import make_directories

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)
_MOST_NAMES = 1_000_000
"""Most names that a pattern of braces may expand to."""

Arrays = dict[str, npt.NDArray[Any]]

Paths = str | Path | Sequence[str | Path]


def shard_paths(given: Paths) -> tuple[Path, ...]:
    """The absolute paths of a pattern or list: braces are expanded as in a shell, `*` by the existing files, in order.

    Raises:
        BadJob: there are none, one is missing, given twice, or compressed, which allows no reads at an offset.
    """
    patterns = [given] if isinstance(given, str | Path) else list(given)
    paths: list[Path] = []
    for pattern in patterns:  # absolute from the start: the working directory may change before the data are read
        for name in expanded(str(Path(pattern).expanduser().absolute())):
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
    """Raise BadJob if a file is given twice, as by a name and a pattern: an epoch would have its samples twice."""
    counts = Counter(path.resolve() for path in paths)
    if twice := next((path for path, count in counts.items() if count > 1), None):
        raise BadJob(
            f"{twice} is given twice", remedy="Name each file once; Job(sampling=…) draws some samples more often."
        )


def expanded(pattern: str) -> Iterator[str]:
    """The names of a pattern with braces; leading zeros of numbers are kept.

    >>> list(expanded("train-{08..10}.{tar,idx}"))[:3]
    ['train-08.tar', 'train-08.idx', 'train-09.tar']

    Raises:
        BadJob: they stand for more than a million names.
    """
    pieces = _BRACES.split(pattern)
    count = math.prod(_num_choices(piece) for piece in pieces[1::2])
    if not count <= _MOST_NAMES:  # of numbers too large for a float it is nan
        raise BadJob(f"{pattern[:200]} stands for {count:.3g} files", remedy=f"At most {_MOST_NAMES:,} are read.")
    choices = [_choices(piece) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    yield from ("".join(chosen) for chosen in itertools.product(*choices))


def _num_choices(inside: str) -> float:
    """Number of names that one pair of braces stands for; NaN if too large for a float."""
    match = _RANGE.fullmatch(inside)
    return inside.count(",") + 1 if match is None else abs(float(match[1]) - float(match[2])) + 1


def _choices(inside: str) -> list[str]:
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",")
    first, last = int(match[1]), int(match[2])
    width = len(match[1]) if match[1].startswith("0") else 0
    step = 1 if first <= last else -1
    return [str(number).zfill(width) for number in range(first, last + step, step)]


def indexed(path: Path, kind: str, look_through: Callable[[Path], Arrays]) -> Arrays:
    """The index of a file: from the cache if the file has not changed since, else from `look_through`."""
    version = version_of(path)
    digest = hashlib.sha256(str(path.resolve()).encode("utf-8", "surrogateescape")).hexdigest()
    place = cache_root() / "data" / "indices" / f"{kind}-{digest[:32]}.npz"
    with suppress(OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        with np.load(io.BytesIO(place.read_bytes()), allow_pickle=False) as stored:
            known = {name: stored[name] for name in stored.files}
        if tuple(known.pop("version", np.zeros(2)).tolist()) == version:
            return known
    arrays = look_through(path)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, version=np.array(version, np.int64), **arrays)
    with suppress(OSError, StokerError):  # without it, the file is looked through at every start
        make_directories(place.parent)
        write_atomic(place, buffer.getvalue(), what="the index of a shard")
    return arrays


class OpenFiles:
    """Files read at offsets; opened when first read, in each process; the least recently used are closed beyond 64.

    Every read names its offset, so that forked processes do not move each other's file position.
    """

    most_open: ClassVar[int] = 64

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes of file number `shard`, from `offset` on.

        Raises:
            OSError: the file is missing or too short.
        """
        content = os.pread(self._descriptor(shard), size, offset)
        while len(content) < size:  # Linux gives at most 2 GiB at once
            more = os.pread(self._descriptor(shard), size - len(content), offset + len(content))
            if not more:
                raise OSError(f"it ends {size - len(content):,} bytes before the end of the sample")
            content += more
        return content

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close all files; also at the interpreter's exit, when `os` is gone from this module."""
        while self._open:
            close(self._open.popitem()[1])

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
    """The file's current version; raises OSError."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def existing_version(path: Path, *, remedy: str) -> Version:
    """As `version_of`, but raises BadJob with `remedy`."""
    try:
        return version_of(path)
    except OSError as error:
        raise BadJob(f"{path} cannot be read: {error.strerror}", remedy=remedy) from error


def note_unreadable(root: Path, name: str, counts_as: Sequence[int]) -> None:
    """Note in the cache that the file `name` below `root` is unreadable, and the version it counts as in this run.

    Without a writable cache nothing is noted, and the repaired file makes another job.
    """
    with suppress(OSError, StokerError):
        notes = _read_notes(root)
        now = version_of(root / name)
        if name in notes and list(now) == notes[name]["mended"]:
            notes[name]["mended"] = None  # the repaired file is unreadable too: wait for the next
        elif name not in notes:
            notes[name] = {"was": [int(part) for part in counts_as], "mended": None}
        make_directories(_notes_path(root).parent)
        write_atomic(_notes_path(root), json.dumps(notes), what="the note of an unreadable file")


def as_first_seen(root: Path, names: Sequence[str], versions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The versions [N, 2] of the files `names`; a repaired file counts as the unreadable version it replaced."""
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
    """The notes about files below `root`; empty if there are none or they cannot be read."""
    with suppress(OSError):
        return read_object(_notes_path(root).read_bytes())
    return {}


Clean: TypeAlias = "CleanList | str | Path | None"
"""A clean list, or the file that `stoker data check -o DIR` wrote it to."""


def left_out(clean: Clean, root: Path) -> frozenset[str]:
    """Names of the samples to leave out, relative to `root`, in printable form (see `stoker.records.codec`).

    A list made of a folder above `root` names its samples from there; samples outside `root` are ignored.

    Raises:
        BadJob: the file holds no clean list.
    """
    if clean is None:
        return frozenset()
    known = clean if isinstance(clean, CleanList) else _read_clean_list(Path(clean))
    ids = frozenset(map(printable, known.dropped_ids()))
    above, below = Path(known.source).expanduser().resolve(), root.expanduser().resolve()
    if above.is_file():
        above = above.parent
    if not below.is_relative_to(above):
        return ids
    between = below.relative_to(above).as_posix()
    prefix = "" if between == "." else printable(f"{between}/")
    return frozenset(name.removeprefix(prefix) for name in ids if name.startswith(prefix))


def left_out_of_files(clean: Clean, paths: Sequence[Path]) -> tuple[frozenset[str], ...]:
    """For each file of many samples, the samples to leave out: their names without the file's name and the colon.

    A list made of a folder above names each file by its path from there, and need not mention these files. For a list
    made elsewhere, as before the files were moved, paths start at the folder that holds them all.

    Raises:
        BadJob: the file holds no clean list, or one of another place, with none of these names.
    """
    if clean is None:
        return (frozenset(),) * len(paths)
    known = clean if isinstance(clean, CleanList) else _read_clean_list(Path(clean))
    ids = frozenset(map(printable, known.dropped_ids()))
    source = Path(known.source).expanduser().resolve()
    above = source.parent if source.is_file() else source
    places = [path.expanduser().parent.resolve() / path.name for path in paths]
    if not any(place.is_relative_to(above) for place in places):
        above = Path(os.path.commonpath([place.parent for place in places]))
    names = [place.relative_to(above).as_posix() if place.is_relative_to(above) else None for place in places]
    names = [None if name is None else printable(name) for name in names]
    by_file: dict[str, set[str]] = {name: set() for name in names if name is not None}
    for sample in ids:
        for index, letter in enumerate(sample):  # file names and keys may have colons as well
            if letter == ":" and sample[:index] in by_file:
                by_file[sample[:index]].add(sample[index + 1 :])
    if source.is_file() or not any((above / sample.rpartition(":")[0]).is_file() for sample in ids):
        require_known(ids, sum(map(len, by_file.values())), paths[0].name)
    return tuple(frozenset() if name is None else frozenset(by_file[name]) for name in names)


def require_known(dropped: frozenset[str], num_found: int, name: str) -> None:
    """Raise BadJob for a clean list of other data: none of its names is a sample here."""
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
