"""Tables of numbers, categories and text: CSV, Parquet and JSONL files.

A table is read once, block by block and checked on the way, into arrays in Stoker's cache, from which samples are then
gathered at random without holding them in memory. It is read anew when a file's size or time of change, or what is
read of it, differs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import numpy as np

from stoker.data.files.sample_files import Clean, Paths, left_out_of_files, require_once
from stoker.data.files.source import IndexedSource, Indices, Labels, digest_of_parts
from stoker.data.files.table_store import (
    Missing,
    StoredTable,
    TableSpec,
    TargetKind,
    folder_of,
    key_of,
    opened,
    require_pyarrow,
    table_spec,
)
from stoker.errors import BadJob

FEATURES, CATEGORIES, TARGET = "features", "categories", "target"
"""Entries of a sample, where it is a dict; text columns keep their names."""


@final
class Table(IndexedSource):
    """Rows of tables.

    With features and a target alone a sample is (features float32 [F], target); otherwise a dict of `features`,
    `categories` int64 [K], each text column by its name, and `target`. The target is int64 for classes and whole
    numbers, else float32.
    """

    def __init__(self, paths: tuple[Path, ...], spec: TableSpec, clean: Clean, like: Table | None) -> None:
        first = paths[0].name
        super().__init__(first if len(paths) == 1 else f"{first} and {len(paths) - 1} more")
        self.paths = paths
        self._given = spec
        self._clean = clean
        self._like = like

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the mapped arrays, which another process maps for itself."""
        return {name: value for name, value in vars(self).items() if name != "table"}

    @cached_property
    def spec(self) -> TableSpec:
        """What is read; of a table like another, with what was found in that one."""
        return self._given if self._like is None else _found_in(self._like, self._given)

    @cached_property
    def table(self) -> StoredTable:
        """The table in the cache; read on first use."""
        root = (
            Path(os.path.commonpath([path.parent for path in self.paths]))
            if len(self.paths) > 1
            else self.paths[0].parent
        )
        dropped = self._dropped(root)
        stats = [_stat(path) for path in self.paths]
        key = key_of(self.spec.text_of(), [[str(path.resolve()), *stat] for path, stat in zip(self.paths, stats,
                     strict=True)], {name: sorted(rows) for name, rows in dropped.items()})  # fmt: skip
        found = opened(folder_of(key))
        if found is not None:
            return found
        require_pyarrow()
        from stoker.data.files.table_build import built

        names = [path.relative_to(root).as_posix() for path in self.paths]
        return built(folder_of(key), self.paths, names, self.spec, dropped)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the target's classes, sorted or as they were given; none where it is a number."""
        return self.table.record.classes

    @property
    def target(self) -> str | int | None:
        """The target's entry."""
        record = self.table.record
        if record.target is None:
            return None
        return 1 if self._is_pair else TARGET

    @property
    def features(self) -> tuple[str, ...]:
        """Columns of the features, in their order."""
        return self.table.record.features

    @property
    def categories(self) -> Mapping[str, tuple[str, ...]]:
        """By column, the values in the order of their numbers."""
        return self.table.record.categories

    @property
    def note(self) -> str | None:
        """What was missing, and what was left out."""
        record = self.table.record
        missing = ", ".join(f"{count:,} of {name!r}" for name, count in record.missing.items())
        told = [
            f"missing values, made what missing= says: {missing}" if missing else "",
            f"{record.num_dropped:,} rows are left out for them" if record.num_dropped else "",
            f"{record.num_cleaned:,} rows are left out by the clean list" if record.num_cleaned else "",
        ]
        return f"{self.name}: {'; '.join(filter(None, told))}" if any(told) else None

    def __len__(self) -> int:
        """Number of rows."""
        return self.table.record.num_rows

    @property
    def fingerprint(self) -> str:
        """Digest of the content that was read, and of what its columns, categories and classes are called."""
        record = self.table.record
        categories = [f"{name}={value}" for name, values in record.categories.items() for value in values]
        digest = digest_of_parts(record.digest, record.features, categories, record.text, record.classes)
        return f"{digest} (of the content)"

    def sample(self, index: int) -> Any:
        """Row `index`."""
        return _first_of(self.rows(np.array([index], np.int64)))

    def sample_id(self, index: int) -> str:
        """The file and the row in it, from 0."""
        file, row = self.table.place(index)
        return f"{file}:{row}"

    def rows(self, indices: Indices) -> Any:
        """The batch of these rows."""
        import torch

        table, record = self.table, self.table.record
        batch: dict[str, Any] = {}
        if record.features:
            batch[FEATURES] = torch.from_numpy(np.take(table.features, indices, axis=0))
        if record.categories:
            batch[CATEGORIES] = torch.from_numpy(np.take(table.categories, indices, axis=0))
        for at, name in enumerate(record.text):
            batch[name] = [table.text(at, int(row)) for row in indices]
        if table.target is not None:
            batch[TARGET] = torch.from_numpy(np.take(table.target, indices))
        return tuple(batch.values()) if self._is_pair else batch

    def labels(self) -> Labels | None:
        """The target of every row, where it is a class or a whole number."""
        table = self.table
        return None if table.target is None or table.record.target_kind == "number" else np.asarray(table.target)

    @property
    def _is_pair(self) -> bool:
        record = self.table.record
        return bool(record.features) and not record.categories and not record.text

    def _dropped(self, root: Path) -> dict[str, frozenset[int]]:
        """By name of a file, the rows that the clean list leaves out."""
        dropped = zip(self.paths, left_out_of_files(self._clean, self.paths), strict=True)
        return {path.relative_to(root).as_posix(): frozenset(int(row) for row in rows if row.isdigit())
                for path, rows in dropped if rows}  # fmt: skip


