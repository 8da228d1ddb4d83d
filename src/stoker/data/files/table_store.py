"""Tables in the cache: memory-mapped arrays with their record, and the spec of the columns that are read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, cast

import numpy as np
import numpy.typing as npt

from stoker.data.files.source import class_names, require_choice
from stoker.errors import BadJob
from stoker.records.codec import digest, dumps, parsed
from stoker.store import cache_root, disk_errors
from stoker.store.files import Appended, disk, file_digests, sha256_file, sync_file, write_file

_RECORD = "table.json"
_VERSION = 3
"""Version of the files below; a table of another version is read again."""

FEATURES, CATEGORIES, TARGET, ROWS = "features.f32", "categories.i64", "target.bin", "rows.i64"


@dataclass(frozen=True, kw_only=True)
class TableRecord:
    """Content of a stored table; `digest` is of its files, `missing` counts missing values by column."""

    num_rows: int
    files: tuple[str, ...]
    ends: tuple[int, ...]
    """Number of rows up to the end of every file."""
    features: tuple[str, ...]
    categories: dict[str, tuple[str, ...]]
    text: tuple[str, ...]
    target: str | None
    target_kind: str | None
    classes: tuple[str, ...]
    means: dict[str, float]
    missing: dict[str, int]
    num_dropped: int
    num_cleaned: int
    sizes: dict[str, int]
    digest: str
    checksum: str = ""
    """SHA-256 of all above."""

    def with_checksum(self) -> TableRecord:
        """A copy with the checksum of its content."""
        return dataclasses.replace(self, checksum=digest(dataclasses.asdict(self) | {"checksum": ""}))


class StoredTable:
    """A table whose arrays are memory-mapped, so that only gathered rows are read."""

    def __init__(self, folder: Path, record: TableRecord) -> None:
        self.record = record
        self._folder = folder
        rows = record.num_rows
        self.rows = self._mapped(ROWS, np.int64, (rows,))
        self.features = self._mapped(FEATURES, np.float32, (rows, len(record.features)))
        self.categories = self._mapped(CATEGORIES, np.int64, (rows, len(record.categories)))
        kind = np.float32 if record.target_kind == "number" else np.int64
        self.target = None if record.target is None else self._mapped(TARGET, kind, (rows,))
        self._texts = [
            (
                self._mapped(f"text-{column}.ends.i64", np.int64, (rows,)),
                self._mapped(f"text-{column}.utf8", np.uint8, (record.sizes[f"text-{column}.utf8"],)),
            )
            for column in range(len(record.text))
        ]

    def text(self, column: int, row: int) -> str:
        """The text in `row` of text column number `column`."""
        ends, content = self._texts[column]
        start = int(ends[row - 1]) if row else 0
        return bytes(content[start : int(ends[row])]).decode()

    def place(self, row: int) -> tuple[str, int]:
        """The file of a sample, and its row there."""
        file = int(np.searchsorted(np.array(self.record.ends), row, side="right"))
        return self.record.files[file], int(self.rows[row])

    def _mapped(self, name: str, dtype: type[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        if 0 in shape:
            return np.empty(shape, dtype)
        return np.memmap(self._folder / name, dtype, "r", shape=shape)


def folder_of(key: str) -> Path:
    """Folder of the table with this key."""
    return cache_root() / "data" / "tables" / key[:40]


def key_of(*parts: object) -> str:
    """Identity of a table before it is read."""
    return hashlib.sha256(json.dumps([_VERSION, *parts]).encode("utf-8", "surrogateescape")).hexdigest()


def opened(folder: Path) -> StoredTable | None:
    """The table in `folder`; None if there is none, or it is incomplete or damaged."""
    try:
        content = parsed((folder / _RECORD).read_bytes())
        record = TableRecord(**{name: _frozen(value) for name, value in content.items()})
        sizes = {name: (folder / name).stat().st_size for name in record.sizes}
        is_whole = record.checksum == record.with_checksum().checksum and sizes == record.sizes
        if not is_whole or _digest_of(file_digests(folder, record.sizes)) != record.digest:
            return None
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return StoredTable(folder, record)


def write_record(folder: Path, record: TableRecord) -> None:
    """Write the record last, once all files are durable: a folder without it holds no table."""
    with disk_errors(folder, "a table's record", error=BadJob):
        for name in record.sizes:
            sync_file(folder / name)
        write_file(folder / _RECORD, dumps(dataclasses.asdict(record.with_checksum())).encode())
        disk().sync_directory(folder)


def digest_of_files(folder: Path, names: Iterable[str]) -> str:
    """SHA-256 of the files of a table."""
    return _digest_of({name: sha256_file(folder / name) for name in names})


def _digest_of(digests: Mapping[str, str]) -> str:
    state = hashlib.sha256("".join(f"{name} {digest};" for name, digest in digests.items()).encode())
    return f"sha256:{state.hexdigest()}"


@contextmanager
def appending(folder: Path, names: Iterable[str]) -> Iterator[dict[str, Appended]]:
    """New files in `folder`, open to be written.

    Raises:
        BadJob: the disk is full, or cannot be written.
    """
    files: dict[str, Appended] = {}
    with disk_errors(folder, "a table in the cache", error=BadJob):
        try:
            for name in names:
                files[name] = Appended(folder / name)
            yield files
        finally:
            for file in files.values():
                file.close()


def _frozen(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return {key: _frozen(item) for key, item in value.items()} if isinstance(value, dict) else value


Format = Literal["csv", "parquet", "jsonl"]
TargetKind = Literal["auto", "class", "integer", "number"]
Missing: TypeAlias = "str | float | Mapping[str, str | float] | None"
"""Treatment of missing values: an error (None), "mean", a number, "drop" for the row; or a dict of these by column."""


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table as a user describes it.

    `features` None means every column that is not named otherwise. `categories` and `classes` hold given values in the
    order of their numbers, None if they are found in the table. `means` are of another table, by column.
    """

    format: Format
    features: tuple[str, ...] | None
    categories: tuple[tuple[str, tuple[str, ...] | None], ...]
    text: tuple[str, ...]
    target: str | None
    target_kind: TargetKind
    classes: tuple[str, ...] | None
    missing: tuple[tuple[str, str | float | None], ...]
    missing_else: str | float | None
    delimiter: str = ","
    means: tuple[tuple[str, float], ...] = ()
    is_like: bool = False
    """True for a table like another, such as a validation file."""

    def for_missing(self, column: str) -> str | float | None:
        """Treatment of missing values of `column`."""
        return dict(self.missing).get(column, self.missing_else)

    def with_features(self, header: Sequence[str]) -> tuple[str, ...]:
        """The columns of features, for a table with these columns."""
        if self.features is not None:
            return self.features
        named = {*(name for name, _ in self.categories), *self.text, self.target}
        return tuple(name for name in header if name not in named)

    def columns(self, features: Sequence[str]) -> tuple[str, ...]:
        """All columns that are read."""
        last = () if self.target is None else (self.target,)
        return tuple(dict.fromkeys([*features, *(name for name, _ in self.categories), *self.text, *last]))

    def text_of(self) -> str:
        """Everything in it, for digests."""
        return json.dumps({name: getattr(self, name) for name in self.__dataclass_fields__})


