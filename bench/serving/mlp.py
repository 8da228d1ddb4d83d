"""An exported model of any size, made in a moment: layers of numbers with ReLU between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import save_file

from stoker.artifacts import Artifact, Golden, publish
from stoker.engines import Graph, load_graph
from stoker.records import ArtifactSource, EngineName, FileDigest, Manifest, TensorSpec, Tolerance


def mlp_artifact(
    folder: Path, widths: Sequence[int], *, engine: EngineName, seed: int = 0, repeats: int = 1
) -> Artifact:
    """The next version of the model `folder`: `x: FP32 [batch, widths[0]] -> y: FP32 [batch, widths[-1]]`.

    Square layers are gone through `repeats` times with the same weights: time without bytes.
    """
    inputs = (TensorSpec(name="x", datatype="FP32", shape=("batch", widths[0])),)
    outputs = (TensorSpec(name="y", datatype="FP32", shape=("batch", widths[-1])),)

    def write(aside: Path, digests: Callable[[], tuple[FileDigest, ...]]) -> Manifest:
        onnx.save(_graph(widths, seed, repeats), aside / "model.onnx")
        graph = Graph(path=aside / "model.onnx", precision="fp32", inputs=inputs, outputs=outputs)
        (one,) = load_graph(engine, graph)
        asked = {"x": np.random.default_rng(seed).standard_normal((4, widths[0]), np.float32)}
        save_file(Golden(asked, one.run(asked)).as_tensors(), aside / "golden.safetensors")
        one.close()
        files = digests()
        return Manifest(
            name=folder.name,
            engine=engine,
            precision="fp32",
            graph="model.onnx",
            golden="golden.safetensors",
            inputs=inputs,
            outputs=outputs,
            tolerance=Tolerance(absolute=1e-3, relative=1e-3),
            proved_on="here",
            source=ArtifactSource(kind="onnx", name="mlp", digest=files[-1].sha256),
            made_at="2026-11-22",
            files=files,
        )

    return publish(folder, write)


def _graph(widths: Sequence[int], seed: int, repeats: int) -> onnx.ModelProto:
    draw = np.random.default_rng(seed)
    nodes, weights, name = [], [], "x"
    for index, (fan_in, fan_out) in enumerate(pairwise(widths)):
        array = draw.standard_normal((fan_in, fan_out), np.float32) * np.float32((2 / fan_in) ** 0.5)
        weights.append(numpy_helper.from_array(array, f"w{index}"))
        if index == len(widths) - 2:
            nodes.append(helper.make_node("MatMul", [name, f"w{index}"], ["y"]))
            break
        for again in range(repeats if fan_in == fan_out else 1):
            nodes.append(helper.make_node("MatMul", [name, f"w{index}"], [f"h{index}.{again}"]))
            name = f"a{index}.{again}"
            nodes.append(helper.make_node("Relu", [f"h{index}.{again}"], [name]))
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", widths[0]])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", widths[-1]])],
        weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
