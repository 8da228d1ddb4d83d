"""Reading tables once, block by block, into arrays on disk. Imports pyarrow, and so is imported when that is done.

Memory holds one block, the targets, and what was found of the vocabularies; the rest goes to disk as it is read.

Missing values of a table: counted, and made what the spec says they become.

The column of the target: classes, whole numbers or numbers, whichever its values are.

Among numbers a word such as `NA` stands for a missing one. Among words it is one of them: there is a country `NA`.
"""

from __future__ import annotations

import errno
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

_ABANDONED_S = 3600.0
"""A table on its way that nothing was written to for so long [s], by a process that is not here, is nobody's."""


def built(
    folder: Path, paths: Sequence[Path], names: Sequence[str], spec: TableSpec, dropped: Mapping[str, frozenset[int]]
) -> StoredTable:
    """The table of these files in `folder`, which is there whole or not at all.

    Args:
        folder: where it will be.
        paths: the files, in order.
        names: what the files are called in samples' names.
        spec: what is read of them.
        dropped: by name of a file, the rows to leave out.

    Raises:
        BadJob: the files cannot be read as the spec says, or the disk is full.
    """
    aside = aside_path(folder)
    with disk_errors(folder, "a table in the cache", error=BadJob):
        make_directories(folder.parent)
        for path in folder.parent.glob(".writing-*"):
            pid = path.name.split("-")[-2]
            with suppress(OSError):
                if pid.isdigit() and not is_alive(int(pid)) and time.time() - _last_change_s(path) > _ABANDONED_S:
                    remove_tree(path)
        aside.mkdir()
    try:
        header = header_of(paths[0], spec, dropped.get(names[0], frozenset()))
        record = _Building(aside, spec, header).read(paths, names, dropped)
        write_record(aside, record)
        _put(aside, folder)
    except BaseException:
        with suppress(OSError):
            remove_tree(aside)
        raise
    table = opened(folder)
    if table is None:
        raise BadJob(f"the table in {folder} was taken away while it was made", remedy="Run the same command again.")
    return table


