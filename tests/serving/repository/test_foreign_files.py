"""Artifacts from elsewhere that would have a server read other files: refused before an engine opens anything."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import openvino.opset13 as ops
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from stoker.artifacts import Artifact, Golden, publish, read
from stoker.engines import loader
from stoker.engines.loader import load
from stoker.errors import BadArtifact
from stoker.records import ArtifactSource, EngineName, FileDigest, Manifest, ServiceSettings, TensorSpec, Tolerance
from stoker.serving.repository.version_loader import load_version
from stoker.testing.tiny_models import tiny_artifact

SECRET = b"TOP-SECRET-KEY-0123456789abcdef!"
ENGINES: tuple[EngineName, ...] = ("onnxruntime", "openvino")

Writes = Callable[[Path], None]
Digests = Callable[[], tuple[FileDigest, ...]]


def artifact_with(
    root: Path, engine: EngineName, graph: str, write_graph: Writes, after_digests: Writes = lambda _: None
) -> Artifact:
    """A model that answers x times the bytes of its weights, and zeros for its golden inputs."""

    def write(directory: Path, digests: Digests) -> Manifest:
        write_graph(directory)
        zeros = Golden({"x": np.zeros((2, 1), np.float32)}, {"y": np.zeros((2, len(SECRET)), np.float32)})
        save_file(zeros.as_tensors(), directory / "golden.safetensors")
        files = digests()
        after_digests(directory)
        return Manifest(
            name="leak",
            engine=engine,
            precision="fp32",
            graph=graph,
            golden="golden.safetensors",
            inputs=(TensorSpec(name="x", datatype="FP32", shape=("batch", 1)),),
            outputs=(TensorSpec(name="y", datatype="FP32", shape=("batch", len(SECRET))),),
            tolerance=Tolerance(absolute=1e-4, relative=1e-4),
            proved_on="a test",
            source=ArtifactSource(kind="onnx", name="t", digest="0" * 64),
            made_at="2026-11-22T00:00:00+00:00",
            files=files,
        )

    return publish(root / "leak", write)


def external_onnx(location: str) -> Writes:
    """A graph whose weights are in another file."""

    def write(directory: Path) -> None:
        weights = TensorProto(name="w", data_type=TensorProto.UINT8, dims=[1, len(SECRET)], data_location="EXTERNAL")
        for key, value in (("location", location), ("offset", "0"), ("length", str(len(SECRET)))):
            weights.external_data.add(key=key, value=value)
        graph = helper.make_graph(
            [
                helper.make_node("Cast", ["w"], ["wf"], to=TensorProto.FLOAT),
                helper.make_node("Mul", ["x", "wf"], ["y"]),
            ],
            "g",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", len(SECRET)])],
            [weights],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
        (directory / "model.onnx").write_bytes(model.SerializeToString())

    return write


def openvino_ir(directory: Path) -> None:
    """The same in OpenVINO's format, its weights taken away."""
    x = ops.parameter([-1, 1], np.float32, name="x")
    x.output(0).get_tensor().set_names({"x"})
    weights = ops.constant(np.frombuffer(SECRET, np.uint8).reshape(1, -1).copy())
    y = ops.multiply(x, ops.convert(weights, "f32"))
    y.output(0).get_tensor().set_names({"y"})
    openvino.save_model(openvino.Model([y], [x], "m"), directory / "model.xml", compress_to_fp16=False)
    (directory / "model.bin").unlink()


def linked(name: str, target: Path) -> Writes:
    """Put a link into the directory after the digests were taken."""
    return lambda directory: (directory / name).symlink_to(target)


def written(name: str) -> Writes:
    """Put a file into the directory after the digests were taken."""
    return lambda directory: (directory / name).write_bytes(SECRET) and None


