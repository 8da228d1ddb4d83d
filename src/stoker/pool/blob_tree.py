"""A folder as blobs: an index of its files by SHA-256, small files packed together, large ones each by itself.

What: an order, a checkpoint or results travel as one small JSON index, whose own SHA-256 stands in the signed log, and
the blobs it names. There is no archive format: nothing unpacks to more than its index says, every size is added up
before anything is written, and every file is checked by its digest. Links are written for the code of a job alone, whose
data they name; what a job sends back holds regular files, read without following a link.
Use when: files of a stranger come in, or go out. Costs: one more hash of every file.

The receiver sets the limits (`TreeLimits`). A tree is written into a folder that does not exist yet.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from stoker.errors import BadRun
from stoker.launching.bundle import Bundle
from stoker.records.codec import dumps, loads
from stoker.store.disk_errors import disk_errors
from stoker.store.files import sync_file
from stoker.store.foreign_files import open_below
from stoker.units import format_bytes

PACKED_BYTES = 256 << 10
"""Files up to this size are packed [bytes]."""

_PART = re.compile(r"[^/\0]{1,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20

PutBlob = Callable[[bytes | Path, str], None]
"""Stores content, bytes or a file, under its SHA-256."""
GetBlob = Callable[[str], Iterator[bytes]]
"""The content of a blob, in parts."""


@dataclass(frozen=True, kw_only=True)
class TreeEntry:
    """A file of a tree, or a link.

    Attributes:
        path: relative, with slashes.
        num_bytes, sha256: of the content; of a link 0 and "".
        offset: in the pack [bytes]; -1: a blob of its own.
        link: where a link points; "" for a file.
    """

    path: str
    num_bytes: int = 0
    sha256: str = ""
    offset: int = -1
    link: str = ""
    is_executable: bool = False


@dataclass(frozen=True, kw_only=True)
class TreeIndex:
    """The files of a folder. `pack` is the blob with the small ones, one after another; "" if there are none."""

    schema: ClassVar[int] = 1

    pack: str = ""
    entries: tuple[TreeEntry, ...] = field(default=())

    @property
    def num_bytes(self) -> int:
        """What its files hold [bytes]."""
        return sum(entry.num_bytes for entry in self.entries)

    @property
    def blobs(self) -> tuple[str, ...]:
        """The blobs that it names."""
        own = (entry.sha256 for entry in self.entries if entry.offset < 0 and not entry.link)
        return tuple(dict.fromkeys((*([self.pack] if self.pack else []), *own)))


@dataclass(frozen=True, kw_only=True)
class TreeLimits:
    """The most that a receiver takes."""

    num_bytes: int
    files: int = 20_000
    has_links: bool = False


def put_bundles(bundles: Iterable[Bundle], put: PutBlob) -> TreeIndex:
    """Store bundles, each below its own folder, and return their index."""
    sources = [(f"{bundle.folder}/{file.path}", file) for bundle in bundles for file in bundle.files]
    pack, entries = bytearray(), []
    for path, file in sorted(sources, key=lambda source: source[0]):
        if file.link:
            entries.append(TreeEntry(path=path, link=file.link))
            continue
        offset = -1
        if file.num_bytes <= PACKED_BYTES:
            offset = len(pack)
            with file.open() as content:
                pack += content.read()
        else:
            put(file.content, file.digest)
        entries.append(TreeEntry(path=path, num_bytes=file.num_bytes, sha256=file.digest, offset=offset,
                                 is_executable=file.is_executable))  # fmt: skip
    return _with_pack(bytes(pack), entries, put)


def put_folder(root: Path, names: Iterable[str], put: PutBlob, limits: TreeLimits, aside: Path) -> TreeIndex:
    """Store the regular files `names` below `root`, which somebody else may have written, and return their index.

    A file that is a link, lies behind one, or is no regular file is left out. Each is copied to `aside` while it is
    hashed: what is stored is what was hashed, whatever its writer does meanwhile.

    Raises:
        BadRun: there are more files or bytes than the limits allow.
    """
    pack, entries, total = bytearray(), list[TreeEntry](), 0
    for name in sorted(names):
        try:
            descriptor = open_below(root, name)
        except OSError:
            continue
        copy = aside / f"blob-{os.getpid()}"
        sha256, size = hashlib.sha256(), 0
        with os.fdopen(descriptor, "rb") as file, disk_errors(copy, "a copy", error=BadRun), copy.open("wb") as out:
            while part := file.read(_CHUNK_BYTES):
                size += len(part)
                if total + size > limits.num_bytes:
                    raise BadRun(f"the files have more than {format_bytes(limits.num_bytes)}; {name} is one of them")
                sha256.update(part)
                out.write(part)
        total += size
        if len(entries) >= limits.files:
            raise BadRun(f"there are more than {limits.files:,} files")
        offset = -1
        if size <= PACKED_BYTES:
            offset = len(pack)
            pack += copy.read_bytes()
        else:
            put(copy, sha256.hexdigest())
        copy.unlink()
        entries.append(TreeEntry(path=name, num_bytes=size, sha256=sha256.hexdigest(), offset=offset))
    return _with_pack(bytes(pack), entries, put)


def put_index(index: TreeIndex, put: PutBlob) -> str:
    """Store an index; its SHA-256 (hex)."""
    content = dumps(index, indent=None).encode()
    sha256 = hashlib.sha256(content).hexdigest()
    put(content, sha256)
    return sha256


def get_index(sha256: str, get: GetBlob, limits: TreeLimits) -> TreeIndex:
    """The index of this digest, if it keeps to the limits and leads nowhere but below its folder.

    Raises:
        BadRun: it does not.
    """
    content = bytearray()
    for part in get(sha256):
        content += part
        if len(content) > 1000 * limits.files:
            raise BadRun(f"the index {sha256[:12]} is longer than {limits.files:,} files need")
    try:
        index = loads(bytes(content), TreeIndex)
    except ValueError as problem:
        raise BadRun(f"the index {sha256[:12]} cannot be read: {problem}") from problem
    require_harmless(index, limits)
    return index


def require_harmless(index: TreeIndex, limits: TreeLimits) -> None:
    """Refuse an index that is too large, or that leads out of its folder.

    Raises:
        BadRun: it is; the path is named.
    """
    if len(index.entries) > limits.files:
        raise BadRun(f"the index names {len(index.entries):,} files; at most {limits.files:,} are taken")
    links = {entry.path for entry in index.entries if entry.link}
    paths = set[str]()
    for entry in index.entries:
        parts = entry.path.split("/")
        if any(_PART.fullmatch(part) is None or part in (".", "..") for part in parts) or len(parts) > 40:
            raise BadRun(f"{entry.path[:200]!r} is no path below a folder")
        if entry.path in paths:
            raise BadRun(f"{entry.path!r} is there twice")
        paths.add(entry.path)
        above = {"/".join(parts[:depth]) for depth in range(1, len(parts))}
        if above & links:
            raise BadRun(f"{entry.path!r} lies behind a link")
        if entry.link and not limits.has_links:
            raise BadRun(f"{entry.path!r} is a link, and only files are taken")
        if not entry.link and (entry.num_bytes < 0 or _SHA256.fullmatch(entry.sha256) is None):
            raise BadRun(f"{entry.path!r} has no size or no digest")
    for path in paths:
        if any(other in paths for other in _above(path)):
            raise BadRun(f"{path!r} lies below a file")
    if index.num_bytes > limits.num_bytes:
        raise BadRun(
            f"the files have {format_bytes(index.num_bytes)}; at most {format_bytes(limits.num_bytes)} are taken"
        )


def write_tree(index: TreeIndex, into: Path, get: GetBlob, limits: TreeLimits) -> None:
    """Write a tree as the new folder `into`; each file is checked by its size and digest.

    Raises:
        BadRun: a blob is not what the index says, or the disk is full; what was written so far is left to the caller.
    """
    require_harmless(index, limits)
    with disk_errors(into, "the files", needed_bytes=index.num_bytes, error=BadRun):
        into.mkdir(parents=True)
        pack_bytes = sum(entry.num_bytes for entry in index.entries if entry.offset >= 0)
        pack = bytes(_whole(index.pack, get, pack_bytes)) if index.pack else b""
        for entry in index.entries:
            path = into / entry.path
            path.parent.mkdir(parents=True, exist_ok=True)
            if entry.link:
                path.symlink_to(entry.link)
                continue
            if entry.offset >= 0:
                content: Iterable[bytes] = (pack[entry.offset : entry.offset + entry.num_bytes],)
            else:
                content = get(entry.sha256)
            sha256, size = hashlib.sha256(), 0
            with path.open("xb") as file:
                for part in content:
                    size += len(part)
                    if size > entry.num_bytes:
                        break
                    sha256.update(part)
                    file.write(part)
            if size != entry.num_bytes or sha256.hexdigest() != entry.sha256:
                raise BadRun(f"{entry.path!r} is not what its index says")
            if entry.is_executable:
                path.chmod(0o755)
            sync_file(path)


def plain_names(root: Path, most: int = 20_000) -> list[str]:
    """Names of the regular files below a folder that somebody else may have written; links are not followed.

    Raises:
        BadRun: there are more than `most`.
    """
    names, waiting = list[str](), [""]
    while waiting:
        below = waiting.pop()
        with os.scandir(root / below) as entries:
            for entry in entries:
                name = f"{below}/{entry.name}".lstrip("/")
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode) and name.count("/") < 20:
                    waiting.append(name)
                elif stat.S_ISREG(mode):
                    names.append(name)
                if len(names) + len(waiting) > most:
                    raise BadRun(f"there are more than {most:,} files in {root}")
    return names


def _whole(sha256: str, get: GetBlob, most_bytes: int) -> bytearray:
    """A blob in memory, if it has no more than `most_bytes`."""
    content = bytearray()
    for part in get(sha256):
        content += part
        if len(content) > most_bytes:
            raise BadRun(f"the blob {sha256[:12]} has more than the {format_bytes(most_bytes)} that its index says")
    return content


def _with_pack(pack: bytes, entries: list[TreeEntry], put: PutBlob) -> TreeIndex:
    if not pack:
        return TreeIndex(entries=tuple(entries))
    sha256 = hashlib.sha256(pack).hexdigest()
    put(pack, sha256)
    return TreeIndex(pack=sha256, entries=tuple(entries))


def _above(path: str) -> Iterator[str]:
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path
