"""The column of the target: classes, whole numbers or numbers, whichever its values are.

Among numbers a word such as `NA` stands for a missing one. Among words it is one of them: there is a country `NA`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stoker.data.files.table_blocks import Block
from stoker.data.files.table_columns import (
    Vocabulary,
    are_numbers,
    as_float32,
    numbers_of,
    numerals_of,
    texts_of,
    too_large,
)
from stoker.data.files.table_spec import TableSpec
from stoker.errors import BadJob

FoundKind = Literal["class", "integer", "number"]
Mask = npt.NDArray[np.bool_]

_INEXACT = 2**53
"""From here on float64, which targets are read as, leaves whole numbers out."""


@dataclass(frozen=True)
class Targets:
    """What was found: the kind; the target of every row, int64 or float32 [N]; names of classes, if it is one."""

    kind: FoundKind
    values: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    classes: tuple[str, ...] = ()


class TargetReader:
    """Reads the target block by block, as every kind that it can still be."""

    def __init__(self, column: str, spec: TableSpec) -> None:
        self.column = column
        kind = "class" if spec.classes is not None else spec.target_kind
        self._wanted = kind
        self._can_be_class = kind in ("auto", "class")
        self._can_be_number = kind != "class"
        self._can_be_integer = kind in ("auto", "integer")
        self._words = Vocabulary(column, spec.classes)
        self._codes: list[npt.NDArray[np.int32]] = []
        self._numbers: list[npt.NDArray[np.float64]] = []
        self._taken_as_missing: str | None = None

    def missing_in(self, block: Block) -> Mask:
        """Which rows [B] lack a target; to be asked of every block, before it is read.

        Raises:
            BadJob: words follow numbers, and a word for a missing number was taken for one.
        """
        if self._can_be_number and self._wanted == "auto" and not are_numbers(block, self.column):
            self._require_no_word_taken(block)
            self._can_be_number = self._can_be_integer = False
            self._numbers.clear()
        is_nothing: Mask = pc.is_null(block.columns[self.column], nan_is_null=True).to_numpy(zero_copy_only=False)
        if not self._can_be_number:
            return is_nothing
        is_missing = np.isnan(numbers_of(block, self.column))
        if self._taken_as_missing is None and (is_missing & ~is_nothing).any():
            at = int((is_missing & ~is_nothing).argmax())
            value = block.columns[self.column][at].as_py()
            self._taken_as_missing = f"row {int(block.rows[at])} of {block.path} is {value!r}"
        return is_missing

    def read(self, block: Block) -> None:
        """Take a block's targets; missing ones, which are counted elsewhere, become anything."""
        if self._can_be_class:
            self._read_classes(block)
        if self._can_be_integer and not _are_whole(block, self.column):
            self._can_be_integer = False
            if self._wanted == "integer":
                raise BadJob(f"{block.path}: the target {self.column!r} has values that are no whole numbers",
                             remedy='Take it as target_kind="number" or "class".')  # fmt: skip
        if self._can_be_number:
            self._numbers.append(self._exact(block, numbers_of(block, self.column)))

    def result(self) -> Targets:
        """The targets of all rows that were read."""
        if self._can_be_number:
            numbers = np.concatenate([*self._numbers, np.empty(0)])
            if self._can_be_integer:
                return Targets("integer", np.nan_to_num(numbers).astype(np.int64))
            return Targets("number", numbers.astype(np.float32))
        classes, final = self._words.sorted()
        codes = np.concatenate([*self._codes, np.empty(0, np.int32)])
        return Targets("class", np.append(final, -1)[codes], classes)

    def _exact(self, block: Block, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The numbers of a block, if what they are kept as holds them.

        Raises:
            BadJob: a whole number cannot be told from the next, or another is too large.
        """
        if self._can_be_integer:
            at = int(np.argmax(np.nan_to_num(np.abs(numbers)))) if len(numbers) else -1
            if at >= 0 and abs(numbers[at]) >= _INEXACT:
                raise BadJob(
                    f"{block.path}, row {int(block.rows[at])}: the target {self.column!r} is {numbers[at]:.0f}; from "
                    f"{_INEXACT:,} on whole numbers are not told apart here",
                    remedy='If they name classes: target_kind="class". If not: target_kind="number".',
                )
            return numbers
        overflows = as_float32(numbers)[1]
        if overflows.any():
            row = int(overflows.argmax())
            raise too_large(block, row, self.column, numbers[row])
        return numbers

    def _read_classes(self, block: Block) -> None:
        try:
            self._codes.append(self._words.codes_of(block, texts_of(block, self.column)).astype(np.int32))
        except BadJob:
            if not self._can_be_number:
                raise
            self._can_be_class = False  # numbers of many values, as a regression has
            self._codes.clear()

    def _require_no_word_taken(self, block: Block) -> None:
        if self._taken_as_missing is not None:
            raise BadJob(
                f"the target {self.column!r} begins with numbers, among which {self._taken_as_missing}, a missing one; "
                f"from row {int(block.rows[0])} of {block.path} on it has words",
                remedy='If they are all classes, say so: target_kind="class". If not: target_kind="number".',
            )


def _are_whole(block: Block, column: str) -> bool:
    values = block.columns[column]
    if block.is_text:
        is_whole = pc.match_substring_regex(numerals_of(values), r"^[+-]?\d+$")
        return pc.all(is_whole).as_py() is not False  # None: all are missing
    return bool(pa.types.is_integer(values.type) or pa.types.is_null(values.type))