def refusal(artifact: Artifact) -> str:
    """Why a server does not take it."""
    with pytest.raises(BadArtifact) as caught:
        load_version(artifact.path, ServiceSettings(instances=1, threads=1), cores=1)
    return caught.value.message


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the server."""
    path = tmp_path / "secret.txt"
    path.write_bytes(SECRET)
    return path


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_behind_an_unlisted_link_are_refused(engine: EngineName, tmp_path: Path, secret: Path) -> None:
    """The server's own file would come back as an answer; golden inputs of zeros do not show it."""
    artifact = artifact_with(tmp_path, engine, "model.onnx", external_onnx("w.bin"), linked("w.bin", secret))
    assert "w.bin is a link" in refusal(artifact)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_in_an_unlisted_file_are_refused(engine: EngineName, tmp_path: Path) -> None:
    """A regular file that nothing was said of is loaded by no engine, hidden or not."""
    for number, name in enumerate(("w.bin", ".w.bin")):
        artifact = artifact_with(tmp_path / str(number), engine, "model.onnx", external_onnx(name), written(name))
        assert f"{name} is not in the manifest's list" in refusal(artifact)


def test_openvino_reads_no_weights_behind_a_link(tmp_path: Path, secret: Path) -> None:
    """`model.bin` next to `model.xml` is read though neither graph nor manifest names it."""
    artifact = artifact_with(tmp_path, "openvino", "model.xml", openvino_ir, linked("model.bin", secret))
    assert "model.bin is a link" in refusal(artifact)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("location", ["../../../secret.txt", "ABSOLUTE", "d/../../../../secret.txt", "w.bin"])
def test_weights_named_outside_the_list_are_refused_by_stoker_itself(
    engine: EngineName, location: str, tmp_path: Path, secret: Path
) -> None:
    """Engines refuse most of these too; one that stops doing so opens nothing."""
    location = str(secret) if location == "ABSOLUTE" else location
    artifact = artifact_with(tmp_path, engine, "model.onnx", external_onnx(location))
    assert "which is not in the manifest's list" in refusal(artifact)


@pytest.mark.parametrize("engine", ENGINES)
def test_weights_in_a_listed_file_are_served(engine: EngineName, tmp_path: Path) -> None:
    """What the manifest lists may be read, in a folder too."""

    def both(directory: Path) -> None:
        external_onnx("weights/w.bin")(directory)
        (directory / "weights").mkdir()
        (directory / "weights" / "w.bin").write_bytes(SECRET)

    loaded = load_version(
        artifact_with(tmp_path, engine, "model.onnx", both).path, ServiceSettings(instances=1, threads=1), cores=1
    )
    answer = loaded.engines[0].run({"x": np.ones((1, 1), np.float32)})["y"]
    assert answer[0].astype(np.uint8).tobytes() == SECRET
    loaded.engines[0].close()


def test_weights_are_searched_for_in_functions_and_attributes(tmp_path: Path) -> None:
    """Wherever a graph can name a file."""

    def tensor(name: str) -> Any:
        found = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[1], data_location="EXTERNAL")
        found.external_data.add(key="location", value=name)
        return found

    inner = helper.make_graph([helper.make_node("Constant", [], ["c"], value=tensor("branch"))], "i", [], [])
    function = helper.make_function(
        "d",
        "F",
        [],
        ["c"],
        [helper.make_node("Constant", [], ["c"], value=tensor("function"))],
        [helper.make_opsetid("", 20)],
    )
    graph = helper.make_graph(
        [helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)], "g", [], [], [tensor("initial")]
    )
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, functions=[function]).SerializeToString())
    assert set(loader.weight_files(path)) == {"branch", "function", "initial"}
    path.write_bytes(b"\xff location of nothing")
    with pytest.raises(ValueError, match="not an ONNX graph"):
        loader.weight_files(path)


