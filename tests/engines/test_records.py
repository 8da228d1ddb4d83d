"""An engine is one record in one file, found by listing `stoker/engines`."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stoker.engines
from stoker.artifacts import read
from stoker.engines import engine_record, engine_records, load
from stoker.errors import BadArtifact
from stoker.exporting.version_writer import library_versions
from stoker.records import dumps
from stoker.serving import protocol
from stoker.testing.tiny_models import tiny_artifact, tiny_inputs

_TOY = '''
"""An engine that answers with zeros."""

import numpy as np

from stoker.engines.base import EngineRecord


class Toy:
    def __init__(self, graph):
        self.outputs = graph.outputs

    def run(self, inputs):
        rows = len(next(iter(inputs.values())))
        return {
            spec.name: np.zeros([rows, *(size if isinstance(size, int) else 1 for size in spec.shape[1:])], np.float32)
            for spec in self.outputs
        }

    def close(self):
        pass


def load_all(graph):
    return [Toy(graph) for _ in range(graph.instances)]


ENGINE = EngineRecord(name="toy", load_all=load_all, platform="toy_graph", packages=("pytest",))
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file `toy.py` in the folder of engines, and nothing else."""
    (tmp_path / "toy.py").write_text(_TOY)
    monkeypatch.setattr(stoker.engines, "__path__", [*stoker.engines.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "stoker.engines.toy", raising=False)


def test_the_engines_are_those_with_a_record() -> None:
    """In the order in which an export prefers them; what an import refers to has its own."""
    assert [record.name for record in engine_records()] == ["openvino", "onnxruntime"]
    assert min(engine_records(), key=lambda record: record.reference_rank).name == "onnxruntime"
    assert engine_record("torch") is None


@pytest.mark.usefixtures("toy")
def test_a_new_engine_is_one_file(tmp_path: Path) -> None:
    """An artifact that names it is read, loaded and run; its platform and its packages are known."""
    artifact = tiny_artifact(tmp_path / "model")
    (artifact.path / "manifest.json").write_text(dumps(dataclasses.replace(artifact.manifest, engine="toy")))
    artifact = read(artifact.path)
    (engine,) = load(artifact)
    (answer,) = engine.run(tiny_inputs()).values()
    assert not np.any(answer)
    assert protocol.model_metadata("m", artifact.manifest, ("1",))["platform"] == "toy_graph"
    assert "pytest" in library_versions()
    assert [record.name for record in engine_records()] == ["openvino", "onnxruntime", "toy"]


def test_an_engine_that_is_not_here_is_refused_with_those_that_are(tmp_path: Path) -> None:
    """A manifest from a newer version, or with a spelling mistake."""
    artifact = tiny_artifact(tmp_path)
    unknown = dataclasses.replace(artifact, manifest=dataclasses.replace(artifact.manifest, engine="openvin"))
    with pytest.raises(BadArtifact, match="cannot be run by openvin: there is no such engine here, only openvino, onn"):
        load(unknown)


def test_engines_are_listed_without_their_libraries() -> None:
    """Which may not be installed."""
    code = (
        "import sys; from stoker.engines import engine_records; assert len(engine_records()) == 2\n"
        "assert not {'openvino', 'onnxruntime', 'torch'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
