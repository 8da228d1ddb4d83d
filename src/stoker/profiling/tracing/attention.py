"""Which attention kernel runs on a GPU that is not here.

What: `scaled_dot_product_attention` chooses among its kernels by asking the GPU in the machine. While a device is
pretended, the choice is made by the target's compute capability instead, below autocast and above autograd, so that
every caller sees it: Python, `nn.MultiheadAttention`, and the recomputation of checkpointed blocks.
A CPU needs none of this: PyTorch chooses for a fake CPU tensor as for a real one.
Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp of PyTorch 2.13. Left out: cuDNN's
kernel, which PyTorch may prefer on compute capability 9.0 and 10.0; it saves what the flash kernel saves.
"""

# ruff: noqa: SLF001 - ATen's names of attention kernels begin with an underscore

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

AttentionKernel = Literal["flash", "memory efficient", "math"]

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_ALIGNMENT = 8
"""Head dimensions are padded to a multiple of this."""
_MASK_ALIGNMENT = 8
"""Rows of a mask are padded to a multiple of this for the memory-efficient kernel."""


@dataclass(frozen=True)
class AttentionCall:
    """What the choice of a kernel rests on; `head_dim` is the width of a query, sequences are in tokens."""

    dtype: torch.dtype
    head_dim: int
    value_dim: int
    queries: int
    keys: int
    has_mask: bool = False
    is_causal: bool = False
    is_grouped: bool = False
    dropout: float = 0.0
    needs_gradient: bool = True


def attention_kernel(call: AttentionCall, capability: tuple[int, int]) -> AttentionKernel:
    """The kernel PyTorch takes for `call` on a GPU of compute capability `capability`.

    >>> attention_kernel(AttentionCall(torch.bfloat16, 64, 64, 1024, 1024, is_causal=True), (8, 0))
    'flash'
    """
    if torch.backends.cuda.flash_sdp_enabled() and _suits_flash(call, capability):
        return "flash"
    if torch.backends.cuda.mem_efficient_sdp_enabled() and _suits_memory_efficient(call, capability):
        return "memory efficient"
    return "math"


def _suits_flash(call: AttentionCall, capability: tuple[int, int]) -> bool:
    is_refused_gradient = (
        call.needs_gradient
        and capability in {(8, 6), (8, 9), (12, 0), (12, 1)}
        and (192 < call.head_dim <= 224 or (call.head_dim > 224 and call.dropout > 0))
    )
    return (
        capability >= (8, 0)
        and call.dtype in _HALVES
        and not call.has_mask
        and call.head_dim == call.value_dim
        and call.head_dim <= 256
        and not (call.is_causal and call.queries != call.keys)
        and not is_refused_gradient
    )


def _suits_memory_efficient(call: AttentionCall, capability: tuple[int, int]) -> bool:
    dtypes = (*_HALVES, torch.float32) if capability >= (8, 0) else (torch.float16, torch.float32)
    alignment = _alignment(call.dtype, capability)
    return (
        capability >= (5, 0)
        and call.dtype in dtypes
        and not call.is_grouped
        and call.head_dim % alignment == 0
        and call.value_dim % alignment == 0
    )


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Scalars that a head must be a multiple of, for the matrix units to be fed."""
    if dtype in _HALVES:
        return 8 if capability >= (7, 0) else 1
    return 4 if capability >= (8, 0) else 1


@contextlib.contextmanager
def attention_of(capability: str) -> Iterator[None]:
    """Within the block, attention on CUDA tensors runs the kernel of a GPU of this compute capability."""
    major, minor = (int(part) for part in capability.split("."))

    def attend(  # the operation's own parameters
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - likewise
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        tensors = (query, key, value)
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if query.dim() == 4 and key.dim() == 4:
            call = AttentionCall(
                query.dtype, query.shape[-1], value.shape[-1], query.shape[-2], key.shape[-2], attn_mask is not None,
                is_causal, query.shape[1] != key.shape[1], dropout_p, needs_gradient,
            )  # fmt: skip
            kernel = attention_kernel(call, (major, minor))
            if kernel == "flash":
                return _flash(tensors, dropout_p, is_causal, scale)
            if kernel == "memory efficient":
                return _memory_efficient(tensors, _as_bias(attn_mask, tensors), dropout_p, is_causal, scale)
        bias = _as_bias(attn_mask, tensors)
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            *tensors, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out

    library = torch.library.Library("aten", "IMPL", "AutogradCUDA")
    library.impl("scaled_dot_product_attention", attend)
    try:
        yield
    finally:
        library._destroy()  # what its own finaliser calls, at a time of our choosing


_QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _flash(tensors: _QKV, dropout: float, is_causal: bool, scale: float | None) -> torch.Tensor:  # noqa: FBT001
    width = tensors[0].shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    excess = -width % _FLASH_ALIGNMENT
    padded = tuple(F.pad(tensor, (0, excess)) for tensor in tensors) if excess else tensors
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        *padded, dropout, is_causal, False, scale=scale
    )[0]
    return out[..., :width] if excess else out


def _memory_efficient(
    tensors: _QKV, bias: torch.Tensor | None, dropout: float, is_causal: bool, scale: float | None  # noqa: FBT001
) -> torch.Tensor:  # fmt: skip
    query, key, value = tensors
    if bias is not None:
        excess = -bias.shape[-1] % _MASK_ALIGNMENT
        bias = F.pad(bias, (0, excess))[..., : bias.shape[-1]] if excess else bias
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_statistics = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_statistics, dropout, is_causal, scale=scale
    )[0]
    return out


def _as_bias(mask: torch.Tensor | None, tensors: _QKV) -> torch.Tensor | None:
    """What is added to the scores: a mask of booleans turned into 0 and -inf."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=tensors[0].dtype, device=mask.device)
    return torch.where(mask.logical_not(), -math.inf, zero)
