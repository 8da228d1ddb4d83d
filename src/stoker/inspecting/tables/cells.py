"""What is wrong with single values, once it is known what their columns are like."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.inspecting.tables.columns import MAIN_SHARE
from stoker.inspecting.tables.profile import ColumnProfile, RowSample, Spread, spread_of
from stoker.inspecting.tables.roles import Roles
from stoker.inspecting.tables.rows import Batch, Table, row_id
from stoker.inspecting.tables.values import Kind, encoding_fault, key_of, kind_of, number_of, shown
from stoker.records.cleaning import Fault, Finding, Gravity

_MOST_OUTLIERS = 0.01
"""Share of a column's numbers that are far out, above which its tail is long and none of them is an outlier."""


@dataclass(frozen=True)
class Fact:
    """What is wrong with a value."""

    fault: Fault
    gravity: Gravity
    detail: str
    measure: float | None = None


@dataclass(frozen=True)
class Rules:
    """What to ask of each value of a column; `known` holds a category's values, of the split that trains."""

    name: str
    is_typed: bool
    kind: Kind | None
    spread: Spread | None
    most_z: float
    is_prose: bool
    is_target: bool
    known: frozenset[Any] | None

    def ask(self, value: Any, *, is_held_out: bool) -> Fact | None:
        """The first thing that is wrong."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return self._missing()
        if isinstance(value, str) and (said := encoding_fault(value)):
            gravity: Gravity = "fault" if said.startswith("is not") else "suspect"
            return Fact("encoding", gravity, said)
        if self.is_prose and isinstance(value, str) and not value.strip():
            return Fact("empty-text", "fault", "is empty")
        if self.kind is not None and kind_of(value, is_typed=self.is_typed) != self.kind:
            return Fact("mixed-types", "fault", f"is {shown(value)!r}; the column holds {self.kind}s")
        if is_held_out and self.known is not None and key_of(value) not in self.known:
            return Fact("out-of-vocabulary", "suspect", f"is {shown(value)!r}, which training never has")
        number = number_of(value, is_typed=self.is_typed) if self.kind == "number" else None
        return None if number is None else self._number(number)

    def _missing(self) -> Fact | None:
        if self.is_target:
            return Fact("unlabelled", "fault", "is missing, and is the target")
        return Fact("empty-text", "fault", "is empty") if self.is_prose else None

    def _number(self, number: float) -> Fact | None:
        if not math.isfinite(number):
            return Fact("not-finite", "fault", f"is {number}")
        z = self.spread.z(number) if self.spread else 0.0
        if z <= self.most_z or self.spread is None or self.is_target:
            return None
        detail = f"is {number:g}: {z:.3g} robust deviations from the median {self.spread.median:g}"
        return Fact("outlier", "suspect", detail, round(z, 2))


def rules_of(
    base: Mapping[str, ColumnProfile], sample: RowSample, roles: Roles, *, is_typed: bool, most_z: float
) -> dict[str, Rules]:
    """What to ask of each column, from the rows that train."""
    rules = {}
    for name, profile in base.items():
        kind = profile.kind if profile.present and profile.kinds[profile.kind] >= MAIN_SHARE * profile.present else None
        is_plain_text = kind == "text" and not is_typed  # a text may look like a number
        is_measured = kind == "number" and name not in roles.ignored  # the number of a row is never far out
        spread = spread_of(sample.column(name), is_typed=is_typed) if is_measured else None
        rules[name] = Rules(
            name=name, is_typed=is_typed, kind=None if is_plain_text else kind,
            spread=_trusted(spread, sample.column(name), most_z, is_typed=is_typed), most_z=most_z,
            is_prose=name in roles.prose or profile.is_prose, is_target=name == roles.target,
            known=frozenset(profile.values) if profile.is_category and name not in roles.ignored else None,
        )  # fmt: skip
    return rules


def cell_findings(table: Table, batch: Batch, rules: Mapping[str, Rules], *, is_held_out: bool) -> Iterator[Finding]:
    """What is wrong with the values of a batch, and with the rows that could not be read."""
    for row, problem in sorted(batch.problems.items()):
        yield Finding(fault=problem.kind, gravity="corrupt", id=row_id(table, batch, row), where=table.split,
                      detail=problem.words)  # fmt: skip
    for name, values in batch.columns.items():
        if name not in rules:
            continue
        asked = rules[name]
        for row, value in enumerate(values):
            if row not in batch.problems and (fact := asked.ask(value, is_held_out=is_held_out)):
                yield Finding(fault=fact.fault, gravity=fact.gravity, id=row_id(table, batch, row), where=table.split,
                              detail=f"{name} {fact.detail}", measure=fact.measure)  # fmt: skip


def _trusted(spread: Spread | None, values: list[Any], most_z: float, *, is_typed: bool) -> Spread | None:
    """The spread, unless so many values are far out that far out is usual."""
    if spread is None:
        return None
    read = (number_of(value, is_typed=is_typed) for value in values)
    numbers = [number for number in read if number is not None and math.isfinite(number)]
    far = sum(spread.z(number) > most_z for number in numbers)
    return spread if far <= max(1, _MOST_OUTLIERS * len(numbers)) else None
