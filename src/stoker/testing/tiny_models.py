"""Exported models with a few weights, made in milliseconds and without torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from stoker.artifacts import Artifact, Golden, publish
from stoker.artifacts.dtypes import Arrays
from stoker.engines import Graph, load_graph
from stoker.records import ArtifactSource, DynamicDim, EngineName, FileDigest, Manifest, Tolerance
from stoker.records import TensorSpec as Spec

Kind = Literal["mlp", "tokens", "images"]
"""`mlp`: numbers to three classes; `tokens`: token ids and their mask to an embedding; `images`: a convolution."""

_SPECS: dict[Kind, tuple[tuple[Spec, ...], tuple[Spec, ...]]] = {
    "mlp": (
        (Spec(name="x", datatype="FP32", shape=("batch", 8)),),
        (Spec(name="y", datatype="FP32", shape=("batch", 3)),),
    ),
    "tokens": (
        (
            Spec(name="input_ids", datatype="INT64", shape=("batch", "tokens"), pad=0),
            Spec(name="attention_mask", datatype="INT64", shape=("batch", "tokens"), pad=0),
        ),
        (Spec(name="embedding", datatype="FP32", shape=("batch", 4)),),
    ),
    "images": (
        (Spec(name="image", datatype="FP32", shape=("batch", 1, 8, 8)),),
        (Spec(name="logits", datatype="FP32", shape=("batch", 3)),),
    ),
}
_ELEMENTS = {"FP32": TensorProto.FLOAT, "INT64": TensorProto.INT64}
_VOCABULARY = 16
_OPSET, _IR_VERSION = 20, 10


def tiny_artifact(
    directory: str | os.PathLike[str],
    *,
    name: str = "tiny",
    kind: Kind = "mlp",
    engine: EngineName = "onnxruntime",
    seed: int = 0,
    **changes: Any,
) -> Artifact:
    """The next version of a tiny model in `directory/name`; the seed fixes its weights.

    - `mlp`: `x: FP32 [batch, 8] -> y: FP32 [batch, 3]`, a layer of 16 with ReLU; its classes are labelled.
    - `tokens`: `input_ids, attention_mask: INT64 [batch, tokens] -> embedding: FP32 [batch, 4]`, the mean of a table's
      rows over the tokens whose mask is 1; ids are 0 to 15, both are padded with 0, `tokens` goes from 1 to 64.
    - `images`: `image: FP32 [batch, 1, 8, 8] -> logits: FP32 [batch, 3]`, a convolution and a mean over the image.

    Its golden answers are the engine's. `changes` replace fields of the manifest, to make it false.
    """
    inputs, outputs = _SPECS[kind]

    def write(aside: Path, digests: Any) -> Manifest:
        onnx.save(tiny_graph(kind, seed=seed), aside / "model.onnx")
        arrays = tiny_inputs(kind, rows=3, seed=seed)
        graph = Graph(path=aside / "model.onnx", precision="fp32", inputs=inputs, outputs=outputs)
        (loaded,) = load_graph(engine, graph)
        save_file(Golden(arrays, loaded.run(arrays)).as_tensors(), aside / "golden.safetensors")
        loaded.close()
        files: tuple[FileDigest, ...] = digests()
        fields: dict[str, Any] = {
            "name": name,
            "engine": engine,
            "precision": "fp32",
            "graph": "model.onnx",
            "golden": "golden.safetensors",
            "inputs": inputs,
            "outputs": outputs,
            "tolerance": Tolerance(absolute=1e-4, relative=1e-4),
            "dims": (DynamicDim(name="tokens", low=1, high=64),) if kind == "tokens" else (),
            "labels": {"y": ("cat", "dog", "owl")} if kind == "mlp" else {},
            "proved_on": "a test",
            "source": ArtifactSource(kind="onnx", name=f"tiny {kind}", digest=files[-1].sha256),
            "made_at": "2026-11-22T00:00:00+00:00",
            "files": files,
        }
        return Manifest(**{**fields, **changes})

    return publish(Path(directory) / name, write)


def tiny_inputs(kind: Kind = "mlp", *, rows: int = 1, tokens: int = 5, seed: int = 0) -> Arrays:
    """Inputs of a tiny model, `rows` samples; in `tokens` the last one has a masked tail."""
    draw = np.random.default_rng(seed)
    if kind == "mlp":
        return {"x": draw.standard_normal((rows, 8), dtype=np.float32)}
    if kind == "images":
        return {"image": draw.standard_normal((rows, 1, 8, 8), dtype=np.float32)}
    mask = np.ones((rows, tokens), dtype=np.int64)
    mask[-1:, (tokens + 1) // 2 :] = 0
    return {"input_ids": draw.integers(1, _VOCABULARY, (rows, tokens)) * mask, "attention_mask": mask}


def tiny_graph(kind: Kind = "mlp", *, seed: int = 0, batch: int | str | None = "batch") -> onnx.ModelProto:
    """The ONNX graph of a tiny model; `batch` is its first dimension."""
    weights, nodes = {"mlp": _mlp, "tokens": _tokens, "images": _images}[kind](np.random.default_rng(seed))

    def values(specs: tuple[Spec, ...]) -> list[onnx.ValueInfoProto]:
        return [
            helper.make_tensor_value_info(spec.name, _ELEMENTS[spec.datatype], [batch, *spec.shape[1:]])
            for spec in specs
        ]

    inputs, outputs = _SPECS[kind]
    arrays = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, f"tiny_{kind}", values(inputs), values(outputs), arrays)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=_IR_VERSION)
    onnx.checker.check_model(model)
    return model


def _mlp(draw: np.random.Generator) -> tuple[dict[str, NDArray[Any]], list[onnx.NodeProto]]:
    weights = {
        "w1": draw.standard_normal((8, 16), dtype=np.float32),
        "b1": draw.standard_normal(16, dtype=np.float32),
        "w2": draw.standard_normal((16, 3), dtype=np.float32),
    }
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("Relu", ["h"], ["a"]),
        helper.make_node("MatMul", ["a", "w2"], ["y"]),
    ]
    return weights, nodes


def _tokens(draw: np.random.Generator) -> tuple[dict[str, NDArray[Any]], list[onnx.NodeProto]]:
    weights = {
        "table": draw.standard_normal((_VOCABULARY, 4), dtype=np.float32),
        "one": np.ones(1, dtype=np.float32),
        "axis1": np.array([1]),
        "axis2": np.array([2]),
    }
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "axis2"], ["mask_BT1"]),
        helper.make_node("Mul", ["rows", "mask_BT1"], ["kept"]),
        helper.make_node("ReduceSum", ["kept", "axis1"], ["sum"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "axis1"], ["count"], keepdims=1),
        helper.make_node("Max", ["count", "one"], ["at_least_one"]),
        helper.make_node("Div", ["sum", "at_least_one"], ["embedding"]),
    ]
    return weights, nodes


def _images(draw: np.random.Generator) -> tuple[dict[str, NDArray[Any]], list[onnx.NodeProto]]:
    weights = {
        "kernel": draw.standard_normal((3, 1, 3, 3), dtype=np.float32),
        "axes": np.array([2, 3]),
    }
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["maps"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["maps"], ["positive"]),
        helper.make_node("ReduceMean", ["positive", "axes"], ["logits"], keepdims=0),
    ]
    return weights, nodes
