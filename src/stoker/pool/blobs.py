"""Blobs: orders, checkpoints and results, each a file named by the SHA-256 of its content.

A blob is hashed while it is written aside and renamed when the hash is right, so that a name never has other content.
Its sender is stored with it: a hash is public once a lease names it, and knowing it does not give the content.
What no unsettled lease needs is deleted after an hour. Each key may store so much that no lease of its own names yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import BadRun
from stoker.pool.events import Refused
from stoker.pool.keys import is_digest
from stoker.store.disk_errors import disk_errors
from stoker.store.files import Appended, append_line, make_directories, remove_leftovers, sync_file, written_aside
from stoker.units import GIB, format_bytes, format_seconds

KEPT_S = 3600.0
"""Time for which a blob is kept that no lease needs [s]."""
MOST_UNNAMED = 1000
"""Blobs of one key that no lease of its own names, at most: each further one is counted with them."""
STALLED_S = 120.0
"""Silence in the middle of a blob after which it counts as broken off [s]."""


class NoRoom(Refused):
    """There is no room for a blob now; there may be later."""

    http_status = 503


@dataclass(frozen=True)
class BlobLimits:
    """Sizes at most [bytes]: of one blob, of all that one key sent and no lease of it names, and of all of one lease.

    `least_free_bytes` of the disk are left for the log.
    """

    most_bytes: int = 16 * GIB
    most_unnamed_bytes: int = 32 * GIB
    most_lease_bytes: int = 256 * GIB
    least_free_bytes: int = GIB


class BlobStore:
    """A folder of blobs."""

    def __init__(self, folder: Path, limits: BlobLimits | None = None, now: Callable[[], float] = time.time) -> None:
        self.folder, self.limits, self._now = folder, limits or BlobLimits(), now
        self._on_their_way = Counter[str]()
        with disk_errors(folder, "the pool's blobs", error=BadRun, option="--folder DIR"):
            make_directories(folder / "senders")
            remove_leftovers(folder)
            self._senders = {path.name: set(path.read_text().split()) for path in (folder / "senders").iterdir()}
            here = [path for path in folder.iterdir() if is_digest(path.name)]
            self._sizes = {path.name: path.stat().st_size for path in here}
        self._unnamed = defaultdict[str, set[str]](set)
        for name, senders in self._senders.items():
            for sender in senders:
                self._unnamed[sender].add(name)

    def path(self, digest: str) -> Path:
        """Where a blob is, or would be.

        Raises:
            Refused: that is no name of a blob.
        """
        if not is_digest(digest):
            raise Refused(f"{digest[:80]!r} names no blob: wanted the SHA-256, 64 hexadecimal digits in lower case")
        return self.folder / digest

    def senders(self, digest: str) -> set[str]:
        """Keys that have sent the blob, and so know its content."""
        return set(self._senders.get(digest, ()))

    def note_sender(self, digest: str, sender: str) -> None:
        """Record that a key has sent a blob which is here, to a peer that forwarded it."""
        if sender not in self._senders.get(digest, ()):
            self._senders.setdefault(digest, set()).add(sender)
            self._unnamed[sender].add(digest)
            append_line(self.folder / "senders" / digest, sender, error=BadRun, is_durable=True)

    def sizes_of(self, digests: Iterable[str]) -> dict[str, int]:
        """Which of these blobs are here, and their sizes [bytes]; from memory, since a lease may name thousands."""
        return {digest: self._sizes[digest] for digest in digests if digest in self._sizes}

    def size_of(self, digests: Iterable[str]) -> int:
        """What blobs take together, as far as they are here [bytes]."""
        return sum(self.sizes_of(digests).values())

    async def write(
        self, digest: str, parts: AsyncIterator[bytes], size: int, sender: str, is_named: Callable[[str], bool]
    ) -> None:
        """Take a blob.

        Args:
            digest: its name.
            parts: its content.
            size: as announced [bytes].
            sender: the key that sends it.
            is_named: whether a lease of the sender names a blob.

        Raises:
            Refused: it is too large, or has another size or hash.
            NoRoom: the disk is full, or the key has sent too much, or too many, that no lease of it names.
            BadRun: it cannot be written (a full disk, …).
        """
        target = self.path(digest)
        unnamed = self._unnamed_bytes(sender, is_named)
        free = shutil.disk_usage(self.folder).free - self.limits.least_free_bytes - self._on_their_way.total()
        limit = min(self.limits.most_bytes, self.limits.most_unnamed_bytes - unnamed - self._on_their_way[sender], free)
        if size > limit:
            if size > self.limits.most_bytes:
                most = format_bytes(self.limits.most_bytes)
                raise Refused(f"a blob of {format_bytes(size)} is too large: the pool takes at most {most}")
            raise NoRoom(
                f"no room for a blob of {format_bytes(size)}: {format_bytes(max(0, limit))} are free for this key",
                remedy="Blobs that no lease names are deleted after an hour; is the pool's disk full?",
            )
        self._on_their_way[sender] += size
        try:
            await self._write(target, parts, size, sender)
        finally:
            self._on_their_way[sender] -= size

    def _unnamed_bytes(self, sender: str, is_named: Callable[[str], bool]) -> int:
        """What a key has sent and no lease of it names [bytes]; what one names is looked at no more.

        Raises:
            NoRoom: these are too many.
        """
        kept = self._unnamed[sender]
        kept -= {name for name in kept if name not in self._sizes or is_named(name)}
        if len(kept) >= MOST_UNNAMED:
            raise NoRoom(
                f"this key has sent {len(kept):,} blobs that no lease of it names, the most that are kept",
                remedy="They are deleted after an hour; name them in a lease.",
            )
        return self.size_of(kept)

    async def _write(self, target: Path, parts: AsyncIterator[bytes], size: int, sender: str) -> None:
        digest, hashed, written = target.name, hashlib.sha256(), 0
        with (
            disk_errors(target, "a blob", needed_bytes=size, error=BadRun, option="--folder DIR"),
            written_aside(target) as aside,
        ):
            with contextlib.closing(Appended(aside)) as file:
                async for part in _in_time(parts, digest):
                    written += len(part)
                    if written > size:
                        raise Refused(f"the blob {digest[:12]}… is longer than the {size} bytes that were announced")
                    hashed.update(part)
                    file.write(part)
            if written != size or hashed.hexdigest() != digest:
                raise Refused(
                    f"the blob came with {written} of {size} bytes and the hash {hashed.hexdigest()[:12]}…, not "
                    f"{digest[:12]}…",
                    remedy="It broke off or was changed on its way: send it again.",
                )
            await asyncio.to_thread(sync_file, aside)  # of gigabytes, while the pool answers others
            self._senders.setdefault(digest, set()).add(sender)
            append_line(self.folder / "senders" / digest, sender, error=BadRun, is_durable=True)
        self._sizes[digest] = size
        self._unnamed[sender].add(digest)

    def delete_unneeded(self, needed: set[str]) -> list[str]:
        """Delete blobs that no lease needs and that are older than an hour; their names."""
        gone = []
        for path in self.folder.iterdir():
            if is_digest(path.name) and path.name not in needed:
                try:
                    if self._now() - path.stat().st_mtime > KEPT_S:
                        self._sizes.pop(path.name, None)
                        path.unlink()
                        (self.folder / "senders" / path.name).unlink(missing_ok=True)
                        self._senders.pop(path.name, None)
                        gone.append(path.name)
                except FileNotFoundError:
                    continue
        return gone


async def _in_time(parts: AsyncIterator[bytes], digest: str) -> AsyncIterator[bytes]:
    """The parts of a blob as they come: the room for its announced size is kept for no sender that sends nothing.

    Raises:
        Refused: the next one does not come.
    """
    while True:
        try:
            async with asyncio.timeout(STALLED_S):
                part = await anext(parts, None)
        except TimeoutError as problem:
            raise Refused(
                f"nothing came of the blob {digest[:12]}… for {format_seconds(STALLED_S)}", remedy="Send it again."
            ) from problem
        if part is None:
            return
        yield part