class _Building:
    """One table on its way to disk."""

    def __init__(self, folder: Path, spec: TableSpec, header: Sequence[str]) -> None:
        self.folder = folder
        self.spec = spec
        self.features = spec.with_features(header)
        require_sensible_missing(spec, self.features, header)
        self.missing = MissingCount(spec)
        self.words = {name: Vocabulary(name, given) for name, given in spec.categories}
        self.target = None if spec.target is None else TargetReader(spec.target, spec)
        self.num_rows = 0
        self.num_dropped = 0
        self.text_ends = [0] * len(spec.text)

    def read(self, paths: Sequence[Path], names: Sequence[str], dropped: Mapping[str, frozenset[int]]) -> TableRecord:
        """All files; the record of what is on disk then."""
        texts = [name for at in range(len(self.spec.text)) for name in (f"text-{at}.ends.i64", f"text-{at}.utf8")]
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
        means = self.missing.means()
        self._fill(means)
        categories = self._order_categories()
        kind, classes = self._write_target()
        written += [TARGET] if self.target is not None else []
        return TableRecord(
            num_rows=self.num_rows, files=tuple(names), ends=tuple(ends), features=self.features, categories=categories,
            text=self.spec.text, target=self.spec.target, target_kind=kind, classes=classes, means=means,
            missing=dict(self.missing.counts), num_dropped=self.num_dropped,
            num_cleaned=sum(len(rows) for rows in dropped.values()),
            sizes={name: (self.folder / name).stat().st_size for name in written},
            digest=digest_of_files(self.folder, written),
        )  # fmt: skip

    def _add(self, block: RowBlock, files: Mapping[str, Appended]) -> None:
        """One block: read, its missing values seen to, written."""
        kept = np.ones(len(block.rows), bool)
        numbers = np.empty((len(block.rows), len(self.features)))
        for at, column in enumerate(self.features):
            numbers[:, at] = numbers_of(block, column)
            kept &= ~self.missing.see_numbers(block, column, numbers[:, at])
        words = {name: texts_of(block, name) for name in (*self.words, *self.spec.text)}
        for name, values in words.items():
            words[name], is_dropped = self.missing.see_words(block, name, values)
            kept &= ~is_dropped
        if self.target is not None:
            rest = block.only(kept)
            kept[kept] = ~self.missing.see_target(rest, self.target.column, self.target.missing_in(rest))
        block, words = block.only(kept), {name: values.filter(pa.array(kept)) for name, values in words.items()}
        if self.target is not None:
            self.target.read(block)
        self.missing.add_means(self.features, numbers[kept])
        codes = [vocabulary.codes_of(block, words[name]) for name, vocabulary in self.words.items()]
        files[ROWS].write(block.rows.tobytes())
        files[FEATURES].write(self._stored(block, numbers[kept]).tobytes())
        files[CATEGORIES].write(np.stack(codes, axis=1).tobytes() if codes else b"")
        for at, name in enumerate(self.spec.text):
            self._write_text(files, at, words[name])
        self.num_rows += int(kept.sum())
        self.num_dropped += int((~kept).sum())

    def _stored(self, block: RowBlock, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        """Features [B, F] as they are kept; raises BadJob where a number is too large for that."""
        stored, overflows = as_float32(numbers)
        if overflows.any():
            row, at = np.argwhere(overflows)[0].tolist()
            raise too_large(block, row, self.features[at], numbers[row, at])
        return stored

    def _write_text(self, files: Mapping[str, Appended], at: int, values: pa.Array) -> None:
        lengths = pc.fill_null(pc.binary_length(values), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        ends = self.text_ends[at] + np.cumsum(lengths)
        files[f"text-{at}.ends.i64"].write(ends.tobytes())
        files[f"text-{at}.utf8"].write("".join(value or "" for value in values.to_pylist()).encode())
        self.text_ends[at] = int(ends[-1]) if len(ends) else self.text_ends[at]

    def _fill(self, means: Mapping[str, float]) -> None:
        """Put means where features are missing."""
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
        if not self.words:
            return {}
        stored = np.memmap(self.folder / CATEGORIES, np.int64, "r+", shape=(self.num_rows, len(self.words)))
        values: dict[str, tuple[str, ...]] = {}
        for at, (name, vocabulary) in enumerate(self.words.items()):
            values[name], final = vocabulary.sorted()
            for start in range(0, self.num_rows, _CHUNK_ROWS):
                stored[start : start + _CHUNK_ROWS, at] = final[stored[start : start + _CHUNK_ROWS, at]]
        stored.flush()
        return values

    def _write_target(self) -> tuple[str | None, tuple[str, ...]]:
        """The target on disk; its kind and classes."""
        if self.target is None:
            return None, ()
        found = self.target.result()
        if found.kind == "class" and not self.spec.is_like:
            counts = np.bincount(found.values.astype(np.int64, copy=False), minlength=len(found.classes))
            empty = [name for name, count in zip(found.classes, counts, strict=True) if not count]
            if empty:
                raise BadJob(
                    f"no row has the target {self.target.column!r} of {', '.join(map(repr, empty))}",
                    remedy="Leave the class out of classes=[…]; for a part with few rows, give like= the table that has all.",
                )
        with disk_errors(self.folder, "a table in the cache", error=BadJob):
            write_file(self.folder / TARGET, found.values.tobytes())
        return found.kind, found.classes


def _put(aside: Path, folder: Path) -> None:
    """Give a table its name, unless another process that made the same was faster."""
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


def _last_change_s(folder: Path) -> float:
    """When something was last written to a folder or its files [s since 1970]."""
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))


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
        if column in features and not (
            choice in ("mean", "drop") or (isinstance(choice, int | float) and not isinstance(choice, bool))
        ):
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
    """What was missing so far, by column; and the sums that means are made of."""

    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self.counts: dict[str, int] = {}
        self._unwanted: dict[str, list[str]] = {}
        self._sums: dict[str, float] = {}
        self._present: dict[str, int] = {}

    def see_numbers(self, block: RowBlock, column: str, numbers: npt.NDArray[np.float64]) -> Mask:
        """Fill a column's numbers [B] in place where a number stands in; which rows are dropped."""
        is_missing = np.isnan(numbers)
        choice = self._choice(block, column, is_missing)
        if isinstance(choice, int | float):
            numbers[is_missing] = choice
        return is_missing & (choice == "drop")

    def see_words(self, block: RowBlock, column: str, values: pa.Array) -> tuple[pa.Array, Mask]:
        """A column's words with a word in place of missing ones, if one was given; and which rows are dropped."""
        is_missing: Mask = pc.is_null(values).to_numpy(zero_copy_only=False)
        choice = self._choice(block, column, is_missing, of_words=True)
        if isinstance(choice, str) and choice != "drop":
            values = pc.fill_null(values, choice)
        return values, is_missing & (choice == "drop")

    def see_target(self, block: RowBlock, column: str, is_missing: Mask) -> Mask:
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

    def _choice(self, block: RowBlock, column: str, is_missing: Mask, *, of_words: bool = False) -> str | float | None:
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


FoundKind = Literal["class", "integer", "number"]

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

    def missing_in(self, block: RowBlock) -> Mask:
        """Which rows [B] lack a target; to be asked of every block, before it is read.

        Raises:
            BadJob: words follow numbers, and a word for a missing number was taken for one.
        """
        if self._can_be_number and self._wanted == "auto" and not are_numbers(block, self.column):
            if self._taken_as_missing is not None:
                raise BadJob(
                    f"the target {self.column!r} begins with numbers, among which {self._taken_as_missing}, a missing one; "
                    f"from row {int(block.rows[0])} of {block.path} on it has words",
                    remedy='If they are all classes, say so: target_kind="class". If not: target_kind="number".',
                )
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

    def read(self, block: RowBlock) -> None:
        """Take a block's targets; missing ones, which are counted elsewhere, become anything."""
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

    def _exact(self, block: RowBlock, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
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


def _are_whole(block: RowBlock, column: str) -> bool:
    values = block.columns[column]
    if block.is_text:
        is_whole = pc.match_substring_regex(numerals_of(values), r"^[+-]?\d+$")
        return pc.all(is_whole).as_py() is not False  # None: all are missing
    return bool(pa.types.is_integer(values.type) or pa.types.is_null(values.type))
