"""The check of tables, which reads rows twice: first to profile the columns and digest the rows, then to check values.

`RowDigests` finds rows that are repeated, shared by two splits, or have two targets (44 bytes a row). `Rules` find
faulty values, given the profile of their column.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.reading.table_readers import BadTable
from stoker.errors import BadJob
from stoker.inspecting.findings import (
    AGAINST,
    Checked,
    CheckOptions,
    Tell,
    class_findings,
    groups_of,
    in_order,
    in_order_of_use,
    rank,
)
from stoker.inspecting.table_columns import (
    MAIN_SHARE,
    ColumnProfile,
    Kind,
    RobustSpread,
    Roles,
    RowSample,
    column_findings,
    encoding_fault,
    key_of,
    kind_of,
    number_of,
    robust_spread,
    roles_of,
    same_as,
    shown,
    target_leaks,
)
from stoker.inspecting.table_files import RowBatch, TableSource, row_id
from stoker.records.data_check import DataKind, Fault, Finding, Gravity, SplitFacts

_MOST_CLASSES = 100


@dataclass(frozen=True)
class ForeignTable:
    """A table of another data set, with the split `against`; its rows are named after that data set."""

    table: TableSource
    name: str
    split: str = AGAINST

    @property
    def is_typed(self) -> bool:
        """See the table."""
        return self.table.is_typed

    @property
    def num_bytes(self) -> int:
        """Size of the table [bytes]."""
        return self.table.num_bytes

    def batches(self) -> Iterator[RowBatch]:
        """The table's rows, without names of their own."""
        return (replace(batch, ids=None) for batch in self.table.batches())


@dataclass
class _Known:
    """The result of the first pass, by split."""

    profiles: dict[str, dict[str, ColumnProfile]] = field(default_factory=dict)
    samples: dict[str, RowSample] = field(default_factory=dict)
    typed: dict[str, bool] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def base(self) -> str:
        """The training split; if there is none, the first."""
        return min((split for split in self.profiles if split != AGAINST), key=rank)


def check_tables(
    kind: DataKind, tables: Sequence[TableSource], against: Sequence[TableSource], options: CheckOptions, tell: Tell
) -> Checked:
    """Read all rows twice.

    Raises:
        BadJob: no row can be read, or an option names a missing column.
    """
    names: dict[str, None] = {}
    for table in tables:
        with suppress(BadTable):  # reported by the first pass
            names |= dict.fromkeys(next(table.batches(), RowBatch(0, {}, 0)).columns)
    roles = roles_of(list(names), options)
    everything = [*tables, *against]
    digests = RowDigests(everything, roles)
    known = _read(everything, digests, tell)
    findings = [*known.findings, *column_findings(known.profiles, roles), *digests.findings()]
    base, sample = known.profiles[known.base], known.samples[known.base]
    is_typed = known.typed[known.base]
    if roles.target:
        findings += target_leaks(sample, list(base), roles.target, is_typed=is_typed)
    rules = rules_of(base, sample, roles, is_typed=is_typed, most_z=options.most_z)
    findings += _asked(tables, rules, known, tell)
    splits = []
    for split, columns in known.profiles.items():
        if split == AGAINST:
            continue
        target, classes = columns.get(roles.target), {}
        if target is not None and not target.is_capped and len(target.values) <= _MOST_CLASSES:
            is_class = target.kind != "number" or len(target.values) <= 0.05 * target.present  # frequent numbers
            counts = sorted(target.values.items(), key=lambda item: str(item[0])) if is_class else []
            classes = {str(value): count for value, count in counts}
        splits.append(SplitFacts(name=split, num_samples=known.rows[split], classes=classes))
    findings += class_findings(in_order_of_use(splits))
    facts = []
    for name, profile in base.items():
        spread = robust_spread(sample.column(name), is_typed=is_typed)
        facts.append(profile.facts(spread.median if spread and profile.kind == "number" else None))
    return Checked(
        kind=kind,
        splits=in_order_of_use(splits),
        columns=tuple(facts),
        findings=in_order(findings),
        notes=(roles.note(),),
    )


