"""A model that makes a tensor on the CPU in its forward pass: it works here and fails on every GPU.

The line to be named is the one with `torch.arange`; `device=x.device` is the change that would do.
"""

import torch
from torch import nn

import stoker


class Positions(nn.Module):
    """Adds a position to each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + torch.arange(6, dtype=x.dtype, device="cpu") / 6)


def job() -> stoker.Job:
    """100 points."""
    inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    return stoker.Job(
        model=Positions,
        data=(inputs, (inputs.sum(1) > 0).long()),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=20,
        until=stoker.epochs(2),
    )
