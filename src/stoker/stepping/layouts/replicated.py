"""Data parallel: each process holds the whole model and takes a part of every batch.

What: PyTorch's DistributedDataParallel adds up gradients in buckets while the backward pass still goes on.
Use when: model, gradients and optimiser state fit on each device. Costs: one sum over all gradients an update, hidden
behind the backward pass as far as links allow. Does not combine with: steps of the job's own, closure optimisers.
Source: Li et al. 2020, https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.jobs import Loss
from stoker.loading import Pass
from stoker.stepping.layouts.base import LossOf, backward, summed
from stoker.stepping.world import World

_SETTINGS = inspect.signature(DistributedDataParallel).parameters
# Buffers are each process's own: what is shared of them is shared by the modules that have them.
_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _SETTINGS else "broadcast_buffers": False
}


class _Replica(DistributedDataParallel):
    """DistributedDataParallel with the attributes of the model that it holds, for losses that look at them."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Replicated:
    """See `stoker.stepping.layouts.base.Spread`."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._world = world
        self._replica = _Replica(model, process_group=world.data, gradient_as_bucket_view=True, **_BUFFERS_STAY)
        self.model = self._replica

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Spread.accumulate`."""
        losses: list[Loss] = []
        for one in passes:
            is_last = one is passes[-1]
            with contextlib.nullcontext() if is_last else self._replica.no_sync():
                # DistributedDataParallel divides by the number of processes.
                loss = backward(loss_of(one), self._world.layout.data_size if one.counts else 0.0)
            losses.append(loss if one.counts else Loss(torch.zeros_like(loss.sum), 0))
        return summed(losses, self._world)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """As `Spread.clip`."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Spread.whole`."""
        return dict(tensors)
