"""Exported models of a few numbers."""

from pathlib import Path

import pytest

from stoker.artifacts import excess
from stoker.engines import load
from stoker.testing.tiny_models import Kind, tiny_artifact, tiny_inputs


@pytest.mark.parametrize("kind", ["mlp", "tokens", "images"])
def test_a_tiny_model_takes_its_tiny_inputs(tmp_path: Path, kind: Kind) -> None:
    """Of any number of samples; another seed is another model."""
    artifact = tiny_artifact(tmp_path, kind=kind)
    artifact.verify()
    asked = tiny_inputs(kind, rows=3)
    specs = {spec.name: spec for spec in artifact.manifest.inputs}
    assert {name: array.shape[2:] for name, array in asked.items()} == {n: s.shape[2:] for n, s in specs.items()}
    (one,), (other,) = load(artifact), load(tiny_artifact(tmp_path, kind=kind, seed=1))
    assert excess(one.run(asked), other.run(asked), artifact.manifest.tolerance) > 1


def test_a_manifest_can_be_made_to_lie(tmp_path: Path) -> None:
    """For tests of what believes it."""
    assert tiny_artifact(tmp_path, name="a", proved_on="nowhere").manifest.proved_on == "nowhere"
