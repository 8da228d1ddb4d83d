"""Taking over ONNX graphs made elsewhere."""

import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from stoker.artifacts import excess, read, write_settings
from stoker.engines import load
from stoker.errors import BadArtifact
from stoker.exporting import About, import_onnx
from stoker.records import DynamicDim, ServiceSettings
from stoker.testing.tiny_models import Kind, tiny_graph, tiny_inputs


def saved(path: Path, model: onnx.ModelProto) -> Path:
    """The graph in a file."""
    onnx.save(model, path)
    return path


def made_of(
    nodes: list[onnx.NodeProto],
    shape: list[int | str | None] | None = None,
    weights: dict[str, np.ndarray] | None = None,
    *,
    out: int = TensorProto.FLOAT,
    opset: int = 20,
    rank: int | None = None,
) -> onnx.ModelProto:
    """A graph from `x` FP32 to `y`, whose shape it does not say."""
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 4] if shape is None else shape)],
        [helper.make_tensor_value_info("y", out, None if rank is None else [None] * rank)],
        [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


@pytest.mark.parametrize("kind", ["mlp", "tokens", "images"])
@pytest.mark.parametrize("batch", ["batch", "N", None, 1])
def test_a_batch_is_found_whatever_it_is_called(tmp_path: Path, kind: Kind, batch: str | int | None) -> None:
    """Named otherwise, not named, or fixed at one by an exporter: samples can be stacked, and engines agree."""
    artifact = import_onnx(saved(tmp_path / "g.onnx", tiny_graph(kind, batch=batch)), tmp_path / "m")
    assert artifact.manifest.is_batched
    assert all(proof.error <= proof.limit for proof in artifact.manifest.proofs)
    (engine,) = load(read(tmp_path / "m"))
    asked = tiny_inputs(kind, rows=5)
    (wanted,) = engine.run(asked).values()
    apart = [next(iter(engine.run({n: a[at : at + 1] for n, a in asked.items()}).values())) for at in range(5)]
    np.testing.assert_allclose(np.concatenate(apart), wanted, rtol=1e-4, atol=1e-4)


def test_a_batch_that_the_graph_needs_at_three_is_left_alone(tmp_path: Path) -> None:
    """A size that is no placeholder is what it is: served request by request."""
    manifest = import_onnx(saved(tmp_path / "g.onnx", tiny_graph(batch=3)), tmp_path / "m").manifest
    assert not manifest.is_batched
    assert (manifest.inputs[0].shape, manifest.outputs[0].shape) == ((3, 8), (3, 3))


def test_a_batch_of_one_that_is_woven_into_the_graph_stays_one(tmp_path: Path) -> None:
    """It says 1 and cannot be made more: a Reshape to [1, 2, 2] decides."""
    nodes = [helper.make_node("Reshape", ["x", "to"], ["y"])]
    model = made_of(nodes, [1, 4], {"to": np.array([1, 2, 2])})
    manifest = import_onnx(saved(tmp_path / "g.onnx", model), tmp_path / "m").manifest
    assert (manifest.inputs[0].shape, manifest.outputs[0].shape) == ((1, 4), (1, 2, 2))
    assert not manifest.is_batched


def test_a_first_dimension_that_mixes_is_no_batch(tmp_path: Path) -> None:
    """It is named N, and a softmax runs over it: not believed, as its samples depend on one another."""
    nodes = [helper.make_node("Softmax", ["x"], ["y"], axis=0)]
    manifest = import_onnx(saved(tmp_path / "g.onnx", made_of(nodes)), tmp_path / "m").manifest
    assert not manifest.is_batched
    assert manifest.inputs[0].shape == ("N", 4)
    drawn, served = manifest.notes
    assert "drawn at random" in drawn
    assert "--inputs FILE.npz" in drawn
    assert "served request by request, without batching: onnxruntime: each sample alone and among 2, 3" in served


def test_a_batch_that_holds_up_to_eight_rows_alone_is_no_batch(tmp_path: Path) -> None:
    """Its answers change between 8 and 32 rows, in which a service would ask it."""
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"], end=1),
        helper.make_node("Greater", ["shape", "eight"], ["is_large"]),
        helper.make_node("Cast", ["is_large"], ["shift"], to=TensorProto.FLOAT),
        helper.make_node("Add", ["x", "shift"], ["y"]),
    ]
    model = saved(tmp_path / "g.onnx", made_of(nodes, weights={"eight": np.array([8])}))
    manifest = import_onnx(model, tmp_path / "m").manifest
    assert not manifest.is_batched
    (tmp_path / "n").mkdir()
    write_settings(tmp_path / "n", ServiceSettings(max_batch_rows=8))
    assert import_onnx(model, tmp_path / "n").manifest.is_batched


