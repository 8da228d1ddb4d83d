"""Small files of rows, models that need no library, and jobs over them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pyarrow as pa
import pyarrow.parquet as pq
from onnx import TensorProto, helper

from stoker.artifacts.dtypes import Arrays
from stoker.errors import ServiceError
from stoker.exporting import import_onnx
from stoker.predicting.batched_inference import PredictionModel
from stoker.predicting.column_mapping import Input, inputs_of
from stoker.predicting.job_identity import RequestedSettings
from stoker.records import ArtifactSource, DynamicDim, Manifest, TensorSpec, Tolerance
from stoker.records.prediction import PixelSettings, PredictionPart

ASKED = RequestedSettings(
    model="m",
    version=1,
    model_digest="0" * 64,
    columns={"x": ("a",)},
    keep=(),
    pixels=PixelSettings(),
    allow_nan=False,
    batch_rows=None,
    part_rows=None,
    threads=None,
)
"""A command that leaves every choice to the job."""


def manifest(
    inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], dims: Sequence[DynamicDim] = (), **changes: Any
) -> Manifest:
    """A manifest with this signature; nothing of it is on a disk."""
    fields: dict[str, Any] = {
        "name": "m",
        "engine": "onnxruntime",
        "precision": "fp32",
        "graph": "model.onnx",
        "golden": "golden.safetensors",
        "inputs": tuple(inputs),
        "outputs": tuple(outputs),
        "dims": tuple(dims),
        "tolerance": Tolerance(absolute=0.0, relative=0.0),
        "proved_on": "a test",
        "source": ArtifactSource(kind="onnx", name="m", digest="0"),
        "made_at": "",
        "files": (),
    }
    return Manifest(**{**fields, **changes})


def vector(datatype: Any = "FP32", count: int = 2, name: str = "x") -> Input:
    """An input of so many numbers."""
    return Input(name, datatype, (count,), None)


def tokens(low: int = 1, high: int | None = 8, *, pad: float | None = 0) -> Input:
    """An input of whole numbers of any length."""
    return Input("ids", "INT64", ("tokens",), pad, (DynamicDim(name="tokens", low=low, high=high),))


def summing(batch_rows: int = 4, *, pad: float | None = 0) -> PredictionModel:
    """A model of `ids [tokens]`: their `sum`, and each of them doubled in `twice [tokens]`."""
    found = manifest(
        [TensorSpec(name="ids", datatype="INT64", shape=("batch", "tokens"), pad=pad)],
        [
            TensorSpec(name="sum", datatype="INT64", shape=("batch",)),
            TensorSpec(name="twice", datatype="INT64", shape=("batch", "tokens")),
        ],
        [DynamicDim(name="tokens", low=1)],
    )
    return PredictionModel(found, inputs_of(found), batch_rows)


def sums(inputs: Arrays) -> Arrays:
    """What an engine of `summing` computes; it fails on 13."""
    ids = inputs["ids"]
    if (ids == 13).any():
        raise ServiceError("thirteen\nand more")
    return {"sum": ids.sum(axis=1), "twice": 2 * ids}


def part(first_row: int, num_rows: int, offset: int = 0) -> PredictionPart:
    """A part of the only source."""
    return PredictionPart(source=0, first_row=first_row, num_rows=num_rows, offset=offset)


def vectors(rows: int, size: int = 8, seed: int = 0) -> Any:
    """Random numbers, FP32."""
    return np.random.default_rng(seed).standard_normal((rows, size), dtype=np.float32)


def write_parquet(path: Path, values: Any, *, row_group_size: int | None = None, **others: Any) -> Path:
    """A file with the vectors in a column `x`, and other columns."""
    flat = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    pq.write_table(pa.table({"x": flat, **others}), path, row_group_size=row_group_size)
    return path


def write_lines(path: Path, lines: Sequence[str]) -> Path:
    """A text file."""
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape"))
    return path


def write_csv(path: Path, values: Any, change: Callable[[int, str], str] = lambda _, line: line) -> Path:
    """The vectors in columns x0, x1, …, as many digits as they need; `change` may spoil lines."""
    header = ",".join(f"x{index}" for index in range(values.shape[1]))
    lines = [",".join(repr(float(value)) for value in row) for row in values]
    return write_lines(path, [header, *(change(row, line) for row, line in enumerate(lines))])


def write_jsonl(path: Path, values: Any) -> Path:
    """The vectors as objects with a key `x`."""
    return write_lines(path, [json.dumps({"x": row.tolist()}) for row in values])


def whole_model(folder: Path) -> Path:
    """A model without a batch, `folder/whole`: x FP32 [n, 4] and a number k to k × softmax over the first dimension."""
    graph = helper.make_graph(
        [helper.make_node("Softmax", ["x"], ["shares"], axis=0), helper.make_node("Mul", ["shares", "k"], ["y"])],
        "g",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4]),
            helper.make_tensor_value_info("k", TensorProto.FLOAT, []),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(model, folder / "whole.onnx")
    samples = {"x": np.arange(12, dtype=np.float32).reshape(3, 4) / 9, "k": np.array(2, np.float32)}
    return import_onnx(folder / "whole.onnx", folder / "whole", inputs=samples).path.parent
