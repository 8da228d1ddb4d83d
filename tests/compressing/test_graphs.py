"""What a graph is made of."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from stoker.compressing.candidates import GraphKind, kind_of
from stoker.compressing.search import candidates_for
from stoker.errors import BadArtifact
from stoker.testing.tiny_models import tiny_graph

EVERYTHING = ("fp32", "bf16", "int8")


def names(kind: GraphKind, dtypes=EVERYTHING) -> list[str]:
    """What would be tried."""
    return [one.name for one in candidates_for(kind, dtypes, ("openvino", "fp32"))]


def test_a_quantised_graph_is_noticed_and_left_alone(tmp_path: Path) -> None:
    """Its operators are named, and nothing quantises it again."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4])],
        [
            helper.make_tensor("s", TensorProto.FLOAT, [], [0.1]),
            helper.make_tensor("z", TensorProto.INT8, [], [0]),
        ],
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), path)
    kind = kind_of(path)
    assert kind.quantised == ("DequantizeLinear", "QuantizeLinear")
    assert names(kind) == []


@pytest.mark.parametrize("operator", ["QGemm", "QAttention", "DynamicQuantizeMatMul", "MatMulIntegerToFloat"])
def test_what_an_import_knows_as_quantised_is_left_alone(operator: str) -> None:
    """Operators of ONNX Runtime's own domain too: there is one table."""
    kind = GraphKind({"Conv": 1, operator: 1})
    assert kind.quantised == (operator,)
    assert names(kind) == []


def test_a_float_graph_is_not_taken_for_quantised(tmp_path: Path) -> None:
    """Products are counted, and candidates in 8 bits are tried."""
    path = tmp_path / "model.onnx"
    onnx.save(tiny_graph("mlp"), path)
    kind = kind_of(path)
    assert (kind.quantised, kind.heavy, kind.has_attention) == ((), 2, False)
    assert any(name.startswith("int8") for name in names(kind))


def test_candidates_follow_the_graph_and_the_machine() -> None:
    """SmoothQuant is for transformers, bf16 for CPUs that have it, scales per batch not for convolutions."""
    transformer = GraphKind({"MatMul": 8, "Softmax": 2})
    network = GraphKind({"Conv": 8, "Gemm": 1})
    assert names(transformer)[2] == "int8 smooth"
    assert "int8 smooth" not in names(network)
    assert "int8 dynamic" not in names(network)
    assert "bf16 openvino" not in names(transformer, ("fp32",))
    assert names(GraphKind({"Gather": 1})) == ["bf16 openvino", "fp32 onnxruntime"]
    assert names(network, ("fp32", "bf16", "fp16"))[:2] == ["bf16 openvino", "fp16 openvino"]


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path) -> None:
    """The file is named."""
    path = tmp_path / "model.onnx"
    path.write_bytes(b"\x00 no graph at all")
    with pytest.raises(BadArtifact, match=r"model\.onnx"):
        kind_of(path)
