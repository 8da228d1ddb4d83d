"""Shards of WebDataset: an image of each key, and the label beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.data.reading.faults import BadTable
from stoker.data.reading.image_kinds import SUFFIXES
from stoker.data.reading.tar_shard import Member, members_of
from stoker.errors import first_line
from stoker.inspecting.sources.base import SAMPLES_OF_A_UNIT, Found, Item, Unit, cut
from stoker.inspecting.sources.splits import split_of
from stoker.records.cleaning import Finding
from stoker.records.codec import parsed

_LABEL_KEYS = ("cls", "label", "class", "target", "y")


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
            return Item(name, self._read(group.image), label, f".{_last(group.image)}")
        except (OSError, EOFError, ValueError) as error:
            return Item(name, b"", problem=f"cannot be read: {first_line(error)}")

    def _read(self, member: Member) -> bytes:
        with self.path.open("rb") as file:
            file.seek(member.offset)
            content = file.read(member.size)
        if len(content) < member.size:
            raise EOFError(f"the shard ends {member.size - len(content):,} bytes before .{member.kind} does")
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
        for member in members_of(path, is_strict=True):
            members.setdefault(member.key, []).append(member)
    except BadTable as error:
        problem = error.what
    return [_group(key, found) for key, found in members.items()], problem


def _group(key: str, members: Sequence[Member]) -> Group:
    image = next((one for one in members if f".{_last(one)}" in SUFFIXES), None)
    label = next((one for one in members if one.kind == "cls"), None)
    return Group(key, image, label or next((one for one in members if one.kind == "json"), None))


def _last(member: Member) -> str:
    """`png` of `seg.png`: what the content is."""
    return member.kind.rpartition(".")[2]


def _label(content: bytes, member: Member) -> str | None:
    """What a `.cls` says, or a `.json` under a name that labels go by."""
    if member.kind == "cls":
        return content.decode("utf-8").strip()
    found = parsed(content)
    if not isinstance(found, dict):
        return str(found)
    return next((str(found[key]) for key in _labels_in(found)), None)


def _labels_in(found: dict[str, object]) -> Iterator[str]:
    return (key for key in _LABEL_KEYS if found.get(key) is not None)
