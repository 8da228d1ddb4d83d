"""The options and the result of a check, and what checks of pictures and of tables share: splits, classes, groups."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker.errors import BadJob
from stoker.records.data_check import CleanList, ColumnFacts, DataCheck, DataKind, Dropped, Finding, SplitFacts

if TYPE_CHECKING:
    from PIL import Image


Tell = Callable[[str, int, int], None]
"""Called with the current step, the number done, and the total, which is 0 if unknown."""

ImageLoader = Callable[[str], "Image.Image | None"]
"""The sample of that name in RGB; None if it has no pixels."""

_KEPT: frozenset[str] = frozenset({"extension", "foreign"})
"""Faults of a file's name: such samples are usable."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of one check, without date and settings."""

    kind: DataKind
    splits: tuple[SplitFacts, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    columns: tuple[ColumnFacts, ...] = ()
    picture: ImageLoader = field(default=lambda _: None)


def clean_list(check: DataCheck, *, drop_suspects: bool = False) -> CleanList:
    """The samples to leave out: unreadable, faulty and repeated ones, and suspects with `drop_suspects`.

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
    """Findings by gravity, fault, and descending measure; equal ones stay in the order of the source."""
    order: Mapping[str, int] = {"corrupt": 0, "fault": 1, "suspect": 2, "note": 3}
    return tuple(sorted(findings, key=lambda finding: (order[finding.gravity], finding.fault, -(finding.measure or 0))))


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `stoker data check`.

    Attributes:
        target: the column of a table to be predicted; if empty, found by name (see `roles_of`).
        text: columns of prose; others are recognised by their length.
        ignore: columns in which equal rows may differ.
        near: look for near duplicates.
        labels: compare labels with those of neighbours.
        least_correlation: least Pearson's r of the decoded pixels of near duplicates.
        most_z: distance up to which a number is no outlier [robust standard deviations].
        workers: number of processes that decode; 0 is one for each usable core.
    """

    target: str = ""
    text: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    near: bool = True
    labels: bool = True
    least_correlation: float = 0.97
    most_z: float = 12.0
    workers: int = 0


SPLITS = {
    "train": "train",
    "training": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "eval": "valid",
    "holdout": "valid",
    "test": "test",
    "testing": "test",
    "t10k": "test",
}
"""The split for the name of a folder, or the first or last word of a file's name."""

AGAINST = "against"
"""The split of another data set that this one is compared with."""

_RANK = {"train": 0, "": 0, "valid": 1, "test": 2, AGAINST: 3}


def rank(split: str) -> int:
    """Order in which splits give up a shared sample [rank]: training (0) before those that measure, then `AGAINST`."""
    return _RANK.get(split, 1)


def split_of(name: str) -> str:
    """The split in the name of a file: `train-0001.tar`, `cifar_test.csv`; empty if there is none.

    >>> [split_of(name) for name in ("train-0001", "x_test", "t10k-images-idx3-ubyte", "flowers")]
    ['train', 'test', 'test', '']
    """
    parts = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    ends = [SPLITS[word] for word in (parts[:1] + parts[-1:]) if word in SPLITS]
    return ends[0] if ends else next((SPLITS[word] for word in parts if word in SPLITS), "")


def are_splits(folders: Iterable[str]) -> bool:
    """True if folders of these names are splits, not classes: all of them, at least two or one for training."""
    named = [SPLITS.get(name.lower(), "") for name in folders]
    return bool(named) and all(named) and (len(set(named)) > 1 or "train" in named)


MOST_IMBALANCE = 10.0
"""Samples of the largest class over those of the smallest, from which imbalance is reported [1]."""


def class_findings(splits: Sequence[SplitFacts], empty: Iterable[tuple[str, str]] = ()) -> Iterator[Finding]:
    """Classes that have no sample, are far from balance, or are missing from training."""
    for split, name in empty:
        yield Finding(fault="empty-class", gravity="fault", where=_place(split, name), detail="has no sample")
    ours = [facts for facts in splits if facts.name != AGAINST]
    for facts in ours:
        counts = sorted(facts.classes.items(), key=lambda item: item[1])
        if len(counts) < 2:
            continue
        (least, fewest), (most, largest) = counts[0], counts[-1]
        ratio = largest / max(1, fewest)
        if ratio >= MOST_IMBALANCE:
            yield Finding(
                fault="imbalance",
                gravity="note",
                where=facts.name,
                measure=round(ratio, 2),
                detail=f"{most} has {largest:,} samples, {least} has {fewest:,}",
            )
    known = {name for facts in ours if rank(facts.name) == 0 for name in facts.classes}
    for facts in ours:
        for name, count in facts.classes.items():
            if known and rank(facts.name) > 0 and name not in known:
                detail = f"{count:,} samples of a class that training does not have"
                yield Finding(fault="unknown-class", gravity="fault", where=_place(facts.name, name), detail=detail)


def in_order_of_use(splits: Iterable[SplitFacts]) -> tuple[SplitFacts, ...]:
    """The training split first, then those that measure."""
    return tuple(sorted(splits, key=lambda split: rank(split.name)))


def _place(split: str, name: str) -> str:
    return f"{split}/{name}" if split else name


def groups_of(contents_NB: NDArray[np.uint8]) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """The first row of each content, in order; and the rows, in order, of each repeated content.

    Args:
        contents_NB: a digest [B bytes] a row.
    """
    if not len(contents_NB):
        return np.empty(0, np.int64), []
    keys = np.ascontiguousarray(contents_NB).view(f"V{contents_NB.shape[1]}").reshape(-1)
    _, first, inverse, counts = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
    repeated = np.flatnonzero(counts[inverse] > 1)
    order = repeated[np.argsort(inverse[repeated], kind="stable")]
    cuts = np.flatnonzero(np.diff(inverse[order])) + 1
    return np.sort(first), [group for group in np.split(order, cuts) if len(group)]
