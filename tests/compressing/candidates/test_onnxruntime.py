"""Graphs that ONNX Runtime's quantiser makes."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from stoker.artifacts import Artifact
from stoker.compressing.candidates import BuildContext
from stoker.compressing.onnxruntime_candidates import dynamic
from stoker.compressing.rows import EvaluationRows


def test_a_linear_layer_whose_weights_have_noted_shapes_is_quantised(tmp_path: Path) -> None:
    """As exported by PyTorch: the quantiser transposes the weights, and would find the old shape noted."""
    weight = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", "weight"], ["y"], transB=1)],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(weight, "weight")],
        value_info=[helper.make_tensor_value_info("weight", TensorProto.FLOAT, [3, 4])],
    )
    path = tmp_path / "model.onnx"
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, path)
    (tmp_path / "made").mkdir()
    context = BuildContext(cast("Artifact", None), cast("EvaluationRows", None), sums_fit=False, graph=path)
    made = dynamic(context, tmp_path / "made")
    inputs = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    (answers,) = onnxruntime.InferenceSession(made.graph).run(None, {"x": inputs})
    np.testing.assert_allclose(answers, inputs @ weight.T, atol=0.1)
