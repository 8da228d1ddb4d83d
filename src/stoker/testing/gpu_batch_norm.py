"""Kernels of batch norm that PyTorch has for GPUs alone, in plain operations for CPU tensors.

Source: `batch_norm_stats`, `batch_norm_elemt`, `batch_norm_backward_reduce` and `batch_norm_backward_elemt` of
aten/src/ATen/native/cuda/Normalization.cuh in PyTorch 2.13, as its `nn.SyncBatchNorm` calls them. Shapes: N samples, C
channels.
"""

from __future__ import annotations

import functools

import torch

_Maybe = torch.Tensor | None


@functools.cache
def give_the_cpu_batch_norm_kernels() -> torch.library.Library:
    """Register them for this process; they last as long as what is returned, which is kept."""
    library = torch.library.Library("aten", "IMPL")
    for kernel in (batch_norm_stats, batch_norm_elemt, batch_norm_backward_reduce, batch_norm_backward_elemt):
        library.impl(kernel.__name__, kernel, "CPU")
    return library


def batch_norm_stats(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and 1 over the standard deviation of each channel [C], in fp32 for tensors of fewer bits."""
    variance, mean = torch.var_mean(_wide(x), _others(x), correction=0)
    return mean, (variance + eps).rsqrt()


def batch_norm_elemt(
    x: torch.Tensor, weight: _Maybe, bias: _Maybe, mean: torch.Tensor, scale: torch.Tensor, eps: float
) -> torch.Tensor:
    """The normalised tensor, in the dtype and layout of `x`."""
    del eps
    y = (_wide(x) - _along(mean, x)) * _along(scale, x)
    y = y if weight is None else y * _along(weight, x)
    y = y if bias is None else y + _along(bias, x)
    return torch.empty_like(x).copy_(y)


def batch_norm_backward_reduce(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: _Maybe,
    input_g: bool,  # noqa: FBT001 - as the operation's schema has them
    weight_g: bool,  # noqa: FBT001
    bias_g: bool,  # noqa: FBT001
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sums [C] of dy and of dy times the centred x; gradients of weight and bias, empty if not asked for."""
    del weight
    of_dy = _wide(dy).sum(_others(x))
    of_both = (_wide(dy) * (_wide(x) - _along(mean, x))).sum(_others(x))
    none = mean.new_empty(0)
    sums = (of_dy.clone(), of_both.clone()) if input_g else (none.clone(), none.clone())
    return *sums, of_both * scale if weight_g else none.clone(), of_dy if bias_g else none.clone()


def batch_norm_backward_elemt(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    weight: _Maybe,
    of_dy: torch.Tensor,
    of_both: torch.Tensor,
    count: torch.Tensor,
) -> torch.Tensor:
    """The gradient of `x`, from sums over all processes and their counts."""
    num_values = count.sum()
    slope = scale if weight is None else scale * weight
    centred = (_wide(x) - _along(mean, x)) * _along(scale.square() * of_both / num_values, x)
    return torch.empty_like(x).copy_((_wide(dy) - _along(of_dy / num_values, x) - centred) * _along(slope, x))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _others(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _along(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.view([-1 if dim == 1 else 1 for dim in range(x.dim())])
