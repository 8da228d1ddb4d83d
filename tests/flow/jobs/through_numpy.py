"""A model that leaves PyTorch on its way: the median of each column comes from NumPy. Runs on a CPU only."""

import numpy as np
import torch
from torch import nn

import stoker


class Centred(nn.Module):
    """A linear layer on columns less fixed medians, which are computed again from the values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        medians = np.median(x.detach().numpy(), axis=1, keepdims=True)
        return self.inner(x - torch.from_numpy(medians))


def job() -> stoker.Job:
    """100 points."""
    inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    return stoker.Job(
        model=Centred,
        data=(inputs, (inputs.sum(1) > 0).long()),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=20,
        until=stoker.epochs(2),
    )
