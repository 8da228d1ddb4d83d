"""Equal pixels: duplicates within a split, leaks between splits, and one picture under two labels."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from stoker.inspecting.groups import groups_of
from stoker.inspecting.pictures.reading import Survey
from stoker.inspecting.sources.splits import AGAINST, rank
from stoker.records.cleaning import Finding

_MOST_BESIDE = 5


def copies(survey: Survey) -> Iterator[Finding]:
    """What is wrong with pictures that are there more than once; those of the other data set are not told of."""
    _, groups = groups_of(survey.signatures["content"])
    for group in groups:
        rows = sorted(group.tolist(), key=functools.partial(_place, survey))
        labels = {survey.label(row) for row in rows} - {None}
        told = _contradictions(survey, rows) if len(labels) > 1 else _repetitions(survey, rows)
        yield from (finding for finding in told if finding.where != AGAINST)


def _place(survey: Survey, row: int) -> tuple[int, int, bool, int]:
    """Which copy is kept: of the split that measures, with a label where one has it, then the first."""
    return -rank(survey.split_name(row)), int(survey.splits[row]), survey.label(row) is None, row


def _contradictions(survey: Survey, rows: list[int]) -> Iterator[Finding]:
    """Every copy: which of them has the right label is not known."""
    labels = " and ".join(sorted({str(survey.label(row)) for row in rows}))
    for row in rows:
        others = tuple(survey.ids[other] for other in rows if other != row)[:_MOST_BESIDE]
        yield Finding(
            fault="contradiction", gravity="fault", id=survey.ids[row], where=survey.split_name(row), beside=others,
            detail=f"is labelled {survey.label(row)}; equal pixels are labelled {labels}",
        )  # fmt: skip


def _repetitions(survey: Survey, rows: list[int]) -> Iterator[Finding]:
    """All but the first."""
    kept, home = rows[0], survey.splits[rows[0]]
    for row in rows[1:]:
        is_leak = survey.splits[row] != home
        detail = f"has the pixels of {survey.ids[kept]}" + (f" in {survey.split_name(kept)}" if is_leak else "")
        yield Finding(
            fault="leak" if is_leak else "duplicate", gravity="fault", id=survey.ids[row],
            where=survey.split_name(row), beside=(survey.ids[kept],), detail=detail,
        )  # fmt: skip
