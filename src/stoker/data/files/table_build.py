"""Building a stored table: files are read once, block by block, into arrays on disk. Imports pyarrow.

Memory holds one block, the targets and the vocabularies; the rest is written as it is read. `MissingCount` counts and
fills missing values; `TargetReader` finds out whether the target is a class, an integer or a number. Among numbers a
word such as `NA` is a missing value; among words it is a value (there is a country `NA`).
"""

from __future__ import annotations

import errno
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stoker.data.files.table_blocks import (
    RowBlock,
    Vocabulary,
    are_numbers,
    as_float32,
    blocks_of,
    header_of,
    numbers_of,
    numerals_of,
    texts_of,
    too_large,
)
from stoker.data.files.table_store import (
    CATEGORIES,
    FEATURES,
    ROWS,
    TARGET,
    StoredTable,
    TableRecord,
    TableSpec,
    appending,
    digest_of_files,
    opened,
    write_record,
)
from stoker.errors import BadJob, nearest
from stoker.store import disk_errors
from stoker.store.files import Appended, aside_path, disk, make_directories, remove_tree, write_file
from stoker.store.locks import is_alive

_CHUNK_ROWS = 2**16

_LEAST_STEPS = 256
"""Least number of steps of float32 between the ends of a feature's values; so few of float64 are rounding of one."""

_ABANDONED_S = 3600.0
"""A half-built table of a dead process is removed once nothing was written to it for so long [s]."""


def built(
    folder: Path, paths: Sequence[Path], names: Sequence[str], spec: TableSpec, dropped: Mapping[str, frozenset[int]]
) -> StoredTable:
    """The table of these files in `folder`, which appears there complete or not at all.

    Args:
        folder: of the table.
        paths: the files, in order.
        names: the files' names in samples' names.
        spec: the columns to read.
        dropped: the rows to leave out, by name of the file.

    Raises:
        BadJob: the files cannot be read as the spec says, or the disk is full.
    """
    aside = aside_path(folder)
    with disk_errors(folder, "a table in the cache", error=BadJob):
        make_directories(folder.parent)
        for path in folder.parent.glob(".writing-*"):  # another machine may share the cache: its pid is not seen here
            pid = path.name.split("-")[-2]
            with suppress(OSError):
                last_change_s = max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
                if pid.isdigit() and not is_alive(int(pid)) and time.time() - last_change_s > _ABANDONED_S:
                    remove_tree(path)
        aside.mkdir()
    try:
        header = header_of(paths[0], spec, dropped.get(names[0], frozenset()))
        record = _Building(aside, spec, header).read(paths, names, dropped)
        write_record(aside, record)
        with disk_errors(folder, "a table in the cache", error=BadJob):
            if opened(folder) is None:
                if folder.exists():  # not whole
                    remove_tree(folder)
                try:
                    disk().rename(aside, folder)
                    disk().sync_directory(folder.parent)
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # then another was faster after all
                        raise
            if aside.exists():
                remove_tree(aside)
    except BaseException:
        with suppress(OSError):
            remove_tree(aside)
        raise
    table = opened(folder)
    if table is None:
        raise BadJob(f"the table in {folder} was taken away while it was made", remedy="Run the same command again.")
    return table


