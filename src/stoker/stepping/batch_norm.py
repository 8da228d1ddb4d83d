"""Batch norm over the samples that belong together: groups within a micro-batch, or parts of a batch on all processes.

`GroupedBatchNorm`. What: each group of samples is normalised by its own statistics and updates the running ones, in
order, as if it came alone. Use when: a micro-batch is several coupling groups. Costs: one call a group and a copy of
the output. Does not combine with: tensors whose first dimension is not the batch (or batch-major multiples of it).
Source: Hoffer, Hubara and Soudry 2017 ("ghost batch normalisation"), https://arxiv.org/abs/1705.08741; here the group
belongs to the Job, so that it is part of what is learned.

`SyncBatchNorm`. What: each process computes count, mean and variance of its part; all of them are gathered and merged
without the cancellation of sums of squares. The backward pass adds up two sums per channel. Parts may differ in size; a
pass that does not count adds nothing. Running statistics are equal everywhere. On GPUs by the kernels of PyTorch's
`nn.SyncBatchNorm`, which read tensors as often as one process's batch norm; on CPUs in plain operations.
Use when: a model with batch norm is trained by several processes that share a batch. Costs: a small message a layer,
forward and backward, that nothing hides; on CPUs five more passes over its input. Does not combine with: gradients of
gradients; groups of coupled samples that are cut into several passes.
Source: T. Chan, G. Golub, R. LeVeque, "Algorithms for Computing the Sample Variance", The American Statistician 37
(1983), formula 1.5; S. Ioffe, C. Szegedy 2015, https://arxiv.org/abs/1502.03167. PyTorch's own `nn.SyncBatchNorm` takes
no CPU tensors, and knows no passes that do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from stoker.records import Coupling

Forward = Callable[[torch.Tensor], torch.Tensor]


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The modules that use batch statistics in training."""
    return [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]  # noqa: SLF001


def statistics_of(model: nn.Module, norms: Collection[nn.Module]) -> dict[str, torch.Tensor]:
    """The running statistics of these batch norms of a model, by name; a shared one has each of its names."""
    chosen = set(map(id, norms))
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in chosen
        for key, buffer in module.named_buffers(recurse=False)
    }


class OrdinaryBatchNorm:
    """Batch norms as they are: what passes at once is normalised together.

    As in the other two classes, `micro_batch` is the size of the next pass [samples], and `counts` whether its samples
    count.
    """

    micro_batch, counts = 0, True


class GroupedBatchNorm:
    """Makes every batch-norm module of a model normalise over groups of `group` samples."""

    counts = True

    def __init__(self, model: nn.Module, group: int) -> None:
        self.group = group
        self.micro_batch = group
        for module in batch_norms(model):
            module.forward = self._grouped(module, module.forward)

    def _grouped(self, module: nn.Module, forward: Forward) -> Forward:
        def grouped(inputs: torch.Tensor) -> torch.Tensor:
            if not module.training or self.micro_batch <= self.group:
                return forward(inputs)
            rows_per_sample, rest = divmod(inputs.shape[0], self.micro_batch)
            if rest:
                raise ValueError(
                    f"batch norm got {inputs.shape[0]} rows for {self.micro_batch} samples; groups of samples cannot "
                    "be separated: use a micro-batch of one coupling group"
                )
            return torch.cat([forward(part) for part in inputs.split(self.group * rows_per_sample)])

        return grouped


class SyncBatchNorm:
    """Makes every batch norm of a model, in training mode, normalise over the processes of `group`, in place.

    All processes make a pass together.
    """

    micro_batch = 0

    def __init__(self, model: nn.Module, group: dist.ProcessGroup) -> None:
        self.counts = True
        self._group = group
        for module in batch_norms(model):
            module.forward = self._synced(module, module.forward)

    def _synced(self, module: Any, forward: Forward) -> Forward:
        def synced(inputs: torch.Tensor) -> torch.Tensor:
            if not module.training:
                return forward(inputs)
            module._check_input_dim(inputs)  # noqa: SLF001 - the module's own error for inputs of other dimensions
            output, mean, variance, count = _Normalized.apply(  # type: ignore[no-untyped-call]
                inputs, module.weight, module.bias, module.eps, self._group, self.counts
            )
            if module.track_running_stats and module.running_mean is not None:
                _track(module, mean, variance, count)
            normalized: torch.Tensor = output
            return normalized

        return synced