def _read(tables: Sequence[TableSource], digests: RowDigests, tell: Tell) -> _Known:
    known, total, done = _Known(), sum(table.num_bytes for table in tables), 0
    columns: dict[str, dict[str, set[str]]] = {}
    for number, table in enumerate(tables):
        here = columns.setdefault(table.split, {}).setdefault(table.name, set())
        profiles = known.profiles.setdefault(table.split, {})
        sample = known.samples.setdefault(table.split, RowSample())
        known.typed.setdefault(table.split, table.is_typed)
        try:
            for batch in table.batches():
                here |= set(batch.columns)
                before = max((profile.num_rows for profile in profiles.values()), default=0)
                good = [row for row in range(batch.num_rows) if row not in batch.problems]
                for name in batch.columns:
                    if name not in profiles:
                        profiles[name] = ColumnProfile(name, num_rows=before, missing=before)
                for name, profile in profiles.items():
                    values = batch.columns.get(name)
                    profile.add([None if values is None else values[row] for row in good], is_typed=table.is_typed)
                sample.add(batch)
                digests.add(number, batch)
                known.rows[table.split] = known.rows.get(table.split, 0) + batch.num_rows - len(batch.problems)
                tell("reading rows", sum(known.rows.values()), 0)
        except BadTable as error:
            known.findings.append(Finding(fault="corrupt", gravity="corrupt", where=table.name, detail=error.what))
        done += table.num_bytes
        tell("reading files", done, total)
    if not any(count for split, count in known.rows.items() if split != AGAINST):
        reasons = "; ".join(f"{finding.where} {finding.detail}" for finding in known.findings)
        raise BadJob(f"No row can be read{f': {reasons}' if reasons else ''}")
    known.profiles = {split: profiles for split, profiles in known.profiles.items() if profiles}
    for split, files in columns.items():
        if split != AGAINST:
            known.findings += _lacking(files)
    return known


def _lacking(files: Mapping[str, set[str]]) -> Iterator[Finding]:
    """Files of one split without a column that its other files have; unreadable files are reported already."""
    union = set().union(*files.values())
    for name, columns in files.items():
        if columns:
            for column in sorted(union - columns):
                yield Finding(
                    fault="missing-column",
                    gravity="fault",
                    where=name,
                    detail=f"has no column {column!r}; other files of its split do",
                )


def _asked(tables: Sequence[TableSource], rules: dict[str, Rules], known: _Known, tell: Tell) -> Iterator[Finding]:
    """The second pass: findings about single values."""
    total = sum(count for split, count in known.rows.items() if split != AGAINST)
    done = 0
    for table in tables:
        is_held_out = rank(table.split) > rank(known.base)
        with suppress(BadTable):  # reported by the first pass
            for batch in table.batches():
                yield from cell_findings(table, batch, rules, is_held_out=is_held_out)
                done += batch.num_rows
                tell("asking values", min(done, total), total)


_MOST_OUTLIERS = 0.01
"""Share of far-out numbers [0 to 1], above which a column has a long tail and none of them is an outlier."""


@dataclass(frozen=True)
class Fact:
    """A fault of a value."""

    fault: Fault
    gravity: Gravity
    detail: str
    measure: float | None = None