def csv(  # noqa: PLR0913 - what can be said of a table
    path: Paths,
    *,
    features: Sequence[str] | None = None,
    target: str | None = None,
    categories: Sequence[str] | Mapping[str, Sequence[str] | None] = (),
    text: Sequence[str] = (),
    target_kind: str = "auto",
    classes: Sequence[str] | None = None,
    missing: Missing = None,
    delimiter: str = ",",
    like: Table | None = None,
    clean: Clean = None,
) -> Table:
    """Rows of CSV files with a header each; nothing is read until it is needed.

    Args:
        path: a file, or several, one after the other.
        features: columns of numbers, together one float32 vector; default: all that are not named otherwise.
        target: the column to learn.
        categories: columns of words that become whole numbers, in the order of the sorted words; or a dict of column
            to its words, where a word that is not among them is an error.
        text: columns that stay text, for `Job(collate=…)` to make tokens of.
        target_kind: "class" (numbered in the order of the sorted words), "integer" or "number"; "auto" takes the first
            of integer, number, class that all values are, where `NA`, `nan` and `null` are missing among numbers.
        classes: the target's classes in the order of their numbers.
        missing: what becomes of missing values: "drop" leaves the row out; for features "mean" or a number; by column
            in a dict, where categories and text may become a word. Default: an error that says how many and where.
        delimiter: what is between fields.
        like: another table, whose columns, categories, classes and means are taken: for validation and test files.
        clean: what `stoker data check` found, to be left out.

    Raises:
        BadJob: words that cannot be meant; and, when it is read, a missing column, a ragged row, a value that is no
            number.
    """
    spec = table_spec("csv", features=features, target=target, categories=categories, text=text,
                      target_kind=target_kind, classes=classes, missing=missing, delimiter=delimiter)  # fmt: skip
    return _table(path, spec, clean, like)


def parquet(  # noqa: PLR0913 - as above
    path: Paths,
    *,
    features: Sequence[str] | None = None,
    target: str | None = None,
    categories: Sequence[str] | Mapping[str, Sequence[str] | None] = (),
    text: Sequence[str] = (),
    target_kind: str = "auto",
    classes: Sequence[str] | None = None,
    missing: Missing = None,
    like: Table | None = None,
    clean: Clean = None,
) -> Table:
    """Rows of Parquet files; arguments as for `csv`. Only the columns that are named are read."""
    spec = table_spec("parquet", features=features, target=target, categories=categories, text=text,
                      target_kind=target_kind, classes=classes, missing=missing)  # fmt: skip
    return _table(path, spec, clean, like)


def jsonl(  # noqa: PLR0913 - as above
    path: Paths,
    *,
    features: Sequence[str] | None = None,
    target: str | None = None,
    categories: Sequence[str] | Mapping[str, Sequence[str] | None] = (),
    text: Sequence[str] = (),
    target_kind: str = "auto",
    classes: Sequence[str] | None = None,
    missing: Missing = None,
    like: Table | None = None,
    clean: Clean = None,
) -> Table:
    """Rows of JSONL files, an object a line; arguments as for `csv`. A key that an object lacks is a missing value."""
    spec = table_spec("jsonl", features=features, target=target, categories=categories, text=text,
                      target_kind=target_kind, classes=classes, missing=missing)  # fmt: skip
    return _table(path, spec, clean, like)


def _table(path: Paths, spec: TableSpec, clean: Clean, like: Table | None) -> Table:
    given = [path] if isinstance(path, str | Path) else list(path)
    if not given:
        raise BadJob(f"a {spec.format} source needs a file", remedy="Give a path, or a list of them.")
    paths = tuple(Path(one).expanduser().absolute() for one in given)
    for one in paths:
        if one.is_dir():
            found = sum(1 for _ in one.glob(f"*.{spec.format}"))
            raise BadJob(
                f"{one} is a folder, and stoker.data.{spec.format} reads files; {found:,} in it end in .{spec.format}",
                remedy=f'Name them: stoker.data.{spec.format}(sorted(Path({one.name!r}).glob("*.{spec.format}"))).',
            )
    require_once(paths)
    return Table(paths, spec, clean, like)


def _found_in(like: Table, given: TableSpec) -> TableSpec:
    """The spec of a table like another.

    Raises:
        BadJob: it says something of its own about columns.
    """
    blank = table_spec(given.format, features=None, target=None, categories=(), text=(), target_kind="auto",
                       classes=None, missing=None, delimiter=given.delimiter)  # fmt: skip
    if given != blank:
        raise BadJob("like=… takes all columns from the other table", remedy="Leave out what is said besides it.")
    record = like.table.record
    return dataclasses.replace(
        like.spec, format=given.format, delimiter=given.delimiter, features=record.features,
        categories=tuple(record.categories.items()), classes=record.classes or None, means=tuple(record.means.items()),
        target_kind=cast("TargetKind", record.target_kind or "auto"), is_like=True,
    )  # fmt: skip


def _stat(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError as error:
        raise BadJob(f"{path} cannot be read: {error.strerror}", remedy="Give a file that is there.") from error
    return found.st_size, found.st_mtime_ns


def _first_of(batch: Any) -> Any:
    if isinstance(batch, tuple):
        return tuple(entry[0] for entry in batch)
    return {name: entry[0] for name, entry in batch.items()}
