"""A model whose shapes depend on values: it looks only at the rows that are on its side. Trains, but has no one shape.

The line to be named is the one with `rows = x[...]`; a hint of how many rows there are would do.
"""

import torch
from torch import nn

import stoker


class PicksRows(nn.Module):
    """Classifies the rows of which the first feature is positive; the others get equal logits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positive = x[:, 0] > 0
        rows = x[positive]
        logits = torch.zeros(x.shape[0], 2, dtype=x.dtype, device=x.device)
        return logits.index_put((positive.nonzero().squeeze(1),), self.inner(rows).to(logits.dtype))


def job() -> stoker.Job:
    """100 points."""
    inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    return stoker.Job(
        model=PicksRows,
        data=(inputs, (inputs.sum(1) > 0).long()),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=20,
        until=stoker.epochs(2),
    )