CoupledBatchNorm = OrdinaryBatchNorm | GroupedBatchNorm | SyncBatchNorm


def couple_batch_norms(
    model: nn.Module, coupling: Coupling, micro_batch: int, sharing: dist.ProcessGroup | None
) -> CoupledBatchNorm:
    """Make the model's batch norms normalise over the coupled samples, in place.

    Args:
        model: on its device.
        coupling: of the job's samples.
        micro_batch: most samples in a pass [samples].
        sharing: the processes that each take a part of every group; None: this process has whole groups.
    """
    if coupling.kind == "batch_norm" and sharing is not None:
        return SyncBatchNorm(model, sharing)
    if coupling.kind == "batch_norm" and coupling.group is not None and micro_batch > coupling.group:
        return GroupedBatchNorm(model, coupling.group)
    return OrdinaryBatchNorm()


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


class _Plain:
    """Batch norm's parts in plain operations, for CPUs: x and its gradient dy are [N, C, ...], all else [C]."""

    @staticmethod
    def mean_and_variance(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each channel; the variance is the biased one."""
        del eps
        wide = x if x.dtype in {torch.float32, torch.float64} else x.float()
        variance_C, mean_C = torch.var_mean(wide, [dim for dim in range(x.dim()) if dim != 1], correction=0)
        return mean_C, variance_C

    @staticmethod
    def normalized(
        x: torch.Tensor,
        mean_C: torch.Tensor,
        variance_C: torch.Tensor,
        weight_C: torch.Tensor | None,
        bias_C: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """The output, in x's dtype."""
        dtype = mean_C.dtype if weight_C is None else weight_C.dtype
        return F.batch_norm(x, mean_C.to(dtype), variance_C.to(dtype), weight_C, bias_C, training=False, eps=eps)

    @staticmethod
    def sums(dy: torch.Tensor, x: torch.Tensor, mean_C: torch.Tensor, scale_C: torch.Tensor) -> torch.Tensor:
        """Sums [2, C] of dy, and of dy times x less its mean; `scale_C` is 1 over the standard deviation."""
        del scale_C
        dims = [dim for dim in range(x.dim()) if dim != 1]
        dy, centred = dy.to(mean_C.dtype), x.to(mean_C.dtype) - _along_channels(mean_C, x)
        return torch.stack([dy.sum(dims), (dy * centred).sum(dims)])

    @staticmethod
    def gradient(
        dy: torch.Tensor,
        x: torch.Tensor,
        mean_C: torch.Tensor,
        scale_C: torch.Tensor,
        weight_C: torch.Tensor | None,
        mean_2C: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient of x, where `mean_2C` is `sums` of all samples over the number of values."""
        slope_C = scale_C if weight_C is None else scale_C * weight_C.to(scale_C.dtype)
        dy, centred = dy.to(mean_C.dtype), x.to(mean_C.dtype) - _along_channels(mean_C, x)
        dx = dy - _along_channels(mean_2C[0], x) - centred * _along_channels(mean_2C[1] * scale_C.square(), x)
        return (dx * _along_channels(slope_C, x)).to(x.dtype)


class _Fused:
    """The same by PyTorch's kernels for GPUs, each of which reads a tensor once."""

    @staticmethod
    def mean_and_variance(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        """See `_Plain`."""
        mean_C, scale_C = torch.batch_norm_stats(_dense(x), eps)
        return mean_C, (scale_C.pow(-2) - eps).clamp(min=0)

    @staticmethod
    def normalized(
        x: torch.Tensor,
        mean_C: torch.Tensor,
        variance_C: torch.Tensor,
        weight_C: torch.Tensor | None,
        bias_C: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        """See `_Plain`."""
        return torch.batch_norm_elemt(_dense(x), weight_C, bias_C, mean_C, (variance_C + eps).rsqrt(), eps)

    @staticmethod
    def sums(dy: torch.Tensor, x: torch.Tensor, mean_C: torch.Tensor, scale_C: torch.Tensor) -> torch.Tensor:
        """See `_Plain`."""
        x = _dense(x)
        of_dy, of_both, *_ = torch.batch_norm_backward_reduce(
            _laid_out_as(x, dy), x, mean_C, scale_C, None, input_g=True, weight_g=False, bias_g=False
        )
        return torch.stack([of_dy, of_both])

    @staticmethod
    def gradient(
        dy: torch.Tensor,
        x: torch.Tensor,
        mean_C: torch.Tensor,
        scale_C: torch.Tensor,
        weight_C: torch.Tensor | None,
        mean_2C: torch.Tensor,
    ) -> torch.Tensor:
        """See `_Plain`."""
        weight_C = None if weight_C is None else weight_C.to(mean_C.dtype)
        one = torch.ones(1, dtype=torch.int32, device=x.device)  # the kernel divides by a count of 32 bits
        x = _dense(x)
        of_dy, of_both = mean_2C
        return torch.batch_norm_backward_elemt(_laid_out_as(x, dy), x, mean_C, scale_C, weight_C, of_dy, of_both, one)


def _is_fused(x: torch.Tensor) -> bool:
    return x.is_cuda


def _along_channels(values_C: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values_C.view([-1 if dim == 1 else 1 for dim in range(x.dim())])


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if it is neither contiguous nor channels-last."""
    return x.contiguous(memory_format=_memory_format(x))


def _laid_out_as(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return dy.contiguous(memory_format=_memory_format(x))


def _memory_format(x: torch.Tensor) -> torch.memory_format:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(x.dim())
    return last if last is not None and x.is_contiguous(memory_format=last) else torch.contiguous_format


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
        kernels = _Fused if _is_fused(x) and x.numel() else _Plain
        channels, exact = x.shape[1], x.dtype if x.dtype is torch.float64 else torch.float32
        all_RS = x.new_zeros(dist.get_world_size(group), 2 * channels + 1, dtype=exact)  # zeros where none count
        if counts and x.numel():
            num_values = all_RS.new_full((1,), x.numel() / channels)
            all_RS[dist.get_rank(group)] = torch.cat([*kernels.mean_and_variance(x, eps), num_values])
        dist.all_reduce(all_RS, group=group)  # gathers: sums with zeros are exact
        mean_RC, variance_RC, count_R1 = all_RS.split([channels, channels, 1], dim=1)
        count = count_R1.sum()
        mean_C = (count_R1 * mean_RC).sum(0) / count
        variance_C = (count_R1 * (variance_RC + (mean_RC - mean_C).square())).sum(0) / count
        y = kernels.normalized(x, mean_C, variance_C, weight_C, bias_C, eps)
        ctx.save_for_backward(x, weight_C, mean_C, (variance_C + eps).rsqrt(), count)
        ctx.group, ctx.counts = group, counts
        ctx.mark_non_differentiable(mean_C, variance_C, count)
        return y, mean_C, variance_C, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs here, and this process's share of those of weight and bias."""
        x, weight_C, mean_C, scale_C, count = ctx.saved_tensors
        kernels = _Fused if _is_fused(x) and x.numel() else _Plain  # on nothing the GPU's kernels are not launched
        own_2C = kernels.sums(dy, x, mean_C, scale_C)
        gradient = None
        if ctx.needs_input_grad[0]:
            total_2C = own_2C.clone() if ctx.counts else torch.zeros_like(own_2C)
            dist.all_reduce(total_2C, group=ctx.group)
            if ctx.counts:
                gradient = kernels.gradient(dy, x, mean_C, scale_C, weight_C, total_2C / count)
            else:
                gradient = torch.zeros_like(x)
        of_weight = own_2C[1] * scale_C if ctx.needs_input_grad[1] else None
        of_bias = own_2C[0] if ctx.needs_input_grad[2] else None
        of_both = (None if each is None else each.to(weight_C.dtype) for each in (of_weight, of_bias))
        return gradient, *of_both, None, None, None
