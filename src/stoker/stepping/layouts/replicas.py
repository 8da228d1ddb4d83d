"""Data parallel: each process holds the whole model and takes a part of every batch.

What: PyTorch's DistributedDataParallel adds up gradients in buckets while the backward pass still goes on. A parameter
without a gradient in some process, which it would wait for, gets a zero there after the pass; one without a gradient in
any process has none afterwards, and no optimiser moves it. Buckets are in one order from the first update on, so that a
resumed run adds up as it would have.
Use when: model, gradients and optimiser state fit on each device. Costs: one sum over all gradients an update, hidden
behind the backward pass as far as links allow. Does not combine with: steps of the job's own, closure optimisers.
Source: Li et al. 2020, https://arxiv.org/abs/2006.15704.

Independent replicas (`Job(sync=…)`): each makes its own update of its part of a batch, without communication. The
gradient is the mean over this process's own samples, and clipped by its own norm; `stepping/diloco.py` exchanges
weights after the update. Does not combine with: shards, tensor parallel, stages.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stoker.jobs import Job, Loss
from stoker.loading.batches import Pass
from stoker.records import Plan
from stoker.stepping.layouts.base import LayoutExecution, LossOf, SingleProcess, Strategy, WholePass, backward, summed
from stoker.stepping.world import World

_SETTINGS = inspect.signature(DistributedDataParallel).parameters
# Buffers are each process's own: what is shared of them is shared by the modules that have them.
_BUFFERS_STAY: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _SETTINGS else "broadcast_buffers": False
}


class Replicated(SingleProcess):
    """See `stoker.stepping.layouts.base.Strategy`."""

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__(model)
        self._world = world
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._whole_pass = DistributedDataParallel(
            WholePass(model), process_group=world.data, gradient_as_bucket_view=True, **_BUFFERS_STAY
        )
        # Each pass puts here the parameters that got a gradient, by index, without running Python bytecode.
        self._used: list[torch.Tensor | None] = [None] * len(self._trained)
        for index, parameter in enumerate(self._trained):
            parameter.register_post_accumulate_grad_hook(functools.partial(operator.setitem, self._used, index))
        # DistributedDataParallel orders its buckets by when the first gradients came: here by gradients of zero, the
        # last parameter's first, in every run.
        self._whole_pass(lambda: None)
        self._give_zeros(self._trained[::-1])
        for parameter in self._trained:
            parameter.grad = None

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Strategy.accumulate`."""
        self._used[:] = [None] * len(self._used)
        with self._whole_pass.no_sync():
            losses = [self._pass(each, loss_of) for each in passes[:-1]]
        before = [used is not None for used in self._used]
        self._used[:] = [None] * len(self._used)
        losses.append(self._pass(passes[-1], loss_of))
        now = [used is not None for used in self._used]
        self._give_zeros([p for p, is_used in zip(self._trained, now, strict=True) if not is_used])
        is_used = [earlier or last for earlier, last in zip(before, now, strict=True)]
        uses = torch.tensor(is_used, dtype=torch.float64, device=self._trained[0].device)
        loss = summed(losses, self._world, uses)
        if not all(is_used):  # otherwise the device need not be waited for
            for parameter, count in zip(self._trained, uses.tolist(), strict=True):
                if count == 0:  # used by no process
                    parameter.grad = None
        return loss

    def _pass(self, one: Pass, loss_of: LossOf) -> Loss:
        """Make a pass, forward and backward."""
        losses: list[Loss] = []

        def work() -> torch.Tensor:
            losses.append(loss_of(one))
            return losses[0].sum

        loss = Loss(self._whole_pass(work), losses[0].count)
        if loss.sum.requires_grad:  # it may depend on parameters in other processes alone
            # DistributedDataParallel divides by the number of processes.
            loss = backward(loss, self._world.layout.data_size if one.counts else 0.0)
        return loss if one.counts else Loss(torch.zeros_like(loss.sum), 0)

    def _give_zeros(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add a gradient of zero to each, in a backward pass, which completes the sum over processes."""
        if parameters:
            torch.autograd.backward(list(parameters), [torch.zeros_like(p) for p in parameters])


class IndependentReplicas(SingleProcess):
    """See `stoker.stepping.layouts.base.Strategy`; losses and norms are this process's own."""

    def accumulate(self, passes: Sequence[Pass], loss_of: LossOf) -> Loss:
        """As `Strategy.accumulate`, of the passes that count; there is at least one."""
        return super().accumulate([each for each in passes if each.counts], loss_of)


class ReplicaExecution(LayoutExecution):
    """See `stoker.stepping.layouts.base.LayoutExecution`."""

    def parallelize(self, plan: Plan, model: nn.Module, world: World, job: Job) -> Strategy:
        """As `LayoutExecution.parallelize`."""
        return Replicated(model, world)


EXECUTION = ReplicaExecution()