@pytest.mark.parametrize(("share", "is_batched"), [(0.02, True), (1.0, False)])
def test_a_batch_that_some_drawn_inputs_move_a_little_is_kept(tmp_path: Path, share: float, is_batched: bool) -> None:
    """Numbers below 0 meet those of others: if by a little, it may be nonsense that real inputs do not show."""
    nodes = [
        helper.make_node("Min", ["x", "zero"], ["below"]),
        helper.make_node("ReduceMean", ["below", "first"], ["mean"], keepdims=1),
        helper.make_node("Mul", ["mean", "share"], ["shared"]),
        helper.make_node("Add", ["x", "shared"], ["y"]),
    ]
    weights = {"zero": np.float32(0), "share": np.float32(share), "first": np.array([0])}
    path = saved(tmp_path / "g.onnx", made_of(nodes, weights={n: np.asarray(a) for n, a in weights.items()}))
    manifest = import_onnx(path, tmp_path / "m").manifest
    assert manifest.is_batched == is_batched
    expected = "drawn inputs of another kind" if is_batched else "request by request"
    assert any(expected in note for note in manifest.notes)


def test_what_is_dynamic_is_kept_with_its_pads_and_limits(tmp_path: Path) -> None:
    """Tokens vary, the mask says what to pad with, and the user how many there may be."""
    about = About(name="words", dims=[DynamicDim(name="tokens", low=1, high=64)], labels={}, metrics={"f1": 0.5})
    manifest = import_onnx(saved(tmp_path / "g.onnx", tiny_graph("tokens")), tmp_path / "m", about=about).manifest
    assert [(spec.shape, spec.pad) for spec in manifest.inputs] == [(("batch", "tokens"), 0)] * 2
    assert manifest.outputs[0].shape == ("batch", 4)
    assert (manifest.name, manifest.dims, manifest.metrics) == ("words", tuple(about.dims), {"f1": 0.5})
    assert any("padded" in proof.what for proof in manifest.proofs)


def test_token_ids_are_drawn_from_the_table_they_look_up(tmp_path: Path) -> None:
    """Ids beyond its rows would fail, or read what is not there; the same are drawn every time."""
    path = saved(tmp_path / "g.onnx", tiny_graph("tokens"))
    first, second = (import_onnx(path, tmp_path / "m").golden() for _ in range(2))
    ids = first.inputs["input_ids"]
    assert 2 < ids.max() < 16
    assert (ids == second.inputs["input_ids"]).all()
    assert set(first.inputs["attention_mask"].ravel()) == {0, 1}


def test_examples_of_the_users_are_the_golden_ones(tmp_path: Path) -> None:
    """The first four of them."""
    asked = tiny_inputs(rows=6, seed=9)
    artifact = import_onnx(saved(tmp_path / "g.onnx", tiny_graph()), tmp_path / "m", inputs=asked)
    assert (artifact.golden().inputs["x"] == asked["x"][:4]).all()
    assert artifact.manifest.notes == ()


