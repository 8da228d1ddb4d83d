"""Conversion of rows to a model's inputs: every input of every row, or why the row is bad.

A number that the input's element type cannot represent makes the row bad; it is never changed to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from stoker.artifacts.dtypes import dtype_of
from stoker.data.reading.table_readers import NOT_A_NUMBER, words_of
from stoker.predicting.column_mapping import Columns, Input
from stoker.predicting.image_inputs import image_of
from stoker.predicting.row_source import Column, SourceRows
from stoker.records import Datatype, InputColumn
from stoker.records.codec import parsed
from stoker.records.prediction import PixelSettings


@dataclass(frozen=True)
class Filled:
    """Inputs of some rows, and the bad ones among them: the column and the reason."""

    inputs: Mapping[str, InputSamples]
    bad: dict[int, tuple[str, str]] = field(default_factory=dict)

    def sizes(self, row: int, inputs: Sequence[Input]) -> dict[str, int]:
        """The sizes of the varying dimensions, by name."""
        return {
            dim: size
            for spec in inputs
            for dim, size in zip(spec.shape, self.inputs[spec.name][row].shape, strict=True)
            if isinstance(dim, str)
        }


def fill(
    rows: SourceRows, inputs: Sequence[Input], columns: Columns, pixels: PixelSettings, *, allow_nan: bool
) -> Filled:
    """The inputs of all rows."""
    bad = {row: ("", reason) for row, reason in rows.broken.items()}
    filled: dict[str, InputSamples] = {}
    for spec in inputs:
        names = columns[spec.name]
        values = [rows.columns[name] for name in names]
        if len(names) > 1 or spec.by_column(names):
            samples = elements(values, names, spec, allow_nan=allow_nan)
        elif (
            (shape := spec.image) is not None
            and spec.datatype != "BYTES"
            and not (isinstance(values[0], pa.Array) and _is_list(values[0].type))
        ):
            folder = Path() if rows.names is not None else Path(rows.source).parent
            image = partial(image_of, spec=spec, shape=shape, settings=pixels, folder=folder)
            plain = partial(of_value, spec=spec, allow_nan=allow_nan)
            objects = values[0].to_pylist() if isinstance(values[0], pa.Array) else values[0]
            samples = collected(objects, spec, partial(_either, image=image, plain=plain))
        else:
            samples = numbers(values[0], spec, allow_nan=allow_nan)
        filled[spec.name] = samples
        for row, reason in samples.bad.items():
            bad.setdefault(row, (", ".join(names) if len(names) == 1 else "", reason))
    varying = [spec for spec in inputs if spec.count is None]
    if len(varying) > 1:  # dimensions of one name must have one size in a row
        for row in set(range(rows.num_rows)) - set(bad):
            sizes: dict[str, int] = {}
            for spec in varying:
                for dim, size in zip(spec.shape, filled[spec.name][row].shape, strict=True):
                    if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                        bad[row] = (spec.name, f"has {size} {dim}, another input of the row has {sizes[dim]}")
    return Filled(filled, bad)


def _either(value: Any, image: Callable[[Any], NDArray[Any]], plain: Callable[[Any], NDArray[Any]]) -> NDArray[Any]:
    """The numbers of an image, or of a list, also one written as text; decided for each value."""
    is_list = isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith("["))
    return plain(value) if is_list else image(value)


@dataclass
class InputSamples:
    """One array per row (one [rows, …] if all have one shape), and why rows are bad; these have zeros."""

    values: NDArray[Any] | list[NDArray[Any]]
    bad: dict[int, str] = field(default_factory=dict)

    def __getitem__(self, row: int) -> NDArray[Any]:
        values = self.values
        return values[row] if isinstance(values, list) else values[row, ...]


def numbers(column: Column, spec: Input, *, allow_nan: bool) -> InputSamples:
    """A row's numbers from each value: a number, a list in row-major order, or nested lists of the input's shape.

    With `allow_nan` a single number that is missing (null, an empty cell, `NA`) is NaN: tables store NaN so.
    """
    if allow_nan and spec.count == 1 and dtype_of(spec.datatype).kind not in "iubO":
        column = _with_missing(column, math.nan)
    if isinstance(column, pa.Array):
        flat = _flat(column)
        if flat is None:
            return numbers(column.to_pylist(), spec, allow_nan=allow_nan)
        return _from_flat(flat, len(column), spec, allow_nan=allow_nan)
    is_text = set(map(type, column)) - {type(None)} == {str}  # as in CSV; JSON may mix numbers and texts
    if spec.count == 1 and spec.datatype != "BYTES" and is_text:  # converted all at once, else one by one
        kind = dtype_of(spec.datatype).kind
        bad = {row: "is empty" for row, text in enumerate(column) if text is None or not text.strip()}
        texts = ["0" if row in bad else text for row, text in enumerate(column)]
        try:
            if any("_" in text for text in texts):  # Python's own 1_000, which training does not accept
                raise ValueError
            values = np.array(texts).astype(np.int64 if kind in "iu" else np.float64)
        except (ValueError, OverflowError):
            values = np.zeros(len(texts), object if kind in "iu" else np.float64)
            for row, text in enumerate(texts):
                try:
                    values[row] = _number(text, is_whole=kind in "iu")
                except ValueError:
                    bad[row] = f"is {text[:40]!r}, which is no number"
        if values.dtype == object:
            found = collected(values.tolist(), spec, lambda value: of_value(value, spec, allow_nan=allow_nan))
            return InputSamples(found.values, found.bad | bad)
        result, refused = cast(values, spec.datatype, allow_nan=allow_nan)
        for row in np.flatnonzero(refused).tolist():
            bad.setdefault(row, why_refused(values[row], spec.datatype))
        return InputSamples(result.reshape(len(values), *spec.shape), bad)
    return collected(column, spec, lambda value: of_value(value, spec, allow_nan=allow_nan))


def _with_missing(column: Column, number: float) -> Column:
    """The column with `number` where one is missing; columns of lists as they are."""
    if isinstance(column, pa.Array):
        is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
        if not is_number:
            return column
        if pa.types.is_floating(column.type) and not math.isnan(number):  # pandas stores missing numbers as NaN
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
        if not column.null_count:
            return column
        return pc.fill_null(column.cast(pa.float64(), safe=False), number)  # large whole numbers are rounded
    # A column of texts stays one, and is converted all at once; a text among numbers has to be JSON.
    filled: float | str = (
        repr(float(number)) if all(isinstance(value, str) for value in column if value is not None) else number
    )
    missing = ("", *NOT_A_NUMBER)
    return [
        filled if value is None or (isinstance(value, str) and value.strip() in missing) else value for value in column
    ]


def elements(columns: Sequence[Column], names: Sequence[str], spec: Input, *, allow_nan: bool) -> InputSamples:
    """A row's numbers from one column for each element."""
    scalar = replace(spec, shape=())
    trained = spec.by_column(names) or (InputColumn(name=""),) * len(names)
    parts = [_element(column, one, scalar, allow_nan=allow_nan) for column, one in zip(columns, trained, strict=True)]
    bad: dict[int, str] = {}
    for name, part in zip(names, parts, strict=True):
        for row, reason in part.bad.items():
            bad.setdefault(row, reason if len(names) == 1 else f"{name} {reason}")
    stacked = np.stack([np.asarray(part.values) for part in parts], axis=1)
    return InputSamples(stacked.reshape(len(stacked), *spec.shape), bad)


