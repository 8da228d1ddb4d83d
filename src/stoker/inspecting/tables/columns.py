"""What is wrong with whole columns: missing values, nothing but one value, two types, or the target told by another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from stoker.inspecting.sources.splits import AGAINST
from stoker.inspecting.tables.profile import ColumnProfile, RowSample
from stoker.inspecting.tables.roles import Roles
from stoker.inspecting.tables.values import key_of, number_of
from stoker.records.cleaning import Finding

MAIN_SHARE = 0.95
"""Share of a column's values that are of one kind, for the others to be odd ones rather than the column mixed."""

_FEWEST_PAIRS = 20
_MOST_EXCEPTIONS = 0.01
"""Rows in which a column that tells the target may be wrong, of those without the most frequent target."""

_SURE_CORRELATION = 0.9999
_ROWS_PER_VALUE = 5
_KINDS = {"number": "numbers", "text": "text", "bool": "booleans", "list": "lists", "object": "objects",
          "bytes": "bytes", "time": "times"}  # fmt: skip


def column_findings(profiles: Mapping[str, Mapping[str, ColumnProfile]], roles: Roles) -> Iterator[Finding]:
    """Findings of each split's columns; a column that only some splits have is missing from the others."""
    names = list(dict.fromkeys(name for split, columns in profiles.items() if split != AGAINST for name in columns))
    for split, columns in profiles.items():
        if split == AGAINST:
            continue
        for name in names:
            place = f"{split}/{name}" if split else name
            if name in columns:
                yield from _of_column(columns[name], place, is_target=name == roles.target)
            else:
                others = [other for other in profiles if name in profiles[other]]
                yield Finding(fault="missing-column", gravity="fault", where=place,
                              detail=f"is in {', '.join(others)}, and not here")  # fmt: skip


def target_leaks(sample: RowSample, columns: Sequence[str], target: str, *, is_typed: bool) -> Iterator[Finding]:
    """Columns that tell the target: equal to it, a renaming of it, or proportional to it."""
    wanted = sample.column(target)
    for name in columns:
        if name == target:
            continue
        pairs = [(a, b) for a, b in zip(sample.column(name), wanted, strict=True) if a is not None and b is not None]
        if len(pairs) >= _FEWEST_PAIRS and (how := _how_told(pairs, is_typed=is_typed)):
            yield Finding(fault="target-leak", gravity="fault", where=name, detail=f"{how} {target!r}")


def _of_column(profile: ColumnProfile, place: str, *, is_target: bool) -> Iterator[Finding]:
    if profile.missing and not is_target:
        share = profile.missing / profile.num_rows
        detail = f"{profile.missing:,} of {profile.num_rows:,} values are missing ({share:.2%})"
        yield Finding(fault="missing", gravity="suspect", where=place, detail=detail, measure=round(share, 6))
    if profile.present > 1 and len(profile.values) == 1 and not profile.is_capped:
        value = next(iter(profile.values))
        yield Finding(fault="constant", gravity="suspect", where=place, detail=f"is {value!r} in every row that has it")
    if profile.present and profile.kinds[profile.kind] < MAIN_SHARE * profile.present:
        counts = profile.kinds.most_common()
        shares = ", ".join(f"{count / profile.present:.1%} {_KINDS[kind]}" for kind, count in counts)
        yield Finding(fault="mixed-types", gravity="suspect", where=place, detail=f"holds {shares}")


def _how_told(pairs: Sequence[tuple[Any, Any]], *, is_typed: bool) -> str:
    """In what way the first of each pair tells the second; empty if it does not."""
    keys = [(key_of(a), key_of(b)) for a, b in pairs]
    targets = {b for _, b in keys}
    if len(targets) < 2:
        return ""
    usual = Counter(b for _, b in keys).most_common(1)[0][1]
    allowed = _MOST_EXCEPTIONS * (len(keys) - usual)
    if sum(a != b for a, b in keys) <= allowed:
        return "equals"
    if len({a for a, _ in keys}) == len(targets) <= len(keys) / _ROWS_PER_VALUE:
        favoured = {a: b for (a, b), _ in sorted(Counter(keys).items(), key=lambda one: one[1])}
        if set(favoured.values()) == targets and sum(favoured[a] != b for a, b in keys) <= allowed:
            return "has a value of its own for each value of"
    numbers = [(number_of(a, is_typed=is_typed), number_of(b, is_typed=is_typed)) for a, b in pairs]
    both = np.array([(a, b) for a, b in numbers if a is not None and b is not None and np.isfinite([a, b]).all()])
    if len(both) < max(_FEWEST_PAIRS, MAIN_SHARE * len(pairs)) or (both.std(axis=0) == 0).any():
        return ""
    r = float(np.corrcoef(both.T)[0, 1])
    return f"is a straight line (r = {r:.6f}) of" if abs(r) >= _SURE_CORRELATION else ""
