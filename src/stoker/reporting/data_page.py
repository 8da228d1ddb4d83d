"""The report of a data check as one HTML file that needs nothing else, with pictures of what was found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker.records.data_check import CleanList, DataCheck, Fault, Finding, Gravity, SplitFacts
from stoker.reporting.markup import Markup, document, element, escaped, facts, header, joined, section, table
from stoker.units import format_rate, format_seconds

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_MOST_CARDS = 24
_MOST_ROWS = 40
_MAX_RELATED = 3
_MOST_CLASSES = 40


def pictured(check: DataCheck) -> tuple[str, ...]:
    """Names of the samples whose pictures the page shows: some of each kind of finding, and their related samples."""
    names: dict[str, None] = {}
    for _, chosen, _ in _kinds(check):
        for finding in chosen[:_MOST_CARDS]:
            names |= dict.fromkeys(name for name in (finding.id, *finding.beside[:_MAX_RELATED]) if name)
    return tuple(names)


def render_data_page(check: DataCheck, clean: CleanList, pictures: Mapping[str, str]) -> str:
    """The page.

    Args:
        check: what was found.
        clean: what is left out because of it.
        pictures: data URIs of samples, by their names.
    """
    classes = [_classes(split) for split in check.splits if split.classes]
    body = joined(
        [
            _headline(check, clean),
            _overview(check),
            *(_kind(gravity_fault, chosen, count, pictures) for gravity_fault, chosen, count in _kinds(check)),
            section("Classes", element("div", *classes, css="balance")) if classes else Markup(""),
            _columns(check),
            _how(check, clean),
            element("footer", escaped("Made by Stoker. The data were read and not changed. This file loads nothing.")),
        ]
    )
    title, styles = f"Data check of {check.source}", ("page.css", "data_page.css")
    return document(title, element("main", body), policy=_POLICY, styles=styles)


def _kinds(check: DataCheck) -> list[tuple[tuple[Gravity, Fault], list[Finding], int]]:
    """Each kind of finding, those of it to be shown (at even distances from the worst to the mildest), and how many."""
    found = []
    for (gravity, fault), count in check.counts().items():
        of_kind = [one for one in check.findings if (one.gravity, one.fault) == (gravity, fault)]
        most = _MOST_CARDS if any(one.id for one in of_kind) else _MOST_ROWS
        step = max(1.0, len(of_kind) / most)
        found.append(((gravity, fault), [of_kind[int(place * step)] for place in range(min(most, count))], count))
    return found


def _headline(check: DataCheck, clean: CleanList) -> Markup:
    faults = sum(finding.gravity in {"corrupt", "fault"} for finding in check.findings)
    suspects = sum(finding.gravity == "suspect" for finding in check.findings)
    result = (
        ("faults", "label"),
        (f"{faults:,}", "big" if faults else "big none"),
        (f"and {suspects:,} suspects, to be looked at", "note"),
    )
    splits = ", ".join(f"{one.num_samples:,} {one.name or 'in all'}" for one in check.splits)
    tiles = [
        ("samples", f"{check.num_samples:,}", splits),
        ("left out", f"{len(clean.dropped):,}", f"{clean.kept:,} are kept"),
        ("kind", check.kind, f"held against {', '.join(check.against)}" if check.against else ""),
        ("time", format_seconds(check.took_s), format_rate(check.num_samples / max(check.took_s, 1e-3), "samples")),
    ]
    status, css = ("faults found", "failed") if faults else ("no faults", "finished")
    return header(f"Data check of {check.source}", status, css, result, tiles)


def _overview(check: DataCheck) -> Markup:
    rows = []
    for (gravity, fault), count in check.counts().items():
        name, meaning = FAULTS[fault]
        link = element("a", escaped(name), href=f"#{gravity}-{fault}")
        badge = element("span", escaped(gravity), css=f"grave {gravity}")
        rows.append((badge, link, escaped(f"{count:,}"), escaped(meaning)))
    if not rows:
        return section("What was found", element("p", escaped("Nothing: no fault, and nothing suspect.")))
    return section("What was found", table(("", "finding", "how many", "what it is"), rows, css="found"))


def _kind(key: tuple[Gravity, Fault], chosen: Sequence[Finding], count: int, pictures: Mapping[str, str]) -> Markup:
    gravity, fault = key
    name, meaning = FAULTS[fault]
    badge = element("span", escaped(f"{count:,}"), css="count")
    some = f"; {len(chosen)} of {count:,} are shown, from the worst to the mildest" if len(chosen) < count else ""
    has_pictures = any(one.id in pictures for one in chosen)
    if has_pictures:
        content = element("div", *(_card(finding, pictures) for finding in chosen), css="cards")
    else:
        rows = [(escaped(one.id or one.where or "the whole set"), escaped(one.detail)) for one in chosen]
        content = table(("where", "what"), rows, css="rows")
    heading = element("h2", escaped(name), badge, id=f"{gravity}-{fault}")
    css = "" if has_pictures else "plain"
    return element("section", heading, element("p", escaped(f"{meaning}{some}"), css="lead"), content, css=css)


def _card(finding: Finding, pictures: Mapping[str, str]) -> Markup:
    beside = [name for name in finding.beside[:_MAX_RELATED] if name in pictures]
    shots = [_shot(finding.id, pictures)] if finding.id in pictures else []
    if beside:
        css = "beside three" if len(beside) > 1 else "beside"
        shots.append(element("div", *(_shot(name, pictures) for name in beside), css=css))
    parts = [element("div", *shots, css="shots")] if shots else []
    named = element("b", escaped(finding.id or finding.where))
    return element("div", *parts, named, element("p", escaped(finding.detail)), css="card")


def _shot(name: str, pictures: Mapping[str, str]) -> Markup:
    kind = "photo" if pictures[name].startswith("data:image/jpeg") else "small"
    return Markup(f'<img class="{kind}" src="{escaped(pictures[name])}" alt="{escaped(name)}" title="{escaped(name)}">')


def _classes(one: SplitFacts) -> Markup:
    most = max(one.classes.values())
    shown = list(one.classes.items())[:_MOST_CLASSES]
    bars = [
        element("li", element("span", escaped(name), title=name),
                element("i", style=f"width:{100 * count / most:.1f}%"), element("span", escaped(f"{count:,}")))
        for name, count in shown
    ]  # fmt: skip
    more = f" (the first {_MOST_CLASSES} of {len(one.classes)})" if len(shown) < len(one.classes) else ""
    heading = element("h3", escaped(f"{one.name or 'all samples'}{more}"))
    return element("div", heading, element("ul", *bars))


def _columns(check: DataCheck) -> Markup:
    """What is known of each column, in the first split, which is the one that trains."""
    if not check.columns:
        return Markup("")
    of = f" of {check.splits[0].name}" if check.splits and check.splits[0].name else ""
    rows = [
        (
            escaped(one.name), escaped(one.kind), escaped(f"{one.missing / max(1, one.num_rows):.2%}"),
            escaped(f"{'≥ ' if one.is_distinct_capped else ''}{one.distinct:,}"),
            escaped("" if one.median is None else f"{one.median:g}"), escaped(" · ".join(one.examples)),
        )
        for one in check.columns
    ]  # fmt: skip
    head = ("column", "kind", "missing", "different values", "median", "most frequent")
    return section(f"Columns{of}", table(head, rows, css="columns"))


def _how(check: DataCheck, clean: CleanList) -> Markup:
    notes = element("ul", *(element("li", escaped(note)) for note in check.notes), css="why")
    settings = ", ".join(f"{name} = {value}" for name, value in check.settings.items())
    rows = [
        ("source", escaped(check.source)),
        ("checked", escaped(check.made_at)),
        ("options", escaped(settings)),
        ("clean list", escaped(f"{len(clean.dropped):,} samples to leave out, {clean.kept:,} kept: clean.json")),
    ]
    return section("How it was looked at", notes if check.notes else Markup(""), facts(rows))


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
    "target-leak": ("target leak", "a column that tells the target"),
    "empty-text": ("empty text", "nothing to read"),
    "encoding": ("encoding", "text that was not decoded as it was encoded"),
}
"""Fault: (its name, what is said of a sample, a column or a class that has it)."""

GRAVITY_COLOURS: dict[Gravity, str] = {"corrupt": "bad", "fault": "ember", "suspect": "amber", "note": "grey"}
"""Names of `palette.COLOURS`."""
