"""A model that decides by a value: it goes through a second layer only while the first one's output is large."""

import torch
from torch import nn

import stoker


class Halting(nn.Module):
    """Up to four turns through one layer, until the largest change is small."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.again, self.out = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x).relu()
        for _ in range(4):
            change = self.again(x).tanh()
            x = x + change
            if change.abs().max().item() < 0.1:
                break
        return self.out(x)


def job() -> stoker.Job:
    """100 points, each batch as a whole: where it halts depends on all of it."""
    inputs = torch.randn(100, 6, generator=torch.Generator().manual_seed(0))
    return stoker.Job(
        model=Halting,
        data=(inputs, (inputs.sum(1) > 0).long()),
        loss=stoker.Objective("cross_entropy", scope="batch"),
        optimizer=stoker.SGD(lr=0.1),
        batch=20,
        until=stoker.epochs(2),
    )
