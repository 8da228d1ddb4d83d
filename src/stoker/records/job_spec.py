"""JobSpec: the identity of a Job as data: stored, compared, and never executed."""

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
    `entry_digest` the SHA-256 of what is executed of that file and the local modules it imports, `parameters` the job
    function's arguments, `settings` everything the Job resolved to, `weights_digest` the SHA-256 of the initial
    weights. `functions` are digests of the parts that `entry_digest` is made of, for naming what changed; None in specs
    of before 2026-11-23, whose digests are of texts, comments included.
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
    functions: dict[str, str] | None = None

    def digest(self) -> str:
        """SHA-256 (hex) of the whole spec; `functions` are in `entry_digest`."""
        return codec.digest({name: value for name, value in codec.to_json(self).items() if name != "functions"})

    def differences(self, other: JobSpec) -> tuple[str, ...]:
        """The differences, one line each: `batch: 512 here, 256 there`; none if the digests are equal."""
        return tuple(
            f"{name.removeprefix('settings.').removeprefix('functions.')}: {mine} here, {theirs} there"
            for name, mine, theirs in self._unequal(other)
        )

    def changes(self, before: JobSpec) -> tuple[str, ...]:
        """What changed since `before`, one line each, for people: `parameter lr: 0.1 -> 0.2`, `function loss in a.py`.

        Nothing where the digests are equal.
        """
        unequal = self._unequal(before)
        names_functions = any(name.startswith("functions.") for name, _, _ in unequal)
        lines = []
        for name, now, then in unequal:
            kind, _, rest = name.partition(".")
            if kind == "functions":
                verb = " is new" if then == _ABSENT else " is no longer used" if now == _ABSENT else " changed"
                lines.append(f"{rest}{verb}")
            elif name.endswith(".source"):
                if not names_functions:  # else it is among them
                    kind = "text" if before.functions is None else "code"
                    lines.append(f"the {kind} of {rest.removesuffix('.source')} changed")
            elif name in _CONTENT:
                lines.append(f"{_CONTENT[name]} changed")
            else:
                label = f"parameter {rest}" if kind == "parameters" else rest if kind == "settings" else name
                lines.append(f"{label}: {then} -> {now}")
        return tuple(lines)

    def _unequal(self, other: JobSpec) -> list[tuple[str, JSON, JSON]]:
        """(dotted name, here, there) of all that differs; parts of the code instead of the digest of all of it."""
        mine, theirs = dict(leaves(codec.to_json(self))), dict(leaves(codec.to_json(other)))
        names = [*mine, *(name for name in theirs if name not in mine)]
        # By digest: a difference here is exactly what made the two specs differ.
        same = {n for n in mine if n in theirs and codec.digest(mine[n]) == codec.digest(theirs[n])}
        has_parts = self.functions is not None and other.functions is not None
        return [
            (name, mine.get(name, _ABSENT), theirs.get(name, _ABSENT))
            for name in names
            if not (name in same or (name.startswith("functions") and not has_parts))
            and not (name in ("entry_digest", "functions") and has_parts and self.functions != other.functions)
        ]


_ABSENT = "absent"
_CONTENT = {
    "entry_digest": "the text of the job file, or of a module beside it,",
    "data_fingerprint": "the content of the training data",
    "weights_digest": "the initial weights (the model, or the seed)",
}
"""Fields that are compared by digest, with their names for users."""


def leaves(value: JSON, path: str = "") -> Iterator[tuple[str, JSON]]:
    """The scalars of a JSON document with their dotted paths; lists count as scalars."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
