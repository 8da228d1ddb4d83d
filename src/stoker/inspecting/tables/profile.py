"""What a column is like, gathered once through the rows, in memory that does not grow with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.inspecting.tables.rows import Batch
from stoker.inspecting.tables.values import Kind, brief, key_of, kind_of, number_of, shown
from stoker.records.cleaning import ColumnFacts

MOST_DISTINCT = 10_000
"""Different values that are counted."""

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
        """Count the values of rows that could be read."""
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
        """What most of its values are; text where it has none."""
        return self.kinds.most_common(1)[0][0] if self.kinds else "text"

    @property
    def present(self) -> int:
        """Values that are not missing."""
        return self.num_rows - self.missing

    @property
    def is_prose(self) -> bool:
        """Whether it is text to be read: long, and mostly different."""
        if self.kind != "text" or not self.present:
            return False
        differs = self.is_capped or len(self.values) > 0.5 * self.present
        return differs and self.characters / self.present >= _PROSE_LENGTH

    @property
    def is_category(self) -> bool:
        """Whether it is text of few values, each there often."""
        return self.kind == "text" and not self.is_capped and len(self.values) <= min(
            _MOST_CATEGORIES, 0.2 * self.present
        )  # fmt: skip

    def facts(self, median: float | None) -> ColumnFacts:
        """For the report."""
        examples = tuple(shown(value, 24) for value, _ in self.values.most_common(3))
        return ColumnFacts(
            name=self.name, kind="prose" if self.is_prose else "category" if self.is_category else self.kind,
            num_rows=self.num_rows, missing=self.missing, distinct=len(self.values), is_distinct_capped=self.is_capped,
            median=median, examples=examples,
        )  # fmt: skip


class RowSample:
    """Rows at even distances, at most so many: what medians and relations of columns are taken from.

    Every row is kept at first; whenever there are too many, every second one goes, and from then on half as many come.
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._stride = 1
        self._seen = 0

    def add(self, batch: Batch) -> None:
        """Take what falls on the stride."""
        for row in range(batch.num_rows):
            if row in batch.problems:
                continue
            if self._seen % self._stride == 0:
                self._rows.append({name: brief(values[row]) for name, values in batch.columns.items()})
                if len(self._rows) > _SAMPLE_ROWS:
                    self._rows, self._stride = self._rows[::2], 2 * self._stride
            self._seen += 1

    def column(self, name: str) -> list[Any]:
        """The values of a column; None where a row lacks it."""
        return [row.get(name) for row in self._rows]


@dataclass(frozen=True)
class Spread:
    """Median of a column of numbers and its robust standard deviation; 0 where too many values are equal."""

    median: float
    deviation: float

    def z(self, value: float) -> float:
        """How many robust standard deviations a value is out."""
        return abs(value - self.median) / self.deviation if self.deviation else 0.0


def spread_of(values: Sequence[Any], *, is_typed: bool) -> Spread | None:
    """From the median absolute deviation, × 1.4826; where that is 0, the mean absolute deviation, × 1.2533.

    Source: B. Iglewicz, D. Hoaglin, "How to Detect and Handle Outliers", 1993, section 3.
    """
    numbers = np.array([n for n in (number_of(value, is_typed=is_typed) for value in values) if n is not None])
    numbers = numbers[np.isfinite(numbers)]
    if len(numbers) < 8:
        return None
    median = float(np.median(numbers))
    away = np.abs(numbers - median)
    deviation = 1.4826 * float(np.median(away)) or 1.2533 * float(away.mean())
    return Spread(median, deviation)