@dataclass(frozen=True)
class Rules:
    """The rules for values of a column; `known` holds a category's values in the training split."""

    name: str
    is_typed: bool
    kind: Kind | None
    spread: RobustSpread | None
    most_z: float
    is_prose: bool
    is_target: bool
    known: frozenset[Any] | None

    def ask(self, value: Any, *, is_held_out: bool) -> Fact | None:
        """The first fault of a value, or None."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            if self.is_target:
                return Fact("unlabelled", "fault", "is missing, and is the target")
            return Fact("empty-text", "fault", "is empty") if self.is_prose else None
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
    """The rules for each column, from the training rows."""
    rules = {}
    for name, profile in base.items():
        kind = profile.kind if profile.present and profile.kinds[profile.kind] >= MAIN_SHARE * profile.present else None
        is_plain_text = kind == "text" and not is_typed  # a text may look like a number
        is_measured = kind == "number" and name not in roles.ignored  # the number of a row is no outlier
        spread = robust_spread(sample.column(name), is_typed=is_typed) if is_measured else None
        rules[name] = Rules(
            name=name,
            is_typed=is_typed,
            kind=None if is_plain_text else kind,
            spread=_trusted(spread, sample.column(name), most_z, is_typed=is_typed),
            most_z=most_z,
            is_prose=name in roles.prose or profile.is_prose,
            is_target=name == roles.target,
            known=frozenset(profile.values) if profile.is_category and name not in roles.ignored else None,
        )
    return rules


def cell_findings(
    table: TableSource, batch: RowBatch, rules: Mapping[str, Rules], *, is_held_out: bool
) -> Iterator[Finding]:
    """Findings about the values of a batch, and about its unreadable rows."""
    for row, problem in sorted(batch.problems.items()):
        yield Finding(
            fault=problem.kind, gravity="corrupt", id=row_id(table, batch, row), where=table.split, detail=problem.words
        )
    for name, values in batch.columns.items():
        if name not in rules:
            continue
        for row, value in enumerate(values):
            if row not in batch.problems and (fact := rules[name].ask(value, is_held_out=is_held_out)):
                yield Finding(
                    fault=fact.fault,
                    gravity=fact.gravity,
                    id=row_id(table, batch, row),
                    where=table.split,
                    detail=f"{name} {fact.detail}",
                    measure=fact.measure,
                )


def _trusted(spread: RobustSpread | None, values: list[Any], most_z: float, *, is_typed: bool) -> RobustSpread | None:
    """The spread, unless too many values are far out for outliers."""
    if spread is None:
        return None
    read = (number_of(value, is_typed=is_typed) for value in values)
    numbers = [number for number in read if number is not None and math.isfinite(number)]
    far = sum(spread.z(number) > most_z for number in numbers)
    return spread if far <= max(1, _MOST_OUTLIERS * len(numbers)) else None


_BYTES = 16
_MOST_NAMED_ROWS = 5


class RowDigests:
    """The digests of every readable row: of all values, and of all but the target."""

    def __init__(self, tables: Sequence[TableSource], roles: Roles) -> None:
        self._tables, self._roles = tables, roles
        self._whole, self._features = bytearray(), bytearray()
        self._table, self._row = array("i"), array("q")
        self._names: dict[tuple[int, int], str] = {}

    def add(self, number: int, batch: RowBatch) -> None:
        """Add the rows of a batch of table `number`."""
        is_typed = self._tables[number].is_typed
        names = sorted(set(batch.columns) - self._roles.ignored - {self._roles.target})
        columns = [[same_as(value, is_typed=is_typed) for value in batch.columns[name]] for name in names]
        targets = batch.columns.get(self._roles.target) or [None] * batch.num_rows
        for row, values in enumerate(zip(*columns, strict=True) if columns else [()] * batch.num_rows):
            if row in batch.problems:
                continue
            content = repr([pair for pair in zip(names, values, strict=True) if pair[1] is not None]).encode(
                "utf-8", "backslashreplace"
            )
            self._features += hashlib.blake2b(content, digest_size=_BYTES).digest()
            target = repr(same_as(targets[row], is_typed=is_typed)).encode("utf-8", "backslashreplace")
            self._whole += hashlib.blake2b(content + b"\0" + target, digest_size=_BYTES).digest()
            self._table.append(number)
            self._row.append(batch.first_row + row)
            if batch.ids is not None:
                self._names[number, batch.first_row + row] = batch.ids[row]

    def findings(self) -> Iterator[Finding]:
        """Repeated rows, and rows that differ only in the target."""
        whole = _rows(self._whole)
        _, groups = groups_of(whole)
        for group in groups:
            ordered = sorted(group.tolist(), key=lambda row: (-rank(self._split(row)), self._table[row], row))
            kept, home = self._id(ordered[0]), self._split(ordered[0])
            for row in ordered[1:]:
                split = self._split(row)
                if split == AGAINST:
                    continue
                detail = f"has the values of {kept}" + (f" in {home}" if split != home else "")
                fault: Fault = "leak" if split != home else "duplicate"
                yield Finding(
                    fault=fault, gravity="fault", id=self._id(row), where=split, related=(kept,), detail=detail
                )
        if self._roles.target:
            _, groups = groups_of(_rows(self._features))
            for group in groups:
                contents = {row: whole[row].tobytes() for row in group.tolist()}
                if len(set(contents.values())) > 1:
                    yield from self._contradictions(contents)

    def _contradictions(self, contents: dict[int, bytes]) -> Iterator[Finding]:
        """Every row with those that have another target; `contents` are digests of all values by row."""
        for row, content in contents.items():
            if self._split(row) != AGAINST:
                unlike = (other for other, digest in contents.items() if digest != content)
                others = tuple(map(self._id, islice(unlike, _MOST_NAMED_ROWS)))
                detail = f"another {shown(self._roles.target)!r} than {others[0]}, with the same values otherwise"
                yield Finding(
                    fault="contradiction",
                    gravity="suspect",
                    id=self._id(row),
                    where=self._split(row),
                    related=others,
                    detail=detail,
                )

    def _split(self, row: int) -> str:
        return self._tables[self._table[row]].split

    def _id(self, row: int) -> str:
        place = self._table[row], self._row[row]
        return self._names.get(place) or f"{self._tables[place[0]].name}:{place[1]}"


def _rows(digests: bytearray) -> NDArray[np.uint8]:
    return np.frombuffer(bytes(digests), np.uint8).reshape(-1, _BYTES)
