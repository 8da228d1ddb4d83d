"""Batch statistics over groups of samples, when a micro-batch holds several groups.

What: each group is normalised by its own statistics and updates the running ones, in order, as if it came alone.
Use when: a micro-batch is several coupling groups. Costs: one call a group and a copy of the output.
Does not combine with: tensors whose first dimension is not the batch (or batch-major multiples of it).
Source: Hoffer, Hubara and Soudry 2017 ("ghost batch normalisation"), https://arxiv.org/abs/1705.08741; here the group
belongs to the Job, so that it is part of what is learned.

Batch statistics over all processes that take parts of a batch, on CPUs as on GPUs.

What: each process finds count, mean and variance of its part, all get everyone's and merge them (Chan et al. 1983,
without the cancellation of sums of squares), and normalise by what comes out; in the backward pass two sums per channel
are added up. Parts may differ in size, and a pass that does not count adds nothing. Running statistics are one
process's, and the same everywhere.
Use when: a model with batch norm is trained by several processes that share a batch. Costs: a small message a layer,
forward and backward, that nothing hides. Does not combine with: gradients of gradients; groups of coupled samples that
are cut into several passes.
Source: T. Chan, G. Golub, R. LeVeque, "Algorithms for Computing the Sample Variance", The American Statistician 37
(1983), formula 1.5; S. Ioffe, C. Szegedy 2015, https://arxiv.org/abs/1502.03167. PyTorch's own `nn.SyncBatchNorm` takes
no CPU tensors, and knows no passes that do not count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable


class GroupedBatchNorm:
    """Makes every batch-norm module of a model normalise over groups of `group` samples."""

    def __init__(self, model: nn.Module, group: int) -> None:
        self.group = group
        self.micro_batch = group
        for module in batch_norms(model):
            module.forward = self._grouped(module, module.forward)

    def _grouped(
        self, module: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def grouped(inputs: torch.Tensor) -> torch.Tensor:
            if not module.training or self.micro_batch <= self.group:
                return forward(inputs)
            rows_per_sample, rest = divmod(inputs.shape[0], self.micro_batch)
            if rest:
                raise ValueError(
                    f"batch norm got {inputs.shape[0]} rows for {self.micro_batch} samples; groups of samples cannot "
                    "be told apart: use a micro-batch of one coupling group"
                )
            return torch.cat([forward(part) for part in inputs.split(self.group * rows_per_sample)])

        return grouped


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The modules that use batch statistics in training."""
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001


Forward = Callable[[torch.Tensor], torch.Tensor]


class SyncBatchNorm:
    """Makes every batch norm of a model, in training mode, normalise over the processes of `group`, in place.

    `counts` says whether the samples of the pass that comes now count; all processes make a pass together.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.counts = True
        self._group = group
        for module in batch_norms(model):
            module.forward = self._synced(module, module.forward)

    def _synced(self, module: Any, forward: Forward) -> Forward:
        def synced(inputs: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return forward(inputs)
            module._check_input_dim(inputs)  # noqa: SLF001 - the module's own words for inputs of other dimensions
            output, mean, variance, count = _Normalized.apply(  # type: ignore[no-untyped-call]
                inputs, module.weight, module.bias, module.eps, self._group, self.counts
            )
            if module.track_running_stats and module.running_mean is not None:
                _track(module, mean, variance, count)
            normalized: torch.Tensor = output
            return normalized

        return synced


@torch.no_grad()
def _track(module: Any, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
    """Move the running statistics as the module itself does, towards the mean and the unbiased variance."""
    factor: Any = module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1 / module.num_batches_tracked.to(mean.dtype)
    if factor is None:
        return
    unbiased = variance * (count / (count - 1).clamp(min=1))
    for running, now in ((module.running_mean, mean), (module.running_var, unbiased)):
        running.add_(factor * (now.to(running.dtype) - running))


class _Normalized(torch.autograd.Function):
    """Inputs [N, C, ...] normalised over all processes; then mean [C], biased variance [C] and number of values."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight_C: torch.Tensor | None,
        bias_C: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup,
        counts: bool,  # noqa: FBT001 - autograd passes arguments by position
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """See the class."""
        mean_C, variance_C, count = _merged(_own_statistics(x, counts=counts), group)
        dtype = mean_C.dtype if weight_C is None else weight_C.dtype
        y = F.batch_norm(x, mean_C.to(dtype), variance_C.to(dtype), weight_C, bias_C, training=False, eps=eps)
        ctx.save_for_backward(x, weight_C, mean_C, (variance_C + eps).rsqrt(), count)
        ctx.group, ctx.counts = group, counts
        ctx.mark_non_differentiable(mean_C, variance_C, count)
        return y, mean_C, variance_C, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs here, and this process's share of those of weight and bias."""
        x, weight_C, mean_C, scale_C, count = ctx.saved_tensors
        dims, shape = _all_but_channels(x), _as_channels(x)
        dy, centred = dy.to(mean_C.dtype), x.to(mean_C.dtype) - mean_C.view(shape)
        own_2C = torch.stack([dy.sum(dims), (dy * centred).sum(dims)])
        gradient = None
        if ctx.needs_input_grad[0]:
            total_2C = own_2C.clone() if ctx.counts else torch.zeros_like(own_2C)
            dist.all_reduce(total_2C, group=ctx.group)
            slope_C = scale_C if weight_C is None else scale_C * weight_C.to(scale_C.dtype)
            away_2C = total_2C / count
            gradient = dy - away_2C[0].view(shape) - centred * (away_2C[1] * scale_C.square()).view(shape)
            gradient = (gradient * slope_C.view(shape)).to(x.dtype) if ctx.counts else torch.zeros_like(x)
        of_weight = own_2C[1] * scale_C if ctx.needs_input_grad[1] else None
        of_bias = own_2C[0] if ctx.needs_input_grad[2] else None
        of_both = (None if one is None else one.to(weight_C.dtype) for one in (of_weight, of_bias))
        return gradient, *of_both, None, None, None


def _own_statistics(x: torch.Tensor, *, counts: bool) -> torch.Tensor:
    """Mean, biased variance and number of the values of each channel here, in one row [2C + 1]; zeros if none count."""
    wide = x if x.dtype in {torch.float32, torch.float64} else x.float()
    channels = x.shape[1]
    if not counts:
        return wide.new_zeros(2 * channels + 1)
    variance_C, mean_C = torch.var_mean(wide, _all_but_channels(x), correction=0)
    return torch.cat([mean_C, variance_C, wide.new_full((1,), x.numel() / channels)])


def _merged(own: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean [C], biased variance [C] and number of values over all processes, from what each has [2C + 1]."""
    everyone_R = own.new_zeros(dist.get_world_size(group), len(own))
    everyone_R[dist.get_rank(group)] = own
    dist.all_reduce(everyone_R, group=group)  # gathers: sums with zeros are exact
    channels = len(own) // 2
    mean_RC, variance_RC, count_R1 = everyone_R.split([channels, channels, 1], dim=1)
    count = count_R1.sum()
    mean_C = (count_R1 * mean_RC).sum(0) / count
    variance_C = (count_R1 * (variance_RC + (mean_RC - mean_C).square())).sum(0) / count
    return mean_C, variance_C, count


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _as_channels(x: torch.Tensor) -> list[int]:
    """The shape by which a value for each channel stands beside `x`."""
    return [-1 if dim == 1 else 1 for dim in range(x.dim())]
