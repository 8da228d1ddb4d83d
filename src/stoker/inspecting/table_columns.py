"""Profiles of table columns, gathered in constant memory; their roles; and findings about whole columns.

Findings are missing values, a single value, mixed types, and a column that gives the target away.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from stoker.errors import BadJob, nearest
from stoker.inspecting.findings import AGAINST, CheckOptions
from stoker.inspecting.table_files import RowBatch
from stoker.records.data_check import ColumnFacts, Finding

Kind = Literal["number", "text", "bool", "list", "object", "bytes", "time"]

_TYPES: dict[type, Kind] = {
    bool: "bool",
    int: "number",
    float: "number",
    str: "text",
    list: "list",
    dict: "object",
    bytes: "bytes",
}
_LONGEST = 200
"""Characters or bytes, above which a value is identified by its digest."""

_MOJIBAKE = re.compile("[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac|\u00ef\u00bf\u00bd")
"""UTF-8 that was read as Latin-1 or Windows-1252: `Ã©` for `é`, `â€` for quotes, `ï¿½` for a replaced character."""


def number_of(value: Any, *, is_typed: bool) -> float | None:
    """The value as a number, if it is one or, in untyped text, looks like one; None otherwise."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number and (is_typed or not isinstance(value, str)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except ValueError:
        return None


def kind_of(value: Any, *, is_typed: bool) -> Kind:
    """The kind of a value; untyped text that looks like a number is one."""
    if not is_typed and isinstance(value, str):
        return "text" if number_of(value, is_typed=False) is None else "number"
    return _TYPES.get(type(value), "time")


def shown(value: Any, most: int = 40) -> str:
    """The value as text, cut to `most` characters."""
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= most else f"{text[: most - 1]}…"


def key_of(value: Any) -> Any:
    """A small hashable key: equal for equal values (1 and 1.0, not "1"); None for NaN."""
    if isinstance(value, list | dict):
        value = json.dumps(value, sort_keys=True, default=repr)
    return None if isinstance(value, float) and math.isnan(value) else brief(value)


def brief(value: Any) -> Any:
    """The value, or its digest if it is long."""
    if not isinstance(value, str | bytes) or len(value) <= _LONGEST:
        return value
    content = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(content, digest_size=16).digest()


def same_as(value: Any, *, is_typed: bool) -> Any:
    """A key that is equal for one value in several formats: 3, 3.0 and, in a CSV, "3".

    Integers that no float represents, such as account numbers, stay integers.
    """
    number = number_of(value, is_typed=is_typed)
    if number is None:
        return value.strip() if isinstance(value, str) else key_of(value)
    try:
        whole = int(value) if isinstance(value, int | str) else number
    except ValueError:
        return number
    return number if whole == number else whole


def encoding_fault(text: str) -> str:
    """The fault in how a text was decoded; empty if there is none."""
    if any("\udc80" <= char <= "\udcff" for char in text):
        return "is not UTF-8"
    if "\ufffd" in text:
        return "holds U+FFFD, which stands for a character that was lost"
    if match := _MOJIBAKE.search(text):
        return f"holds {match[0]!r}: UTF-8 that was read as Latin-1"
    return "holds NUL" if "\x00" in text else ""


MOST_DISTINCT = 10_000
"""Most different values that are counted."""

_SAMPLE_ROWS = 20_000
_PROSE_LENGTH = 20
_MOST_CATEGORIES = 1_000


