"""Reading tables once, block by block, into arrays on disk. Imports pyarrow, and so is imported when that is done.

Memory holds one block, the targets, and what was found of the vocabularies; the rest goes to disk as it is read.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from stoker.data.files.table_blocks import Block, blocks_of, header_of
from stoker.data.files.table_columns import Vocabulary, as_float32, numbers_of, texts_of, too_large
from stoker.data.files.table_missing import MissingCount, require_sensible_missing
from stoker.data.files.table_spec import TableSpec
from stoker.data.files.table_store import (
    CATEGORIES,
    FEATURES,
    ROWS,
    TARGET,
    StoredTable,
    TableRecord,
    appending,
    digest_of_files,
    opened,
    write_record,
)
from stoker.data.files.table_target import TargetReader
from stoker.errors import BadJob
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
        _remove_abandoned(folder.parent)
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

    def _add(self, block: Block, files: Mapping[str, Appended]) -> None:
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

    def _stored(self, block: Block, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
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
            _require_all(found.values, found.classes, self.target.column)
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


def _require_all(codes: npt.NDArray[np.int64] | npt.NDArray[np.float32], classes: Sequence[str], column: str) -> None:
    """Refuse a class that no row has."""
    counts = np.bincount(codes.astype(np.int64, copy=False), minlength=len(classes))
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        raise BadJob(
            f"no row has the target {column!r} of {', '.join(map(repr, empty))}",
            remedy="Leave the class out of classes=[…]; for a part with few rows, give like= the table that has all.",
        )


def _remove_abandoned(parent: Path) -> None:
    """Take away what processes that are gone left half made.

    A process of another machine or container that shares the cache is not seen here: what is written to stays.
    """
    for path in parent.glob(".writing-*"):
        pid = path.name.split("-")[-2]
        with suppress(OSError):
            if pid.isdigit() and not is_alive(int(pid)) and time.time() - _last_change_s(path) > _ABANDONED_S:
                remove_tree(path)


def _last_change_s(folder: Path) -> float:
    """When something was last written to a folder or its files [s since 1970]."""
    return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
