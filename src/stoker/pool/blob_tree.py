"""A folder as one blob: the contents of its files one after another, then an index of them.

What: an order's code and data, a checkpoint, and results travel as one blob each, since the log names one. It is no
archive format: nothing is compressed, the index adds up to the size of the blob, and everything is checked before
anything is written. Links are taken in the code of a job alone, whose data they name; what a job sends back holds
regular files, read without following a link.
Use when: files of a stranger come in, or go out. Costs: one hash of every file, and a copy of the whole.

```
contents of the files | index, as JSON | its length [bytes], 8 bytes, little-endian
```
The receiver sets the limits (`TreeLimits`).
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, ClassVar

from stoker.errors import BadJob, BadRun, PlaceFailed
from stoker.launching.bundle import Bundle
from stoker.records.codec import dumps, loads
from stoker.store.disk_errors import disk_errors
from stoker.store.files import sync_file
from stoker.store.foreign_files import open_below
from stoker.units import format_bytes

_PART = re.compile(r"[^/\0]{1,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
_MOST_DEEP = 40


@dataclass(frozen=True, kw_only=True)
class TreeEntry:
    """A file of a tree, or a link.

    Attributes:
        path: relative, with slashes.
        offset, num_bytes, sha256: of the content in the blob; of a link 0, 0 and "".
        link: where a link points; "" for a file.
    """

    path: str
    offset: int = 0
    num_bytes: int = 0
    sha256: str = ""
    link: str = ""
    is_executable: bool = False


@dataclass(frozen=True, kw_only=True)
class TreeIndex:
    """The files of a tree, in the order of their contents."""

    schema: ClassVar[int] = 1

    entries: tuple[TreeEntry, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        """What its files hold [bytes]."""
        return sum(entry.num_bytes for entry in self.entries)

    def digests(self) -> dict[str, str]:
        """SHA-256 (hex) of each file, by path."""
        return {entry.path: entry.sha256 for entry in self.entries if not entry.link}


@dataclass(frozen=True, kw_only=True)
class TreeLimits:
    """The most that a receiver takes."""

    num_bytes: int
    files: int = 20_000
    has_links: bool = False


class _Writer:
    """A tree that is being written to a file."""

    def __init__(self, file: IO[bytes], limits: TreeLimits | None = None) -> None:
        self._file, self._limits = file, limits
        self._entries: list[TreeEntry] = []
        self._size = 0

    def add(self, path: str, content: IO[bytes], *, is_executable: bool = False) -> str:
        """Add a file; its SHA-256 (hex).

        Raises:
            BadRun: it goes over the limits.
        """
        if self._limits is not None and len(self._entries) >= self._limits.files:
            raise BadRun(f"there are more than {self._limits.files:,} files")
        sha256, offset = hashlib.sha256(), self._size
        while part := content.read(_CHUNK_BYTES):
            self._size += len(part)
            if self._limits is not None and self._size > self._limits.num_bytes:
                raise BadRun(f"the files have more than {format_bytes(self._limits.num_bytes)}; {path} is one of them")
            sha256.update(part)
            self._file.write(part)
        self._entries.append(
            TreeEntry(
                path=path,
                offset=offset,
                num_bytes=self._size - offset,
                sha256=sha256.hexdigest(),
                is_executable=is_executable,
            )
        )
        return sha256.hexdigest()

    def link(self, path: str, target: str) -> None:
        """Add a link."""
        self._entries.append(TreeEntry(path=path, offset=self._size, link=target))

    def close(self) -> TreeIndex:
        """Write the index."""
        index = TreeIndex(entries=tuple(self._entries))
        content = dumps(index, indent=None).encode()
        self._file.write(content + len(content).to_bytes(8, "little"))
        return index


def pack_bundles(bundles: Iterable[Bundle], target: Path) -> TreeIndex:
    """Write bundles, each below its own folder, as a tree into the file `target`.

    Raises:
        BadJob: a file was changed while it was read.
    """
    sources = [(f"{bundle.folder}/{file.path}", file) for bundle in bundles for file in bundle.files]
    with disk_errors(target, "what is sent", error=BadRun), target.open("wb") as out:
        writer = _Writer(out)
        for path, file in sorted(sources, key=lambda source: source[0]):
            if file.link:
                writer.link(path, file.link)
                continue
            with file.open() as content:
                if writer.add(path, content, is_executable=file.is_executable) != file.digest:
                    raise BadJob(f"{path} was changed while it was read", remedy="The same command reads it again.")
        return writer.close()


def pack_folder(root: Path, names: Iterable[str], target: Path, limits: TreeLimits) -> TreeIndex:
    """Write the regular files `names` below `root`, which another user may write, as a tree into the file `target`.

    Files that are links, are reached through one, are not regular or are gone are left out. What is written is what was
    hashed, whatever its writer does at the same time.

    Raises:
        BadRun: there are more files or bytes than the limits allow.
        PlaceFailed: the disk is full, or fails otherwise.
    """
    with disk_errors(target, "a copy", error=PlaceFailed), target.open("wb") as out:
        writer = _Writer(out, limits)
        for name in sorted(names):
            try:
                descriptor = open_below(root, name)
            except OSError:
                continue
            with os.fdopen(descriptor, "rb") as content:
                writer.add(name, content)
        return writer.close()


def read_index(path: Path, limits: TreeLimits) -> TreeIndex:
    """The index of a tree in a file, if it keeps to the limits and leads nowhere but below its folder.

    Raises:
        BadRun: it does not, or is no index.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, 1000 * limits.files):
            raise BadRun("what was sent has no index, or one that is longer than its files need")
        file.seek(size - 8 - length)
        try:
            index = loads(file.read(length), TreeIndex)
        except ValueError as problem:
            raise BadRun(f"the index of what was sent cannot be read: {problem}") from problem
    require_harmless(index, limits)
    if index.num_bytes != size - 8 - length:
        raise BadRun(f"the index says {index.num_bytes:,} bytes, and {size - 8 - length:,} were sent")
    return index