def _element(column: Column, trained: InputColumn, spec: Input, *, allow_nan: bool) -> InputSamples:
    """A row's number from the value of a column, read as in training."""
    if trained.words:
        return _numbers_of_words(_texts(column), trained, dtype_of(spec.datatype))
    if trained.missing is not None:
        column = _with_missing(column, trained.missing)
    return numbers(column, spec, allow_nan=allow_nan)


def _numbers_of_words(texts: Sequence[str | None], trained: InputColumn, dtype: np.dtype[Any]) -> InputSamples:
    """A number for each row, looked up once for each different word."""
    numbers: dict[str | None, int] = {}
    reasons: dict[str | None, str] = {}
    for text in dict.fromkeys(texts):
        try:
            numbers[text] = trained.number_of(text)
        except ValueError as error:
            numbers[text], reasons[text] = 0, str(error)
    values = np.fromiter(map(numbers.__getitem__, texts), dtype, len(texts))
    bad = {row: reasons[text] for row, text in enumerate(texts) if text in reasons} if reasons else {}
    return InputSamples(values, bad)


def _texts(column: Column) -> list[str | None]:
    """The values of a category as text, as tables have them in training."""
    if not isinstance(column, pa.Array):
        if all(value is None or isinstance(value, str) for value in column):
            return column
        try:
            column = pa.array(column)
        except (pa.ArrowException, OverflowError, UnicodeError):
            return [value if value is None else str(value) for value in column]
    texts: list[str | None] = words_of(column).to_pylist()
    return texts


