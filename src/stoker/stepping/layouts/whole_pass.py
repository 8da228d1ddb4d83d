"""A pass through a model, loss and all, as the forward pass of one module: what layouts put their wrappers around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class WholePass(nn.Module):
    """Holds a model; its forward pass is the work that it is given.

    Within DistributedDataParallel or FSDP2, all that a loss does with the model then lies in the wrapper's one forward
    pass: calls of submodules, several passes, weights and attributes that it reads. What comes out is the loss alone.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        """What the work returns."""
        return work()
