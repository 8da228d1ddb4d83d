"""Choosing and loading an engine."""

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.devices import attached_cpu
from stoker.engines import default_threads, load
from stoker.errors import BadArtifact
from stoker.testing.tiny_models import tiny_artifact


def test_threads_are_the_usable_cores_shared_among_instances() -> None:
    """At least one each, however many instances there are."""
    cores = attached_cpu().cores
    assert default_threads(1) == cores
    assert default_threads(10 * cores) == 1


def test_a_program_of_pytorch_is_not_opened(tmp_path: Path) -> None:
    """It may hold pickles."""
    with pytest.raises(BadArtifact, match="pickle"):
        load(tiny_artifact(tmp_path).__class__(*_as_torch(tmp_path)))


def _as_torch(tmp_path: Path) -> tuple[Path, Any]:
    import dataclasses

    artifact = tiny_artifact(tmp_path)
    return artifact.path, dataclasses.replace(artifact.manifest, engine="torch")


def test_a_graph_that_is_not_there_is_told(tmp_path: Path) -> None:
    """A half-copied artifact."""
    artifact = tiny_artifact(tmp_path)
    artifact.graph_path.unlink()
    with pytest.raises(BadArtifact, match=r"There is no .*model\.onnx"):
        load(artifact)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_an_engine_that_is_not_installed_is_told_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """`pip install 'stoker[serve]'` is the remedy."""
    artifact = tiny_artifact(tmp_path, engine=engine)
    imported = builtins.__import__

    def refuse(name: str, *arguments: Any, **named: Any) -> Any:
        if name == engine:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *arguments, **named)

    monkeypatch.delitem(sys.modules, f"stoker.engines.{engine}")
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(BadArtifact, match="is not installed") as caught:
        load(artifact)
    assert caught.value.remedy == "pip install 'stoker[serve]'"


def test_engines_and_artifacts_do_not_load_torch(tmp_path: Path) -> None:
    """A server of exported models starts without it, and runs them without it."""
    code = (
        "import sys; from stoker.engines import load\n"
        "from stoker.testing.tiny_models import tiny_artifact, tiny_inputs\n"
        f"for name in ('openvino', 'onnxruntime'):\n"
        f"    load(tiny_artifact({str(tmp_path)!r}, engine=name))[0].run(tiny_inputs())\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
