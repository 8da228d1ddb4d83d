"""An exported model in the terminal."""

import json
from pathlib import Path

import numpy as np
import pytest

from stoker.cli.exports import export_document, read_dynamic, read_inputs, render_export
from stoker.errors import BadArtifact
from stoker.records import Proof
from stoker.testing.tiny_models import tiny_artifact
from tests.cli.page import Page


def shown(artifact, width: int = 120) -> str:
    """What is printed of an artifact."""
    console = Page(width)
    render_export(artifact, console)
    return console.text


def test_the_table_has_signature_checks_files_and_place(tmp_path: Path) -> None:
    """Labels and padding with shapes; what holds and what does not; sizes; the directory."""
    proofs = (Proof(what="one", error=1e-7, limit=1e-3), Proof(what="other", error=float("inf"), limit=1e-3))
    artifact = tiny_artifact(tmp_path, proofs=proofs, metrics={"test/accuracy": 0.93})
    text = shown(artifact)
    for expected in (
        "tiny version 1: onnxruntime, fp32",
        "x",
        "FP32",
        "[batch, 8]",
        "cat, dog, owl",
        "1.0e-07",
        "inf",
        "does not hold",
        "model.onnx",
        "test/accuracy 0.93",
        str(artifact.path),
    ):
        assert expected in text
    assert "padded with 0" in shown(tiny_artifact(tmp_path, kind="tokens"))


def test_a_narrow_terminal_loses_no_words(tmp_path: Path) -> None:
    """Long lines are folded."""
    proofs = (Proof(what="each of these words is needed to know what was checked", error=0, limit=1e-3),)
    text = " ".join(shown(tiny_artifact(tmp_path, proofs=proofs), width=50).split())
    assert all(word in text for word in proofs[0].what.split())


def test_the_document_is_json_with_the_manifest(tmp_path: Path) -> None:
    """Path, version and digest with it."""
    artifact = tiny_artifact(tmp_path)
    document = json.loads(json.dumps(export_document(artifact)))
    assert document["manifest"]["name"] == "tiny"
    assert (document["version"], document["digest"]) == (1, artifact.digest)


@pytest.mark.parametrize("option", ["tokens", "x.1", "x.one=t", ".1=t", "x.1=", "x.-1=t"])
def test_dynamic_dimensions_of_another_form_are_told(option: str) -> None:
    """With the form that is wanted."""
    with pytest.raises(BadArtifact, match=r"wanted INPUT\.DIM=NAME"):
        read_dynamic([option])


def test_dynamic_dimensions_of_several_inputs_are_gathered() -> None:
    """Names of inputs may have dots in them."""
    assert read_dynamic(["a.b.1=t", "a.b.2=u", "c.1=t"]) == {"a.b": {1: "t", 2: "u"}, "c": {1: "t"}}
    assert read_dynamic(None) == {}


def test_files_of_inputs_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    """Objects, which could run code when they are unpickled; an array without a name; a file that is cut off."""
    np.savez(tmp_path / "o.npz", x=np.array([{"a": 1}], dtype=object))
    np.save(tmp_path / "a.npy", np.zeros(2))
    np.savez(tmp_path / "cut.npz", x=np.zeros(100))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:-30])
    for name in ("o.npz", "a.npy", "cut.npz", "none.npz"):
        with pytest.raises(BadArtifact, match="cannot be read"):
            read_inputs(tmp_path / name)
    assert read_inputs(None) is None