def _lowest(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The lowest number of each column [F], infinite where it has none; NaN is none."""
    lowest: npt.NDArray[np.float64] = np.fmin.reduce(numbers, axis=0, initial=np.inf)
    return lowest


class _Building:
    """One table while it is read and written."""

    def __init__(self, folder: Path, spec: TableSpec, header: Sequence[str]) -> None:
        self.folder = folder
        self.spec = spec
        self.features = spec.with_features(header)
        require_sensible_missing(spec, self.features, header)
        self.missing = MissingCount(spec)
        self.vocabularies = {name: Vocabulary(name, given) for name, given in spec.categories}
        self.target = None if spec.target is None else TargetReader(spec.target, spec)
        self.low, self.high = np.full(len(self.features), np.inf), np.full(len(self.features), -np.inf)
        self.is_rounded = np.zeros(len(self.features), bool)
        self.num_rows = 0
        self.num_dropped = 0
        self.text_ends = [0] * len(spec.text)

    def read(self, paths: Sequence[Path], names: Sequence[str], dropped: Mapping[str, frozenset[int]]) -> TableRecord:
        """Read all files into arrays on disk; returns their record."""
        texts = [name for i in range(len(self.spec.text)) for name in (f"text-{i}.ends.i64", f"text-{i}.utf8")]
        written = [ROWS, FEATURES, CATEGORIES, *texts]
        ends = []
        with appending(self.folder, written) as files:
            for path, name in zip(paths, names, strict=True):
                left_out = dropped.get(name, frozenset())
                for block in blocks_of(path, self.spec, self.spec.columns(self.features), left_out):
                    self._add(block, files)
                ends.append(self.num_rows)
        self.missing.require_none()
        if not self.num_rows:
            raise BadJob(f"{paths[0]} has no rows", remedy="Give a file with at least one row after the header.")
        if not self.spec.is_like:
            self._require_distinct()
        means = self.missing.means()
        self._fill(means)
        categories = self._order_categories()
        kind, classes = self._write_target()
        written += [TARGET] if self.target is not None else []
        return TableRecord(
            num_rows=self.num_rows,
            files=tuple(names),
            ends=tuple(ends),
            features=self.features,
            categories=categories,
            text=self.spec.text,
            target=self.spec.target,
            target_kind=kind,
            classes=classes,
            means=means,
            missing=dict(self.missing.counts),
            num_dropped=self.num_dropped,
            num_cleaned=sum(len(rows) for rows in dropped.values()),
            sizes={name: (self.folder / name).stat().st_size for name in written},
            digest=digest_of_files(self.folder, written),
        )

    def _add(self, block: RowBlock, files: Mapping[str, Appended]) -> None:
        """Read one block, treat its missing values, and write it."""
        kept = np.ones(len(block.rows), bool)
        numbers = np.empty((len(block.rows), len(self.features)))
        for index, column in enumerate(self.features):
            numbers[:, index] = numbers_of(block, column)
            kept &= ~self.missing.see_numbers(block, column, numbers[:, index])
        texts = {}
        for name in (*self.vocabularies, *self.spec.text):
            texts[name], is_dropped = self.missing.see_words(block, name, texts_of(block, name))
            kept &= ~is_dropped
        if self.target is not None:
            rest = block.only(kept)
            kept[kept] = ~self.missing.see_target(rest, self.target.column, self.target.missing_in(rest))
        block, numbers = block.only(kept), numbers[kept]
        texts = {name: values.filter(pa.array(kept)) for name, values in texts.items()}
        if self.target is not None:
            self.target.read(block)
        self.missing.add_means(self.features, numbers)
        codes = [vocabulary.codes_of(block, texts[name]) for name, vocabulary in self.vocabularies.items()]
        features, overflows = as_float32(numbers)
        if overflows.any():
            row, index = np.argwhere(overflows)[0].tolist()
            raise too_large(block, row, self.features[index], numbers[row, index])
        self.low, self.high = np.fmin(self.low, _lowest(numbers)), np.fmax(self.high, -_lowest(-numbers))
        self.is_rounded |= ((features != numbers) & ~np.isnan(numbers)).any(axis=0)
        files[ROWS].write(block.rows.tobytes())
        files[FEATURES].write(features.tobytes())
        files[CATEGORIES].write(np.stack(codes, axis=1).tobytes() if codes else b"")
        for index, name in enumerate(self.spec.text):
            lengths = pc.fill_null(pc.binary_length(texts[name]), 0).to_numpy(zero_copy_only=False).astype(np.int64)
            ends = self.text_ends[index] + np.cumsum(lengths)
            files[f"text-{index}.ends.i64"].write(ends.tobytes())
            files[f"text-{index}.utf8"].write("".join(value or "" for value in texts[name].to_pylist()).encode())
            self.text_ends[index] = int(ends[-1]) if len(ends) else self.text_ends[index]
        self.num_rows += int(kept.sum())
        self.num_dropped += int((~kept).sum())

    def _require_distinct(self) -> None:
        """Raise BadJob for a feature whose values float32 rounds to a few, such as moments in seconds since 1970."""
        for index in np.flatnonzero(self.is_rounded & (self.low < self.high)):
            low, high = float(self.low[index]), float(self.high[index])
            largest = max(abs(low), abs(high))
            step = float(np.spacing(np.float32(largest)))
            if _LEAST_STEPS * np.spacing(largest) < high - low < _LEAST_STEPS * step:
                raise BadJob(
                    f"feature {self.features[index]!r} goes from {low:.12g} to {high:.12g}, where float32 has "
                    f"steps of {step:g}: most of its values would become equal",
                    remedy="Subtract its least value in the file, or give it as categories=[…] or leave it out if it "
                    "is an identifier.",
                )

    def _fill(self, means: Mapping[str, float]) -> None:
        """Replace missing features by means."""
        if not means:
            return
        shape = (self.num_rows, len(self.features))
        stored = np.memmap(self.folder / FEATURES, np.float32, "r+", shape=shape)
        by_column = np.array([means.get(name, np.nan) for name in self.features], np.float32)
        for start in range(0, self.num_rows, _CHUNK_ROWS):
            chunk = stored[start : start + _CHUNK_ROWS]
            chunk[:] = np.where(np.isnan(chunk), by_column, chunk)
        stored.flush()

    def _order_categories(self) -> dict[str, tuple[str, ...]]:
        """Number the values of categories in their final order."""
        if not self.vocabularies:
            return {}
        stored = np.memmap(self.folder / CATEGORIES, np.int64, "r+", shape=(self.num_rows, len(self.vocabularies)))
        values: dict[str, tuple[str, ...]] = {}
        for index, (name, vocabulary) in enumerate(self.vocabularies.items()):
            values[name], final = vocabulary.sorted()
            for start in range(0, self.num_rows, _CHUNK_ROWS):
                stored[start : start + _CHUNK_ROWS, index] = final[stored[start : start + _CHUNK_ROWS, index]]
        stored.flush()
        return values

    def _write_target(self) -> tuple[str | None, tuple[str, ...]]:
        """Write the target; returns its kind and classes."""
        if self.target is None:
            return None, ()
        targets = self.target.result()
        if targets.kind == "class" and not self.spec.is_like:
            counts = np.bincount(targets.values.astype(np.int64, copy=False), minlength=len(targets.classes))
            empty = [name for name, count in zip(targets.classes, counts, strict=True) if not count]
            if empty:
                raise BadJob(
                    f"no row has the target {self.target.column!r} of {', '.join(map(repr, empty))}",
                    remedy="Leave the class out of classes=[…]; for a part with few rows, give like= the table that "
                    "has all.",
                )
        with disk_errors(self.folder, "a table in the cache", error=BadJob):
            write_file(self.folder / TARGET, targets.values.tobytes())
        return targets.kind, targets.classes


_NAMED = 3
"""Number of places that an error lists for a column's missing values."""

_OF_TARGET = ' A target can only be dropped; if a word such as NA is one of its classes: target_kind="class".'

Mask = npt.NDArray[np.bool_]


def require_sensible_missing(spec: TableSpec, features: Sequence[str], header: Sequence[str]) -> None:
    """Check `missing=` against the table's columns.

    Raises:
        BadJob: it names a column that is not in `header`; or gives something other than "mean", "drop" or a number for
            one of `features`, or other than "drop" for the target.
    """
    for column, choice in spec.missing:
        if column not in header and not spec.is_like:  # a validation file may lack some
            raise BadJob(f"missing={{{column!r}: …}}: the table has no such column. {nearest(column, header)}")
        is_number = isinstance(choice, int | float) and not isinstance(choice, bool)
        if column in features and choice not in ("mean", "drop") and not is_number:
            raise BadJob(
                f"missing={{{column!r}: {choice!r}}}: {column!r} is a column of numbers",
                remedy='Give "mean", "drop", or a number; for a category any word.',
            )
        if column == spec.target and choice != "drop":
            raise BadJob(
                f"missing={{{column!r}: {choice!r}}}: {column!r} is the target, which nothing can stand in for",
                remedy='Give "drop", which leaves the row out.',
            )


class MissingCount:
    """Counts missing values by column, replaces them, and sums up means."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self.counts: dict[str, int] = {}
        self._unwanted: dict[str, list[str]] = {}
        self._sums: dict[str, float] = {}
        self._present: dict[str, int] = {}

    def see_numbers(self, block: RowBlock, column: str, numbers: npt.NDArray[np.float64]) -> Mask:
        """Fill a column's numbers [B] in place if `missing` gives a number; returns the rows to drop."""
        is_missing = np.isnan(numbers)
        choice = self._choice(block, column, is_missing)
        if isinstance(choice, int | float):
            numbers[is_missing] = choice
        return is_missing & (choice == "drop")

    def see_words(self, block: RowBlock, column: str, values: pa.Array) -> tuple[pa.Array, Mask]:
        """A column's words, missing ones replaced if `missing` gives a word; and the rows to drop."""
        is_missing: Mask = pc.is_null(values).to_numpy(zero_copy_only=False)
        choice = self._choice(block, column, is_missing, of_words=True)
        if isinstance(choice, str) and choice != "drop":
            values = pc.fill_null(values, choice)
        return values, is_missing & (choice == "drop")

    def see_target(self, block: RowBlock, column: str, is_missing: Mask) -> Mask:
        """The rows to drop for lack of a target, where `is_missing` [B]."""
        return is_missing & (self._choice(block, column, is_missing, of_words=True) == "drop")

    def add_means(self, columns: Sequence[str], numbers: npt.NDArray[np.float64]) -> None:
        """Add the kept rows [B, F] to the means."""
        for values, column in zip(numbers.T, columns, strict=True):
            if self._spec.for_missing(column) == "mean":
                present = values[~np.isnan(values)]
                self._sums[column] = self._sums.get(column, 0.0) + float(present.sum())
                self._present[column] = self._present.get(column, 0) + len(present)

    def means(self) -> dict[str, float]:
        """The mean of every feature whose missing values it replaces: given with the spec, or of these rows."""
        given = dict(self._spec.means)
        means = {}
        for column, total in self._sums.items():
            if column not in given and not self._present[column]:
                raise BadJob(f"the column {column!r} has no values to take a mean of", remedy="Leave it out.")
            means[column] = given.get(column, total / max(1, self._present[column]))
            if self.counts.get(column) and not math.isfinite(means[column]):
                raise BadJob(
                    f"the mean of {column!r}, for {self.counts[column]:,} missing values, is {means[column]:g}: the "
                    "column has infinite ones",
                    remedy="Mend these, or give a number in place of the mean.",
                )
        return means

    def require_none(self) -> None:
        """Raise BadJob, with counts and places, if values are missing and `missing` does not say what they become."""
        if not self._unwanted:
            return
        counts = []
        for column, places in self._unwanted.items():
            more = f" and {self.counts[column] - len(places):,} more" if self.counts[column] > len(places) else ""
            counts.append(f"{self.counts[column]:,} of {column!r} ({', '.join(places)}{more})")
        raise BadJob(
            f"values are missing: {'; '.join(counts)}",
            remedy='Say what they become: missing="drop"; "mean" or a number for features; by column in a dict.'
            + (_OF_TARGET if self._spec.target in self._unwanted else ""),
        )

    def _choice(self, block: RowBlock, column: str, is_missing: Mask, *, of_words: bool = False) -> str | float | None:
        """The treatment of the column's missing values, which are counted."""
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


FoundKind = Literal["class", "integer", "number"]

_INEXACT = 2**53
"""From here on float64, as which targets are read, cannot represent every whole number."""


@dataclass(frozen=True)
class Targets:
    """The target's kind; its value in every row, int64 or float32 [N]; names of classes, if it is one."""

    kind: FoundKind
    values: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    classes: tuple[str, ...] = ()


class TargetReader:
    """Reads the target block by block, as every kind that is still possible."""

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

    def missing_in(self, block: RowBlock) -> Mask:
        """The rows [B] without a target; call it for every block, before `read`.

        Raises:
            BadJob: words follow numbers, and a word such as `NA` was taken for a missing number before.
        """
        if self._can_be_number and self._wanted == "auto" and not are_numbers(block, self.column):
            if self._taken_as_missing is not None:
                raise BadJob(
                    f"the target {self.column!r} begins with numbers, among which {self._taken_as_missing}, a missing "
                    f"one; from row {int(block.rows[0])} of {block.path} on it has words",
                    remedy='If they are all classes, say so: target_kind="class". If not: target_kind="number".',
                )
            self._can_be_number = self._can_be_integer = False
            self._numbers.clear()
        is_nothing: Mask = pc.is_null(block.columns[self.column], nan_is_null=True).to_numpy(zero_copy_only=False)
        if not self._can_be_number:
            return is_nothing
        is_missing = np.isnan(numbers_of(block, self.column))
        if self._taken_as_missing is None and (is_missing & ~is_nothing).any():
            index = int((is_missing & ~is_nothing).argmax())
            value = block.columns[self.column][index].as_py()
            self._taken_as_missing = f"row {int(block.rows[index])} of {block.path} is {value!r}"
        return is_missing

    def read(self, block: RowBlock) -> None:
        """Add a block's targets; missing ones, which `MissingCount` counts, get an arbitrary value."""
        if self._can_be_class:
            try:
                self._codes.append(self._words.codes_of(block, texts_of(block, self.column)).astype(np.int32))
            except BadJob:
                if not self._can_be_number:
                    raise
                self._can_be_class = False  # numbers of many values, as a regression has
                self._codes.clear()
        if self._can_be_integer and not _are_whole(block, self.column):
            self._can_be_integer = False
            if self._wanted == "integer":
                what = f"{block.path}: the target {self.column!r} has values that are no whole numbers"
                raise BadJob(what, remedy='Take it as target_kind="number" or "class".')
        if self._can_be_number:
            self._numbers.append(self._exact(block, numbers_of(block, self.column)))

    def result(self) -> Targets:
        """The targets of all rows read."""
        if self._can_be_number:
            numbers = np.concatenate([*self._numbers, np.empty(0)])
            if self._can_be_integer:
                return Targets("integer", np.nan_to_num(numbers).astype(np.int64))
            return Targets("number", numbers.astype(np.float32))
        classes, final = self._words.sorted()
        codes = np.concatenate([*self._codes, np.empty(0, np.int32)])
        return Targets("class", np.append(final, -1)[codes], classes)

    def _exact(self, block: RowBlock, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The numbers of a block; raises BadJob if the stored type cannot represent them."""
        if self._can_be_integer:
            index = int(np.argmax(np.nan_to_num(np.abs(numbers)))) if len(numbers) else -1
            if index >= 0 and abs(numbers[index]) >= _INEXACT:
                raise BadJob(
                    f"{block.path}, row {int(block.rows[index])}: the target {self.column!r} is {numbers[index]:.0f}; "
                    f"from {_INEXACT:,} on whole numbers are not exact here",
                    remedy='If they name classes: target_kind="class". If not: target_kind="number".',
                )
            return numbers
        overflows = as_float32(numbers)[1]
        if overflows.any():
            row = int(overflows.argmax())
            raise too_large(block, row, self.column, numbers[row])
        return numbers


def _are_whole(block: RowBlock, column: str) -> bool:
    values = block.columns[column]
    if block.is_text:
        is_whole = pc.match_substring_regex(numerals_of(values), r"^[+-]?\d+$")
        return pc.all(is_whole).as_py() is not False  # None: all are missing
    return bool(pa.types.is_integer(values.type) or pa.types.is_null(values.type))
