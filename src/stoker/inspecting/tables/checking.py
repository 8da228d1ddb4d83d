"""Everything that is looked for in tables. Rows are read twice: to know the columns, and to ask the values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from stoker.data.reading.faults import BadTable
from stoker.errors import BadJob
from stoker.inspecting.checked import Checked, Tell, in_order
from stoker.inspecting.classes import class_findings, in_order_of_use
from stoker.inspecting.options import CheckOptions
from stoker.inspecting.sources.splits import AGAINST, rank
from stoker.inspecting.tables.cells import Rules, cell_findings, rules_of
from stoker.inspecting.tables.columns import column_findings, target_leaks
from stoker.inspecting.tables.digests import RowDigests
from stoker.inspecting.tables.profile import ColumnProfile, RowSample, spread_of
from stoker.inspecting.tables.roles import Roles, roles_of
from stoker.inspecting.tables.rows import Batch, Table
from stoker.records.cleaning import DataKind, Finding, SplitFacts

_MOST_CLASSES = 100


@dataclass(frozen=True)
class ForeignTable:
    """A table of another data set, of the split `against`; its rows are named after that data set."""

    table: Table
    name: str
    split: str = AGAINST

    @property
    def is_typed(self) -> bool:
        """As the table's."""
        return self.table.is_typed

    @property
    def num_bytes(self) -> int:
        """As the table's [bytes]."""
        return self.table.num_bytes

    def batches(self) -> Iterator[Batch]:
        """As the table's."""
        return (replace(batch, ids=None) for batch in self.table.batches())


@dataclass
class _Known:
    """What the first reading gathers."""

    profiles: dict[str, dict[str, ColumnProfile]] = field(default_factory=dict)
    samples: dict[str, RowSample] = field(default_factory=dict)
    typed: dict[str, bool] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def base(self) -> str:
        """The split that trains; where none is said to, the first."""
        return min((split for split in self.profiles if split != AGAINST), key=rank)


def check_tables(
    kind: DataKind, tables: Sequence[Table], against: Sequence[Table], options: CheckOptions, tell: Tell
) -> Checked:
    """Read everything twice.

    Raises:
        BadJob: no row can be read, or an option names a column that is not there.
    """
    roles = roles_of(_columns_of(tables), options)
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
    splits = _facts(known, roles)
    findings += class_findings(splits)
    facts = []
    for name, profile in base.items():
        spread = spread_of(sample.column(name), is_typed=is_typed)
        facts.append(profile.facts(spread.median if spread and profile.kind == "number" else None))
    return Checked(kind=kind, splits=splits, columns=tuple(facts), findings=in_order(findings), notes=(roles.note(),))


def _columns_of(tables: Sequence[Table]) -> list[str]:
    """Names of the columns of the first batch of each table that can be read."""
    names: dict[str, None] = {}
    for table in tables:
        try:
            names |= dict.fromkeys(next(table.batches(), Batch(0, {}, 0)).columns)
        except BadTable:
            continue  # told when it is read
    return list(names)


def _read(tables: Sequence[Table], digests: RowDigests, tell: Tell) -> _Known:
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
                _add(batch, profiles, is_typed=table.is_typed)
                sample.add(batch)
                digests.add(number, batch)
                known.rows[table.split] = known.rows.get(table.split, 0) + batch.num_rows - len(batch.problems)
                tell("reading rows", sum(known.rows.values()), 0)
        except BadTable as error:
            known.findings.append(Finding(fault="corrupt", gravity="corrupt", where=table.name, detail=error.what))
        done += table.num_bytes
        tell("reading files", done, total)
    if not any(count for split, count in known.rows.items() if split != AGAINST):
        told = "; ".join(f"{finding.where} {finding.detail}" for finding in known.findings)
        raise BadJob(f"No row can be read{f': {told}' if told else ''}")
    known.profiles = {split: profiles for split, profiles in known.profiles.items() if profiles}
    known.findings += [one for split, files in columns.items() if split != AGAINST for one in _lacking(files)]
    return known


def _lacking(files: Mapping[str, set[str]]) -> Iterator[Finding]:
    """Files of one split without a column that its other files have; those that could not be read are told already."""
    union = set().union(*files.values())
    for name, columns in files.items():
        if columns:
            for column in sorted(union - columns):
                yield Finding(fault="missing-column", gravity="fault", where=name,
                              detail=f"has no column {column!r}; other files of its split do")  # fmt: skip


def _add(batch: Batch, profiles: dict[str, ColumnProfile], *, is_typed: bool) -> None:
    """Count the values of the rows that could be read; a column that comes late was missing before."""
    before = max((profile.num_rows for profile in profiles.values()), default=0)
    good = [row for row in range(batch.num_rows) if row not in batch.problems]
    for name in batch.columns:
        if name not in profiles:
            profiles[name] = ColumnProfile(name, num_rows=before, missing=before)
    for name, profile in profiles.items():
        values = batch.columns.get(name)
        profile.add([None if values is None else values[row] for row in good], is_typed=is_typed)


def _asked(tables: Sequence[Table], rules: dict[str, Rules], known: _Known, tell: Tell) -> Iterator[Finding]:
    """The second reading."""
    total = sum(count for split, count in known.rows.items() if split != AGAINST)
    done = 0
    for table in tables:
        is_held_out = rank(table.split) > rank(known.base)
        try:
            for batch in table.batches():
                yield from cell_findings(table, batch, rules, is_held_out=is_held_out)
                done += batch.num_rows
                tell("asking values", min(done, total), total)
        except BadTable:
            continue  # told at the first reading


def _facts(known: _Known, roles: Roles) -> tuple[SplitFacts, ...]:
    found = []
    for split, columns in known.profiles.items():
        if split == AGAINST:
            continue
        target = columns.get(roles.target)
        classes = {}
        if target is not None and not target.is_capped and len(target.values) <= _MOST_CLASSES and _is_class(target):
            classes = {str(value): count for value, count in sorted(target.values.items(), key=lambda one: str(one[0]))}
        found.append(SplitFacts(name=split, num_samples=known.rows[split], classes=classes))
    return in_order_of_use(found)


def _is_class(target: ColumnProfile) -> bool:
    """Whether the target's values are classes: text, booleans, or numbers of which each is there often."""
    return target.kind != "number" or len(target.values) <= 0.05 * target.present
