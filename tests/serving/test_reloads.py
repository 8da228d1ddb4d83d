"""Newer versions, corrupt ones, half-copied ones, while requests come in."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import threading
from pathlib import Path

from stoker.testing.tiny_models import tiny_artifact
from tests.serving.asking import ask, infer, load, metric, running


def test_a_newer_version_takes_over_without_a_gap(tmp_path: Path) -> None:
    """While requests come in from several sides, versions are published and loaded: every request is answered."""
    first = tiny_artifact(tmp_path, name="digits", seed=0)
    answers = {1: first.golden().outputs["y"].tolist()}
    inputs = first.golden().inputs["x"]
    body = {"inputs": [{"name": "x", "shape": list(inputs.shape), "datatype": "FP32", "data": inputs.tolist()}]}
    with running(tmp_path) as up, concurrent.futures.ThreadPoolExecutor(3) as pool:
        is_over = threading.Event()

        def load_on() -> set[int]:
            seen: set[int] = set()
            while not is_over.is_set():
                status, answer = infer(up, body=body)
                assert status == 200, answer
                seen.add(int(answer["model_version"]))
            return seen

        clients_ = [pool.submit(load_on) for _ in range(3)]
        try:
            for version in range(2, 6):
                answers[version] = tiny_artifact(tmp_path, name="digits", seed=version).golden().outputs["y"].tolist()
                assert load(up, "digits")[0] == 200
                assert infer(up, body=body)[1]["model_version"] == str(version)
        finally:
            is_over.set()
        seen = set().union(*(one.result() for one in clients_))
        assert seen <= set(answers)
        assert len(seen) > 1


def test_a_corrupt_version_leaves_the_old_one_serving(tmp_path: Path) -> None:
    """The index, the answer to the load request and a metric say why; requests are answered as before."""
    tiny_artifact(tmp_path, name="digits")
    with running(tmp_path) as up:
        graph = tiny_artifact(tmp_path, name="digits", seed=1).graph_path
        graph.write_bytes(graph.read_bytes()[:-10] + bytes(10))
        status, answer = load(up, "digits")
        assert status == 503
        assert "SHA-256" in answer["error"]
        assert infer(up)[1]["model_version"] == "1"
        index = ask(f"{up.started.admin}/v2/repository/index", {})[1]
        assert [(one["version"], one["state"]) for one in index] == [("1", "READY"), ("2", "UNAVAILABLE")]
        assert "SHA-256" in index[1]["reason"]
        assert metric(up, 'stoker_model_loads_total{model="digits",outcome="failed"}') == 1
        assert infer(up, version="2")[0] == 503


def test_a_version_with_other_answers_is_not_served(tmp_path: Path) -> None:
    """Whole files whose graph does not give the golden answers are refused, with the numbers."""
    tiny_artifact(tmp_path, name="digits")
    with running(tmp_path) as up:
        other = tiny_artifact(tmp_path, name="digits", seed=1, golden="golden.safetensors")
        wrong = tiny_artifact(tmp_path / "elsewhere", name="digits", seed=2)
        shutil.copy(wrong.graph_path, other.graph_path)
        manifest = json.loads((other.path / "manifest.json").read_text())
        entry = json.loads((wrong.path / "manifest.json").read_text())["files"]
        graph = next(one for one in entry if one["name"] == "model.onnx")
        manifest["files"] = [graph if one["name"] == "model.onnx" else one for one in manifest["files"]]
        (other.path / "manifest.json").write_text(json.dumps(manifest))
        status, answer = load(up, "digits")
        assert status == 503
        assert "times what the manifest allows" in answer["error"]
        assert infer(up)[1]["model_version"] == "1"


def test_a_half_copied_version_is_seen_once_it_is_whole(tmp_path: Path) -> None:
    """Files without a manifest are no version; a manifest without its files is refused until they are there."""
    whole = tiny_artifact(tmp_path / "elsewhere", name="digits", seed=1).path
    tiny_artifact(tmp_path / "models", name="digits")
    target = tmp_path / "models" / "digits" / "2"
    with running(tmp_path / "models") as up:
        target.mkdir()
        shutil.copy(whole / "model.onnx", target)
        assert load(up, "digits")[0] == 200
        assert infer(up)[1]["model_version"] == "1"
        shutil.copy(whole / "manifest.json", target)
        assert "golden.safetensors" in load(up, "digits")[1]["error"]
        assert infer(up)[1]["model_version"] == "1"
        shutil.copy(whole / "golden.safetensors", target)
        assert load(up, "digits")[0] == 200
        assert infer(up)[1]["model_version"] == "2"


def test_an_unloaded_model_says_so_and_comes_back(tmp_path: Path) -> None:
    """Unloading makes the server answer 503, and readiness of the model falls; loading brings it back."""
    tiny_artifact(tmp_path, name="digits")
    with running(tmp_path) as up:
        assert ask(f"{up.started.admin}/v2/repository/models/digits/unload", {})[0] == 200
        status, answer = infer(up)
        assert (status, "unloaded" in answer["error"]) == (503, True)
        assert ask(f"{up.started.http}/v2/models/digits/ready")[0] == 503
        assert load(up, "digits")[0] == 200
        assert infer(up)[0] == 200
