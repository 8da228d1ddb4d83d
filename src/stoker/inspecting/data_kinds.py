"""One check of one data set, whatever its kind.

What a path holds: told from names and first bytes, never guessed from content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.data.reading.file_listing import SUFFIXES, files_below
from stoker.errors import BadJob
from stoker.inspecting.findings import Checked, CheckOptions, Tell, class_findings, in_order, split_of
from stoker.inspecting.image_check import check_pictures
from stoker.inspecting.image_sources import (
    FoundImages,
    find_idx,
    find_images,
    find_numpy,
    find_shards,
    idx_pairs,
    list_classes,
)
from stoker.inspecting.table_check import ForeignTable, check_tables
from stoker.inspecting.table_files import CsvTable, JsonlTable, ParquetTable, TableSource, TextTable
from stoker.records.data_check import DataKind, Finding


def check(path: Path, against: Sequence[Path], options: CheckOptions, *, workers: int, tell: Tell) -> Checked:
    """Find what is wrong with the data at `path`, and what of it is also in `against`.

    Args:
        path: a file or a folder; it is only read.
        against: other data sets, of the same sort (with pixels, or of rows).
        options: what to look for.
        workers: processes that decode.
        tell: is told how far it is.

    Raises:
        BadJob: there is nothing to check, or an option does not fit.
        RunFailed: a process that decodes died.
    """
    found = find(path)
    others = [(str(one), find(one)) for one in against]
    if isinstance(found, FoundImages):
        pictures = [(name, other) for name, other in others if isinstance(other, FoundImages)]
        _require_same_kind(len(pictures), others, path)
        return check_pictures(found, pictures, options, workers, tell)
    tables = [
        ForeignTable(table, f"{name}/{table.name}" if table.name else name)
        for name, other in others if isinstance(other, FoundTables) for table in other.tables
    ]  # fmt: skip
    _require_same_kind(sum(isinstance(other, FoundTables) for _, other in others), others, path)
    checked = check_tables(found.kind, found.tables, tables, options, tell)
    early = [*found.findings, *class_findings((), found.empty_classes)]
    return replace(checked, findings=in_order([*early, *checked.findings]))


def _require_same_kind(same: int, others: Sequence[tuple[str, object]], path: Path) -> None:
    if same < len(others):
        raise BadJob(f"{path} cannot be held against {', '.join(name for name, _ in others)}: one of them has pixels, "
                     "the other rows")  # fmt: skip


_TABLES: dict[str, Callable[[Path, str, str], TableSource]] = {
    ".csv": CsvTable, ".tsv": CsvTable, ".jsonl": JsonlTable, ".ndjson": JsonlTable, ".parquet": ParquetTable,
    ".pq": ParquetTable,
}  # fmt: skip
_NUMPY = {".npy", ".npz"}
_TEXT = frozenset({".txt"})
_READABLE = (
    "It reads folders of images or of .txt files, CSV, TSV, JSONL, Parquet, shards of WebDataset (.tar), IDX files and "
    ".npy or .npz with images."
)


@dataclass(frozen=True)
class FoundTables:
    """Tables, classes without a file (split, class), and what was amiss on the way."""

    kind: DataKind
    tables: tuple[TableSource, ...]
    empty_classes: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()


def find(path: Path) -> FoundImages | FoundTables:
    """The samples of a file or a folder.

    A folder is what most speaks for: images if it has any, else shards, IDX files, NumPy files, tables, texts.

    Raises:
        BadJob: there is nothing, or nothing that is known.
    """
    if not path.exists():
        raise BadJob(f"{path} is not there")
    return _of_file(path) if path.is_file() else _of_folder(path)


def _of_file(path: Path) -> FoundImages | FoundTables:
    suffix = path.suffix.lower()
    if suffix in _TABLES:
        return FoundTables("table", (_TABLES[suffix](path, path.name, split_of(path.stem)),))
    if suffix == ".tar":
        return find_shards(path, [path])
    if suffix in _NUMPY:
        return find_numpy(path, [path])
    stems = list(idx_pairs([path]))
    if stems:
        beside = [one for one in path.parent.iterdir() if stems[0] in one.name]
        return find_idx(path, beside)
    if path.name.endswith((".tar.gz", ".tgz", ".tar.zst")):
        raise BadJob(f"{path} is a compressed shard", remedy="Unpack it to .tar: keys are read where they lie.")
    raise BadJob(f"{path} is of no kind that is known", remedy=_READABLE)


def _of_folder(root: Path) -> FoundImages | FoundTables:
    files = [root / name for name in files_below(root)]
    suffixes = Counter(path.suffix.lower() for path in files)
    if suffixes.keys() & SUFFIXES:
        return find_images(root)
    if suffixes[".tar"]:
        return find_shards(root, [path for path in files if path.suffix.lower() == ".tar"])
    if idx_pairs(files):
        return find_idx(root, files)
    if suffixes.keys() & _NUMPY:
        return find_numpy(root, [path for path in files if path.suffix.lower() in _NUMPY])
    if suffixes.keys() & _TABLES.keys():
        return FoundTables("table", tuple(_tables(root, files)))
    if suffixes[".txt"]:
        return _texts(root)
    kinds = ", ".join(suffix or "without ending" for suffix, _ in suffixes.most_common(5))
    raise BadJob(f"{root} holds nothing that is known{f': {kinds}' if kinds else ''}", remedy=_READABLE)


def _tables(root: Path, files: Iterable[Path]) -> Iterable[TableSource]:
    for path in files:
        if make := _TABLES.get(path.suffix.lower()):
            inside = path.parent.name if path.parent != root else ""
            yield make(path, path.relative_to(root).as_posix(), split_of(inside) or split_of(path.stem))


def _texts(root: Path) -> FoundTables:
    listing = list_classes(root, _TEXT)
    tables: list[TableSource] = []
    for split in dict.fromkeys(split for split, _ in listing.files):
        samples = sorted((name, label) for (where, label), names in listing.files.items() if where == split
                         for name in names)  # fmt: skip
        names, labels = zip(*samples, strict=True)
        tables.append(TextTable(root, split, names, labels))
    return FoundTables("text", tuple(tables), listing.empty_classes)
