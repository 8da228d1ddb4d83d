"""What a user names: files, folders and patterns, and the sources they mean."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from glob import glob, has_magic
from pathlib import Path

from stoker.data.reading.image_kinds import SUFFIXES
from stoker.errors import BadJob
from stoker.predicting.sources.arrays import ArraySource
from stoker.predicting.sources.base import Source
from stoker.predicting.sources.images import ImageSource
from stoker.predicting.sources.parquet import ParquetSource
from stoker.predicting.sources.text import CsvSource, JsonlSource

_MAKERS: dict[str, Callable[[Path], Source]] = {
    ".parquet": ParquetSource,
    ".pq": ParquetSource,
    ".csv": CsvSource,
    ".tsv": lambda path: CsvSource(path, delimiter="\t"),
    ".jsonl": JsonlSource,
    ".ndjson": JsonlSource,
    ".npy": ArraySource,
    ".npz": ArraySource,
    **dict.fromkeys(SUFFIXES, ImageSource),
}
_READABLE = "Parquet, CSV, TSV, JSONL, NPY, NPZ, images, or a folder of files of one of these kinds"


def find_sources(names: Sequence[str]) -> tuple[Source, ...]:
    """The sources behind names of files, folders and patterns (`data/*.parquet`), in the order given.

    A folder is its files with rows, sorted by name, or all images in and below it.

    Raises:
        BadJob: something is not there, of an unknown kind, given twice, or a folder holds nothing or several kinds.
    """
    found = [source for name in names for source in _expanded(name)]
    paths = [source.path.resolve() for source in found]
    if twice := next((path for path, times in Counter(paths).items() if times > 1), None):
        raise BadJob(f"{twice} is given twice", remedy="Name each file once.")
    for source in found:
        _check_readable(source)
    return tuple(found)


def _expanded(name: str) -> list[Source]:
    path = Path(name)
    if not path.exists() and has_magic(name):
        matches = sorted(glob(name, recursive=True))  # noqa: PTH207 - the pattern may be absolute
        if not matches:
            raise BadJob(f"No file matches {name}")
        return [source for match in matches for source in _expanded(match)]
    if path.is_dir():
        return _in_folder(path)
    if not path.exists():
        raise BadJob(f"{name} is not there", remedy=f"Give {_READABLE}.")
    return [_source_of(path)]


def _source_of(path: Path) -> Source:
    make = _MAKERS.get(path.suffix.lower())
    if make is None:
        raise BadJob(f"{path} is of a kind that cannot be read ({path.suffix or 'no suffix'})", remedy=_READABLE)
    return make(path)


def _in_folder(folder: Path) -> list[Source]:
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.suffix.lower() in _MAKERS)
    tables = [path for path in files if path.suffix.lower() not in SUFFIXES]
    images = ImageSource(folder)
    suffixes = sorted({path.suffix.lower() for path in tables})
    if len(suffixes) > 1 or (suffixes and len(files) > len(tables)):
        kinds = ", ".join(sorted({path.suffix.lower() for path in files}))
        raise BadJob(f"{folder} holds files of several kinds: {kinds}", remedy=f"Name one kind: {folder}/*{kinds[:4]}")
    if tables:
        return [_source_of(path) for path in tables]
    if not images.files():
        raise BadJob(f"{folder} holds nothing that can be read", remedy=f"Give {_READABLE}.")
    return [images]


def _check_readable(source: Source) -> None:
    for path in source.files():
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise BadJob(
                f"{path} cannot be read: {error.strerror}", remedy="Check that this user may read it."
            ) from error
