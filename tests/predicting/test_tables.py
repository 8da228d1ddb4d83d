from __future__ import annotations

import io
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.errors import BadJob
from stoker.predicting.batched_inference import RowOutputs
from stoker.predicting.prediction_output import encode, label_columns, schema_of, table_of
from stoker.predicting.row_source import SourceColumn, SourceRows
from stoker.records import Manifest, TensorSpec
from tests.predicting.builders import manifest

INPUT = TensorSpec(name="x", datatype="FP32", shape=("batch", 2))


def _manifest(name: str, shape: tuple[Any, ...], datatype: Any = "FP32", **changes: Any) -> Manifest:
    return manifest([INPUT], [TensorSpec(name=name, datatype=datatype, shape=("batch", *shape))], **changes)


def _table(found: Manifest, values: Any, keep: Any = None, names: Any = None) -> pa.Table:
    columns = {} if keep is None else {"id": keep}
    fields = [SourceColumn("id", keep.type if isinstance(keep, pa.Array) else None)] if columns else []
    rows = SourceRows("in.csv", 10, 3, columns, names=names)
    schema = schema_of(found, fields)
    return table_of(rows, RowOutputs([0, 2], {found.outputs[0].name: values}, {}), found, schema, list(columns))


def test_rows_keep_their_place_and_their_columns() -> None:
    """A bad row is left out, and what is copied goes with its own row."""
    table = _table(_manifest("y", ()), np.float32([1, 2]), pa.array(["a", "b", "c"]))
    assert table.to_pydict() == {"source": ["in.csv"] * 2, "row": [10, 12], "id": ["a", "c"], "y": [1, 2]}


def test_kept_json_is_text() -> None:
    """What may change its type from row to row has one in the output."""
    assert _table(_manifest("y", ()), np.float32([1, 2]), ["a", None, {"b": 1}])["id"].to_pylist() == ["a", '{"b": 1}']


def test_each_image_is_its_own_source() -> None:
    """Rows of a folder of images are row 0 of their files."""
    table = _table(_manifest("y", ()), np.float32([1, 2]), names=["a.png", "b.png", "c.png"])
    assert (table["source"].to_pylist(), table["row"].to_pylist()) == (["a.png", "c.png"], [0, 0])


def test_names_and_text_that_are_no_utf8_are_written_in_escapes() -> None:
    """A Latin-1 file name, as in job.json, and half an emoji in a kept text; inside of kept JSON as JSON writes it."""
    odd, kept = "caf\udce9", ["\ud83d", None, {"b": "\ud83d"}]
    table = _table(_manifest("y", ()), np.float32([1, 2]), kept, names=[odd, "b", "c"])
    assert table["source"].to_pylist() == ["caf\\xe9", "c"]
    assert table["id"].to_pylist() == ["\\ud83d", '{"b": "\\ud83d"}']
    assert _table(_manifest("y", ()), np.float32([1, 2]), [odd] * 3)["id"].to_pylist() == ["caf\\xe9"] * 2
    rows = SourceRows(odd, 0, 1, {})
    found = _manifest("y", ())
    alone = table_of(rows, RowOutputs([0], {"y": np.float32([1])}, {}), found, schema_of(found, []), [])
    assert alone["source"].to_pylist() == ["caf\\xe9"]


@pytest.mark.parametrize(
    ("shape", "values", "kind"),
    [
        ((3,), np.float32([[1, 2, 3], [4, 5, 6]]), pa.list_(pa.float32(), 3)),
        ((2, 1), np.float32([[[1], [2]], [[3], [4]]]), pa.list_(pa.list_(pa.float32(), 1), 2)),
        (("tokens",), [np.float32([1]), np.float32([2, 3])], pa.list_(pa.float32())),
        (("tokens", 2), [np.float32([[1, 2]]), np.float32([])], pa.list_(pa.list_(pa.float32(), 2))),
    ],
    ids=["vector", "matrix", "varying", "varying rows"],
)
def test_shapes_are_lists(shape: tuple[Any, ...], values: Any, kind: pa.DataType) -> None:
    """Fixed dimensions are lists of a fixed size, others lists of any; read back they are what they were."""
    table = _table(_manifest("y", shape), values)
    again = pq.read_table(io.BytesIO(encode(table, {})))
    assert again.schema.field("y").type == kind
    assert again["y"].to_pylist() == [value.tolist() for value in values]


def test_types_that_parquet_lacks_are_widened() -> None:
    """BF16 becomes FP32, exactly; FP16 stays; strings are bytes."""
    values = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    assert _table(_manifest("y", (), "BF16"), values).schema.field("y").type == pa.float32()
    assert _table(_manifest("y", (), "BF16"), values)["y"].to_pylist() == [1.5, -2.0]
    assert _table(_manifest("y", (), "FP16"), np.float16([1.5, 2])).schema.field("y").type == pa.float16()
    assert _table(_manifest("y", (), "BYTES"), np.array([b"a", b"\xff"], object))["y"].to_pylist() == [b"a", b"\xff"]


def test_the_label_is_the_largest_elements() -> None:
    """One output with names gives `label`, unless the user keeps a column of that name; other outputs have none."""
    found = _manifest("y", (2,), labels={"y": ("cat", "dog"), "z": ("a",)})
    assert label_columns(found, []) == {"y": "label"}
    assert label_columns(found, ["label"]) == {"y": "y_label"}
    assert _table(found, np.float32([[1, 2], [4, 3]]))["label"].to_pylist() == ["dog", "cat"]
    taken = _manifest("label", (2,), labels={"label": ("cat", "dog")})
    assert _table(taken, np.float32([[1, 2], [4, 3]]))["label_label"].to_pylist() == ["dog", "cat"]
    assert label_columns(_manifest("y", (3,), labels={"y": ("cat", "dog")}), []) == {}


def test_a_row_whose_outputs_are_nan_has_no_label() -> None:
    """NaN would count as the largest."""
    found = _manifest("y", (2,), labels={"y": ("cat", "dog")})
    assert _table(found, np.float32([[1, np.nan], [4, 3]]))["label"].to_pylist() == [None, "cat"]


def test_no_rows_are_an_empty_table() -> None:
    """A part whose rows are all bad is there all the same, with the columns of the others."""
    found = _manifest("y", (2,), labels={"y": ("cat", "dog")})
    empty = RowOutputs([], {"y": np.empty((0, 2), np.float32)}, {})
    table = table_of(SourceRows("in", 0, 0, {}), empty, found, schema_of(found, []), [])
    assert len(table) == 0
    assert table.schema == _table(found, np.float32([[1, 2], [4, 3]])).schema


def test_two_columns_of_one_name_are_refused() -> None:
    """A kept column may not be called like an output."""
    with pytest.raises(BadJob, match="two columns 'y'"):
        schema_of(_manifest("y", ()), [SourceColumn("y", pa.int64())])


def test_the_same_table_is_the_same_bytes() -> None:
    """Files of one part can be compared byte by byte."""
    table = _table(_manifest("y", ()), np.float32([1, 2]))
    assert encode(table, {"a": "b"}) == encode(table, {"a": "b"})
    assert pq.read_metadata(io.BytesIO(encode(table, {"a": "b"}))).metadata[b"a"] == b"b"
