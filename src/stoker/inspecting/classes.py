"""What the number of samples of each class tells; of pictures and of tables alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from stoker.inspecting.sources.splits import AGAINST, rank
from stoker.records.cleaning import Finding, SplitFacts

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