def collected(values: Sequence[Any], spec: Input, make: Callable[[Any], NDArray[Any]]) -> InputSamples:
    """Samples made one by one; `make` raises ValueError with the fault of a value."""
    arrays: list[NDArray[Any]] = []
    bad: dict[int, str] = {}
    blank = np.zeros(tuple(size if isinstance(size, int) else 0 for size in spec.shape), dtype_of(spec.datatype))
    for row, value in enumerate(values):
        try:
            arrays.append(make(value))
        except ValueError as error:
            bad[row] = str(error)
            arrays.append(blank)
    return InputSamples(arrays if spec.count is None or not arrays else np.stack(arrays), bad)


def shaped(flat: NDArray[Any], spec: Input) -> NDArray[Any]:
    """Elements of one row, flat or of the input's number of dimensions, in the input's shape.

    Raises:
        ValueError: they are too few or too many.
    """
    if flat.ndim > 1:
        if len(flat.shape) != len(spec.shape):
            raise ValueError(f"has {flat.ndim} levels of lists, wanted {len(spec.shape)}")
        shape = flat.shape
    else:
        rest = math.prod(known for known in spec.shape if isinstance(known, int))
        unknown = sum(isinstance(known, str) for known in spec.shape)
        if unknown == 0 and flat.size != rest:
            raise ValueError(f"has {flat.size} numbers, wanted {rest}")
        if unknown > 1:
            raise ValueError(f"is a flat list, wanted lists in lists of shape {list(spec.shape)}")
        if unknown and (rest == 0 or flat.size % rest):
            raise ValueError(f"has {flat.size} numbers, wanted a multiple of {rest}")
        shape = tuple(known if isinstance(known, int) else flat.size // rest for known in spec.shape)
    for size, expected in zip(shape, spec.shape, strict=True):
        if isinstance(expected, int) and size != expected:
            raise ValueError(f"has the shape {list(shape)}, wanted {list(spec.shape)}")
    for dim in spec.dims:
        size = shape[spec.shape.index(dim.name)]
        if size < dim.low or (dim.high is not None and size > dim.high):
            raise ValueError(f"has {size} {dim.name}, the model takes {dim.low} to {dim.high or 'any number'}")
    return flat.reshape(shape)


def of_value(value: Any, spec: Input, *, allow_nan: bool) -> NDArray[Any]:
    """The numbers, or strings, of one Python value."""
    if value is None:
        raise ValueError("is null")
    if spec.datatype == "BYTES":
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str | bytes) for text in values):
            raise ValueError("holds something that is no string")
        strings = np.empty(len(values), object)
        strings[:] = [text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text for text in values]
        return shaped(strings, spec)
    if isinstance(value, str):
        try:  # a cell of CSV with several numbers: a JSON array
            value = parsed(value)
        except ValueError:
            shown = value if len(value) < 40 else f"{value[:39]}…"
            raise ValueError(f"is {shown!r}, which is no number and no JSON array") from None
    try:
        array = np.asarray(value)
    except ValueError:
        raise ValueError("has lists of several lengths in one list") from None
    if array.dtype.kind not in "biuf":
        is_empty = value == [] or (isinstance(value, list) and None in value)
        raise ValueError("is empty or null" if is_empty else "holds something that is no number")
    result, refused = cast(array, spec.datatype, allow_nan=allow_nan)
    if refused.any():
        index = int(np.argmax(refused.reshape(-1)))
        raise ValueError(_refusal(array.reshape(-1)[index], index, array.size, spec))
    return shaped(result, spec)


def _refusal(value: Any, index: int, count: int, spec: Input) -> str:
    reason = why_refused(value, spec.datatype)
    return reason if count == 1 else f"element {index} {reason}"


def _number(text: str, *, is_whole: bool) -> float | int:
    if "_" in text:
        raise ValueError(text)
    try:
        return int(text) if is_whole else float(text)
    except ValueError:
        return float(text)