@dataclass
class ColumnProfile:
    """Counts of one column in one split, or in all."""

    name: str
    num_rows: int = 0
    missing: int = 0
    kinds: Counter[Kind] = field(default_factory=Counter)
    values: Counter[Any] = field(default_factory=Counter)
    is_capped: bool = False
    characters: int = 0

    def add(self, values: Sequence[Any], *, is_typed: bool) -> None:
        """Count the values of readable rows."""
        self.num_rows += len(values)
        keys = list(map(key_of, values))
        first = dict(zip(reversed(keys), reversed(values), strict=True))
        for key, count in Counter(keys).items():
            if key is None:
                self.missing += count
                continue
            self.kinds[kind_of(first[key], is_typed=is_typed)] += count
            self.characters += count * len(first[key]) if isinstance(first[key], str) else 0
            if key in self.values or len(self.values) < MOST_DISTINCT:
                self.values[key] += count
            else:
                self.is_capped = True

    @property
    def kind(self) -> Kind:
        """The kind of most of its values; text if it has none."""
        return self.kinds.most_common(1)[0][0] if self.kinds else "text"

    @property
    def present(self) -> int:
        """Number of values that are not missing [rows]."""
        return self.num_rows - self.missing

    @property
    def is_prose(self) -> bool:
        """True for text to be read: long, and mostly different."""
        if self.kind != "text" or not self.present:
            return False
        differs = self.is_capped or len(self.values) > 0.5 * self.present
        return differs and self.characters / self.present >= _PROSE_LENGTH

    @property
    def is_category(self) -> bool:
        """True for text of few, frequent values."""
        return (
            self.kind == "text" and not self.is_capped and len(self.values) <= min(_MOST_CATEGORIES, 0.2 * self.present)
        )

    def facts(self, median: float | None) -> ColumnFacts:
        """For the report."""
        examples = tuple(shown(value, 24) for value, _ in self.values.most_common(3))
        return ColumnFacts(
            name=self.name,
            kind="prose" if self.is_prose else "category" if self.is_category else self.kind,
            num_rows=self.num_rows,
            missing=self.missing,
            distinct=len(self.values),
            is_distinct_capped=self.is_capped,
            median=median,
            examples=examples,
        )


class RowSample:
    """At most 20,000 rows at even distances, for medians and relations of columns.

    Every row is kept at first; whenever there are too many, every second one is dropped and the stride doubles.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._stride = 1
        self._seen = 0

    def add(self, batch: RowBatch) -> None:
        """Keep the rows on the stride."""
        for row in range(batch.num_rows):
            if row in batch.problems:
                continue
            if self._seen % self._stride == 0:
                self._rows.append({name: brief(values[row]) for name, values in batch.columns.items()})
                if len(self._rows) > _SAMPLE_ROWS:
                    self._rows, self._stride = self._rows[::2], 2 * self._stride
            self._seen += 1

    def column(self, name: str) -> list[Any]:
        """The values of a column; None if a row lacks it."""
        return [row.get(name) for row in self._rows]


@dataclass(frozen=True)
class RobustSpread:
    """Median of a column of numbers and its robust standard deviation; 0 if too many values are equal."""

    median: float
    deviation: float

    def z(self, value: float) -> float:
        """Distance of a value from the median [robust standard deviations]."""
        return abs(value - self.median) / self.deviation if self.deviation else 0.0


def robust_spread(values: Sequence[Any], *, is_typed: bool) -> RobustSpread | None:
    """Spread by the median absolute deviation × 1.4826; if that is 0, the mean absolute deviation × 1.2533.

    Source: B. Iglewicz, D. Hoaglin, "How to Detect and Handle Outliers", 1993, section 3.
    """
    numbers = np.array([n for n in (number_of(value, is_typed=is_typed) for value in values) if n is not None])
    numbers = numbers[np.isfinite(numbers)]
    if len(numbers) < 8:
        return None
    median = float(np.median(numbers))
    away = np.abs(numbers - median)
    deviation = 1.4826 * float(np.median(away)) or 1.2533 * float(away.mean())
    return RobustSpread(median, deviation)


_TARGETS = ("target", "label", "labels", "class", "y")
_NAMES_OF_ROWS = frozenset({"id", "index", "row", "row_id", "uuid", "guid", "unnamed: 0", ""})


@dataclass(frozen=True)
class Roles:
    """The column to be predicted (empty if unknown), columns of prose, and columns that only name a row."""

    target: str
    prose: frozenset[str]
    ignored: frozenset[str]

    def note(self) -> str:
        """A line about the roles for the report."""
        target = f"the target is {self.target!r}" if self.target else "no target is known: --target COLUMN names it"
        ignored = ", ".join(repr(name) for name in sorted(self.ignored))
        return target + (f"; rows are compared without {ignored}" if ignored else "")


def roles_of(columns: Collection[str], options: CheckOptions) -> Roles:
    """Roles by the options; the default target is a column named `target`, `label`, `labels`, `class` or `y`.

    Raises:
        BadJob: an option names a missing column.
    """
    for name in (*((options.target,) if options.target else ()), *options.text, *options.ignore):
        if name not in columns:
            raise BadJob(f"There is no column {name!r}", remedy=nearest(name, columns))
    lower = {name.lower(): name for name in columns}
    target = options.target or next((lower[name] for name in _TARGETS if name in lower), "")
    named = {name for name in columns if name.strip().lower() in _NAMES_OF_ROWS}
    return Roles(target, frozenset(options.text), frozenset({*named, *options.ignore}) - {target})


MAIN_SHARE = 0.95
"""Share of a column's values of one kind [0 to 1], from which the others are odd; below, the column is mixed."""

