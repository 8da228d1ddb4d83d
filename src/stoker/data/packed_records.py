"""What is on disk of a packed dataset, as records: the manifest of the whole, and what each shard holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from stoker.errors import BadJob
from stoker.records.codec import JSON, digest, loads
from stoker.store.disk_errors import read_errors
from stoker.store.verified import file_digests
from stoker.units import format_bytes

MANIFEST = "manifest.json"
JOURNAL = "building.jsonl"
"""Shards that are whole, one a line, while not all of them are; the first line is the header."""
LOCK = "lock"
SHARDS = "shard-*.bin"
_QUIET_BYTES = 2**30
"""Less than this is read in a second or so, without a word."""
ALIGNMENT = 64
"""Where blocks begin in a shard [bytes]: rows of any type can be read in place."""


@dataclass(frozen=True)
class Block:
    """One entry of all samples of a shard: `offset` [bytes], and its shape for each sample if that is one for all.

    Else `shape` is None: `shapes` [n, dims] and `ends` [n], both int64, lie at these offsets; a sample's values begin
    where those before it end [bytes from `offset`].
    """

    offset: int
    shape: tuple[int, ...] | None
    shapes: int = 0
    ends: int = 0


@dataclass(frozen=True)
class Shard:
    """Samples number * `rows_per_shard` and on, `count` of them, in one file."""

    schema: ClassVar[int] = 1
    number: int
    count: int
    num_bytes: int
    sha256: str
    blocks: tuple[Block, ...]

    @property
    def file_name(self) -> str:
        """What its file is called."""
        return f"shard-{self.number:06d}.bin"

    def is_there(self, folder: Path) -> bool:
        """Whether its file has the size it should have."""
        try:
            return (folder / self.file_name).stat().st_size == self.num_bytes
        except FileNotFoundError:
            return False


@dataclass(frozen=True)
class Header:
    """What was packed: `source` is its fingerprint, `form` and `entries` (dtype, dimensions) its samples' layout."""

    schema: ClassVar[int] = 1
    source: str
    length: int
    rows_per_shard: int
    form: JSON
    entries: tuple[tuple[str, int], ...]

    @property
    def num_shards(self) -> int:
        """Files that all samples take."""
        return -(-self.length // self.rows_per_shard)


@dataclass(frozen=True)
class Manifest:
    """A packed dataset that is whole."""

    schema: ClassVar[int] = 1
    header: Header
    shards: tuple[Shard, ...]
    checksum: str = ""
    """SHA-256 of the above; "" in manifests of before 2026-11-23."""

    def with_checksum(self) -> Manifest:
        """The same, with the checksum of what it holds."""
        return replace(self, checksum=digest(replace(self, checksum="")))

    @property
    def num_bytes(self) -> int:
        """What it takes on disk [bytes]."""
        return sum(shard.num_bytes for shard in self.shards)


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest in `folder`; None where there is none.

    Raises:
        BadJob: it is damaged, or of another version.
    """
    path = folder / MANIFEST
    if not path.exists():
        return None
    with read_errors(path, "the manifest"):
        text = path.read_bytes()
    try:
        manifest = loads(text, Manifest)
        if manifest.checksum not in ("", manifest.with_checksum().checksum):
            raise ValueError("it is not as it was written")
    except ValueError as problem:
        raise BadJob(
            f"{path} is no manifest of a packed dataset: {problem}", remedy=f"Delete {folder}: it is packed again."
        ) from problem
    return manifest


def not_whole(folder: Path, shards: Iterable[Shard], tell: Callable[[str], None]) -> tuple[list[Shard], list[Shard]]:
    """Shards whose file is not there with its size, and those whose content is another than was packed.

    Raises:
        BadJob: a file cannot be read.
    """
    there = [shard for shard in shards if shard.is_there(folder)]
    with read_errors(folder, "the packed dataset"):
        digests = file_digests(
            folder, [shard.file_name for shard in there],
            reading=lambda size: tell(f"reading {format_bytes(size)} in {folder} to see that nothing is damaged")
            if size > _QUIET_BYTES else None,
        )  # fmt: skip
    damaged = [shard for shard in there if digests.get(shard.file_name) != shard.sha256]
    return [shard for shard in shards if shard not in there], damaged
