"""JobSpec: what a Job is, as data: stored, compared, and never executed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from stoker.records import codec
from stoker.records.codec import JSON

DataClass = Literal["indexed", "seekable", "stream"]


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job's identity.

    Two jobs with equal digests learn the same thing. `entry` is the job file's name (None for a job made in Python),
    `entry_digest` the SHA-256 of that file and the local modules it imports, `parameters` the job function's arguments,
    `settings` everything the Job resolved to, `weights_digest` the SHA-256 of the initial weights.
    """

    schema: ClassVar[int] = 1
    name: str
    entry: str | None
    entry_digest: str | None
    parameters: dict[str, JSON]
    settings: dict[str, JSON]
    data_class: DataClass
    data_fingerprint: str
    num_train: int
    weights_digest: str

    def digest(self) -> str:
        """SHA-256 (hex) of the whole spec."""
        return codec.digest(self)

    def differences(self, other: JobSpec) -> tuple[str, ...]:
        """What differs, one line each: `batch: 512 here, 256 there`; nothing where the digests are equal."""
        mine, theirs = dict(leaves(codec.to_json(self))), dict(leaves(codec.to_json(other)))
        names = [*mine, *(name for name in theirs if name not in mine)]
        return tuple(
            f"{name.removeprefix('settings.')}: {mine.get(name, 'absent')} here, {theirs.get(name, 'absent')} there"
            for name in names
            if not _is_same(name, mine, theirs)
        )


def _is_same(name: str, mine: dict[str, JSON], theirs: dict[str, JSON]) -> bool:
    # By digest, so that what counts as a difference here is what made two specs differ.
    return name in mine and name in theirs and codec.digest(mine[name]) == codec.digest(theirs[name])


def leaves(value: JSON, path: str = "") -> Iterator[tuple[str, JSON]]:
    """The scalars of a JSON document with their dotted paths; lists count as scalars."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
