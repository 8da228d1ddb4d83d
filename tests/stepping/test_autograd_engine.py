"""Backward passes that call PyTorch's engine: the same gradients, and nothing imported for them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from stoker.stepping import autograd_engine
from stoker.stepping.autograd_engine import backward


def _gradients(how) -> list[torch.Tensor]:
    """Gradients of a small model after two passes, which `how` accumulates."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    for _ in range(2):
        loss = model(torch.randn(16, 6)).square().sum()
        how(loss, torch.full_like(loss.detach(), 1 / 16))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("has_engine", [True, False])
def test_gradients_are_those_of_backward(has_engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and accumulated; also where the engine cannot be called."""
    if not has_engine:
        monkeypatch.setattr(autograd_engine, "_run", None)
    expected = _gradients(lambda loss, gradient: loss.backward(gradient))
    assert all(map(torch.equal, _gradients(backward), expected))


def test_a_gradient_of_another_shape_is_refused_as_by_pytorch() -> None:
    """The engine alone would add it up."""
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        backward(torch.ones((), requires_grad=True) * 2, torch.ones(3))


def test_a_loss_without_a_graph_is_refused_as_by_pytorch() -> None:
    """With the message by which the remedy is found."""
    with pytest.raises(RuntimeError, match="does not require grad"):
        backward(torch.ones(()), torch.ones(()))


_SCRIPT = """
import sys
import torch
import stoker

def heard(event):
    if event.kind == "progress" and event.fields["updates"] == 1:
        print([name for name in ("sympy", "torch.fx.experimental.symbolic_shapes") if name in sys.modules])

data = torch.randn(256, 6), torch.zeros(256, dtype=torch.long)
model = lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
stoker.train(
    stoker.Job(
        model=model, data=data, valid=data, loss="cross_entropy", optimizer=stoker.AdamW(lr=0.1), batch=16,
        until=stoker.updates(3),
    ),
    sink=heard,
)
"""


@pytest.mark.slow
def test_a_run_makes_its_first_update_without_symbolic_shapes() -> None:
    """They are a sixth of the time to the first update of a small job."""
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
