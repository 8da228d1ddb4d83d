"""Graphs in one call: the bits of the same operations called from Python, and errors that say the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from stoker.stepping import graph_interpreter
from stoker.stepping.graph_interpreter import interpreted
from stoker.stepping.step_failures import ran_out_of_memory
from stoker.zoo import GPT


def _graph_of(model: nn.Module, x: torch.Tensor) -> torch.fx.GraphModule:
    """The model's output and the gradient of its sum."""
    parameters = list(model.parameters())

    def work(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out = model(x)
        return (out.detach(), *torch.autograd.grad(out.float().sum(), parameters))

    return make_fx(work)(x)


class _Masked(nn.Module):
    """An infinity, an empty list, indices with a gap, entries of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x).masked_fill(x[:, :1] > 0, float("-inf")).softmax(1)
        one, other = out.split([2, 4], 1)
        return (one.mean() + other[:, torch.tensor([3, 0])]).square() * out.sum()


class _InHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x)


def _convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.MaxPool2d(2), nn.Flatten())


def _gpt() -> nn.Module:
    return GPT(layers=2, width=8, heads=2, context=8, vocab=5)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (_Masked, torch.randn(5, 8)),
        (_InHalf, torch.randn(5, 8)),
        (_convolutional, torch.randn(5, 1, 6, 6)),
        (_gpt, torch.randint(0, 5, (3, 8))),
    ],
    ids=["masked", "bf16 with dropout", "batch norm", "attention"],
)
def test_outputs_draws_and_buffers_are_those_of_calls_from_python(model, x) -> None:
    """Whatever arguments operations have: the same bits, also in what they write to."""
    torch.manual_seed(0)
    module = model()
    graph = _graph_of(module, x)
    repeat = interpreted(graph)
    assert repeat is not None
    states = []
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for way in (graph.forward, repeat):
        module.load_state_dict(before, strict=False)
        torch.manual_seed(1)
        with torch.no_grad():
            states.append([*way(x), torch.rand(1), *(buffer.clone() for buffer in module.buffers())])
    for one, other in zip(*states, strict=True):
        assert torch.equal(one.nan_to_num(9.0), other.nan_to_num(9.0))


def test_weights_are_read_where_they_lie() -> None:
    """Also once an optimiser has given a parameter another tensor."""
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    repeat = interpreted(_graph_of(model, x))
    assert repeat is not None
    model.weight.data = torch.zeros(2, 4)
    with torch.no_grad():
        assert torch.equal(repeat(x)[0], model.bias.expand(3, 2))


def test_what_is_no_operation_of_atens_is_left_to_python() -> None:
    """A Python function in a graph."""
    assert interpreted(torch.fx.symbolic_trace(lambda x: (torch.sin(x),))) is None


def test_without_the_builder_nothing_is_interpreted(monkeypatch) -> None:
    """It is not public, and may go."""
    graph = _graph_of(nn.Linear(4, 2), torch.randn(3, 4))
    assert interpreted(graph) is not None
    monkeypatch.setattr(graph_interpreter, "_IS_THERE", False)
    assert interpreted(graph) is None


def test_an_error_keeps_its_class_and_its_words() -> None:
    """A label out of range; the setting that is changed for it is put back."""
    graph = make_fx(lambda x, y: (F.cross_entropy(x, y),))(torch.randn(4, 3), torch.zeros(4, dtype=torch.int64))
    repeat = interpreted(graph)
    assert repeat is not None
    is_optimising = torch._C._get_graph_executor_optimize()
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        repeat(torch.randn(4, 3), torch.full((4,), 7))
    assert torch._C._get_graph_executor_optimize() == is_optimising


def test_memory_that_cannot_be_had_is_known_as_such() -> None:
    """Recovery makes the same update again with fewer samples at once."""
    repeat = interpreted(torch.fx.GraphModule(nn.Module(), _expanding()))
    assert repeat is not None
    with pytest.raises(RuntimeError) as problem:
        repeat(torch.zeros(4))
    assert ran_out_of_memory(problem.value)


def _expanding() -> torch.fx.Graph:
    """As many rows of a tensor as no memory holds."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    wide = graph.call_function(torch.ops.aten.expand.default, (x, [2**44, 4]))
    contiguous = {"memory_format": torch.contiguous_format}
    graph.output((graph.call_function(torch.ops.aten.clone.default, (wide,), contiguous),))
    return graph
