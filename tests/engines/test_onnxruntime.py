"""ONNX Runtime as an engine."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

from stoker.engines import Graph, load, load_graph
from stoker.engines.onnxruntime import OnnxRuntime
from stoker.errors import BadArtifact
from stoker.records import TensorSpec
from stoker.testing.tiny_models import tiny_artifact
from tests.engines.conformance import EngineConformance, graph_of


class TestOnnxRuntime(EngineConformance):
    """It does what every engine must."""

    engine = "onnxruntime"


def test_strings_go_in_and_come_out(tmp_path: Path) -> None:
    """As bytes, which is what the protocol sends."""
    nodes = [helper.make_node("StringConcat", ["x", "x"], ["y"])]
    path = graph_of(tmp_path / "g.onnx", nodes, {"x": TensorProto.STRING}, {"y": TensorProto.STRING}, {})
    specs = [TensorSpec(name=name, datatype="BYTES", shape=("batch",)) for name in "xy"]
    graph = Graph(path=path, precision="fp32", inputs=(specs[0],), outputs=(specs[1],))
    (engine,) = load_graph("onnxruntime", graph)
    found = engine.run({"x": np.array([b"ab", "ü".encode()], dtype=object)})["y"]
    assert found.tolist() == [b"abab", "üü".encode()]


def test_instances_of_one_thread_share_a_session_and_others_have_their_own(tmp_path: Path) -> None:
    """Threads of a session are one pool: an instance would get fewer while others run."""
    artifact = tiny_artifact(tmp_path)
    for threads, sessions in ((1, 1), (2, 3)):
        engines = load(artifact, instances=3, threads=threads)
        each = [engine._session for engine in engines if isinstance(engine, OnnxRuntime)]
        assert len({id(one) for one in each}) == sessions
        assert all(one.get_session_options().intra_op_num_threads == threads for one in each)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_precision_that_it_would_not_compute_in_is_refused(tmp_path: Path, precision: str) -> None:
    """A hint does not exist; the graph's own types decide."""
    with pytest.raises(BadArtifact, match="openvino"):
        load(tiny_artifact(tmp_path, precision=precision, engine="onnxruntime"))


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="it has CUDA")
def test_without_cuda_a_gpu_is_refused(tmp_path: Path) -> None:
    """It would run on the CPU in silence."""
    with pytest.raises(BadArtifact, match="no CUDA") as caught:
        load(tiny_artifact(tmp_path), where="cuda")
    assert "onnxruntime-gpu" in str(caught.value)
