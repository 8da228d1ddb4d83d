"""What every engine must do: a class to inherit from, with the engine's loader."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from stoker.artifacts import excess
from stoker.artifacts.golden import cut, filled, rows, stacked
from stoker.engines import Graph, load, load_graph
from stoker.engines.base import BadInput
from stoker.errors import BadArtifact, ServiceError
from stoker.records import Datatype, EngineName, TensorSpec
from stoker.testing.tiny_models import Kind, tiny_artifact, tiny_graph, tiny_inputs

KINDS: tuple[Kind, ...] = ("mlp", "tokens", "images")


def reference(kind: Kind, seed: int, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a tiny model answers, by ONNX's own evaluator in Python."""
    from onnx.reference import ReferenceEvaluator

    graph = tiny_graph(kind, seed=seed)
    names = [one.name for one in graph.graph.output]
    return dict(zip(names, ReferenceEvaluator(graph).run(names, inputs), strict=True))


def graph_of(path: Path, nodes: list, inputs: dict[str, int], outputs: dict[str, int], weights: dict) -> Path:
    """A graph of one-dimensional tensors [batch] in a file."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, kind, ["batch"]) for name, kind in inputs.items()],
        [helper.make_tensor_value_info(name, kind, ["batch"]) for name, kind in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def spec_of(name: str, datatype: Datatype) -> TensorSpec:
    """One number a sample."""
    return TensorSpec(name=name, datatype=datatype, shape=("batch",))


class EngineConformance:
    """Inherit, and set `engine`."""

    engine: EngineName

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_answers_as_the_oracle(self, tmp_path: Path, kind: Kind) -> None:
        """Its answers are those of the graph's definition, at several sizes."""
        artifact = tiny_artifact(tmp_path, kind=kind, engine=self.engine, seed=3)
        (engine,) = load(artifact, threads=1)
        for count in (1, 2, 7):
            asked = tiny_inputs(kind, rows=count, tokens=count + 2, seed=count)
            assert excess(engine.run(asked), reference(kind, 3, asked), artifact.manifest.tolerance) <= 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_it_gives_its_golden_answers(self, tmp_path: Path, kind: Kind) -> None:
        """What was written down at the export is what it answers now."""
        artifact = tiny_artifact(tmp_path, kind=kind, engine=self.engine)
        golden = artifact.golden()
        (engine,) = load(artifact)
        assert excess(engine.run(golden.inputs), golden.outputs, artifact.manifest.tolerance) <= 1

    @settings(max_examples=15, suppress_health_check=[HealthCheck.differing_executors])  # one class an engine
    @given(data=st.data())
    def test_a_sample_has_the_same_answer_in_any_company(
        self, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
    ) -> None:
        """Alone, in a batch, and filled up to the length of another."""
        artifact = tiny_artifact(tmp_path_factory.getbasetemp() / self.engine, kind="tokens", engine=self.engine)
        manifest = artifact.manifest
        (engine,) = load(artifact, threads=1)
        lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
        each = [tiny_inputs("tokens", rows=1, tokens=n, seed=at) for at, n in enumerate(lengths)]
        together = engine.run(stacked(filled(one, manifest.inputs, {"tokens": max(lengths)}) for one in each))
        for at, one in enumerate(each):
            mine = cut(rows(together, slice(at, at + 1)), manifest.outputs, {"tokens": lengths[at]})
            assert excess(mine, engine.run(one), manifest.tolerance) <= 1

    def test_answers_are_the_callers_own(self, tmp_path: Path) -> None:
        """A later run changes nothing in them, and they can be written to."""
        (engine,) = load(tiny_artifact(tmp_path, engine=self.engine), threads=1)
        first = engine.run(tiny_inputs(rows=2, seed=1))["y"]
        kept = first.copy()
        second = engine.run(tiny_inputs(rows=2, seed=2))["y"]
        assert (first == kept).all()
        first[:] = 0
        assert (second != 0).any()

    def test_inputs_may_lie_in_memory_anyhow_and_are_left_alone(self, tmp_path: Path) -> None:
        """Read-only, strided and temporary arrays are answered like others; none is written to."""
        (engine,) = load(tiny_artifact(tmp_path, kind="tokens", engine=self.engine), threads=1)
        asked = tiny_inputs("tokens", rows=4, tokens=6)
        wanted = engine.run(asked)["embedding"]
        read_only = {name: array.copy() for name, array in asked.items()}
        for array in read_only.values():
            array.flags.writeable = False
        strided = {name: np.asfortranarray(array) for name, array in asked.items()}
        for one in (read_only, strided):
            assert (engine.run(one)["embedding"] == wanted).all()
        wide = {name: np.repeat(array, 2, axis=1) for name, array in asked.items()}
        for _ in range(20):  # the arrays it is given live no longer than the call
            assert (engine.run({name: array[:, ::2] for name, array in wide.items()})["embedding"] == wanted).all()
        assert all((asked[name] == read_only[name]).all() for name in asked)

    @pytest.mark.parametrize("threads", [1, 2])
    def test_instances_answer_at_the_same_time(self, tmp_path: Path, threads: int) -> None:
        """Each of three gives its own callers their own answers, whatever the others do."""
        engines = load(tiny_artifact(tmp_path, engine=self.engine), instances=3, threads=threads)
        assert len(engines) == 3
        asked = [[tiny_inputs(rows=1 + at % 4, seed=100 * one + at) for at in range(30)] for one in range(3)]

        def ask_all(one: int) -> list[np.ndarray]:
            return [engines[one].run(request)["y"] for request in asked[one]]

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(ask_all, range(3)))
        for request, answer in zip(itertools.chain(*asked), itertools.chain(*found), strict=True):
            np.testing.assert_allclose(answer, reference("mlp", 0, request)["y"], rtol=1e-4, atol=1e-4)

    def test_other_threads_go_on_while_it_computes(self, tmp_path: Path) -> None:
        """Python's lock is given up: a thread that counts moves on during one long run."""
        size = 1400
        weight = np.ones((size, size), dtype=np.float32) / size
        nodes = [helper.make_node("MatMul", [f"h{at}", "w"], [f"h{at + 1}"]) for at in range(6)]
        graph = helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info("h0", TensorProto.FLOAT, ["batch", size])],
            [helper.make_tensor_value_info("h6", TensorProto.FLOAT, ["batch", size])],
            [numpy_helper.from_array(weight, "w")],
        )
        path = tmp_path / "slow.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
        spec = TensorSpec(name="h0", datatype="FP32", shape=("batch", size))
        out = TensorSpec(name="h6", datatype="FP32", shape=("batch", size))
        (engine,) = load_graph(self.engine, Graph(path=path, precision="fp32", inputs=(spec,), outputs=(out,)))
        counted, stop = itertools.count(), threading.Event()

        def count() -> None:
            while not stop.is_set():
                next(counted)
                stop.wait(1e-4)

        thread = threading.Thread(target=count)
        thread.start()
        try:
            before = next(counted)
            engine.run({"h0": np.ones((size, size), dtype=np.float32)})
            assert next(counted) > before + 1
        finally:
            stop.set()
            thread.join()

    @pytest.mark.parametrize("instances", [1, 2])
    def test_inputs_that_cannot_be_computed_fail_alone(self, tmp_path: Path, instances: int) -> None:
        """The error says why, on one line, and requests before and after it are answered."""
        engines = load(tiny_artifact(tmp_path, kind="tokens", engine=self.engine), instances=instances, threads=1)
        asked = tiny_inputs("tokens", rows=2, tokens=5)
        bad = {**asked, "attention_mask": asked["attention_mask"][:, :3]}
        wanted = reference("tokens", 0, asked)["embedding"]
        for engine in engines:
            has_answered = False
            for request in (bad, asked, bad, asked, asked, bad):
                if request is asked:
                    has_answered = True
                    np.testing.assert_allclose(engine.run(asked)["embedding"], wanted, rtol=1e-4, atol=1e-4)
                    continue
                kind = BadInput if has_answered else ServiceError
                with pytest.raises(kind, match=f"{self.engine} could not compute this: .*[a-z]") as caught:
                    engine.run(bad)
                assert "\n" not in caught.value.message
            engine.close()

    @pytest.mark.parametrize(
        ("element", "values"),
        [
            (TensorProto.BOOL, np.array([True, False, True])),
            (TensorProto.UINT8, np.array([1, 255], dtype=np.uint8)),
            (TensorProto.INT8, np.array([-128, 127], dtype=np.int8)),
            (TensorProto.INT32, np.array([-(2**31), 5], dtype=np.int32)),
            (TensorProto.INT64, np.array([2**31 - 1, 5])),
            (TensorProto.FLOAT16, np.array([1.5, -2.0], dtype=np.float16)),
            (TensorProto.DOUBLE, np.array([1.5, -2.0])),
            (TensorProto.FLOAT, np.zeros(0, dtype=np.float32)),
        ],
    )
    def test_types_go_in_and_come_out(self, tmp_path: Path, element: int, values: np.ndarray) -> None:
        """What a graph only passes on comes out in its type and with its values, no samples included."""
        from stoker.artifacts import datatype_of

        nodes = [helper.make_node("Identity", ["x"], ["y"])]
        path = graph_of(tmp_path / "g.onnx", nodes, {"x": element}, {"y": element}, {})
        datatype = datatype_of(values.dtype)
        specs = [TensorSpec(name=name, datatype=datatype, shape=("batch",)) for name in "xy"]
        graph = Graph(path=path, precision="fp32", inputs=(specs[0],), outputs=(specs[1],))
        (engine,) = load_graph(self.engine, graph)
        found = engine.run({"x": values})["y"]
        assert found.dtype == values.dtype
        assert (found == values).all()

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("index", [5, 2**30, -6])
    def test_an_index_beyond_its_table_is_refused(self, tmp_path: Path, threads: int, index: int) -> None:
        """It is no row of zeros, and the engine goes on with others."""
        table = np.arange(1, 11, dtype=np.float32).reshape(5, 2)
        nodes = [
            helper.make_node("Gather", ["table", "x"], ["rows"]),
            helper.make_node("ReduceSum", ["rows", "axes"], ["y"], keepdims=0),
        ]
        weights = {"table": table, "axes": np.array([1])}
        path = graph_of(tmp_path / "g.onnx", nodes, {"x": TensorProto.INT64}, {"y": TensorProto.FLOAT}, weights)
        graph = Graph(path=path, precision="fp32", inputs=(spec_of("x", "INT64"),), outputs=(spec_of("y", "FP32"),))
        (engine,) = load_graph(self.engine, dataclasses.replace(graph, threads=threads))
        for _ in range(3):
            with pytest.raises(BadInput):
                engine.run({"x": np.array([0, index])})
            assert engine.run({"x": np.array([0, 4])})["y"].tolist() == [3.0, 19.0]

    @pytest.mark.parametrize("index", [3, 2**30, -4])
    def test_an_address_beyond_its_tensor_is_refused(self, tmp_path: Path, index: int) -> None:
        """What it points at may be another request's, or no memory of the process."""
        nodes = [
            helper.make_node("Unsqueeze", ["at", "one"], ["places"]),
            helper.make_node("Unsqueeze", ["x", "one"], ["columns"]),
            helper.make_node("Concat", ["columns", "columns", "columns"], ["table"], axis=1),
            helper.make_node("GatherND", ["table", "places"], ["y"], batch_dims=1),
        ]
        inputs = {"x": TensorProto.FLOAT, "at": TensorProto.INT64}
        path = graph_of(tmp_path / "g.onnx", nodes, inputs, {"y": TensorProto.FLOAT}, {"one": np.array([1])})
        specs = spec_of("x", "FP32"), spec_of("at", "INT64")
        graph = Graph(path=path, precision="fp32", inputs=specs, outputs=(spec_of("y", "FP32"),))
        (engine,) = load_graph(self.engine, graph)
        asked = {"x": np.array([7, 8], np.float32), "at": np.array([0, -1])}
        assert engine.run(asked)["y"].tolist() == [7.0, 8.0]
        with pytest.raises(BadInput):
            engine.run({**asked, "at": np.array([index, 0])})
        assert engine.run(asked)["y"].tolist() == [7.0, 8.0]

    @pytest.mark.parametrize("threads", [1, 2])
    @pytest.mark.parametrize("operator", ["GatherElements", "ScatterElements"])
    def test_an_element_beyond_its_dimension_is_refused(self, tmp_path: Path, operator: str, threads: int) -> None:
        """And the engine goes on with others, of the same shapes."""
        nodes = [
            helper.make_node("Unsqueeze", ["at", "one"], ["places"]),
            helper.make_node("Unsqueeze", ["x", "one"], ["columns"]),
            helper.make_node("Concat", ["columns", "columns", "columns"], ["table"], axis=1),
            helper.make_node(
                operator, ["table", "places", *["columns"] * (operator == "ScatterElements")], ["z"], axis=1
            ),
            helper.make_node("ReduceSum", ["z", "one"], ["y"], keepdims=0),
        ]
        inputs = {"x": TensorProto.FLOAT, "at": TensorProto.INT64}
        path = graph_of(tmp_path / "g.onnx", nodes, inputs, {"y": TensorProto.FLOAT}, {"one": np.array([1])})
        specs = spec_of("x", "FP32"), spec_of("at", "INT64")
        graph = Graph(path=path, precision="fp32", inputs=specs, outputs=(spec_of("y", "FP32"),), threads=threads)
        (engine,) = load_graph(self.engine, graph)
        asked = {"x": np.array([7, 8], np.float32), "at": np.array([2, -3])}
        answer = engine.run(asked)["y"].tolist()
        for index in (3, -4, 2**30):
            with pytest.raises(ServiceError):
                engine.run({**asked, "at": np.array([index, 0])})
            assert engine.run(asked)["y"].tolist() == answer

    def test_it_closes(self, tmp_path: Path) -> None:
        """One of two instances closes, the other goes on."""
        first, second = load(tiny_artifact(tmp_path, engine=self.engine), instances=2, threads=1)
        first.close()
        assert second.run(tiny_inputs())["y"].shape == (1, 3)
        second.close()

    @pytest.mark.parametrize("content", [b"", b"not a graph", bytes(1000)])
    def test_a_graph_that_is_none_is_refused(self, tmp_path: Path, content: bytes) -> None:
        """The path and the engine are in the message."""
        artifact = tiny_artifact(tmp_path, engine=self.engine)
        artifact.graph_path.write_bytes(content)
        with pytest.raises(BadArtifact, match=rf"{self.engine} cannot load .*model\.onnx"):
            load(artifact)

    @pytest.mark.parametrize(
        ("changes", "told"),
        [
            ({"inputs": (TensorSpec(name="z", datatype="FP32", shape=("batch", 8)),)}, "has the inputs x"),
            ({"outputs": (TensorSpec(name="z", datatype="FP32", shape=("batch", 3)),)}, "has the outputs y"),
            ({"inputs": (TensorSpec(name="x", datatype="INT8", shape=("batch", 8)),)}, "is FP32, .* says INT8"),
        ],
    )
    def test_a_manifest_that_lies_is_refused(self, tmp_path: Path, changes: dict, told: str) -> None:
        """Names and types are held against the graph's when it is loaded."""
        with pytest.raises(BadArtifact, match=told):
            load(tiny_artifact(tmp_path, engine=self.engine, **changes))
