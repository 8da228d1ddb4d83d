"""Shards of WebDataset: tar files whose members share a key, `KEY.jpg` with `KEY.cls` or `KEY.json`.

Source: the WebDataset format (github.com/webdataset/webdataset, README): the key is the name up to the first dot of its
last part.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import first_line
from stoker.inspecting.sources.base import SAMPLES_OF_A_UNIT, Found, Item, Unit, cut
from stoker.inspecting.sources.folder import IMAGE_SUFFIXES
from stoker.inspecting.sources.splits import split_of
from stoker.records.cleaning import Finding

_LABEL_KEYS = ("cls", "label", "class", "target", "y")


@dataclass(frozen=True)
class Member:
    """A file in a shard: its ending, and where it is [bytes]."""

    suffix: str
    offset: int
    size: int


@dataclass(frozen=True)
class Group:
    """The members of one key: the image, and what holds its label."""

    key: str
    image: Member | None
    label: Member | None


@dataclass(frozen=True)
class ShardUnit:
    """Some keys of a shard; `name` is the shard's path below the source."""

    path: Path
    name: str
    split: str
    groups: tuple[Group, ...]

    def __len__(self) -> int:
        """How many keys."""
        return len(self.groups)

    def item(self, index: int) -> Item:
        """A key with its image and its label."""
        group = self.groups[index]
        name = f"{self.name}:{group.key}"
        if group.image is None:
            return Item(name, b"", problem="has no image beside it")
        try:
            label = _label(self._read(group.label), group.label) if group.label else None
            return Item(name, self._read(group.image), label, group.image.suffix)
        except (OSError, EOFError, ValueError) as error:
            return Item(name, b"", problem=f"cannot be read: {first_line(error)}")

    def _read(self, member: Member) -> bytes:
        with self.path.open("rb") as file:
            file.seek(member.offset)
            content = file.read(member.size)
        if len(content) < member.size:
            raise EOFError(f"the shard ends {member.size - len(content):,} bytes before {member.suffix} does")
        return content


def find_shards(root: Path, paths: Sequence[Path]) -> Found:
    """The keys of some shards, cut into units; a shard that ends early is read as far as it goes, and told."""
    units: list[Unit] = []
    findings: list[Finding] = []
    for path in paths:
        name = path.name if path == root else path.relative_to(root).as_posix()
        groups, problem = list_groups(path)
        if problem:
            findings.append(Finding(fault="corrupt", gravity="corrupt", where=name, detail=problem))
        split = split_of(path.name.partition(".")[0]) or split_of(path.parent.name if path != root else "")
        units += [
            ShardUnit(path, name, split, tuple(groups[rows.start : rows.stop]))
            for rows in cut(len(groups), SAMPLES_OF_A_UNIT)
        ]
    return Found("shards", tuple(units), (), tuple(findings))


def list_groups(path: Path) -> tuple[list[Group], str]:
    """The keys of a shard in order, and what is wrong with it; only headers are read."""
    members: dict[str, list[Member]] = {}
    problem = ""
    try:
        with tarfile.open(path, "r:") as archive:
            for entry in archive:
                if entry.isfile():
                    key, suffix = _key(entry.name)
                    members.setdefault(key, []).append(Member(suffix, entry.offset_data, entry.size))
            problem = _end_problem(path, archive.offset)
    except (tarfile.TarError, OSError, EOFError) as error:
        problem = f"is no whole tar file: {first_line(error)}"
    return [_group(key, found) for key, found in members.items()], problem


def _end_problem(path: Path, offset: int) -> str:
    """What is wrong where the last header was looked for: a whole tar file has a block of zeros there."""
    with path.open("rb") as file:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
    if block == bytes(tarfile.BLOCKSIZE):
        return ""
    return f"is cut off: after {min(offset, path.stat().st_size):,} bytes there is no end marker"


def _key(name: str) -> tuple[str, str]:
    """The key of a member and the rest: `a/b.seg.png` is (`a/b`, `.seg.png`)."""
    folder, slash, last = name.rpartition("/")
    stem, dot, suffix = last.partition(".")
    return f"{folder}{slash}{stem}", (dot + suffix).lower()


def _group(key: str, members: Sequence[Member]) -> Group:
    image = next((one for one in members if f".{one.suffix.rpartition('.')[2]}" in IMAGE_SUFFIXES), None)
    label = next((one for one in members if one.suffix == ".cls"), None)
    return Group(key, image, label or next((one for one in members if one.suffix == ".json"), None))


def _label(content: bytes, member: Member) -> str | None:
    """What a `.cls` says, or a `.json` under a name that labels go by."""
    if member.suffix == ".cls":
        return content.decode("utf-8").strip()
    found = json.loads(content)
    if not isinstance(found, dict):
        return str(found)
    return next((str(found[key]) for key in _labels_in(found)), None)


def _labels_in(found: dict[str, object]) -> Iterator[str]:
    return (key for key in _LABEL_KEYS if found.get(key) is not None)