_FEWEST_PAIRS = 20
_MOST_EXCEPTIONS = 0.01
"""Share of rows without the most frequent target, in which a column that gives the target away may differ [0 to 1]."""

_SURE_CORRELATION = 0.9999
_ROWS_PER_VALUE = 5
_KINDS = {
    "number": "numbers",
    "text": "text",
    "bool": "booleans",
    "list": "lists",
    "object": "objects",
    "bytes": "bytes",
    "time": "times",
}


def column_findings(profiles: Mapping[str, Mapping[str, ColumnProfile]], roles: Roles) -> Iterator[Finding]:
    """Findings about each split's columns; a column that only some splits have is missing from the others."""
    names = list(dict.fromkeys(name for split, columns in profiles.items() if split != AGAINST for name in columns))
    for split, columns in profiles.items():
        if split == AGAINST:
            continue
        for name in names:
            place = f"{split}/{name}" if split else name
            if name in columns:
                profile = columns[name]
                if profile.missing and name != roles.target:
                    share = profile.missing / profile.num_rows
                    detail = f"{profile.missing:,} of {profile.num_rows:,} values are missing ({share:.2%})"
                    yield Finding(
                        fault="missing", gravity="suspect", where=place, detail=detail, measure=round(share, 6)
                    )
                if profile.present > 1 and len(profile.values) == 1 and not profile.is_capped:
                    value = next(iter(profile.values))
                    detail = f"is {value!r} in every row that has it"
                    yield Finding(fault="constant", gravity="suspect", where=place, detail=detail)
                if profile.present and profile.kinds[profile.kind] < MAIN_SHARE * profile.present:
                    counts = profile.kinds.most_common()
                    shares = ", ".join(f"{count / profile.present:.1%} {_KINDS[kind]}" for kind, count in counts)
                    yield Finding(fault="mixed-types", gravity="suspect", where=place, detail=f"holds {shares}")
            else:
                others = [other for other in profiles if name in profiles[other]]
                yield Finding(
                    fault="missing-column",
                    gravity="fault",
                    where=place,
                    detail=f"is in {', '.join(others)}, and not here",
                )


def target_leaks(sample: RowSample, columns: Sequence[str], target: str, *, is_typed: bool) -> Iterator[Finding]:
    """Columns that give the target away: equal to it, a renaming of it, or linear in it."""
    targets = sample.column(target)
    for name in columns:
        if name == target:
            continue
        pairs = [(a, b) for a, b in zip(sample.column(name), targets, strict=True) if a is not None and b is not None]
        if len(pairs) >= _FEWEST_PAIRS and (how := _relation(pairs, is_typed=is_typed)):
            yield Finding(fault="target-leak", gravity="fault", where=name, detail=f"{how} {target!r}")


def _relation(pairs: Sequence[tuple[Any, Any]], *, is_typed: bool) -> str:
    """How the first of each pair determines the second; empty if it does not."""
    keys = [(key_of(a), key_of(b)) for a, b in pairs]
    targets = {b for _, b in keys}
    if len(targets) < 2:
        return ""
    usual = Counter(b for _, b in keys).most_common(1)[0][1]
    allowed = _MOST_EXCEPTIONS * (len(keys) - usual)
    if sum(a != b for a, b in keys) <= allowed:
        return "equals"
    if len({a for a, _ in keys}) == len(targets) <= len(keys) / _ROWS_PER_VALUE:
        favoured = {a: b for (a, b), _ in sorted(Counter(keys).items(), key=lambda item: item[1])}
        if set(favoured.values()) == targets and sum(favoured[a] != b for a, b in keys) <= allowed:
            return "has a value of its own for each value of"
    numbers = [(number_of(a, is_typed=is_typed), number_of(b, is_typed=is_typed)) for a, b in pairs]
    both = np.array([(a, b) for a, b in numbers if a is not None and b is not None and np.isfinite([a, b]).all()])
    if len(both) < max(_FEWEST_PAIRS, MAIN_SHARE * len(pairs)) or (both.std(axis=0) == 0).any():
        return ""
    r = float(np.corrcoef(both.T)[0, 1])
    return f"is a straight line (r = {r:.6f}) of" if abs(r) >= _SURE_CORRELATION else ""