@pytest.mark.parametrize(
    ("inputs", "told"),
    [
        ({"z": np.zeros((2, 8), np.float32)}, "are z; the graph takes x"),
        ({"x": np.zeros((2, 8))}, "is float64"),
        ({"x": np.zeros((2, 7), np.float32)}, r"\[2, 7\]; the graph takes float32 \['batch', 8\]"),
        ({"x": np.zeros((0, 8), np.float32)}, "no common number of samples"),
    ],
)
def test_examples_that_do_not_fit_the_graph_are_told(tmp_path: Path, inputs: dict, told: str) -> None:
    """Names, types, shapes, and none at all."""
    with pytest.raises(BadArtifact, match=told):
        import_onnx(saved(tmp_path / "g.onnx", tiny_graph()), tmp_path / "m", inputs=inputs)


def test_a_quantised_graph_is_noticed(tmp_path: Path) -> None:
    """Its precision is int8: compressing it again would lose more."""
    weights = {"scale": np.float32(0.1), "zero": np.uint8(128)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
    ]
    path = saved(tmp_path / "g.onnx", made_of(nodes, weights={n: np.asarray(a) for n, a in weights.items()}))
    assert import_onnx(path, tmp_path / "m").manifest.precision == "int8"
    assert import_onnx(saved(tmp_path / "f.onnx", tiny_graph()), tmp_path / "f").manifest.precision == "fp32"


def test_weights_in_files_beside_are_taken_along(tmp_path: Path) -> None:
    """And are in the manifest with their digests."""
    onnx.save(tiny_graph(), tmp_path / "g.onnx", save_as_external_data=True, location="g.data", size_threshold=0)
    artifact = import_onnx(tmp_path / "g.onnx", tmp_path / "m")
    (tmp_path / "g.data").unlink()
    assert "g.data" in {one.name for one in artifact.manifest.files}
    artifact.verify()
    golden = artifact.golden()
    (engine,) = load(artifact)
    assert excess(engine.run(golden.inputs), golden.outputs, artifact.manifest.tolerance) <= 1


def _branching() -> onnx.ModelProto:
    """Two branches that add weights of their own, and nothing else that is large."""

    def branch(name: str) -> onnx.GraphProto:
        weights = numpy_helper.from_array(np.ones(4, np.float32), f"w_{name}")
        told = helper.make_tensor_value_info(f"y_{name}", TensorProto.FLOAT, None)
        return helper.make_graph(
            [helper.make_node("Add", ["x", weights.name], [told.name])], name, [], [told], [weights]
        )

    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Greater", ["most", "limit"], ["is_large"]),
        helper.make_node("If", ["is_large"], ["y"], then_branch=branch("then"), else_branch=branch("else")),
    ]
    return made_of(nodes, weights={"limit": np.array(0, np.float32)})


def test_weights_of_branches_in_a_file_beside_are_taken_along(tmp_path: Path) -> None:
    """Of a graph within the graph as well; without them no engine could load what was written."""
    weight, limit = np.ones(4, np.float32).tobytes(), np.array(0, np.float32).tobytes()
    apart = (sys.getsizeof(weight) + sys.getsizeof(limit)) // 2  # by which the library tells large ones from small
    onnx.save(_branching(), tmp_path / "g.onnx", save_as_external_data=True, location="w.data", size_threshold=apart)
    assert not onnx.load(tmp_path / "g.onnx", load_external_data=False).graph.initializer[0].external_data
    artifact = import_onnx(tmp_path / "g.onnx", tmp_path / "m")
    assert "w.data" in {file.name for file in artifact.manifest.files}
    (tmp_path / "w.data").unlink()
    with pytest.raises(BadArtifact, match=r"w\.data, which is not there"):
        import_onnx(tmp_path / "g.onnx", tmp_path / "n")


