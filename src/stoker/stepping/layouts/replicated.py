"""Data parallel: each process holds the whole model and takes a part of every batch.

What: PyTorch's DistributedDataParallel adds up gradients in buckets while the backward pass still goes on. Which
parameters a pass used is looked up in its graph every time, so that one without a gradient on some process, or on all,
neither hangs nor is moved; and buckets stay as they are, so that a resumed run adds up in the same order.
Use when: model, gradients and optimiser state fit on each device. Costs: one sum over all gradients an update, hidden
behind the backward pass as far as links allow. Does not combine with: steps of the job's own, closure optimisers.
Source: Li et al. 2020, https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.jobs import Loss
from stoker.loading import Content, Pass
from stoker.stepping.layouts.base import LossOf, MeasuresOf, backward, summed
from stoker.stepping.layouts.whole_pass import WholePass
from stoker.stepping.world import World

_SETTINGS = inspect.signature(DistributedDataParallel).parameters
# Buffers are each process's own: what is shared of them is shared by the modules that have them.
_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _SETTINGS else "broadcast_buffers": False
}


class Replicated:
    """See `stoker.stepping.layouts.base.Spread`."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model = model
        self._world = world
        self._first = next(p for p in model.parameters() if p.requires_grad)
        self._whole_pass = DistributedDataParallel(
            WholePass(model), process_group=world.data, gradient_as_bucket_view=True, find_unused_parameters=True,
            **_BUFFERS_STAY,
        )  # fmt: skip
        self._has_passed = False

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Spread.accumulate`."""
        losses = [self._pass(one, loss_of) for one in passes[:-1]]
        with self._told_nothing():
            losses.append(self._pass(passes[-1], loss_of, is_last=True))
        return summed(losses, self._world)

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
        """As `Spread.clip`."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Spread.whole`."""
        return dict(tensors)

    def measures(self, content: Content, size: int, measure: MeasuresOf) -> dict[str, Loss]:
        """As `Spread.measures`."""
        return measure(self.model, content, size)

    def _pass(self, one: Pass, loss_of: LossOf, *, is_last: bool = False) -> Loss:
        """Make a pass, forward and backward, the last of a batch with the sum over all processes."""
        found: list[Loss] = []

        def work() -> torch.Tensor:
            loss = loss_of(one)
            found.append(loss)
            # What depends on no parameter here may do so elsewhere: the sum over processes begins in a backward pass.
            return loss.sum if loss.sum.requires_grad else loss.sum + 0.0 * self._first.flatten()[0]

        with contextlib.nullcontext() if is_last else self._whole_pass.no_sync():
            total = self._whole_pass(work)
            # DistributedDataParallel divides by the number of processes.
            loss = backward(Loss(total, found[0].count), self._world.layout.data_size if one.counts else 0.0)
        return loss if one.counts else Loss(torch.zeros_like(loss.sum), 0)

    @contextlib.contextmanager
    def _told_nothing(self) -> Iterator[None]:
        """Within the first sum over processes PyTorch does not warn that every parameter was used."""
        if self._has_passed:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
            yield
        self._has_passed = True
