"""What the columns of a table are for."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from stoker.errors import BadJob, nearest
from stoker.inspecting.options import CheckOptions

_TARGETS = ("target", "label", "labels", "class", "y")
_NAMES_OF_ROWS = frozenset({"id", "index", "row", "row_id", "uuid", "guid", "unnamed: 0", ""})


@dataclass(frozen=True)
class Roles:
    """The column to be predicted (empty: none is known), columns of prose, and those that only name a row."""

    target: str
    prose: frozenset[str]
    ignored: frozenset[str]

    def note(self) -> str:
        """What was taken for what."""
        target = f"the target is {self.target!r}" if self.target else "no target is known: --target COLUMN names it"
        ignored = ", ".join(repr(name) for name in sorted(self.ignored))
        return target + (f"; rows are compared without {ignored}" if ignored else "")


def roles_of(columns: Collection[str], options: CheckOptions) -> Roles:
    """As options say; where they do not, the target is a column named `target`, `label`, `labels`, `class` or `y`.

    Raises:
        BadJob: an option names a column that is not there.
    """
    for name in (*((options.target,) if options.target else ()), *options.text, *options.ignore):
        if name not in columns:
            raise BadJob(f"There is no column {name!r}", remedy=nearest(name, columns))
    lower = {name.lower(): name for name in columns}
    target = options.target or next((lower[name] for name in _TARGETS if name in lower), "")
    named = {name for name in columns if name.strip().lower() in _NAMES_OF_ROWS}
    return Roles(target, frozenset(options.text), frozenset({*named, *options.ignore}) - {target})
