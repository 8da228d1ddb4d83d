"""A job for places: a small network on a table, whose updates take well under a millisecond of arithmetic."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import stoker


def job(epochs: float = 20) -> stoker.Job:
    """Three layers on 20,000 rows of 32 numbers, whose target is a smooth function of them."""
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(20_000, 32, generator=draw)
    targets = torch.sin(inputs[:, :4].sum(dim=1, keepdim=True)) + 0.1 * torch.randn(20_000, 1, generator=draw)
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)),
        data=TensorDataset(inputs, targets),
        valid=stoker.holdout(0.1),
        loss="mse",
        optimizer=stoker.AdamW(lr=1e-3),
        batch=256,
        until=stoker.epochs(epochs),
    )
