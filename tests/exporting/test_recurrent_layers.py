"""Recurrent layers over sequences of any length."""

from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

from stoker.engines import Graph, load_graph
from stoker.exporting import About, export_module, recurrent_layers
from stoker.records import EngineName


class Recurrent(nn.Module):
    """Two kinds of layers: outputs of each step, and the last states of each sample."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 4, num_layers=2, bidirectional=True, batch_first=batch_first)
        self.gru = nn.GRU(8, 3, bias=False, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, series: torch.Tensor) -> tuple[torch.Tensor, ...]:
        steps, (hidden, cell) = self.lstm(series if self.batch_first else series.transpose(0, 1))
        steps, last = self.gru(steps)
        steps = steps if self.batch_first else steps.transpose(0, 1)
        return steps, hidden.transpose(0, 1), cell.transpose(0, 1), last.transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("batch_first", [True, False])
def test_steps_of_recurrent_layers_may_vary(tmp_path: Path, batch_first: bool) -> None:
    """They are not unrolled over those of the examples: any number is answered as PyTorch does, by either engine."""
    torch.manual_seed(0)
    module = Recurrent(batch_first=batch_first).eval()
    about = About(dynamic={"series": {1: "steps"}})
    artifact = export_module(module, torch.randn(8, 6, 2), tmp_path / "m", about)
    assert "model.pt2" not in {file.name for file in artifact.manifest.files}
    manifest = artifact.manifest
    graph = Graph(path=artifact.graph_path, precision="fp32", inputs=manifest.inputs, outputs=manifest.outputs)
    names: tuple[EngineName, ...] = ("openvino", "onnxruntime")
    for (engine,) in (load_graph(name, graph) for name in names):
        for shape in ((1, 1, 2), (5, 9, 2)):
            series = torch.randn(shape)
            answers = engine.run({"series": series.numpy()})
            with torch.no_grad():
                expected = module(series)
            for answer, tensor in zip(answers.values(), expected, strict=True):
                torch.testing.assert_close(torch.from_numpy(answer), tensor, rtol=1e-4, atol=1e-5)


def test_a_fixed_number_of_steps_keeps_pytorchs_own_program(tmp_path: Path) -> None:
    """It is for use without Stoker, which such a model does not need."""

    class Steps(nn.GRU):
        def forward(self, series: torch.Tensor) -> torch.Tensor:
            return super().forward(series)[0]

    module = Steps(2, 3, batch_first=True).eval()
    assert recurrent_layers.has_recurrence(module)
    artifact = export_module(module, torch.randn(8, 2, 2), tmp_path / "m")
    assert "model.pt2" in {file.name for file in artifact.manifest.files}


def test_another_thread_trains_while_layers_are_traced() -> None:
    """The operators of a trace have no gradients, so they are for the tracing thread alone."""
    module, reached = Recurrent(), list[bool]()

    def train() -> None:
        sum(part.sum() for part in module(torch.randn(2, 4, 2))).backward()
        reached.extend(parameter.grad is not None for parameter in module.parameters())

    with recurrent_layers.whole_recurrences():
        thread = Thread(target=train)
        thread.start()
        thread.join()
    assert reached
    assert all(reached)


def test_without_onnxscripts_own_functions_models_are_exported_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are private to it, and a model without recurrent layers needs none of them."""
    monkeypatch.setattr(recurrent_layers, "_TRANSLATIONS", "onnxscript.function_libs.moved")
    assert not recurrent_layers.has_recurrence(Recurrent())
    artifact = export_module(nn.Linear(4, 2).eval(), torch.randn(8, 4), tmp_path / "m")
    assert "model.onnx" in {file.name for file in artifact.manifest.files}
