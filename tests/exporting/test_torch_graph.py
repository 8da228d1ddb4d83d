"""Files of a model that came from PyTorch."""

from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

from stoker.exporting import export_module, torch_export


@pytest.mark.slow
def test_weights_of_more_than_a_protobuf_holds_lie_beside_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a file that the manifest names, found from wherever the artifact is copied to."""
    monkeypatch.setattr(torch_export, "_MOST_INLINE_BYTES", 0)
    artifact = export_module(nn.Linear(64, 32).eval(), torch.randn(4, 64), tmp_path / "m")
    names = {one.name for one in artifact.manifest.files}
    assert "model.onnx.data" in names
    (tmp_path / "m").rename(tmp_path / "copied")
    model = onnx.load(tmp_path / "copied" / "1" / "model.onnx")
    assert any(list(one.dims) == [32, 64] for one in model.graph.initializer)
    assert {
        entry.value for one in model.graph.initializer for entry in one.external_data if entry.key == "location"
    } <= {"model.onnx.data"}


def test_tied_weights_are_written_under_both_names(tmp_path: Path) -> None:
    """`load_state_dict` finds each where it looks."""
    from safetensors.torch import load_file

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    torch_export.write_weights(model, tmp_path / "w.safetensors")
    stored = load_file(tmp_path / "w.safetensors")
    assert torch.equal(stored["0.weight"], stored["1.weight"])
    model.load_state_dict(stored)
