"""Images as a model's input. The range of pixel values, which the signature lacks, must be given; it is not guessed."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from stoker.artifacts.dtypes import dtype_of
from stoker.data.reading.image_decoding import fitted, loaded, upright
from stoker.data.reading.pixel_scale import REMEDY, are_of_unit_pixels
from stoker.data.reading.table_readers import BadImage
from stoker.errors import BadJob
from stoker.predicting.column_mapping import ImageShape, Input
from stoker.predicting.row_source import RowSource
from stoker.records.prediction import PixelSettings, PredictionPart

_RANGE = re.compile(r"0\.\.(1|255)")


@dataclass(frozen=True)
class Pixels:
    """Pixels of 0 to 255 become (pixel / `divisor` − `mean`) / `std`, with one mean and std per channel or for all."""

    divisor: float
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


def parse_pixels(text: str, spec: Input) -> Pixels:
    """Parse `--pixels`: `0..255`, `0..1`, or `MEAN/STD` of pixels from 0 to 1, with commas between channels.

    An input of UINT8 takes pixels unchanged and needs none; other integers that can hold 0..255 take only that.

    Raises:
        BadJob: another form, one that the input's type cannot hold, a std that is not positive, or empty for an input
            of another type than UINT8.
    """
    remedy = "Say what the model was trained on: --pixels 0..255, --pixels 0..1, or --pixels MEAN/STD of 0 to 1."
    if not text:
        if spec.datatype == "UINT8":
            return Pixels(1.0)
        raise BadJob(f"The input {spec} does not tell what values pixels have", remedy=remedy)
    is_float = spec.datatype in ("FP16", "BF16", "FP32", "FP64")
    if not is_float and (text != "0..255" or spec.datatype in ("BOOL", "INT8")):
        raise BadJob(
            f"The input {spec} cannot hold the pixels of --pixels {text}",
            remedy="Integers take the bytes themselves: leave --pixels out for UINT8, write 0..255 for longer ones.",
        )
    if match := _RANGE.fullmatch(text):
        return Pixels(1.0 if match[1] == "255" else 255.0)
    mean, slash, std = text.partition("/")
    try:
        pixels = Pixels(255.0, tuple(map(float, mean.split(","))), tuple(map(float, std.split(","))))
    except ValueError:
        raise BadJob(f"--pixels {text} is not understood", remedy=remedy) from None
    channels = (1, spec.image.channels if spec.image else 1)
    is_possible = all(map(math.isfinite, (*pixels.mean, *pixels.std))) and min(pixels.std) > 0
    if not slash or not is_possible or not {len(pixels.mean), len(pixels.std)} <= set(channels):
        raise BadJob(f"--pixels {text} does not fit the input {spec}", remedy=remedy)
    if not are_of_unit_pixels(pixels.mean, pixels.std):
        raise BadJob(
            f"--pixels {text}: mean and deviation are applied to pixels from 0 to 1, and are not of these",
            remedy=REMEDY,
        )
    return pixels


def image_of(value: Any, spec: Input, shape: ImageShape, settings: PixelSettings, folder: Path) -> NDArray[Any]:
    """An image's numbers; `value` is its bytes, its path (from `folder`), or both in a mapping.

    Raises:
        ValueError: it is missing, cannot be decoded, or its size does not fit.
    """
    image = _opened(value, folder)
    height, width = shape.height or image.height, shape.width or image.width
    if not settings.resize and (image.width, image.height) != (width, height):
        raise ValueError(
            f"has {image.width} × {image.height} pixels, wanted {width} × {height} (--resize stretch, crop or pad)"
        )
    try:
        pixels_CHW: NDArray[Any] = fitted(image, shape.channels, (height, width), settings.resize or "stretch")
    except BadImage as error:
        raise ValueError(f"cannot be taken: {error}") from None
    scale = parse_pixels(settings.values, spec)
    if (scale.divisor, scale.mean, scale.std) != (1.0, (0.0,), (1.0,)):
        mean, std = (np.reshape(of_channels, (-1, 1, 1)) for of_channels in (scale.mean, scale.std))
        pixels_CHW = (pixels_CHW / scale.divisor - mean) / std
    values: NDArray[Any] = pixels_CHW.astype(dtype_of(spec.datatype))
    if not shape.has_channel_dim:
        return values.reshape(values.shape[1:])
    return np.ascontiguousarray(values.transpose(1, 2, 0)) if shape.channels_last else values


def _bytes_or_path(value: Any) -> Any:
    return (value.get("bytes") or value.get("path")) if isinstance(value, Mapping) else value


_ROWS_AT_ONCE = 1024


@final
class TableOfImages:
    """A table with the image files that some of its columns name: they are part of its content."""

    def __init__(self, table: RowSource, columns: Sequence[str]) -> None:
        self.path, self.format = table.path, table.format
        self.fields, self.extent, self.open = table.fields, table.extent, table.open
        self._columns = tuple(columns)

    @cached_property
    def _files(self) -> tuple[Path, ...]:
        extent, named = self.extent(_ROWS_AT_ONCE), dict[Path, None]()
        with closing(self.open(self._columns)) as reader:
            for number, offset in enumerate(extent.offsets):
                first = number * _ROWS_AT_ONCE
                num_rows = min(_ROWS_AT_ONCE, extent.num_rows - first)
                rows = reader.read(PredictionPart(source=0, first_row=first, num_rows=num_rows, offset=offset))
                for column in rows.columns.values():
                    values = column.to_pylist() if isinstance(column, pa.Array) else column
                    paths = (path for path in map(_bytes_or_path, values) if isinstance(path, str) and path)
                    named |= dict.fromkeys(self.path.parent / path for path in paths)
        return (self.path, *filter(os.path.isfile, named))

    def files(self) -> Sequence[Path]:
        """The table, and the images that are there."""
        return self._files


def _opened(value: Any, folder: Path) -> Image.Image:
    value = _bytes_or_path(value)
    if value is None or value in ("", b""):
        raise ValueError("is null")
    if not isinstance(value, str | bytes):
        kind = type(value).__name__
        raise ValueError(f"is a {kind}, wanted an image or its path")  # noqa: TRY004 - a bad row, like the others
    try:
        return upright(loaded(value if isinstance(value, bytes) else (folder / value).read_bytes()))
    except OSError as error:
        raise ValueError(f"cannot be read: {error.filename}: {error.strerror}") from None
    except BadImage as error:
        raise ValueError(f"cannot be decoded as an image: {error}") from None