@dataclass(frozen=True)
class _Flat:
    """The elements of all rows that are not null, one after the other; their number in each row, and null ones.

    `inner` are the sizes of the lists within a row's list.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int64]
    rows: NDArray[np.int64]
    nulls: NDArray[np.bool_] | None
    inner: tuple[int, ...]


def _flat(column: pa.Array) -> _Flat | None:
    """A column of numbers or of lists of them; None if lists hold lists of several lengths, or no numbers."""
    rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False))
    present = column.drop_null()
    lengths = np.ones(len(present), np.int64)
    if _is_list(present.type):
        lengths = pc.list_value_length(present).to_numpy(zero_copy_only=False).astype(np.int64)
        present = present.flatten()
    inner: tuple[int, ...] = ()
    while _is_list(present.type):
        if not pa.types.is_fixed_size_list(present.type) or present.null_count or not present.type.list_size:
            return None
        inner, present = (*inner, present.type.list_size), present.flatten()
    if not (
        pa.types.is_integer(present.type) or pa.types.is_floating(present.type) or pa.types.is_boolean(present.type)
    ):
        return None
    nulls = present.is_null().to_numpy(zero_copy_only=False) if present.null_count else None
    values = (present.fill_null(0) if present.null_count else present).to_numpy(zero_copy_only=False)
    return _Flat(values, lengths * math.prod(inner), rows, nulls, inner)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _from_flat(flat: _Flat, num_rows: int, spec: Input, *, allow_nan: bool) -> InputSamples:
    bad = dict.fromkeys(sorted(set(range(num_rows)) - set(flat.rows.tolist())), "is null")
    values, refused = cast(flat.values, spec.datatype, allow_nan=allow_nan)
    starts = np.concatenate([[0], np.cumsum(flat.lengths)])
    for position in np.flatnonzero(refused if flat.nulls is None else refused | flat.nulls)[::-1]:
        index = int(np.searchsorted(starts, position, side="right")) - 1
        is_null = flat.nulls is not None and bool(flat.nulls[position])
        element = int(position - starts[index])
        bad[int(flat.rows[index])] = (
            f"element {element} is null"
            if is_null
            else _refusal(flat.values[position], element, int(flat.lengths[index]), spec)
        )
    has_shape = spec.count is not None and flat.inner in ((), spec.shape[1:])
    if not bad and has_shape and bool((flat.lengths == spec.count).all()):
        return InputSamples(values.reshape(num_rows, *spec.shape))
    pieces: list[Any] = [None] * num_rows
    for index, row in enumerate(flat.rows.tolist()):
        piece = values[starts[index] : starts[index + 1]]
        pieces[row] = piece.reshape(-1, *flat.inner) if flat.inner else piece
    found = collected(
        [None if row in bad else piece for row, piece in enumerate(pieces)], spec, lambda piece: _piece(piece, spec)
    )
    return InputSamples(found.values, found.bad | bad)


def _piece(piece: NDArray[Any] | None, spec: Input) -> NDArray[Any]:
    if piece is None:
        raise ValueError("is null")
    return shaped(piece, spec)


def cast(values: NDArray[Any], datatype: Datatype, *, allow_nan: bool) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """The values as `datatype`, and which of them it cannot represent (these become 0).

    Rounding to a shorter float is accepted; a fraction or too large a number for an integer is refused, as are NaN and
    infinities unless allowed.
    """
    dtype = dtype_of(datatype)
    if datatype == "BOOL":
        refused = ~((values == 0) | (values == 1))
    elif dtype.kind in "iu":
        refused = _no_integer(values, np.iinfo(dtype))
    else:
        with np.errstate(over="ignore"):
            result = values.astype(dtype)
        is_finite = np.isfinite(values)
        refused = is_finite & ~np.isfinite(result)
        if not allow_nan:
            refused |= ~is_finite
        if refused.any():
            result[refused] = 0
        return result, refused
    return np.where(refused, 0, values).astype(dtype), refused


def why_refused(value: Any, datatype: Datatype) -> str:
    """Why `cast` refused a value, as text."""
    dtype = dtype_of(datatype)
    number = float(value)
    if not np.isfinite(number):
        return f"is {number}"
    if dtype.kind in "iu" and number != int(number):
        return f"is {value}, which is no whole number ({datatype})"
    return f"is {value}, which {datatype} cannot hold"


def _no_integer(values: NDArray[Any], limits: np.iinfo[Any]) -> NDArray[np.bool_]:
    if values.dtype.kind == "b":
        return np.zeros(values.shape, np.bool_)
    if values.dtype.kind == "f":  # 2**63 is the nearest float to the largest int64, and not an int64 itself
        values = values.astype(np.float64)
        inside = (values >= float(limits.min)) & (values < float(limits.max) + (1.0 if limits.bits < 64 else 0.0))
        return np.asarray(~(inside & (np.floor(values) == values)))
    low, high = np.iinfo(values.dtype).min, np.iinfo(values.dtype).max
    refused = np.zeros(values.shape, np.bool_)
    if limits.min > low:
        refused |= values < limits.min
    if limits.max < high:
        refused |= values > limits.max
    return refused
