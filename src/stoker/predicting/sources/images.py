"""Rows from image files: a row each, found in a folder and all below it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import final

import pyarrow as pa

from stoker.data.reading.folders import files_below
from stoker.data.reading.image_kinds import SUFFIXES
from stoker.predicting.rows import Field, Rows
from stoker.predicting.sources.base import Extent, cut_evenly
from stoker.records.prediction import PredictionPart, SourceFormat

IMAGE, PATH = "image", "path"
"""The columns of such a source: what is decoded, and the file's path below the folder."""


@final
class ImageSource:
    """An image file, or a folder; files in it are sorted by their paths."""

    format: SourceFormat = "images"

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _paths(self) -> tuple[Path, ...]:
        if self.path.is_file():
            return (self.path,)
        names = (name for name in files_below(self.path) if Path(name).suffix.lower() in SUFFIXES)
        return tuple(self.path / name for name in sorted(names))

    def files(self) -> Sequence[Path]:
        """The images."""
        return self._paths

    def fields(self) -> tuple[Field, ...]:
        """The image and its path."""
        return (Field(IMAGE, pa.string(), is_image=True), Field(PATH, pa.string()))

    def extent(self, part_rows: int) -> Extent:
        """A row for each image."""
        return cut_evenly(len(self._paths), part_rows)

    def open(self, columns: Sequence[str]) -> ImageReader:
        """Begin reading."""
        return ImageReader(self.path, self._paths, columns)


@final
class ImageReader:
    """Gives paths; who computes a part reads and decodes the files."""

    def __init__(self, root: Path, paths: Sequence[Path], columns: Sequence[str]) -> None:
        self._root = root
        self._paths = paths
        self._columns = tuple(columns)

    def read(self, part: PredictionPart) -> Rows:
        """The paths of a part."""
        paths = self._paths[part.first_row : part.first_row + part.num_rows]
        relative = [path.name if path == self._root else path.relative_to(self._root).as_posix() for path in paths]
        values = {IMAGE: [str(path) for path in paths], PATH: relative}
        columns = {name: values[name] for name in self._columns}
        return Rows(str(self._root), part.first_row, part.num_rows, columns, names=[str(path) for path in paths])

    def close(self) -> None:
        """Nothing is open."""
