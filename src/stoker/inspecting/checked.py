"""What a check hands over: what it found, and where to see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stoker.errors import BadJob
from stoker.records.cleaning import CleanList, ColumnFacts, DataCheck, DataKind, Dropped, Finding, SplitFacts

if TYPE_CHECKING:
    from PIL import Image

Tell = Callable[[str, int, int], None]
"""Is told what is being done, how many of it are done, and of how many; 0 where that is not known."""

Picture = Callable[[str], "Image.Image | None"]
"""The sample of that name in RGB; None where it has no pixels."""

_KEPT: frozenset[str] = frozenset({"extension", "foreign"})
"""Faults of a name: such samples can be read."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The findings of one check, before anyone has said when it was made."""

    kind: DataKind
    splits: tuple[SplitFacts, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    columns: tuple[ColumnFacts, ...] = ()
    picture: Picture = field(default=lambda _: None)


def clean_list(check: DataCheck, *, drop_suspects: bool = False) -> CleanList:
    """The samples to leave out: what cannot be read, what is wrong or counts twice; suspects if that is asked for.

    Raises:
        BadJob: nothing would be left.
    """
    gravities = {"corrupt", "fault", "suspect"} if drop_suspects else {"corrupt", "fault"}
    dropped: dict[str, Dropped] = {}
    for finding in check.findings:
        if finding.id and finding.gravity in gravities and finding.fault not in _KEPT:
            dropped.setdefault(finding.id, Dropped(id=finding.id, why=finding.fault, detail=finding.detail))
    unread = {finding.id for finding in check.findings if finding.id and finding.gravity == "corrupt"}
    kept = check.num_samples - len(set(dropped) - unread)
    if not kept and check.num_samples:
        first = next(iter(dropped.values()))
        raise BadJob(
            f"Of {check.source} nothing would be left: all {check.num_samples:,} samples have faults; "
            f"the first: {first.id} {first.detail}"
        )
    return CleanList(source=check.source, made_at=check.made_at, kept=kept, dropped=tuple(dropped.values()))


def in_order(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The gravest first; within a kind, by how far out, then in the order of the source."""
    order: Mapping[str, int] = {"corrupt": 0, "fault": 1, "suspect": 2, "note": 3}
    return tuple(sorted(findings, key=lambda one: (order[one.gravity], one.fault, -(one.measure or 0.0))))
