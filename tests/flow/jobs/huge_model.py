"""Weights that fit nowhere: one linear layer of 1 TB in fp32, before gradients and the optimiser's state.

The function that makes the model must not be called for real: here it would ask for all of the memory at once.
"""

import torch
from torch import nn

import stoker


def job(width: int = 500_000) -> stoker.Job:
    """A layer of width x width weights between two small ones."""
    inputs = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.Linear(width, width), nn.Linear(width, 2)),
        data=(inputs, (inputs.sum(1) > 0).long()),
        loss="cross_entropy",
        optimizer=stoker.AdamW(lr=1e-3),
        batch=4,
        until=stoker.epochs(1),
    )
