"""The kind of a data set, from file names and first bytes, and the check for that kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
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
    """Find the faults of the data at `path`, and samples that are also in `against`.

    Args:
        path: a file or a folder; it is only read.
        against: other data sets of the same sort (with pixels, or of rows).
        options: what to look for.
        workers: number of processes that decode.
        tell: called with the progress.

    Raises:
        BadJob: there is nothing to check, or an option is invalid.
        RunFailed: a decoding process died.
    """
    ours = find(path)
    others = [(str(other), find(other)) for other in against]
    if any(type(other) is not type(ours) for _, other in others):
        names = ", ".join(name for name, _ in others)
        raise BadJob(f"{path} cannot be held against {names}: one of them has pixels, the other rows")
    if isinstance(ours, FoundImages):
        pictures = [(name, other) for name, other in others if isinstance(other, FoundImages)]
        return check_pictures(ours, pictures, options, workers, tell)
    tables = [
        ForeignTable(table, f"{name}/{table.name}" if table.name else name)
        for name, other in others if isinstance(other, FoundTables) for table in other.tables
    ]  # fmt: skip
    checked = check_tables(ours.kind, ours.tables, tables, options, tell)
    early = [*ours.findings, *class_findings((), ours.empty_classes)]
    return replace(checked, findings=in_order([*early, *checked.findings]))


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
    """Tables, classes without a file (split, class), and faults found while listing them."""

    kind: DataKind
    tables: tuple[TableSource, ...]
    empty_classes: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()


def find(path: Path) -> FoundImages | FoundTables:
    """The samples of a file or a folder.

    A folder's kind is the first of these that it has: images, shards, IDX files, NumPy files, tables, texts.

    Raises:
        BadJob: the path does not exist, or holds nothing of a known kind.
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
        return find_idx(path, [other for other in path.parent.iterdir() if stems[0] in other.name])
    if path.name.endswith((".tar.gz", ".tgz", ".tar.zst")):
        raise BadJob(f"{path} is a compressed shard", remedy="Unpack it to .tar: keys are read where they lie.")
    raise BadJob(f"{path} is of no kind that is known", remedy=_READABLE)


def _of_folder(root: Path) -> FoundImages | FoundTables:
    files = [root / name for name in files_below(root)]
    tables: list[TableSource] = []
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
        for path in files:
            if make := _TABLES.get(path.suffix.lower()):
                inside = path.parent.name if path.parent != root else ""
                tables.append(make(path, path.relative_to(root).as_posix(), split_of(inside) or split_of(path.stem)))
        return FoundTables("table", tuple(tables))
    if suffixes[".txt"]:
        listing = list_classes(root, _TEXT)
        for split in dict.fromkeys(split for split, _ in listing.files):
            samples = sorted((name, label) for (where, label), names in listing.files.items() if where == split
                             for name in names)  # fmt: skip
            names, labels = zip(*samples, strict=True)
            tables.append(TextTable(root, split, names, labels))
        return FoundTables("text", tuple(tables), listing.empty_classes)
    kinds = ", ".join(suffix or "without ending" for suffix, _ in suffixes.most_common(5))
    raise BadJob(f"{root} holds nothing that is known{f': {kinds}' if kinds else ''}", remedy=_READABLE)
