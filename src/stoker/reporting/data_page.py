"""The report of a data check as one HTML file that needs nothing else, with pictures of what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from stoker.records.data_check import CleanList, DataCheck, Fault, Finding, Gravity
from stoker.reporting import pages
from stoker.units import format_rate, format_seconds

_MOST_CARDS = 24
_MOST_ROWS = 40
_MAX_RELATED = 3
_MOST_CLASSES = 40


def pictured(check: DataCheck) -> tuple[str, ...]:
    """Names of the samples whose pictures the page shows: some of each kind of finding, and their related samples."""
    names: dict[str, None] = {}
    for _, chosen, _ in _kinds(check):
        for finding in chosen[:_MOST_CARDS]:
            names |= dict.fromkeys(name for name in (finding.id, *finding.related[:_MAX_RELATED]) if name)
    return tuple(names)


def render_data_page(
    check: DataCheck, clean: CleanList, pictures: Mapping[str, str], *, layout: Literal["page", "fragment"] = "page"
) -> str:
    """The page, or its content alone (`fragment`).

    Args:
        check: what was found.
        clean: what is left out because of it.
        pictures: data URIs of samples, by their names.
        layout: what stands around it.
    """
    faults = sum(finding.gravity in {"corrupt", "fault"} for finding in check.findings)
    suspects = sum(finding.gravity == "suspect" for finding in check.findings)
    splits = ", ".join(f"{split.num_samples:,} {split.name or 'in all'}" for split in check.splits)
    return pages.render(
        "data_check",
        layout=f"{layout}.html.j2",
        title=f"Data check of {check.source}",
        policy="default-src 'none'; style-src 'unsafe-inline'; img-src data:",
        scripts=(),
        faults=faults,
        result=[
            ("faults", "label"),
            (f"{faults:,}", "big" if faults else "big none"),
            (f"and {suspects:,} suspects, to be looked at", "note"),
        ],
        tiles=[
            ("samples", f"{check.num_samples:,}", splits),
            ("left out", f"{len(clean.dropped):,}", f"{clean.kept:,} are kept"),
            ("kind", check.kind, f"held against {', '.join(check.against)}" if check.against else ""),
            ("time", format_seconds(check.took_s), format_rate(check.num_samples / max(check.took_s, 1e-3), "samples")),
        ],
        check=check,
        words=FAULTS,
        kinds=_kinds(check),
        pictures=pictures,
        max_related=_MAX_RELATED,
        max_classes=_MOST_CLASSES,
        columns=_column_rows(check),
        facts_of_check=[
            ("source", check.source),
            ("checked", check.made_at),
            ("options", ", ".join(f"{name} = {value}" for name, value in check.settings.items())),
            ("clean list", f"{len(clean.dropped):,} samples to leave out, {clean.kept:,} kept: clean.json"),
        ],
    )


def _kinds(check: DataCheck) -> list[tuple[tuple[Gravity, Fault], list[Finding], int]]:
    """Each kind of finding, those of it to be shown (at even distances from the worst to the mildest), and how many."""
    kinds = []
    for (gravity, fault), count in check.counts().items():
        of_kind = [finding for finding in check.findings if (finding.gravity, finding.fault) == (gravity, fault)]
        most = _MOST_CARDS if any(finding.id for finding in of_kind) else _MOST_ROWS
        step = max(1.0, len(of_kind) / most)
        kinds.append(((gravity, fault), [of_kind[int(place * step)] for place in range(min(most, count))], count))
    return kinds


def _column_rows(check: DataCheck) -> list[tuple[str, ...]]:
    """Statistics of each column, in the first split, which is the one that trains."""
    return [
        (
            column.name,
            column.kind,
            f"{column.missing / max(1, column.num_rows):.2%}",
            f"{'≥ ' if column.is_distinct_capped else ''}{column.distinct:,}",
            "" if column.median is None else f"{column.median:g}",
            " · ".join(column.examples),
        )
        for column in check.columns
    ]


FAULTS: dict[Fault, tuple[str, str]] = {
    "corrupt": ("corrupt", "cannot be decoded to its end"),
    "empty": ("empty file", "has no bytes"),
    "foreign": ("other file", "is no data by its name, and was not opened"),
    "extension": ("wrong extension", "is of another format than its name says; it can be read, and is kept"),
    "mode": ("odd mode", "has other channels than nearly all others"),
    "shape": ("odd size", "has another size or shape than nearly all others"),
    "blank": ("blank", "shows one colour"),
    "not-finite": ("not finite", "holds NaN or infinity"),
    "duplicate": ("duplicate", "is there twice in its split; the first is kept"),
    "near-duplicate": ("near duplicate", "looks like another of its split"),
    "leak": ("leak", "is in two splits; the one that measures keeps it"),
    "near-leak": ("near leak", "looks like one of another split"),
    "contradiction": ("contradiction", "has equal content under two labels"),
    "suspect-label": ("suspect label", "nearly all of its nearest neighbours carry one other label"),
    "unlabelled": ("no label", "has no label, where others have one"),
    "empty-class": ("empty class", "a class without a sample"),
    "imbalance": ("imbalance", "the largest class has ten times the samples of the smallest, or more"),
    "unknown-class": ("unknown class", "a class that training does not have"),
    "ragged": ("ragged", "has more or fewer values than it should"),
    "missing": ("missing values", "a column with values that are missing"),
    "missing-column": ("missing column", "lacks a column that others have"),
    "constant": ("constant column", "a column with one value"),
    "mixed-types": ("mixed types", "a value of another type than its column's, or a column of several"),
    "outlier": ("outlier", "a number far from the median of its column"),
    "out-of-vocabulary": ("out of vocabulary", "a category that training never has"),
    "target-leak": ("target leak", "a column that gives the target away"),
    "empty-text": ("empty text", "nothing to read"),
    "encoding": ("encoding", "text that was not decoded as it was encoded"),
}
"""Fault: (its name, what is said of a sample, a column or a class that has it)."""