def test_a_graph_without_such_weights_is_not_parsed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of usual models never imports the parser."""
    artifact = tiny_artifact(tmp_path)
    monkeypatch.setattr(onnx, "load", lambda *_, **__: pytest.fail("it was parsed"))
    assert loader.weight_files(artifact.graph_path) == ()


@pytest.mark.parametrize("graph", ["model.pb", "model.tflite", "model"])
def test_a_graph_of_another_format_is_refused(graph: str, tmp_path: Path) -> None:
    """OpenVINO would read these, with further files that nothing here knows."""
    artifact = artifact_with(tmp_path, "openvino", graph, written(graph))
    artifact.verify()
    with pytest.raises(BadArtifact, match=r"end in \.onnx or \.xml"):
        load(artifact)


def test_pipes_and_sockets_are_refused_without_waiting_for_them(tmp_path: Path) -> None:
    """Opening a pipe that has no writer would wait for ever."""
    artifact = tiny_artifact(tmp_path)
    os.mkfifo(artifact.path / "pipe")
    with pytest.raises(BadArtifact, match="pipe is not a regular file"):
        artifact.verify()
    (artifact.path / "pipe").unlink()
    content = artifact.graph_path.read_bytes()
    artifact.graph_path.unlink()
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(artifact.path)  # a socket's path has at most 107 letters
        try:
            bound.bind("model.onnx")
        finally:
            os.chdir(before)
        with pytest.raises(BadArtifact, match="not a regular file"):
            artifact.verify()
    artifact.graph_path.unlink()
    artifact.graph_path.write_bytes(content)
    artifact.verify()


def test_a_file_that_becomes_a_link_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: Path) -> None:
    """Between the listing and the reading somebody swaps it."""
    artifact = tiny_artifact(tmp_path)
    listing = artifact._listing()
    secret.write_bytes(artifact.graph_path.read_bytes())  # so that nothing but the link itself is wrong
    artifact.graph_path.unlink()
    artifact.graph_path.symlink_to(secret)
    monkeypatch.setattr(Artifact, "_listing", lambda _: listing)
    with pytest.raises(BadArtifact, match=r"model\.onnx cannot be read"):
        artifact.verify()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_file_that_is_replaced_while_the_engine_loads_is_refused(
    engine: EngineName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was verified is what the engine read."""
    artifact = tiny_artifact(tmp_path, engine=engine)
    content = artifact.graph_path.read_bytes()

    def swapping(*arguments: Any, **options: Any) -> Any:
        artifact.graph_path.unlink()
        artifact.graph_path.write_bytes(content)
        return load(*arguments, **options)

    monkeypatch.setattr("stoker.engines.load", swapping)
    assert "changed while it was being loaded" in refusal(artifact)


def test_directories_above_the_files_may_be_links(tmp_path: Path) -> None:
    """As git-sync and volumes of Kubernetes make them: the whole of it, a model, or a version."""
    made = tiny_artifact(tmp_path / "store", name="digits")
    (tmp_path / "by-model").mkdir()
    (tmp_path / "by-model" / "digits").symlink_to(made.path.parent)
    (tmp_path / "all").symlink_to(tmp_path / "store")
    (tmp_path / "by-version" / "digits").mkdir(parents=True)
    (tmp_path / "by-version" / "digits" / "7").symlink_to(made.path)
    for place, version in (("by-model", 1), ("all", 1), ("by-version", 7)):
        artifact = read(tmp_path / place / "digits")
        artifact.verify()
        assert artifact.version == version


def test_a_mount_whose_files_are_links_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """As of a ConfigMap: `manifest.json -> ..data/manifest.json`."""
    made = tiny_artifact(tmp_path / "store", name="digits")
    version = tmp_path / "mount" / "digits" / "1"
    shutil.copytree(made.path, version / "..2026")
    (version / "..data").symlink_to("..2026")
    for path in made.path.iterdir():
        (version / path.name).symlink_to(f"..data/{path.name}")
    with pytest.raises(BadArtifact, match=r"is a link|not in the manifest") as caught:
        read(version).verify()
    assert caught.value.remedy