class TableColumns(TypedDict, total=False):
    """What a user says of a table's columns; see `stoker.data.csv`."""

    features: Sequence[str] | None
    target: str | None
    categories: Sequence[str] | Mapping[str, Sequence[str] | None]
    text: Sequence[str]
    target_kind: str
    classes: Sequence[str] | None
    missing: Missing


def table_spec(
    table_format: Format,
    *,
    features: Sequence[str] | None = None,
    target: str | None = None,
    categories: Sequence[str] | Mapping[str, Sequence[str] | None] = (),
    text: Sequence[str] = (),
    target_kind: str = "auto",
    classes: Sequence[str] | None = None,
    missing: Missing = None,
) -> TableSpec:
    """The spec for a user's arguments.

    Raises:
        BadJob: an argument is invalid.
    """
    require_choice("target_kind=…", target_kind, ("auto", "class", "integer", "number"))
    known = dict(categories) if isinstance(categories, Mapping) else dict.fromkeys(_words("categories", categories))
    spec = TableSpec(
        format=table_format,
        features=None if features is None else _words("features", features),
        categories=tuple((name, None if values is None else class_names(values)) for name, values in known.items()),
        text=_words("text", text),
        target=target,
        target_kind=cast("TargetKind", target_kind),
        classes=None if classes is None else class_names(classes),
        missing=tuple(missing.items()) if isinstance(missing, Mapping) else (),
        missing_else=None if isinstance(missing, Mapping) else missing,
    )
    roles = [*(spec.features or ()), *(name for name, _ in spec.categories), *spec.text, *filter(None, [spec.target])]
    twice = sorted({name for name in roles if roles.count(name) > 1})
    if twice:
        raise BadJob(f"the column {twice[0]!r} is named for two things", remedy="Name it in one place.")
    if spec.classes is not None and spec.target_kind not in ("auto", "class"):
        raise BadJob(f'classes=… and target_kind="{spec.target_kind}" exclude each other')
    if spec.target is None and spec.classes is not None:
        raise BadJob("classes=… are of a target, and none is named", remedy="Name its column: target=….")
    numbers = {*(spec.features or ())}
    for column, choice in (*spec.missing, ("features", spec.missing_else)):
        if isinstance(choice, str) and choice not in ("mean", "drop") and column in {*numbers, "features"}:
            raise BadJob(
                f"missing={choice!r} of {column!r} is not known",
                remedy='Give "mean", "drop", or a number; for a category any word.',
            )
    return spec


def _words(what: str, given: Sequence[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        raise BadJob(f"{what}={given!r} is one word", remedy=f"Give a list of columns: {what}=[{given!r}].")
    return tuple(given)
