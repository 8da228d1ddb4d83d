"""OpenVINO as an engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from stoker.artifacts import dtype_of
from stoker.devices import attached_cpu
from stoker.engines import Graph, load, load_graph
from stoker.errors import BadArtifact, ServiceError
from stoker.records import Datatype, TensorSpec
from stoker.testing.tiny_models import tiny_artifact, tiny_inputs
from tests.engines.conformance import EngineConformance, graph_of


class TestOpenVino(EngineConformance):
    """It does what every engine must."""

    engine = "openvino"


def test_fp32_is_computed_in_fp32(tmp_path: Path) -> None:
    """Where the CPU has bf16 OpenVINO would compute in that, unasked: 1 + 2^-10 would then be 1."""
    artifact = tiny_artifact(tmp_path, engine="openvino")
    (engine,) = load(artifact, threads=1)
    asked = tiny_inputs(rows=4)
    (exact,) = load(tiny_artifact(tmp_path, name="other"), threads=1)
    assert np.abs(engine.run(asked)["y"] - exact.run(asked)["y"]).max() < 1e-5


@pytest.mark.skipif("bf16" not in attached_cpu().fast_dtypes, reason="this CPU does not compute in bf16")
def test_bf16_is_computed_in_bf16(tmp_path: Path) -> None:
    """Its answers differ from fp32 by about as much as bf16 has digits."""
    asked = tiny_inputs(rows=64)
    (exact,) = load(tiny_artifact(tmp_path), threads=1)
    (engine,) = load(tiny_artifact(tmp_path, name="bf16", engine="openvino", precision="bf16"), threads=1)
    apart = np.abs(engine.run(asked)["y"] - exact.run(asked)["y"]).max()
    assert 1e-4 < apart < 0.5


@pytest.mark.skipif("fp16" in attached_cpu().fast_dtypes, reason="this CPU computes in fp16")
def test_a_precision_that_the_cpu_lacks_is_refused(tmp_path: Path) -> None:
    """OpenVINO takes another one in silence."""
    artifact = tiny_artifact(tmp_path, engine="openvino", precision="fp16")
    with pytest.raises(BadArtifact, match=r"to be computed in fp16; OpenVINO computes in"):
        load(artifact)


def test_numbers_in_bfloat16_go_in_and_come_out(tmp_path: Path) -> None:
    """NumPy has no such type of its own; its bits are handed over."""
    nodes = [helper.make_node("Identity", ["x"], ["y"])]
    path = graph_of(tmp_path / "g.onnx", nodes, {"x": TensorProto.BFLOAT16}, {"y": TensorProto.BFLOAT16}, {})
    specs = [TensorSpec(name=name, datatype="BF16", shape=("batch",)) for name in "xy"]
    graph = Graph(path=path, precision="fp32", inputs=(specs[0],), outputs=(specs[1],))
    (engine,) = load_graph("openvino", graph)
    values = np.array([1.5, -3.0, 2.0**100]).astype(dtype_of("BF16"))
    found = engine.run({"x": values})["y"]
    assert found.dtype == values.dtype
    assert (found == values).all()


def test_whole_numbers_of_more_than_32_bits_are_refused(tmp_path: Path) -> None:
    """OpenVINO would drop what is above them: 5e9 becomes 705032704."""
    (engine,) = load(tiny_artifact(tmp_path, kind="tokens", engine="openvino"))
    asked = tiny_inputs("tokens")
    for number in (2**31, -(2**31) - 1, 5 * 10**9):
        with pytest.raises(ServiceError, match="'input_ids' has numbers that need more"):
            engine.run({**asked, "input_ids": np.full_like(asked["input_ids"], number)})
    assert engine.run(asked)["embedding"].shape == (1, 4)


def test_strings_are_left_to_the_other_engine(tmp_path: Path) -> None:
    """OpenVINO ends the process over them."""
    spec = TensorSpec(name="x", datatype="BYTES", shape=("batch",))
    with pytest.raises(BadArtifact, match="strings") as caught:
        load_graph(
            "openvino", Graph(path=tiny_artifact(tmp_path).graph_path, precision="fp32", inputs=(spec,), outputs=())
        )
    assert "onnxruntime" in str(caught.value)


def test_a_gpu_is_not_its_place(tmp_path: Path) -> None:
    """The remedy names the engine whose place it is."""
    with pytest.raises(BadArtifact, match="onnxruntime"):
        load(tiny_artifact(tmp_path, engine="openvino"), where="cuda")


@pytest.mark.parametrize(
    ("nodes", "numbers", "least", "greatest"),
    [
        ([("Mod", "x", "c", "y")], {"c": 1000}, -(2**24), 2**24),
        ([("Div", "x", "c", "y")], {"c": 3}, -(2**24), 2**24),
        ([("Less", "x", "c", "b"), ("Where", "b", "x", "c", "y")], {"c": 1_600_000_000}, 1 - 2**24, 2**24 - 1),
        ([("ReduceMax", "x", "a", "y")], {"a": [0]}, -(2**24), 2**24),
        ([("Mul", "x", "f", "p"), ("Mod", "p", "c", "y")], {"f": 1001, "c": 1000}, -(2**24 // 1001), 2**24 // 1001),
        ([("Sub", "x", "f", "p"), ("Div", "p", "c", "y")], {"f": 1_600_000_000, "c": 7}, 1_583_222_784, 1_616_777_216),
        ([("Sub", "f", "x", "p"), ("Div", "p", "c", "y")], {"f": 1_600_000_000, "c": 7}, 1_583_222_784, 1_616_777_216),
        ([("Mul", "x", "f", "y")], {"f": 1000}, -2_147_483, 2_147_483),
        ([("Sub", "x", "c", "y")], {"c": 7}, -(2**31) + 7, 2**31 - 1),
        ([("Pow", "x", "c", "y")], {"c": 2}, -(2**12), 2**12),
        ([("Pow", "x", "c", "y")], {"c": 3}, -(2**8), 2**8),
        ([("Pow", "c", "x", "y")], {"c": 2}, 0, 24),
        (
            [("Neg", "x", "n"), ("Add", "n", "f", "p"), ("Div", "p", "c", "y")],
            {"f": 1_600_000_000, "c": 7},
            1_583_222_784,
            1_616_777_216,
        ),
        (
            [("Mul", "x", "m", "n"), ("Add", "n", "f", "p"), ("Div", "p", "c", "y")],
            {"m": -2, "f": 1_600_000_000, "c": 7},
            791_611_392,
            808_388_608,
        ),
    ],
    ids=[
        "mod",
        "div",
        "less",
        "largest",
        "hash",
        "days",
        "age",
        "product",
        "difference",
        "square",
        "cube",
        "power",
        "negated",
        "factor",
    ],
)
@pytest.mark.parametrize("datatype", ["INT32", "INT64"])
def test_whole_numbers_are_exact_or_refused(
    tmp_path: Path,
    nodes: list[tuple[str, ...]],
    numbers: dict[str, Any],
    least: int,
    greatest: int,
    datatype: Datatype,
) -> None:
    """OpenVINO compares and divides in float32: 100,000,001 would have the remainder, and the row, of 100,000,000."""
    kind, dtype = TensorProto.DataType.Value(datatype), dtype_of(datatype)
    made = [helper.make_node(name, operands[:-1], operands[-1:]) for name, *operands in nodes]
    constants = {name: np.array(value, np.int64 if name == "a" else dtype) for name, value in numbers.items()}
    path = graph_of(tmp_path / "g.onnx", made, {"x": kind}, {"y": kind}, constants)
    specs = [TensorSpec(name=name, datatype=datatype, shape=("batch",)) for name in "xy"]
    graph = Graph(path=path, precision="fp32", inputs=(specs[0],), outputs=(specs[1],))
    (engine,), (other,) = load_graph("openvino", graph), load_graph("onnxruntime", graph)
    for first in (least, -3, greatest - 8):
        asked = {"x": np.clip(np.arange(first, first + 9), least, greatest).astype(dtype)}
        assert engine.run(asked)["y"].tolist() == other.run(asked)["y"].tolist()
    if (least, greatest) != (-(2**31) + 7, 2**31 - 1):
        for beyond in (least - 1, greatest + 1):
            with pytest.raises(ServiceError, match="openvino is exact for numbers from"):
                engine.run({"x": np.full(3, beyond, dtype)})


@pytest.mark.parametrize(
    ("node", "constant"),
    [
        (("Mod", "x", "c", "y"), 100_000_007),
        (("Div", "c", "x", "y"), 1_000_000_007),
        (("Mod", "x", "c", "y"), 2**31 + 11),
        (("Mul", "x", "c", "y"), 2_654_435_761),
        (("Add", "x", "c", "y"), 2**40),
    ],
    ids=["remainder", "quotient", "divisor", "factor", "sum"],
)
def test_a_constant_that_is_not_exact_refuses_every_number(
    tmp_path: Path, node: tuple[str, ...], constant: int
) -> None:
    """In float32 -5 % 100,000,007 would be 100,000,000, and 2^40 becomes the largest number of 32 bits."""
    kind, (name, *operands) = TensorProto.INT64, node
    made = [helper.make_node(name, operands[:-1], operands[-1:])]
    path = graph_of(tmp_path / "g.onnx", made, {"x": kind}, {"y": kind}, {"c": np.array(constant, np.int64)})
    specs = [TensorSpec(name=name, datatype="INT64", shape=("batch",)) for name in "xy"]
    (engine,) = load_graph("openvino", Graph(path=path, precision="fp32", inputs=(specs[0],), outputs=(specs[1],)))
    with pytest.raises(ServiceError, match="'x' meets a constant of the model that needs more"):
        engine.run({"x": np.array([-5, 3])})


@pytest.mark.parametrize("name", ["Less", "Equal", "GreaterOrEqual"])
def test_comparisons_with_a_small_constant_are_exact_for_every_number(tmp_path: Path, name: str) -> None:
    """Rounding to float32 does not carry a larger number over it, so nothing is refused: `ids.clamp(max=999)`."""
    for constant in (0, -5, 999, 2**24 - 1, 1 - 2**24):
        made = [helper.make_node(name, ["x", "c"], ["b"]), helper.make_node("Where", ["b", "x", "c"], ["y"])]
        numbers = {"c": np.array(constant, np.int64)}
        path = graph_of(tmp_path / "g.onnx", made, {"x": TensorProto.INT64}, {"y": TensorProto.INT64}, numbers)
        specs = [TensorSpec(name=name, datatype="INT64", shape=("batch",)) for name in "xy"]
        graph = Graph(path=path, precision="fp32", inputs=(specs[0],), outputs=(specs[1],))
        (engine,), (other,) = load_graph("openvino", graph), load_graph("onnxruntime", graph)
        near = [center + offset for center in (0, constant, 2**24, -(2**24)) for offset in range(-4, 5)]
        asked = {"x": np.array([*near, 2**31 - 1, -(2**31), 1_600_000_001])}
        assert engine.run(asked)["y"].tolist() == other.run(asked)["y"].tolist()


@pytest.mark.parametrize("constant", [2**24, 2**24 + 1, 2**32, 2**63 - 1, -(2**63)])
def test_comparisons_with_a_large_constant_are_exact_for_small_numbers(tmp_path: Path, constant: int) -> None:
    """A constant of more than 32 bits becomes the largest or the least of them: `ids < 2**32` refuses no small id."""
    made = [helper.make_node(name, ["x", "c"], [name]) for name in ("Less", "Equal", "Greater")]
    numbers = {"c": np.array(constant, np.int64)}
    kinds = {node.output[0]: TensorProto.BOOL for node in made}
    path = graph_of(tmp_path / "g.onnx", made, {"x": TensorProto.INT64}, kinds, numbers)
    spec = TensorSpec(name="x", datatype="INT64", shape=("batch",))
    outputs = tuple(TensorSpec(name=name, datatype="BOOL", shape=("batch",)) for name in kinds)
    graph = Graph(path=path, precision="fp32", inputs=(spec,), outputs=outputs)
    (engine,), (other,) = load_graph("openvino", graph), load_graph("onnxruntime", graph)
    asked = {"x": np.array([1 - 2**24, -3, 0, 5, 2**24 - 1])}
    answers, expected = engine.run(asked), other.run(asked)
    assert {name: answers[name].tolist() for name in kinds} == {name: expected[name].tolist() for name in kinds}
    with pytest.raises(ServiceError, match="openvino is exact for numbers from"):
        engine.run({"x": np.array([2**24])})
