"""A batch that fits nowhere: BatchNorm couples all of its samples, so it cannot be cut.

At its default, what the forward pass keeps is more than 500 GB; `--set coupling_group=1000` would do.
"""

import torch
from torch import nn

import stoker

FEATURES = 16


class Points(torch.utils.data.Dataset):
    """Points that are computed when asked for, so that four million of them take no memory."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        point = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return point, (point.sum() > 0).long()


def job(batch: int = 4_000_000, width: int = 16_384, coupling_group: int = 0) -> stoker.Job:
    """A wide network with BatchNorm; `coupling_group` 0 couples the whole batch."""
    return stoker.Job(
        model=lambda: nn.Sequential(nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)),
        data=Points(batch),
        loss="cross_entropy",
        optimizer=stoker.SGD(lr=0.1),
        batch=batch,
        coupling_group=coupling_group or None,
        until=stoker.epochs(1),
    )
