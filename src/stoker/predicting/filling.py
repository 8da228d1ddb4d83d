"""From rows to the inputs of a model: every input of every row, or why the row is bad."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from numpy.typing import NDArray

from stoker.predicting.inputs import Input
from stoker.predicting.mapping import Columns
from stoker.predicting.pixels import image_of
from stoker.predicting.rows import Column, Rows
from stoker.predicting.samples import Samples, collected, elements, numbers, of_value
from stoker.records.prediction import PixelSettings


@dataclass(frozen=True)
class Filled:
    """Inputs of some rows, and the bad ones among them: the column and the reason."""

    inputs: Mapping[str, Samples]
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)

    def sizes(self, row: int, inputs: Sequence[Input]) -> dict[str, int]:
        """The sizes of the dimensions that vary, by name."""
        return {
            dim: size
            for one in inputs
            for dim, size in zip(one.shape, self.inputs[one.name][row].shape, strict=True)
            if isinstance(dim, str)
        }


def fill(rows: Rows, inputs: Sequence[Input], columns: Columns, pixels: PixelSettings, *, allow_nan: bool) -> Filled:
    """The inputs of all rows."""
    bad = {row: ("", reason) for row, reason in rows.broken.items()}
    filled: dict[str, Samples] = {}
    for one in inputs:
        names = columns[one.name]
        values = [rows.columns[name] for name in names]
        if len(names) > 1:
            samples = elements(values, names, one, allow_nan=allow_nan)
        elif (shape := one.image) is not None and one.datatype != "BYTES" and _may_hold_images(values[0]):
            folder = Path() if rows.names is not None else Path(rows.source).parent
            image = partial(image_of, one=one, shape=shape, settings=pixels, folder=folder)
            plain = partial(of_value, one=one, allow_nan=allow_nan)
            samples = collected(_objects(values[0]), one, partial(_either, image=image, plain=plain))
        else:
            samples = numbers(values[0], one, allow_nan=allow_nan)
        filled[one.name] = samples
        for row, reason in samples.bad.items():
            bad.setdefault(row, (", ".join(names) if len(names) == 1 else "", reason))
    found = Filled(filled, bad)
    _check_sizes(found, rows.num_rows, inputs)
    return found


def _check_sizes(filled: Filled, num_rows: int, inputs: Sequence[Input]) -> None:
    """Dimensions of one name have one size in a row."""
    shared = [one for one in inputs if one.count is None]
    if len(shared) < 2:
        return
    for row in range(num_rows):
        if row in filled.bad:
            continue
        sizes: dict[str, int] = {}
        for one in shared:
            for dim, size in zip(one.shape, filled.inputs[one.name][row].shape, strict=True):
                if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                    filled.bad[row] = (one.name, f"has {size} {dim}, another input of the row has {sizes[dim]}")


def _may_hold_images(column: Column) -> bool:
    """Whether values may be images or their paths: all of them by a column's type, or each by itself."""
    if isinstance(column, pa.Array):
        kind = column.type
        return not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))
    return True


def _either(value: Any, image: Callable[[Any], NDArray[Any]], plain: Callable[[Any], NDArray[Any]]) -> NDArray[Any]:
    """An image's numbers, or those of a list, also one that is written out; one bad value does not speak for others."""
    is_list = isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))
    return plain(value) if is_list else image(value)


def _objects(column: Column) -> list[Any]:
    return list(column.to_pylist() if isinstance(column, pa.Array) else column)
