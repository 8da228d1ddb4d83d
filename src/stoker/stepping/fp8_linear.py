"""fp8 products: linear layers in the repeated blocks of a model multiply 8-bit floating-point numbers.

What: precision fp8 is bf16 in which the three products of such a layer (output, gradient of the input, gradient of the
weight) multiply e4m3 numbers (input, weight) and e5m2 numbers (gradient of the output). Each tensor is scaled by its
own largest magnitude before it is rounded; sums are in fp32, results in bf16. Masters, gradients, reductions and
optimiser states are those of bf16. Passes without gradients, such as evaluation, are in bf16.
Use when: `Job(numerics=["fp8"])` of a transformer of billions of parameters, compiled, on GPUs with fp8 (compute
capability 8.9: L4, RTX 40, H100 and newer). Costs: each operand is read once more for its largest magnitude, and
rounded; a gradient's relative error of some percent. Not compiled, these casts take longer than the products save.
A layer is an `nn.Linear` of at least `LEAST_FEATURES` inputs and outputs, multiples of 16, and takes a multiple of 16
rows. Other layers and passes are in bf16: embeddings, the output layer, routers of few experts.
A scale is that of the rows which a process has in one pass, so that roundings differ by micro-batch and layout, as all
roundings do: same law.
Does not combine with: layouts other than replicas and shards, optimizer offload, derivatives of gradients.
Source: P. Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433; scaling as torchao's "tensorwise"
recipe (github.com/pytorch/ao, torchao/float8), which TorchTitan uses, arXiv:2410.06511, section 2.2. Here the input is
kept in fp8 for the backward pass, not in bf16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from stoker.stepping.activation_checkpointing import repeated_blocks

FP8_SINCE = (8, 9)
"""Compute capability of the first devices that multiply in fp8.

Source: NVIDIA Ada GPU Architecture whitepaper (2023), appendix A; Hopper, which is 9.0, has it as well.
"""

LEAST_FEATURES = 256
"""Inputs and outputs of a layer from which on it is in fp8: smaller products are bound by memory."""

_MULTIPLE = 16
"""Sizes of matrices are multiples of this many elements, by cuBLASLt's rules for fp8."""

_LEAST_MAGNITUDE = 1e-12
"""The magnitude by which a tensor of zeros is scaled."""

_is_on = False


def has_fp8_products() -> bool:
    """Whether this PyTorch multiplies in fp8."""
    return hasattr(torch, "_scaled_mm")


@contextlib.contextmanager
def fp8_products() -> Iterator[None]:
    """Within the block, layers that `prepare_linears` has prepared multiply in fp8 where gradients are recorded."""
    global _is_on  # noqa: PLW0603 - of the process, as the functions that other precisions replace; the compiler reads it
    before, _is_on = _is_on, True
    try:
        yield
    finally:
        _is_on = before


def prepare_linears(model: nn.Module) -> None:
    """Let linear layers in the repeated blocks of `model` multiply in fp8 within `fp8_products`, in place.

    Names and identity of modules stay; a copy of the model is prepared as well.
    """
    for block in repeated_blocks(model):
        for module in block.modules():
            if type(module) is nn.Linear and all(
                size >= LEAST_FEATURES and size % _MULTIPLE == 0 for size in module.weight.shape
            ):
                layer: Any = module  # its type says that `forward` is a method
                layer.forward = Fp8Forward(module, module.forward)


@dataclass(eq=False)
class Fp8Forward:
    """The forward pass of a linear layer: in fp8 within `fp8_products`, where it would be in bf16; else as it was."""

    layer: nn.Linear
    forward: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - PyTorch's own name
        """The layer's output."""
        if not (_is_on and torch.is_grad_enabled() and _suits(input)):
            return self.forward(input)
        output: torch.Tensor = _Fp8Products.apply(input, self.layer.weight, self.layer.bias)  # type: ignore[no-untyped-call]
        return output


def _suits(x: torch.Tensor) -> bool:
    """Whether a product of these rows would be in bf16, and may be in fp8."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    rows = x.numel() // x.shape[-1]
    return dtype == torch.bfloat16 and x.is_floating_point() and rows > 0 and rows % _MULTIPLE == 0


class _Fp8Products(torch.autograd.Function):
    """x @ weight.T + bias, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        x8_MK, x_scale = _rounded(x_MK, torch.float8_e4m3fn)
        weight8_NK, weight_scale = _rounded(weight_NK, torch.float8_e4m3fn)
        # Fast accumulation only here, as by the recipe: gradients are summed in full fp32.
        short_bias = None if bias is None else bias.bfloat16()
        output_MN = _multiplied(x8_MK, weight8_NK.t(), x_scale, weight_scale, short_bias, is_fast=True)
        # The weight, not its 8 bits: under shards it is let go of after the forward pass, and gathered again.
        ctx.save_for_backward(x8_MK, x_scale, weight_NK)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return output_MN.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x8_MK, x_scale, weight_NK = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_MN = grad.reshape(-1, grad.shape[-1])
        grad8_MN, grad_scale = _rounded(grad_MN, torch.float8_e5m2)
        grad_x = grad_weight = grad_bias = None
        if needs_x:
            weight8_NK, weight_scale = _rounded(weight_NK, torch.float8_e4m3fn)
            grad_x_MK = _multiplied(grad8_MN, _by_columns(weight8_NK), grad_scale, weight_scale)
            grad_x = grad_x_MK.view(ctx.shape).to(ctx.dtype)
        if needs_weight:
            grad_weight_NK = _multiplied(grad8_MN.t().contiguous(), _by_columns(x8_MK), grad_scale, x_scale)
            grad_weight = grad_weight_NK.to(weight_NK.dtype)
        if needs_bias and ctx.bias_dtype is not None:
            grad_bias = grad_MN.sum(0).to(ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


def _multiplied(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    is_fast: bool = False,
) -> torch.Tensor:
    """The product a @ b + bias in bf16; tensor cores take rows of `a` and columns of `b`.

    Without autocast, which would round within the CPU's kernel.
    """
    with torch.autocast(a.device.type, enabled=False):
        return torch._scaled_mm(  # noqa: SLF001 - the public function's operation has no formula of its FLOPs
            a, b, a_scale, b_scale, bias, out_dtype=torch.bfloat16, use_fast_accum=is_fast
        )


def _by_columns(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with its columns contiguous."""
    return matrix.t().contiguous().t()


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor in 8 bits, its largest magnitude at the end of the range, and the factor that gives it back."""
    largest = x.abs().amax().float().clamp(min=_LEAST_MAGNITUDE)
    scale = torch.finfo(dtype).max / largest
    return (x.float() * scale).to(dtype), scale.reciprocal()
