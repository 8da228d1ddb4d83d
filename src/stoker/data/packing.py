"""Packing a dataset: every sample is read once, in order, into shards; a killed process continues where it stopped.

Each shard is written under a temporary name, renamed and noted in a journal, so that a killed process loses one shard
at most. The manifest comes last: without it there is no packed dataset. A full disk leaves nothing behind. One process
packs at a time; others wait, and then find it done.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.data.packed_format import (
    JOURNAL,
    LOCK,
    MANIFEST,
    SHARDS,
    Array,
    Header,
    Manifest,
    SampleLayout,
    Shard,
    entries_of,
    not_whole,
    read_manifest,
    shard_of,
)
from stoker.errors import BadJob, StokerError
from stoker.records.codec import dumps, loads
from stoker.store import append_line, disk_errors, files, read_lines, write_atomic
from stoker.store.files import disk, make_directories, remove_leftovers
from stoker.units import format_bytes

_FULL = (errno.ENOSPC, errno.EDQUOT)
_LINES = 20
"""Lines about the progress, about."""


@dataclass(frozen=True)
class PackingTask:
    """A dataset to pack.

    Attributes:
        name: of the dataset, for messages.
        header: the manifest's header.
        layout: of its samples.
        read: sample `index`.
        num_bytes: estimated size of all of it [bytes].
        tell: called with lines about the progress.
    """

    name: str
    header: Header
    layout: SampleLayout
    read: Callable[[int], Any]
    num_bytes: int
    tell: Callable[[str], None]


def opened(folder: Path, packing: PackingTask) -> Manifest:
    """The manifest of the dataset packed in `folder`; packs what is missing or damaged.

    A complete dataset is only read: it may be another user's, or on a file system that is mounted read-only.

    Raises:
        BadJob: the folder holds something else, samples differ in form, or the disk is full or cannot be written.
    """
    _require_own(folder)
    found = read_manifest(folder)
    if found is not None and found.header == packing.header and not any(not_whole(folder, found.shards, packing.tell)):
        return found
    with disk_errors(folder, f"the packed {packing.name}", error=BadJob):
        make_directories(folder)
    with _locked(folder):
        found = read_manifest(folder)
        if found is not None and found.header != packing.header:
            packing.tell(f"{packing.name} is not what was packed in {folder}: packing it again")
            _clear(folder)
            found = None
        if found is not None and not any(not_whole(folder, found.shards, packing.tell)):
            return found  # another process packed it
        return _built(folder, packing, () if found is None else found.shards)


def _built(folder: Path, packing: PackingTask, recorded: Sequence[Shard]) -> Manifest:
    """Pack the shards that are missing; `recorded` are those of a manifest some of whose files are gone."""
    with disk_errors(folder, f"the packed {packing.name}", error=BadJob):
        remove_leftovers(folder)
    known = {shard.number: shard for shard in recorded or _journaled(folder, packing.header)}
    damaged = not_whole(folder, known.values(), packing.tell)[1]
    if damaged:
        names = ", ".join(shard.file_name for shard in damaged[:3])
        packing.tell(f"{len(damaged)} files of {packing.name} in {folder} are damaged ({names}): packing them again")
    with disk_errors(folder, f"the packed {packing.name}", error=BadJob):
        for shard in damaged:
            disk().remove_file(folder / shard.file_name)
    there = {number: shard for number, shard in known.items() if shard.is_there(folder)}
    missing = [number for number in range(packing.header.num_shards) if number not in there]
    needed = packing.num_bytes * len(missing) // max(1, packing.header.num_shards)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise BadJob(
            f"packing {packing.name} takes about {format_bytes(needed)}, and {format_bytes(free)} are free at {folder}",
            remedy="Free some space, or give a path on another disk: stoker.data.packed(dataset, path=…).",
        )
    if not (folder / JOURNAL).exists():
        append_line(folder / JOURNAL, dumps(packing.header, indent=None), error=BadJob)
        for shard in there.values():
            append_line(folder / JOURNAL, dumps(shard, indent=None), error=BadJob)
    try:
        for done, number in enumerate(missing):
            if done % max(1, len(missing) // _LINES) == 0:
                packing.tell(f"packing {packing.name} in {folder}: {len(there)} of {packing.header.num_shards} files")
            first = number * packing.header.rows_per_shard
            last = min(first + packing.header.rows_per_shard, packing.header.length)
            samples = [_read(packing, index) for index in range(first, last)]
            shard, content = shard_of(number, samples)
            what = f"file {number + 1} of the packed {packing.name}"
            write_atomic(folder / shard.file_name, content, what=what, error=BadJob)
            append_line(folder / JOURNAL, dumps(shard, indent=None), error=BadJob)
            there[number] = shard
            if number in known and known[number] != there[number]:
                raise BadJob(
                    f"{folder / there[number].file_name} was lost, and packed again it has other content than before: "
                    "the dataset has changed, or draws at random",
                    remedy=f"Delete {folder}: all of it is packed again.",
                )
        manifest = Manifest(packing.header, tuple(there[number] for number in sorted(there))).with_checksum()
        write_atomic(folder / MANIFEST, dumps(manifest, indent=None), what="the manifest", error=BadJob)
        packing.tell(f"packed {packing.name} in {folder}: {format_bytes(manifest.num_bytes)}")
    except StokerError as problem:
        if getattr(problem.__cause__, "errno", None) in _FULL:
            _clear(folder)
            free = shutil.disk_usage(folder).free
            raise BadJob(
                f"the disk is full: packing {packing.name} takes about {format_bytes(packing.num_bytes)}; what had "
                f"been packed is removed again, and {format_bytes(free)} are free at {folder}",
                remedy="Free some space, or give a path on another disk: stoker.data.packed(dataset, path=…).",
            ) from problem
        raise
    with suppress(OSError):
        (folder / JOURNAL).unlink()
    return manifest


def _read(packing: PackingTask, index: int) -> list[Array]:
    """The entries of a sample."""
    what = f"sample {index} of {packing.name}"
    try:
        sample = packing.read(index)
    except StokerError:
        raise
    except Exception as problem:
        raise BadJob(
            f"{what} raised {type(problem).__name__}: {problem}",
            remedy="Mend or leave out the sample; the same command then continues.",
        ) from problem
    return entries_of(sample, packing.layout, what)


def _journaled(folder: Path, header: Header) -> list[Shard]:
    """The shards that an earlier attempt noted; none if it packed something else, whose files are removed."""
    lines = read_lines(folder / JOURNAL)
    with suppress(ValueError):
        if lines and loads(lines[0], Header) == header:
            return [loads(line, Shard) for line in lines[1:]]
    _clear(folder)
    return []


def _require_own(folder: Path) -> None:
    """Raise BadJob if the folder holds something other than a packed dataset."""
    if folder.exists() and not folder.is_dir():
        raise BadJob(f"{folder} is a file, and a packed dataset is a folder", remedy="Give another path.")
    if not folder.exists() or any((folder / name).exists() for name in (MANIFEST, JOURNAL, LOCK)):
        return
    if others := [entry.name for entry in folder.iterdir()]:
        raise BadJob(
            f"{folder} holds {', '.join(sorted(others)[:3])}, and no packed dataset",
            remedy="Give an empty folder, or one that is not there yet.",
        )


def _clear(folder: Path) -> None:
    """Remove what packing leaves in a folder, the manifest first, and nothing else."""
    for path in (folder / MANIFEST, folder / JOURNAL, *sorted(folder.glob(SHARDS))):
        with suppress(FileNotFoundError):
            path.unlink()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within the block no other process packs into `folder`, where the file system has locks."""
    with disk_errors(folder, "the lock of a packed dataset", error=BadJob):
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with suppress(files.LocksUnsupported):
            files.wait_lock(descriptor)
        yield
    finally:
        os.close(descriptor)
