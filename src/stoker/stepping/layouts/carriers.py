"""What is around a pipeline's stage: how it is spread over the processes that share a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import nn

from stoker.stepping.layouts.after_backward import AfterBackward
from stoker.stepping.world import World

Work = Callable[[], torch.Tensor]
"""A pass through the stage."""


class Carrier(Protocol):
    """What is around a stage's model: how it is spread over the processes that share a batch."""

    def forward(self, work: Work) -> torch.Tensor:
        """What `work` returns, with the parameters where it looks for them."""
        ...

    def before_backward(self, *, is_last: bool) -> None:
        """Get ready for a backward pass; the last one of an update leaves the sum of gradients, or `finish` does."""
        ...

    def finish(self) -> None:
        """Add up the gradients, after the last backward pass."""
        ...

    def after_evaluation(self) -> None:
        """Let go of what a pass without a backward one leaves."""
        ...

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The stage's tensors put together over the processes that hold parts of it."""
        ...


class Replica:
    """A stage whose parameters each process holds whole; see Carrier."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._reducer = AfterBackward(model, world)

    def forward(self, work: Work) -> torch.Tensor:
        """See Carrier."""
        return work()

    def before_backward(self, *, is_last: bool) -> None:
        """See Carrier."""

    def finish(self) -> None:
        """See Carrier."""
        self._reducer.reduce()

    def after_evaluation(self) -> None:
        """See Carrier."""

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See Carrier."""
        return self._reducer.whole(tensors)


def carrier(model: nn.Module, world: World) -> Carrier:
    """What goes around `model`, the stage of this process, in place."""
    if world.layout.shards == 1:
        return Replica(model, world)
    from stoker.stepping.layouts.sharded_stage import ShardedStage  # noqa: PLC0415 - FSDP2 takes long to import

    return ShardedStage(model, world)
