"""Sources of rows of tables with numbers, categories and text: CSV, Parquet and JSONL files.

A table is read and checked once, block by block, into arrays in Stoker's cache, from which samples are gathered at
random without holding them in memory. It is read again when a file's size or time of change, or the request, differs.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack, cast, final

import numpy as np

from stoker.data.files.sample_files import Clean, Paths, existing_version, left_out_of_files, require_once
from stoker.data.files.source import IndexedSource, Indices, Labels, Subset, digest_of_parts, needs
from stoker.data.files.table_store import (
    Missing,
    StoredTable,
    TableColumns,
    TableSpec,
    TargetKind,
    folder_of,
    key_of,
    opened,
    table_spec,
)
from stoker.errors import BadJob
from stoker.records import InputColumn

FEATURES, CATEGORIES, TARGET = "features", "categories", "target"
"""Entries of a sample that is a dict; text columns keep their names."""


@final
class Table(IndexedSource):
    """Rows of tables.

    With only features and a target a sample is (features float32 [F], target); otherwise a dict of `features`,
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
        """The state without the mapped arrays, which another process maps for itself."""
        return {name: value for name, value in vars(self).items() if name != "table"}

    @cached_property
    def spec(self) -> TableSpec:
        """The columns to read; for a table like another, with the columns, categories and classes of that one."""
        return self._given if self._like is None else _found_in(self._like, self._given)

    @cached_property
    def table(self) -> StoredTable:
        """The table in the cache; read on first use."""
        root = Path(os.path.commonpath([path.parent for path in self.paths]))
        names = [path.relative_to(root).as_posix() for path in self.paths]
        left_out = zip(names, left_out_of_files(self._clean, self.paths), strict=True)
        dropped = {name: frozenset(int(row) for row in rows if row.isdigit()) for name, rows in left_out if rows}
        versions = [existing_version(path, remedy="Give a file that is there.") for path in self.paths]
        key = key_of(
            self.spec.text_of(),
            [[str(path.resolve()), *version] for path, version in zip(self.paths, versions, strict=True)],
            {name: sorted(rows) for name, rows in dropped.items()},
        )
        stored = opened(folder_of(key))
        if stored is not None:
            return stored
        with needs("pyarrow"):
            from stoker.data.files.table_build import built
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
        """The values of every category in the order of their numbers."""
        return self.table.record.categories

    @property
    def encoding(self) -> Mapping[str, Sequence[object]]:
        """Features, classes, values of categories, and the means that stand for missing values."""
        record = self.table.record
        means = {f"mean of {name!r}": (mean,) for name, mean in record.means.items() if record.missing.get(name)}
        target = () if record.target_kind is None else ("a class" if record.target_kind == "class" else "a number",)
        values = {f"{name!r}, value": known for name, known in record.categories.items()}
        return {"feature": record.features, "target": target, "class": record.classes, **values, **means}

    @property
    def input_columns(self) -> Mapping[str | int, tuple[InputColumn, ...]]:
        """The columns of the features and of the categories, with what their missing values become."""
        record, spec = self.table.record, self.spec
        features = []
        for name in record.features:
            choice = spec.for_missing(name)
            number = record.means[name] if choice == "mean" else choice
            missing = float(number) if isinstance(number, int | float) and not math.isnan(number) else None
            features.append(InputColumn(name=name, missing=missing))
        filled = {name: str(value) for name, value in spec.missing if value != "drop"}
        categories = tuple(
            InputColumn(name=name, words=words, missing_word=filled.get(name))
            for name, words in record.categories.items()
        )
        entries: dict[str | int, tuple[InputColumn, ...]] = {
            0 if self._is_pair else FEATURES: tuple(features),
            CATEGORIES: categories,
        }
        return {entry: columns for entry, columns in entries.items() if columns}

    @property
    def note(self) -> str | None:
        """Counts of missing values and of rows left out."""
        record = self.table.record
        missing = ", ".join(f"{count:,} of {name!r}" for name, count in record.missing.items())
        parts = [
            f"missing values, made what missing= says: {missing}" if missing else "",
            f"{record.num_dropped:,} rows are left out for them" if record.num_dropped else "",
            f"{record.num_cleaned:,} rows are left out by the clean list" if record.num_cleaned else "",
        ]
        return f"{self.name}: {'; '.join(filter(None, parts))}" if any(parts) else None

    @property
    def note_on_parts(self) -> str | None:
        """The features with means that are of this table's rows, whatever part these are in."""
        record = self.table.record
        filled = [] if self._like is not None else [repr(name) for name in record.means if record.missing.get(name)]
        return (
            f"the means in place of missing values of {', '.join(filled)} are of all rows, those set aside included; "
            "with files of their own, read like=TABLE, they would be of the training rows"
            if filled
            else None
        )

    def __len__(self) -> int:
        """Number of rows."""
        return self.table.record.num_rows

    @property
    def fingerprint(self) -> str:
        """Digest of the content that was read, and of the names of columns, categories and classes."""
        record = self.table.record
        categories = [f"{name}={value}" for name, values in record.categories.items() for value in values]
        digest = digest_of_parts(record.digest, record.features, categories, record.text, record.classes)
        return f"{digest} (of the content)"

    def sample(self, index: int) -> Any:
        """Row `index`."""
        batch = self.rows(np.array([index], np.int64))
        if isinstance(batch, tuple):
            return tuple(entry[0] for entry in batch)
        return {name: entry[0] for name, entry in batch.items()}

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
        for column, name in enumerate(record.text):
            batch[name] = [table.text(column, int(row)) for row in indices]
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
    like: Table | Subset | None = None,
    clean: Clean = None,
) -> Table:
    """Rows of CSV files with a header each; nothing is read until it is needed.

    Args:
        path: a file, or several, read one after the other.
        features: columns of numbers, together one float32 vector; default: all that are not named otherwise.
        target: the column to learn.
        categories: columns of words that become whole numbers, in the order of the sorted words; or a dict from column
            to its words, where any other word is an error.
        text: columns that stay text, for `stoker.Fields(collate=…)` to make tokens of.
        target_kind: "class" (numbered in the order of the sorted words), "integer" or "number"; "auto" takes the first
            of integer, number, class that all values are; among numbers `NA`, `nan` and `null` are missing values.
        classes: the target's classes in the order of their numbers.
        missing: treatment of missing values: "drop" leaves the row out; "mean" or a number for features; a dict by
            column, where categories and text may become a word. Default: an error that counts and locates them.
        delimiter: character between fields.
        like: another table, or a part of one, whose columns, categories, classes and means are used: for validation and
            test files.
        clean: the clean list of `stoker data check`, whose rows are left out.

    Raises:
        BadJob: an argument is invalid; and, when it is read, a column is missing, a row is ragged, or a value is not a
            number.
    """
    spec = table_spec(
        "csv",
        features=features,
        target=target,
        categories=categories,
        text=text,
        target_kind=target_kind,
        classes=classes,
        missing=missing,
    )
    return _table(path, dataclasses.replace(spec, delimiter=delimiter), clean, like)


