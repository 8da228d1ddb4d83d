"""Answers as a Parquet file: where each row came from, the columns kept, every output, and labels."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stoker.artifacts.elements import dtype_of
from stoker.errors import BadJob
from stoker.predicting.answering import Answers, Values
from stoker.predicting.inputs import sample_shape
from stoker.predicting.rows import Column, Field, Rows
from stoker.records import Datatype, Manifest

SOURCE, ROW, LABEL = "source", "row", "label"
"""Columns of every table: the file, the row in it (from 0); and the class that was found."""


def schema_of(manifest: Manifest, kept: Sequence[Field]) -> pa.Schema:
    """The columns of the output; kept ones of JSON are strings, since each row may hold another type.

    Raises:
        BadJob: two of them would have one name.
    """
    fields = [pa.field(SOURCE, pa.string()), pa.field(ROW, pa.int64())]
    fields += [pa.field(field.name, field.type or pa.string()) for field in kept]
    for spec in manifest.outputs:
        fields.append(pa.field(spec.name, _type_of(spec.datatype, sample_shape(spec, manifest))))
    fields += [pa.field(column, pa.string()) for column in label_columns(manifest, [one.name for one in kept]).values()]
    names = [field.name for field in fields]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadJob(
            f"The output would have two columns {twice[0]!r}",
            remedy=f"Leave it out of --keep; {SOURCE}, {ROW}, the outputs and their labels are always there.",
        )
    return pa.schema(fields)


def label_columns(manifest: Manifest, kept: Sequence[str]) -> dict[str, str]:
    """The outputs whose largest element names a class, and the column with its name.

    That is `label` where there is one such output and no other column is called so, else `OUTPUT_label`.
    """
    outputs = {spec.name: sample_shape(spec, manifest) for spec in manifest.outputs}
    labelled = [name for name, labels in manifest.labels.items() if outputs.get(name) == (len(labels),)]
    is_plain = len(labelled) == 1 and LABEL not in {*outputs, *kept}
    return {name: LABEL if is_plain else f"{name}_label" for name in labelled}


def table_of(rows: Rows, answers: Answers, manifest: Manifest, schema: pa.Schema, keep: Sequence[str]) -> pa.Table:
    """The table of a part, without its bad rows."""
    arrays = dict(zip((SOURCE, ROW), _origins(rows, answers.rows), strict=True))
    for name in keep:
        arrays[name] = _kept(rows.columns[name], answers.rows, schema.field(name).type)
    for name, outputs in answers.outputs.items():
        arrays[name] = _output(outputs, schema.field(name).type)
    for name, column in label_columns(manifest, keep).items():
        arrays[column] = _labels(np.asarray(answers.outputs[name]), manifest.labels[name])
    return pa.Table.from_arrays([arrays[field.name] for field in schema], schema=schema)


def encode(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The table as a Parquet file; the same bytes for the same table and version of the library."""
    buffer = io.BytesIO()
    pq.write_table(table.replace_schema_metadata(dict(metadata)), buffer, compression="zstd")
    return buffer.getvalue()


def _type_of(datatype: Datatype, shape: Sequence[int | str]) -> pa.DataType:
    """Vectors are lists of fixed size, dimensions that vary are lists; BF16, which Parquet has not, becomes FP32."""
    if datatype == "BYTES":
        kind = pa.binary()
    else:
        kind = pa.float32() if datatype == "BF16" else pa.from_numpy_dtype(dtype_of(datatype))
    for size in reversed(shape):
        kind = pa.list_(kind, size) if isinstance(size, int) else pa.list_(kind)
    return kind


def _origins(rows: Rows, chosen: Sequence[int]) -> tuple[pa.Array, pa.Array]:
    """The file of each of these rows, and its number there; see `Rows.origin`."""
    if rows.names is not None:
        return pa.array([rows.names[row] for row in chosen], pa.string()), pa.array([0] * len(chosen), pa.int64())
    numbers = rows.first_row + np.asarray(chosen, np.int64)
    return pa.repeat(pa.scalar(rows.source, pa.string()), len(chosen)), pa.array(numbers)


def _output(values: Values, kind: pa.DataType) -> pa.Array:
    """An output of all rows as a column."""
    if isinstance(values, list):
        return pa.array([_storable(one).tolist() for one in values], kind)
    column = pa.array(_storable(values).reshape(-1))
    levels = []
    while pa.types.is_fixed_size_list(kind):
        levels.append(kind.list_size)
        kind = kind.value_type
    for size in reversed(levels):
        column = pa.FixedSizeListArray.from_arrays(column, size)
    return column


def _labels(values: NDArray[Any], labels: Sequence[str]) -> pa.Array:
    """The class with the largest output of each row; null where one of them is NaN, which nothing is larger than."""
    by_row = _storable(values).reshape(-1, len(labels))
    is_told = ~np.isnan(by_row).any(axis=1) if by_row.dtype.kind == "f" else np.ones(len(by_row), np.bool_)
    pairs = zip(by_row.argmax(axis=1).tolist(), is_told.tolist(), strict=True)
    return pa.array([labels[index] if told else None for index, told in pairs], pa.string())


def _storable(values: NDArray[Any]) -> NDArray[Any]:
    return values.astype(np.float32) if values.dtype == dtype_of("BF16") else values


def _kept(column: Column, rows: Sequence[int], kind: pa.DataType) -> pa.Array:
    """A column that is copied, at these rows."""
    if isinstance(column, pa.Array):
        return column.take(pa.array(rows, pa.int64())).cast(kind)
    return pa.array([_as_text(column[row]) for row in rows], kind)


def _as_text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