def require_harmless(index: TreeIndex, limits: TreeLimits) -> None:
    """Refuse an index that is too large, or that leads out of its folder.

    Raises:
        BadRun: it is; the path is named.
    """
    if len(index.entries) > limits.files:
        raise BadRun(f"the index names {len(index.entries):,} files; at most {limits.files:,} are taken")
    files = {entry.path for entry in index.entries}
    if len(files) < len(index.entries):
        raise BadRun("the index names a file twice")
    offset = 0
    for entry in index.entries:
        parts = entry.path.split("/")
        if any(_PART.fullmatch(part) is None or part in (".", "..") for part in parts) or len(parts) > _MOST_DEEP:
            raise BadRun(f"{entry.path[:200]!r} is no path below a folder")
        if any("/".join(parts[:depth]) in files for depth in range(1, len(parts))):
            raise BadRun(f"{entry.path!r} is reached through a link, or below a file")
        if "\0" in entry.link or not _is_encodable(entry.path + entry.link):
            raise BadRun(f"{entry.path[:200]!r}: no file can have that name, or no link that target")
        if entry.link and not limits.has_links:
            raise BadRun(f"{entry.path!r} is a link, and only files are taken")
        if entry.offset != offset or entry.num_bytes < 0 or (entry.link and entry.num_bytes):
            raise BadRun(f"{entry.path!r} does not follow the file before it")
        if not entry.link and _SHA256.fullmatch(entry.sha256) is None:
            raise BadRun(f"{entry.path!r} has no digest")
        offset += entry.num_bytes
    if index.num_bytes > limits.num_bytes:
        raise BadRun(
            f"the files have {format_bytes(index.num_bytes)}; at most {format_bytes(limits.num_bytes)} are taken"
        )


def _is_encodable(name: str) -> bool:
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return True


def unpack(path: Path, into: Path, limits: TreeLimits) -> TreeIndex:
    """Write the tree in the file `path` as the new folder `into`; each file is checked by its digest.

    Raises:
        BadRun: it is not what its index says, goes over the limits, or the disk is full; what was written is left.
    """
    index = read_index(path, limits)
    with disk_errors(into, "the files", needed_bytes=index.num_bytes, error=PlaceFailed), path.open("rb") as file:
        into.mkdir(parents=True)
        for entry in index.entries:
            target = into / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            if entry.link:
                target.symlink_to(entry.link)
                continue
            sha256 = hashlib.sha256()
            with target.open("xb") as out:
                for part in _parts(file, entry.num_bytes):
                    sha256.update(part)
                    out.write(part)
            if sha256.hexdigest() != entry.sha256:
                raise BadRun(f"{entry.path!r} is not what its index says")
            if entry.is_executable:
                target.chmod(0o755)
            sync_file(target)
    return index


def read_member(path: Path, name: str, limits: TreeLimits, most_bytes: int = 64 << 20) -> bytes | None:
    """The content of one file of the tree in the file `path`; None if it has no such file.

    Raises:
        BadRun: the tree is not what its index says, or the file has more than `most_bytes`, which are held in memory.
    """
    entry = next((one for one in read_index(path, limits).entries if one.path == name and not one.link), None)
    if entry is None:
        return None
    if entry.num_bytes > most_bytes:
        raise BadRun(
            f"{name!r} has {format_bytes(entry.num_bytes)}, and at most {format_bytes(most_bytes)} of it are read"
        )
    with path.open("rb") as file:
        file.seek(entry.offset)
        content = file.read(entry.num_bytes)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise BadRun(f"{name!r} is not what its index says")
    return content


def plain_names(root: Path, most: int = 20_000) -> list[str]:
    """Names of the regular files below a folder that another user may have written; links are not followed.

    Raises:
        BadRun: there are more than `most`, or it cannot be read.
    """
    names, waiting = list[str](), [""]
    try:
        while waiting:
            below = waiting.pop()
            with os.scandir(root / below) as entries:
                for entry in entries:
                    name = f"{below}/{entry.name}".lstrip("/")
                    mode = entry.stat(follow_symlinks=False).st_mode
                    if stat.S_ISDIR(mode) and name.count("/") < _MOST_DEEP:
                        waiting.append(name)
                    elif stat.S_ISREG(mode):
                        names.append(name)
                    if len(names) + len(waiting) > most:
                        raise BadRun(f"there are more than {most:,} files in {root}")
    except OSError as problem:
        raise BadRun(f"{root} cannot be read: {problem.strerror}") from problem
    return names


def _parts(file: IO[bytes], num_bytes: int) -> Iterator[bytes]:
    while num_bytes:
        part = file.read(min(num_bytes, _CHUNK_BYTES))
        if not part:
            raise BadRun("what was sent is cut off")
        num_bytes -= len(part)
        yield part


def same_files(index: TreeIndex, expected: Mapping[str, str], below: str) -> str:
    """The first file of `expected` (SHA-256 by name) that the tree has not, or not as it should be; "" for none."""
    found = index.digests()
    return next((name for name, sha256 in expected.items() if found.get(f"{below}/{name}") != sha256), "")