def _external_elsewhere(tmp_path: Path, location: str) -> Path:
    onnx.save(tiny_graph(), tmp_path / "g.onnx", save_as_external_data=True, location="g.data", size_threshold=0)
    model = onnx.load(tmp_path / "g.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (tmp_path / "g.onnx").write_bytes(model.SerializeToString())
    return tmp_path / "g.onnx"


@pytest.mark.parametrize(
    ("location", "told"),
    [("gone.data", "weights in gone.data, which is not there"), ("../g.data", "outside"), ("/etc/passwd", "outside")],
)
def test_weights_that_are_missing_or_elsewhere_are_told(tmp_path: Path, location: str, told: str) -> None:
    """A graph may not make others' files part of an artifact."""
    with pytest.raises(BadArtifact, match=told):
        import_onnx(_external_elsewhere(tmp_path, location), tmp_path / "m")


def test_a_cut_off_file_is_told(tmp_path: Path) -> None:
    """At any length: no ONNX, not valid, or not loaded; never a traceback."""
    whole = tiny_graph().SerializeToString()
    for length in (0, 1, 10, 100, len(whole) // 2, len(whole) - 5):
        (tmp_path / "g.onnx").write_bytes(whole[:length])
        with pytest.raises(BadArtifact, match=r"g\.onnx"):
            import_onnx(tmp_path / "g.onnx", tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_an_operation_that_does_not_exist_is_named(tmp_path: Path) -> None:
    """In the standard domain by the checker, in another by the engines."""
    model = made_of([helper.make_node("Frobnicate", ["x"], ["y"])], rank=2)
    with pytest.raises(BadArtifact, match=r"is not valid ONNX: .*No Op registered for Frobnicate"):
        import_onnx(saved(tmp_path / "g.onnx", model), tmp_path / "m")
    model = made_of([helper.make_node("Frobnicate", ["x"], ["y"], domain="my.own")])
    model.opset_import.append(helper.make_opsetid("my.own", 1))
    with pytest.raises(BadArtifact, match=r"(?s)No engine can load g.onnx \(opset 20\).*Frobnicate.*Frobnicate"):
        import_onnx(saved(tmp_path / "g.onnx", model), tmp_path / "m")


def test_an_output_that_is_no_tensor_is_told_with_the_converters_option(tmp_path: Path) -> None:
    """scikit-learn's converter gives dictionaries unless it is asked not to."""
    model = tiny_graph()
    kind = model.graph.output[0].type
    kind.sequence_type.elem_type.tensor_type.elem_type = TensorProto.FLOAT
    nodes = [helper.make_node("SequenceConstruct", ["h"], ["y"])]
    del model.graph.node[2:]
    model.graph.node.extend(nodes)
    with pytest.raises(BadArtifact, match="is no tensor") as caught:
        import_onnx(saved(tmp_path / "g.onnx", model), tmp_path / "m")
    assert "zipmap" in str(caught.value)


def test_engines_that_disagree_are_told_apart_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference goes into the artifact, with the other's error among the proofs."""
    from stoker.engines import openvino

    real = openvino.OpenVino.run
    monkeypatch.setattr(
        openvino.OpenVino, "run", lambda self, asked: {n: a * 1.1 for n, a in real(self, asked).items()}
    )
    manifest = import_onnx(saved(tmp_path / "g.onnx", tiny_graph()), tmp_path / "m").manifest
    assert manifest.engine == "onnxruntime"
    (wrong,) = [proof for proof in manifest.proofs if proof.error > proof.limit]
    assert wrong.what.startswith("openvino and onnxruntime")
    assert wrong.error == pytest.approx(0.1, rel=1e-3)


@pytest.mark.parametrize("opset", [7, 13, 22])
def test_older_and_newer_operations_are_taken_over(tmp_path: Path, opset: int) -> None:
    """As far as an engine knows them."""
    model = made_of([helper.make_node("Relu", ["x"], ["y"])], opset=opset)
    assert import_onnx(saved(tmp_path / "g.onnx", model), tmp_path / "m").manifest.is_batched


def test_examples_are_drawn_of_a_size_that_is_allowed(tmp_path: Path) -> None:
    """And that can be cut to half."""
    about = About(dims=[DynamicDim(name="tokens", low=20, high=50)])
    artifact = import_onnx(saved(tmp_path / "g.onnx", tiny_graph("tokens")), tmp_path / "m", about=about)
    assert artifact.golden().inputs["input_ids"].shape == (4, 40)


def test_sizes_that_cannot_vary_are_those_of_the_users_examples(tmp_path: Path) -> None:
    """A graph without a batch that says anything goes, and reshapes to one size: as models with states do."""
    nodes = [
        helper.make_node("Reshape", ["x", "to"], ["h"]),
        helper.make_node("ReduceSum", ["h"], ["y"], keepdims=0),
    ]
    path = saved(tmp_path / "g.onnx", made_of(nodes, ["?", "?"], {"to": np.array([4, 3])}))
    with pytest.raises(BadArtifact, match="cannot answer inputs of these shapes") as caught:
        import_onnx(path, tmp_path / "m")
    assert "--inputs" in str(caught.value)
    manifest = import_onnx(path, tmp_path / "m", inputs={"x": np.ones((2, 6), np.float32)}).manifest
    assert (manifest.inputs[0].shape, manifest.outputs[0].shape, manifest.dims) == ((2, 6), (), ())


def test_outputs_tell_two_dimensions_of_images_apart(tmp_path: Path) -> None:
    """Height and width keep their names, and a dimension without one gets one."""
    nodes = [helper.make_node("Transpose", ["x"], ["y"], perm=[0, 3, 1, 2])]
    manifest = import_onnx(saved(tmp_path / "g.onnx", made_of(nodes, ["N", 3, "h", "?"])), tmp_path / "m").manifest
    assert manifest.inputs[0].shape == ("batch", 3, "h", "x_3")
    assert manifest.outputs[0].shape == ("batch", "x_3", 3, "h")


def test_dimensions_cannot_be_named_from_outside(tmp_path: Path) -> None:
    """The graph names them itself."""
    with pytest.raises(BadArtifact, match="said by its graph"):
        import_onnx(saved(tmp_path / "g.onnx", tiny_graph()), tmp_path / "m", about=About(dynamic={"x": {1: "n"}}))


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    """A name that leads nowhere, and a directory."""
    (tmp_path / "d.onnx").mkdir()
    for name in ("nowhere.onnx", "d.onnx"):
        with pytest.raises(BadArtifact, match="There is no file"):
            import_onnx(tmp_path / name, tmp_path / "m")


def test_a_graph_of_strings_is_served_by_the_engine_that_can(tmp_path: Path) -> None:
    """Its golden answers are strings too."""
    nodes = [helper.make_node("StringConcat", ["x", "x"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", TensorProto.STRING, ["N"])],
        [helper.make_tensor_value_info("y", TensorProto.STRING, ["N"])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    artifact = import_onnx(saved(tmp_path / "g.onnx", model), tmp_path / "m")
    assert (artifact.manifest.engine, artifact.manifest.is_batched) == ("onnxruntime", True)
    assert artifact.golden().outputs["y"].tolist()[1] == b"word 1word 1"


def test_outputs_of_a_model_without_a_batch_vary_where_its_inputs_do(tmp_path: Path) -> None:
    """An example of one caller does not say that there is only one: as of models that hand their state back."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("ReduceSum", ["state", "axis"], ["sum"], keepdims=0),
            helper.make_node("Add", ["x", "sum"], ["y"]),
            helper.make_node("Identity", ["state"], ["stateN"]),
        ],
        "g",
        [value("x", TensorProto.FLOAT, [None, 4]), value("state", TensorProto.FLOAT, [2, None, 4])],
        [value("y", TensorProto.FLOAT, None), value("stateN", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([0]), "axis")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    draw = np.random.default_rng(0)
    inputs = {
        "x": draw.standard_normal((1, 4), dtype=np.float32),
        "state": draw.standard_normal((2, 1, 4), dtype=np.float32),
    }
    artifact = import_onnx(saved(tmp_path / "g.onnx", model), tmp_path / "m", inputs=inputs)
    assert not artifact.manifest.is_batched
    shapes = {spec.name: spec.shape for spec in artifact.manifest.outputs}
    assert [[isinstance(dim, str) for dim in shapes[name]] for name in ("y", "stateN")] == [
        [True, False],
        [False, True, False],
    ]
