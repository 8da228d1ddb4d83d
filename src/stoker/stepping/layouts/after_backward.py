"""Gradients added up over the processes that share a batch, after the backward pass of the last one.

What: what DistributedDataParallel does, for parameters that are divided among other processes as well, which it does
not take. Use when: replicas are combined with tensor parallel or stages. Costs: one sum over this process's gradients
an update, in messages of BUCKET_BYTES, which nothing hides. Does not combine with: shards.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stoker.jobs import Loss
from stoker.loading import Content, Pass
from stoker.stepping.layouts.base import LossOf, MeasuresOf, backward, summed
from stoker.stepping.layouts.global_norm import clip_to_global_norm
from stoker.stepping.local_tensors import is_spread, local
from stoker.stepping.world import World

_REDISTRIBUTION = logging.getLogger("torch.distributed.tensor._redistribute")

BUCKET_BYTES = 25 * 2**20
"""Gradients that go in one message [bytes], as in DistributedDataParallel."""


class AfterBackward:
    """See `stoker.stepping.layouts.base.Spread`."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model = model
        self._world = world

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Spread.accumulate`."""
        losses: list[Loss] = []
        for one in passes:
            loss = backward(loss_of(one), 1.0 if one.counts else 0.0)
            losses.append(loss if one.counts else Loss(torch.zeros_like(loss.sum), 0))
        self.reduce()
        return summed(losses, self._world)

    def reduce(self) -> None:
        """Add up the gradients that the backward passes left here."""
        if self._world.layout.data_size > 1 and self._world.data is not None:
            trained = [p for p in self.model.parameters() if p.requires_grad]
            sum_over(gradients_of(trained, self._world.data), self._world.data)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """As `Spread.clip`."""
        return clip_to_global_norm(parameters, max_norm)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Spread.whole`."""
        return whole_tensors(tensors)

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """As `Spread.measures`."""
        return measure(self.model, content, size)


def gradients_of(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """This process's part of the gradient of each parameter that has one anywhere in the group; zeros if not here."""
    has_one = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(has_one, group=group)
    found: list[torch.Tensor] = []
    for parameter, count in zip(parameters, has_one.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            found.append(local(parameter.grad))
    return found


def sum_over(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Replace tensors by their sums over a group, in place; a few at once, together at most BUCKET_BYTES."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.flatten() for tensor in bucket])
        dist.all_reduce(flat, group=group)
        sums = flat.split([tensor.numel() for tensor in bucket])
        torch._foreach_copy_(list(bucket), [one.view_as(to) for one, to in zip(sums, bucket, strict=True)])


def whole_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Named tensors, those that are divided put together; each process of their meshes has to ask."""
    return {name: _full(tensor) if is_spread(tensor) else tensor for name, tensor in tensors.items()}


@torch.no_grad()
def _full(tensor: Any) -> torch.Tensor:
    """A DTensor's whole tensor; without PyTorch's warning that it takes a message for each dimension of the mesh."""
    was_disabled, _REDISTRIBUTION.disabled = _REDISTRIBUTION.disabled, True
    try:
        full: torch.Tensor = tensor.full_tensor()
    finally:
        _REDISTRIBUTION.disabled = was_disabled
    return full


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors that follow each other, of one dtype."""
    bucket: list[torch.Tensor] = []
    held = 0
    for tensor in tensors:
        if bucket and (held >= BUCKET_BYTES or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(tensor)
        held += tensor.numel() * tensor.element_size()
    if bucket:
        yield bucket
