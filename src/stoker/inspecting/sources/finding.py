"""What a path holds: told from names and first bytes, never guessed from content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from stoker.data.reading.folders import files_below
from stoker.data.reading.image_kinds import SUFFIXES
from stoker.errors import BadJob
from stoker.inspecting.sources.arrays import find_idx, find_numpy, idx_pairs
from stoker.inspecting.sources.base import Found
from stoker.inspecting.sources.folder import find_images, list_classes
from stoker.inspecting.sources.shards import find_shards
from stoker.inspecting.sources.splits import split_of
from stoker.inspecting.tables.files import CsvTable, JsonlTable, ParquetTable, TextTable
from stoker.inspecting.tables.rows import Table
from stoker.records.cleaning import DataKind, Finding

_TABLES: dict[str, Callable[[Path, str, str], Table]] = {
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
    tables: tuple[Table, ...]
    empty_classes: tuple[tuple[str, str], ...] = ()
    findings: tuple[Finding, ...] = ()


def find(path: Path) -> Found | FoundTables:
    """The samples of a file or a folder.

    A folder is what most speaks for: images if it has any, else shards, IDX files, NumPy files, tables, texts.

    Raises:
        BadJob: there is nothing, or nothing that is known.
    """
    if not path.exists():
        raise BadJob(f"{path} is not there")
    return _of_file(path) if path.is_file() else _of_folder(path)


def _of_file(path: Path) -> Found | FoundTables:
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


def _of_folder(root: Path) -> Found | FoundTables:
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


def _tables(root: Path, files: Iterable[Path]) -> Iterable[Table]:
    for path in files:
        if make := _TABLES.get(path.suffix.lower()):
            inside = path.parent.name if path.parent != root else ""
            yield make(path, path.relative_to(root).as_posix(), split_of(inside) or split_of(path.stem))


def _texts(root: Path) -> FoundTables:
    listing = list_classes(root, _TEXT)
    tables: list[Table] = []
    for split in dict.fromkeys(split for split, _ in listing.files):
        samples = sorted((name, label) for (where, label), names in listing.files.items() if where == split
                         for name in names)  # fmt: skip
        names, labels = zip(*samples, strict=True)
        tables.append(TextTable(root, split, names, labels))
    return FoundTables("text", tuple(tables), listing.empty_classes)