def parquet(
    path: Paths, *, like: Table | Subset | None = None, clean: Clean = None, **columns: Unpack[TableColumns]
) -> Table:
    """Rows of Parquet files; arguments as for `csv`. Only named columns are read.

    Args:
        path: a file, or several with the same columns.
        like: a table whose encoding of categories, and whose features and target, are taken over.
        clean: a list of rows to leave out, as `stoker data check` writes it.
        **columns: features, target, categories, text, missing, …: see `csv`.

    Raises:
        BadJob: a file cannot be read, or lacks a column; see `csv`.
    """
    return _table(path, table_spec("parquet", **columns), clean, like)


def jsonl(
    path: Paths, *, like: Table | Subset | None = None, clean: Clean = None, **columns: Unpack[TableColumns]
) -> Table:
    """Rows of JSONL files, one object a line; arguments as for `csv`. A missing key is a missing value.

    Args:
        path: a file, or several with the same keys.
        like: a table whose encoding of categories, and whose features and target, are taken over.
        clean: a list of rows to leave out, as `stoker data check` writes it.
        **columns: features, target, categories, text, missing, …: see `csv`.

    Raises:
        BadJob: a file cannot be read, or lacks a key; see `csv`.
    """
    return _table(path, table_spec("jsonl", **columns), clean, like)


def _table(path: Paths, spec: TableSpec, clean: Clean, like: IndexedSource | None) -> Table:
    given = [path] if isinstance(path, str | Path) else list(path)
    if not given:
        raise BadJob(f"a {spec.format} source needs a file", remedy="Give a path, or a list of them.")
    paths = tuple(Path(name).expanduser().absolute() for name in given)
    kind = spec.format
    for folder in filter(Path.is_dir, paths):
        count = sum(1 for _ in folder.glob(f"*.{kind}"))
        raise BadJob(
            f"{folder} is a folder, and stoker.data.{kind} reads files; {count:,} in it end in .{kind}",
            remedy=f'Name them: stoker.data.{kind}(sorted(Path({folder.name!r}).glob("*.{kind}"))).',
        )
    require_once(paths)
    while isinstance(like, Subset):  # a part has the columns, categories, classes and means of its whole
        like = like.whole
    if not (like is None or isinstance(like, Table)):
        raise BadJob(f"like={like!r} is no table", remedy="Give the table of the training data, or a part of it.")
    return Table(paths, spec, clean, like)


def _found_in(like: Table, given: TableSpec) -> TableSpec:
    """The spec of a table like another; raises BadJob if `given` names columns of its own."""
    if given != dataclasses.replace(table_spec(given.format), delimiter=given.delimiter):
        raise BadJob("like=… takes all columns from the other table", remedy="Leave out the other arguments.")
    record = like.table.record
    return dataclasses.replace(
        like.spec,
        format=given.format,
        delimiter=given.delimiter,
        features=record.features,
        categories=tuple(record.categories.items()),
        classes=record.classes or None,
        means=tuple(record.means.items()),
        target_kind=cast("TargetKind", record.target_kind or "auto"),
        is_like=True,
    )
