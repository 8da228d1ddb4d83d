"""A block's columns as numbers and codes. Imports pyarrow, and so is imported when a table is read."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stoker.data.files.table_blocks import Block
from stoker.errors import BadJob, nearest

NOT_A_NUMBER = ("NA", "N/A", "n/a", "NaN", "nan", "null", "NULL")
"""What stands for a missing number in text, beside nothing at all."""

MOST_VALUES = 2**16
"""A column of categories or classes with more different values than this is taken for a mistake."""


def numbers_of(block: Block, column: str) -> npt.NDArray[np.float64]:
    """A column as float64 [B], with NaN where it is missing.

    Raises:
        BadJob: a value is no number, or the column is of a type without numbers.
    """
    values = _plain(block.columns[column])
    if pa.types.is_null(values.type):
        return np.full(len(values), np.nan)
    if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
        values = _parsed(block, column, values)
    elif not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
              or pa.types.is_boolean(values.type) or pa.types.is_decimal(values.type)):  # fmt: skip
        raise BadJob(
            f"{block.path}: the column {column!r} is of type {values.type}, which has no numbers",
            remedy="Make numbers of it, or leave it out of features=[…].",
        )
    numbers: npt.NDArray[np.float64] = pc.cast(values, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    return numbers


def as_float32(numbers: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """The numbers as float32, and which of them are finite and too large for it."""
    with np.errstate(over="ignore"):
        stored = numbers.astype(np.float32)
    return stored, np.isinf(stored) & np.isfinite(numbers)


def too_large(block: Block, row: int, column: str, value: float) -> BadJob:
    """What to say of a number of a block that float32 does not hold."""
    return BadJob(
        f"{block.path}, row {int(block.rows[row])}: {column!r} is {value:g}, and float32 ends at 3.4e38",
        remedy="Give it in another unit, or leave the row out with clean=….",
    )


def texts_of(block: Block, column: str) -> pa.Array:
    """A column as large_string [B], null where it is missing or NaN; numbers and booleans as they are written.

    Raises:
        BadJob: the column is of a type that has no text.
    """
    values = _plain(block.columns[column])
    if pa.types.is_float32(values.type) or pa.types.is_float64(values.type):
        values = pc.if_else(pc.is_nan(values), pa.scalar(None, values.type), values)
    try:
        return pc.cast(values, pa.large_string())
    except pa.ArrowException as error:
        raise BadJob(
            f"{block.path}: the column {column!r} is of type {values.type}, which has no text", remedy="Leave it out."
        ) from error


def are_numbers(block: Block, column: str) -> bool:
    """Whether every value of a column that is not missing, nor a word for that, is a number; booleans are none."""
    values = _plain(block.columns[column])
    if pa.types.is_boolean(values.type):
        return False
    try:
        numbers_of(block, column)
    except BadJob:
        return False
    return True


class Vocabulary:
    """The different values of a column, numbered as they come, or as they were given."""

    def __init__(self, column: str, given: tuple[str, ...] | None) -> None:
        self.column = column
        self.given = given
        self.numbers: dict[str, int] = {value: number for number, value in enumerate(given or ())}

    def codes_of(self, block: Block, texts: pa.Array) -> npt.NDArray[np.int64]:
        """The numbers [B] of values [B], -1 where one is missing.

        Raises:
            BadJob: a value is not among those given, or there are too many.
        """
        encoded = pc.dictionary_encode(texts)
        known = np.array([self._number(block, texts, value) for value in encoded.dictionary.to_pylist()], np.int64)
        places = pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        return np.where(places < 0, -1, np.append(known, -1)[places])

    def sorted(self) -> tuple[tuple[str, ...], npt.NDArray[np.int64]]:
        """The values in their final order (as given, else by themselves), and the final number of each code."""
        if self.given is not None:
            return self.given, np.arange(len(self.given), dtype=np.int64)
        values = tuple(sorted(self.numbers))
        final = np.empty(len(values), np.int64)
        final[[self.numbers[value] for value in values]] = np.arange(len(values))
        return values, final

    def _number(self, block: Block, texts: pa.Array, value: str) -> int:
        if value not in self.numbers:
            if self.given is not None:
                at = int(block.rows[texts.to_pylist().index(value)])
                raise BadJob(
                    f"{block.path}, row {at}: {self.column!r} is {value!r}, which is not among its {len(self.given):,} "
                    f"values. {nearest(value, self.given)}",
                    remedy="Add it where the values are named, or leave the row out with clean=….",
                )
            if len(self.numbers) == MOST_VALUES:
                raise BadJob(
                    f"{block.path}: the column {self.column!r} has more than {MOST_VALUES:,} different values",
                    remedy="As categories they would be as many rows of a table; take it as text=[…], or leave it out.",
                )
            self.numbers[value] = len(self.numbers)
        return self.numbers[value]


def _plain(values: pa.Array) -> pa.Array:
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def numerals_of(texts: pa.Array) -> pa.Array:
    """Text [B] without space around it, null where it is a word for a missing number."""
    texts = pc.utf8_trim_whitespace(texts)
    words = pa.array(["", *NOT_A_NUMBER], texts.type)
    is_word = pc.fill_null(pc.is_in(texts, value_set=words), fill_value=False)
    return pc.if_else(is_word, pa.scalar(None, texts.type), texts)


def _parsed(block: Block, column: str, texts: pa.Array) -> pa.Array:
    """Text as numbers."""
    values = numerals_of(texts)
    try:
        return pc.cast(values, pa.float64())
    except pa.ArrowException as error:
        at, value = next((at, value) for at, value in enumerate(values.to_pylist()) if not _is_number(value))
        raise BadJob(
            f"{block.path}, row {int(block.rows[at])}: {column!r} is {value!r}, which is no number",
            remedy=f"A column of words is named in categories=[{column!r}] or text=[{column!r}].",
        ) from error


def _is_number(value: str | None) -> bool:
    if value is None:
        return True
    try:
        pc.cast(pa.scalar(value), pa.float64())
    except pa.ArrowException:
        return False
    return True
