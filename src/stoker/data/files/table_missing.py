"""Missing values of a table: counted, and made what the spec says they become."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stoker.data.files.table_blocks import Block
from stoker.data.files.table_spec import TableSpec
from stoker.errors import BadJob, nearest

_NAMED = 3
"""So many places of a column's missing values are told."""

_OF_TARGET = ' A target can only be dropped; if a word such as NA is one of its classes: target_kind="class".'

Mask = npt.NDArray[np.bool_]


def require_sensible_missing(spec: TableSpec, features: Sequence[str], header: Sequence[str]) -> None:
    """Refuse a word for missing values that no column can have.

    Raises:
        BadJob: `missing=` names a column that the table, whose columns are `header`, lacks; or says something other
            than "mean", "drop" or a number of one of `features`, than "drop" of the target.
    """
    for column, choice in spec.missing:
        if column not in header and not spec.is_like:  # a file to validate on may lack some
            raise BadJob(f"missing={{{column!r}: …}}: the table has no such column. {nearest(column, header)}")
        if column in features and not (choice in ("mean", "drop") or _is_number(choice)):
            raise BadJob(
                f"missing={{{column!r}: {choice!r}}}: {column!r} is a column of numbers",
                remedy='Give "mean", "drop", or a number; for a category any word.',
            )
        if column == spec.target and choice != "drop":
            raise BadJob(
                f"missing={{{column!r}: {choice!r}}}: {column!r} is the target, which nothing can stand in for",
                remedy='Give "drop", which leaves the row out.',
            )


def _is_number(choice: object) -> bool:
    return isinstance(choice, int | float) and not isinstance(choice, bool)


class MissingCount:
    """What was missing so far, by column; and the sums that means are made of."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self.counts: dict[str, int] = {}
        self._unwanted: dict[str, list[str]] = {}
        self._sums: dict[str, float] = {}
        self._present: dict[str, int] = {}

    def see_numbers(self, block: Block, column: str, numbers: npt.NDArray[np.float64]) -> Mask:
        """Fill a column's numbers [B] in place where a number stands in; which rows are dropped."""
        is_missing = np.isnan(numbers)
        choice = self._choice(block, column, is_missing)
        if isinstance(choice, int | float):
            numbers[is_missing] = choice
        return is_missing & (choice == "drop")

    def see_words(self, block: Block, column: str, values: pa.Array) -> tuple[pa.Array, Mask]:
        """A column's words with a word in place of missing ones, if one was given; and which rows are dropped."""
        is_missing: Mask = pc.is_null(values).to_numpy(zero_copy_only=False)
        choice = self._choice(block, column, is_missing, of_words=True)
        if isinstance(choice, str) and choice != "drop":
            values = pc.fill_null(values, choice)
        return values, is_missing & (choice == "drop")

    def see_target(self, block: Block, column: str, is_missing: Mask) -> Mask:
        """Which rows are dropped for want of a target, as `is_missing` [B] says."""
        return is_missing & (self._choice(block, column, is_missing, of_words=True) == "drop")

    def add_means(self, columns: Sequence[str], numbers: npt.NDArray[np.float64]) -> None:
        """Take the rows that are kept [B, F] into the means."""
        for at, column in enumerate(columns):
            if self._spec.for_missing(column) == "mean":
                present = numbers[:, at][~np.isnan(numbers[:, at])]
                self._sums[column] = self._sums.get(column, 0.0) + float(present.sum())
                self._present[column] = self._present.get(column, 0) + len(present)

    def means(self) -> dict[str, float]:
        """The mean of every feature whose missing values it stands in for: given with the spec, or of these rows."""
        given = dict(self._spec.means)
        means = {}
        for column, total in self._sums.items():
            if column not in given and not self._present[column]:
                raise BadJob(f"the column {column!r} has no values to take a mean of", remedy="Leave it out.")
            means[column] = given.get(column, total / max(1, self._present[column]))
        return means

    def require_none(self) -> None:
        """Refuse values that are missing where nothing was said of that.

        Raises:
            BadJob: there are some; how many, and where.
        """
        if not self._unwanted:
            return
        told = []
        for column, places in self._unwanted.items():
            more = f" and {self.counts[column] - len(places):,} more" if self.counts[column] > len(places) else ""
            told.append(f"{self.counts[column]:,} of {column!r} ({', '.join(places)}{more})")
        raise BadJob(
            f"values are missing: {'; '.join(told)}",
            remedy='Say what they become: missing="drop"; "mean" or a number for features; by column in a dict.'
            + (_OF_TARGET if self._spec.target in self._unwanted else ""),
        )

    def _choice(self, block: Block, column: str, is_missing: Mask, *, of_words: bool = False) -> str | float | None:
        """What missing values of the column become; they are counted."""
        choice = self._spec.for_missing(column)
        is_named = column in dict(self._spec.missing)
        if of_words and not is_named and choice != "drop":
            choice = None  # a mean or number is for features
        if of_words and choice is not None and not isinstance(choice, str):
            choice = str(choice)
        count = int(is_missing.sum())
        if count:
            self.counts[column] = self.counts.get(column, 0) + count
        if count and choice is None:
            places = self._unwanted.setdefault(column, [])
            rows = block.rows[is_missing][: _NAMED - len(places)].tolist()
            places += [f"{block.path.name}:{row}" for row in rows]
        return choice
