"""Everything that is looked for in data with pixels, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from PIL import Image

from stoker.errors import BadJob
from stoker.inspecting.checked import Checked, Picture, Tell, in_order
from stoker.inspecting.classes import class_findings, in_order_of_use
from stoker.inspecting.options import CheckOptions
from stoker.inspecting.pictures.copies import copies
from stoker.inspecting.pictures.near import near_findings, near_pairs
from stoker.inspecting.pictures.neighbours import suspects
from stoker.inspecting.pictures.outliers import outliers
from stoker.inspecting.pictures.pixels import Unreadable
from stoker.inspecting.pictures.reading import Survey, survey
from stoker.inspecting.sources.base import Found, Item, Unit
from stoker.inspecting.sources.splits import AGAINST
from stoker.records.cleaning import Finding


@dataclass(frozen=True)
class Foreign:
    """A unit of another data set: it is of the split `against`, and its samples are named after that data set."""

    unit: Unit
    source: str
    split: str = AGAINST

    def __len__(self) -> int:
        """How many samples."""
        return len(self.unit)

    def item(self, index: int) -> Item:
        """One of them."""
        item = self.unit.item(index)
        return replace(item, id=f"{self.source}/{item.id}")


def check_pictures(
    found: Found, against: Sequence[tuple[str, Found]], options: CheckOptions, workers: int, tell: Tell
) -> Checked:
    """Decode all samples, and hold them against each other.

    Raises:
        BadJob: there is nothing to check.
        RunFailed: a process that decodes died.
    """
    others = [Foreign(unit, source) for source, other in against for unit in other.units]
    if not found.units and not found.findings and not found.empty_classes:
        raise BadJob("There is no image to check")
    seen = survey([*found.units, *others], workers, tell)
    findings = [*found.findings, *(one for one in seen.findings if one.where != AGAINST)]
    facts = seen.facts()
    findings += [*class_findings(facts, found.empty_classes), *_unlabelled(seen), *copies(seen), *outliers(seen)]
    notes = [f"{len(seen):,} samples were decoded to their end; equal pixels are told by their SHA-256"]
    explained = {finding.id for finding in findings if finding.fault in {"duplicate", "leak", "contradiction"}}
    if options.near:
        near = near_pairs(seen, options.least_correlation, tell)
        findings += [one for one in near_findings(seen, near.pairs) if one.where != AGAINST and one.id not in explained]
        notes.append(near.note())
    if options.labels:
        accused, note = suspects(seen, tell)
        findings += [one for one in accused if one.id not in explained]
        notes.append(note)
    ours = in_order_of_use(one for one in facts if one.name != AGAINST)
    return Checked(kind=found.kind, splits=ours, findings=in_order(findings), notes=tuple(notes), picture=_seen(seen))


def _unlabelled(seen: Survey) -> Iterator[Finding]:
    """Samples without a label, where others have one."""
    if not seen.classes:
        return
    for row in (seen.labels < 0).nonzero()[0].tolist():
        if seen.split_name(row) != AGAINST:
            yield Finding(fault="unlabelled", gravity="fault", id=seen.ids[row], where=seen.split_name(row),
                          detail="has no label, others have one")  # fmt: skip


def _seen(seen: Survey) -> Picture:
    """Pictures by the names of their samples."""
    rows: dict[str, int] = {}

    def picture(name: str) -> Image.Image | None:
        if not rows:
            rows.update({one: row for row, one in enumerate(seen.ids)})
        try:
            return seen.picture(rows[name]) if name in rows else None
        except Unreadable:
            return None

    return picture
