"""What a check hands over: what it found, and where to see it.

How a data set is checked.

Names of splits, as people write them.

What the number of samples of each class tells; of pictures and of tables alike.

Rows of equal content, by their digests.
"""

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
"""Is told what is being done, how many of it are done, and of how many; 0 where that is not known."""

ImageLoader = Callable[[str], "Image.Image | None"]
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
    picture: ImageLoader = field(default=lambda _: None)


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


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """What `stoker data check` may be told.

    Attributes:
        target: the column of a table to be predicted; found by its name where it is empty (see `tables.roles`).
        text: columns whose values are prose; such are told from their length as well.
        ignore: columns that two rows need not share to count as the same.
        near: whether to look for near duplicates.
        labels: whether to hold labels against those of neighbours.
        least_correlation: how alike the pixels of near duplicates are (Pearson's r, after decoding both).
        most_z: how far out a number is no outlier yet, in robust standard deviations.
        workers: processes that decode; 0 is as many as the process may use cores.
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
    "train": "train", "training": "train",
    "valid": "valid", "validation": "valid", "val": "valid", "dev": "valid", "eval": "valid", "holdout": "valid",
    "test": "test", "testing": "test", "t10k": "test",
}  # fmt: skip
"""What a folder or the first or last word of a file's name says: the split."""

AGAINST = "against"
"""The split of another data set that this one is held against."""

_RANK = {"train": 0, "": 0, "valid": 1, "test": 2, AGAINST: 3}


def rank(split: str) -> int:
    """Of two splits with one content, the one with the lower rank gives its copy up: training before what measures."""
    return _RANK.get(split, 1)


def split_of(name: str) -> str:
    """The split that the name of a file tells: `train-0001.tar`, `cifar_test.csv`; empty where it tells none.

    >>> [split_of(name) for name in ("train-0001", "x_test", "t10k-images-idx3-ubyte", "flowers")]
    ['train', 'test', 'test', '']
    """
    words = [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]
    ends = [SPLITS[word] for word in (words[:1] + words[-1:]) if word in SPLITS]
    return ends[0] if ends else next((SPLITS[word] for word in words if word in SPLITS), "")


def are_splits(folders: Iterable[str]) -> bool:
    """Whether folders of these names are splits, not classes: all of them, and at least two or one that says train."""
    named = [SPLITS.get(name.lower(), "") for name in folders]
    return bool(named) and all(named) and (len(set(named)) > 1 or "train" in named)


MOST_IMBALANCE = 10.0
"""Samples of the largest class over those of the smallest, above which it is told."""


def class_findings(splits: Sequence[SplitFacts], empty: Iterable[tuple[str, str]] = ()) -> Iterator[Finding]:
    """Classes without a sample, far from balance, or in a split that measures and not in the one that trains."""
    for split, name in empty:
        yield Finding(fault="empty-class", gravity="fault", where=_place(split, name), detail="has no sample")
    ours = [facts for facts in splits if facts.name != AGAINST]
    for facts in ours:
        if len(facts.classes) > 1 and _ratio(facts.classes) >= MOST_IMBALANCE:
            least, *_, most = sorted(facts.classes, key=facts.classes.__getitem__)
            yield Finding(
                fault="imbalance", gravity="note", where=facts.name, measure=round(_ratio(facts.classes), 2),
                detail=f"{most} has {facts.classes[most]:,} samples, {least} has {facts.classes[least]:,}",
            )  # fmt: skip
    yield from _unknown(ours)


def in_order_of_use(splits: Iterable[SplitFacts]) -> tuple[SplitFacts, ...]:
    """The split that trains first, then those that measure."""
    return tuple(sorted(splits, key=lambda one: rank(one.name)))


def _unknown(splits: Sequence[SplitFacts]) -> Iterator[Finding]:
    training = [facts for facts in splits if rank(facts.name) == 0 and facts.classes]
    known = {name for facts in training for name in facts.classes}
    for facts in splits:
        if training and rank(facts.name) > 0:
            for name in facts.classes:
                if name not in known:
                    detail = f"{facts.classes[name]:,} samples of a class that training does not have"
                    yield Finding(fault="unknown-class", gravity="fault", where=_place(facts.name, name), detail=detail)


def _ratio(classes: dict[str, int]) -> float:
    return max(classes.values()) / max(1, min(classes.values()))


def _place(split: str, name: str) -> str:
    return f"{split}/{name}" if split else name


def groups_of(contents_NB: NDArray[np.uint8]) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """The first row of each content, in order; and the rows, in order, of each content that is there more than once.

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
