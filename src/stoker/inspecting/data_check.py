"""The verb `stoker data check`: the faults of a data set as a document, a page, and a list of samples to leave out.

The kind of the data is found from file names and first bytes.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from stoker.data.reading.file_listing import SUFFIXES, files_below
from stoker.devices.cpu import usable_cpus
from stoker.errors import BadJob
from stoker.inspecting.findings import Checked, CheckOptions, Tell, class_findings, clean_list, in_order, split_of
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
from stoker.records import CleanList, dumps, to_json
from stoker.records.data_check import DataCheck, DataKind, Finding
from stoker.reporting.data_page import pictured, render_data_page
from stoker.store.files import make_directories, write_atomic

CHECK_FILE, CLEAN_FILE, PAGE_FILE = "check.json", "clean.json", "report.html"

_THUMBNAIL = 112
"""Longer side of a picture in the page [pixels]; small ones are enlarged by whole factors."""


@dataclass(frozen=True)
class CheckedData:
    """A check, and the samples it would leave out."""

    check: DataCheck
    clean: CleanList


def check_data(
    path: str | Path,
    options: CheckOptions | None = None,
    *,
    against: Sequence[str | Path] = (),
    out: str | Path | None = None,
    drop_suspects: bool = False,
    tell: Tell = lambda _what, _done, _total: None,
) -> CheckedData:
    """Find the faults of a data set, which is only read.

    Args:
        path: a folder of images or texts, a table, shards of WebDataset, IDX or NumPy files.
        options: what to look for.
        against: other data sets, whose samples must not be in this one.
        out: directory for `check.json`, `clean.json` and `report.html`; not within `path`.
        drop_suspects: leave suspects out as well.
        tell: called with the progress.

    Raises:
        BadJob: there is nothing to check, an option is invalid, `out` cannot be made, or no sample would be left.
        RunFailed: a process that decodes died.
    """
    options = options or CheckOptions()
    source, began = Path(path), time.monotonic()
    folder = None if out is None else Path(out)
    if folder is not None:  # before the check, which may take hours
        if source.is_dir() and folder.resolve().is_relative_to(source.resolve()):
            what = f"{folder} is within {source}"
            raise BadJob(what, remedy="Choose a directory elsewhere: the data are not touched.")
        try:
            make_directories(folder)
        except OSError as error:
            what = f"{folder} cannot be made: {error.strerror or error}"
            raise BadJob(what, remedy="Choose another directory.") from error
        if not folder.is_dir():
            raise BadJob(f"{folder} is a file", remedy="Choose a directory.")
    made_at = datetime.now(UTC).isoformat(timespec="seconds")
    workers = options.workers or len(usable_cpus())
    checked = check(source, list(map(Path, against)), options, workers=workers, tell=tell)
    document = DataCheck(
        source=str(path),
        kind=checked.kind,
        made_at=made_at,
        took_s=round(time.monotonic() - began, 3),
        against=tuple(map(str, against)),
        splits=checked.splits,
        columns=checked.columns,
        findings=checked.findings,
        notes=checked.notes,
        settings=to_json(options),
    )
    # Absolute, because the list is also used where training runs, in another working directory.
    clean = dataclasses.replace(
        clean_list(document, drop_suspects=drop_suspects), source=str(source.expanduser().absolute())
    )
    if folder is not None:  # the page first, the list that training uses last
        pictures = {name: picture for name in pictured(document) if (picture := _thumbnail(checked, name))}
        write_atomic(folder / PAGE_FILE, render_data_page(document, clean, pictures))
        write_atomic(folder / CHECK_FILE, dumps(document))
        write_atomic(folder / CLEAN_FILE, dumps(clean))
    return CheckedData(document, clean)


def _thumbnail(checked: Checked, name: str) -> str:
    """A picture as a data URI; empty for a sample without pixels."""
    image = checked.picture(name)
    if image is None:
        return ""
    if max(image.size) > _THUMBNAIL:
        image.thumbnail((_THUMBNAIL, _THUMBNAIL))
    content = io.BytesIO()
    if image.width * image.height <= 64 * 64:
        image.save(content, "PNG", optimize=True)
        return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    image.save(content, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{base64.b64encode(content.getvalue()).decode()}"


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
        for name, other in others
        if isinstance(other, FoundTables)
        for table in other.tables
    ]
    checked = check_tables(ours.kind, ours.tables, tables, options, tell)
    early = [*ours.findings, *class_findings((), ours.empty_classes)]
    return replace(checked, findings=in_order([*early, *checked.findings]))


_TABLES: dict[str, Callable[[Path, str, str], TableSource]] = {
    ".csv": CsvTable,
    ".tsv": CsvTable,
    ".jsonl": JsonlTable,
    ".ndjson": JsonlTable,
    ".parquet": ParquetTable,
    ".pq": ParquetTable,
}
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
            samples = sorted(
                (name, label) for (where, label), names in listing.files.items() if where == split for name in names
            )
            names, labels = zip(*samples, strict=True)
            tables.append(TextTable(root, split, names, labels))
        return FoundTables("text", tuple(tables), listing.empty_classes)
    kinds = ", ".join(suffix or "without ending" for suffix, _ in suffixes.most_common(5))
    raise BadJob(f"{root} holds nothing that is known{f': {kinds}' if kinds else ''}", remedy=_READABLE)
