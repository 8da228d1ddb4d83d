"""A stack of equal residual blocks: what each passes on is most of what a pass keeps where they are checkpointed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import stoker


class ResidualBlock(nn.Module):
    """x_BD + down(relu(up(norm(x_BD))))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        hidden: torch.Tensor = torch.relu(self.up(self.norm(x)))
        return x + self.down(hidden)


class ResidualStack(nn.Module):
    """x_BI to logits_BC.

    Args:
        blocks: number of blocks.
        width: D.
    """

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, width), nn.Linear(width, 4)
        self.blocks = nn.ModuleList(ResidualBlock(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The logits."""
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def stack_job(blocks: int = 8, batch: int = 2048, width: int = 64, **changes: Any) -> stoker.Job:
    """A stack on random samples: two epochs of two updates."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3 * batch, 16, generator=generator)
    settings: dict[str, Any] = {
        "model": lambda: ResidualStack(blocks, width),
        "data": (inputs, torch.randint(4, (3 * batch,), generator=generator)),
        "loss": "cross_entropy",
        "optimizer": stoker.AdamW(lr=1e-3),
        "batch": batch,
        "until": stoker.epochs(2),
        "valid": stoker.holdout(1 / 3),
    }
    return stoker.Job(**settings | changes)
