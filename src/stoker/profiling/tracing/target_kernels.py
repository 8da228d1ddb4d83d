"""Kernels of the target in a trace: a GPU's attention and norms, and recurrent layers of oneDNN and cuDNN.

Attention: `scaled_dot_product_attention` chooses among its kernels by the GPU in the machine. While a device is
pretended, the target's compute capability decides, below autocast and above autograd, so that it holds for every
caller: Python, `nn.MultiheadAttention`, and the recomputation of checkpointed blocks. On a CPU, PyTorch chooses for a
fake tensor as for a real one.
Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and attention.cpp of PyTorch 2.13. Left out: cuDNN's
kernel, which PyTorch may prefer on compute capability 9.0 and 10.0; it saves the same tensors as the flash kernel.

Single kernels: a few operations are one kernel on a GPU, and are written as several others where a build has no kernel
of it, as one for CPUs has none for GPUs: gradients of SiLU and Mish, and RMS norm and its gradient.
Source: aten/src/ATen/native/native_functions.yaml (operations with kernels and a `CompositeImplicitAutograd`) and
layer_norm.cpp (`rms_norm_symint`) of PyTorch 2.13.

Recurrent layers: PyTorch's fakes of both libraries' layers leave out the memory kept for the backward pass, which can
be most of an LSTM's memory. oneDNN's workspace follows from its layout. For a GPU pretended on a build without CUDA,
PyTorch would run a recurrent layer step by step; here it becomes cuDNN's single operation, with a fake backward pass.
Source: oneDNN, src/cpu/rnn/rnn_utils.hpp (`set_workspace_sizes`, `get_good_ld`); equal to the workspaces that PyTorch
2.13 allocated for 28 random shapes in fp32 and bf16. cuDNN does not publish its reserve: here, the gates, the cell and
its tanh for each step, which a backward pass needs; this was not measured.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

# ruff: noqa: SLF001 - ATen's names of kernels begin with an underscore

aten = torch.ops.aten

AttentionKernel = Literal["flash", "memory efficient", "math"]

_HALVES = (torch.float16, torch.bfloat16)
_FLASH_ALIGNMENT = 8
"""Head dimensions are padded to a multiple of this."""
_MASK_ALIGNMENT = 8
"""Rows of a mask are padded to a multiple of this for the memory-efficient kernel."""


@dataclass(frozen=True)
class AttentionCall:
    """The properties that decide the kernel; `head_dim` is the width of a query, sequences are in tokens."""

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
    # A head must be a multiple of this for the matrix units.
    elements, since = (8, (7, 0)) if call.dtype in _HALVES else (4, (8, 0))
    alignment = elements if capability >= since else 1
    return (
        capability >= (5, 0)
        and call.dtype in dtypes
        and not call.is_grouped
        and call.head_dim % alignment == 0
        and call.value_dim % alignment == 0
    )


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
                dtype=query.dtype,
                head_dim=query.shape[-1],
                value_dim=value.shape[-1],
                queries=query.shape[-2],
                keys=key.shape[-2],
                has_mask=attn_mask is not None,
                is_causal=is_causal,
                is_grouped=query.shape[1] != key.shape[1],
                dropout=dropout_p,
                needs_gradient=needs_gradient,
            )
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

    with replaced_kernels("AutogradCUDA", {"scaled_dot_product_attention": attend}):
        yield


_SINGLE = ("silu_backward", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward")


@contextlib.contextmanager
def single_kernels_of_cuda() -> Iterator[None]:
    """Within the block, operations on CUDA tensors that are one kernel there are one operation."""

    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("fake tensors run no kernel")

    # PyTorch writes an operation as others where its backend has no kernel of it: here it has one, which never runs.
    missing = [name for name in _SINGLE if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA")]
    with (
        replaced_kernels("CUDA", dict.fromkeys(missing, never)),
        replaced_kernels("AutogradCUDA", {"rms_norm": _rms_norm}),
    ):
        yield


def _rms_norm(
    x: torch.Tensor, normalized_shape: list[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    if weight is not None and weight.dtype != x.dtype:
        out: torch.Tensor = aten.rms_norm.default._op_dk(
            torch._C.DispatchKey.CompositeImplicitAutograd, x, normalized_shape, weight, eps
        )
        return out
    fused: torch.Tensor = aten._fused_rms_norm(x, normalized_shape, weight, eps)[0]
    return fused


@contextlib.contextmanager
def replaced_kernels(dispatch_key: str, kernels: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the block, ATen's operations run these kernels for `dispatch_key` in place of autograd's own."""
    library = torch.library.Library("aten", "IMPL", dispatch_key)
    for name, kernel in kernels.items():
        library.impl(name, kernel)
    try:
        yield
    finally:
        library._destroy()  # called by its finaliser too, but later


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
    tensors: _QKV,
    bias: torch.Tensor | None,
    dropout: float,
    is_causal: bool,  # noqa: FBT001
    scale: float | None,
) -> torch.Tensor:
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
    """The addend of the scores: a boolean mask as 0 and -inf."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=tensors[0].dtype, device=mask.device)
    return torch.where(mask.logical_not(), -math.inf, zero)


_PAGE = 4096
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""cuDNN's numbers of kinds of cells."""
_KEPT = (1, 1, 6, 5)
"""Vectors of the hidden size kept by a step of each kind."""


def completed(func: Any, args: tuple[Any, ...], out: Any) -> Any:
    """The results of an operation, with the memory left out by PyTorch's fake of it."""
    complete = _COMPLETE.get(func)
    return out if complete is None else complete(args, out)


@functools.cache
def stand_in(func: Any) -> Callable[..., Any] | None:
    """A fake of an operation that PyTorch has no fake of, or None."""
    if not func._schema.returns and func.overloadpacket.__name__.startswith("_fused_"):
        return lambda *_args, **_kwargs: None  # an optimiser that writes into its arguments, such as fused SGD
    return _STAND_INS.get(func)


def recurrent_flops(func: Any, args: tuple[Any, ...], out: Any) -> int:
    """FLOPs of a recurrent layer's matrix products, a multiply-add counted as two; 0 for any other operation."""
    formula = _FLOPS.get(func)
    return 0 if formula is None else formula(args, out)


@contextlib.contextmanager
def recurrence_of_cudnn() -> Iterator[None]:
    """Within the block, recurrent layers on CUDA tensors are cuDNN's."""
    with replaced_kernels("AutogradCUDA", {f"{name}.input": _layer(name) for name in _MODES}):
        yield


def onednn_workspace_bytes(*, steps: int, batch: int, inputs: int, hidden: int, scalar: int) -> int:
    """Memory that oneDNN's LSTM layer keeps for its backward pass [bytes]; `scalar` is the size of its dtype [bytes].

    >>> onednn_workspace_bytes(steps=32, batch=8, inputs=64, hidden=128, scalar=4)
    2023424
    """
    widest, rows = max(inputs, hidden), 2 * (steps + 1) * batch
    arrays = (
        steps * batch * _leading(4 * hidden, scalar) * scalar,
        steps * batch * _leading(hidden, scalar) * scalar,
        rows * hidden * scalar,
        rows * _leading(widest, scalar) * scalar,
        rows * _leading(widest, 4) * 4,
        rows * _leading(widest, 4) * 4,
        rows * hidden * 4,
    )
    return sum(-(-num_bytes // _PAGE) * _PAGE for num_bytes in arrays)


def _leading(width: int, scalar: int) -> int:
    """The leading dimension of a matrix: whole cache lines, and not a multiple of 256."""
    line = 64 // scalar
    padded = -(-width // line) * line
    return padded + line if padded % 256 == 0 else padded


def _with_onednn_workspace(args: tuple[Any, ...], out: Any) -> Any:
    output, hidden_state, cell_state, workspace = out
    if workspace.numel() or not args[-1]:
        return out
    steps, batch, hidden = output.shape
    size = onednn_workspace_bytes(
        steps=steps, batch=batch, inputs=args[0].shape[-1], hidden=hidden, scalar=output.element_size()
    )
    return output, hidden_state, cell_state, workspace.new_empty(size, dtype=torch.uint8)


def _with_cudnn_reserve(args: tuple[Any, ...], out: Any) -> Any:
    output, hidden_state, cell_state, reserve, buffer = out
    mode, hidden, layers, trains, both_ways = args[6], args[7], args[9], args[12], args[13]
    if reserve.numel() or not trains:
        return out
    rows = output.shape[0] * output.shape[1]
    size = rows * hidden * layers * (2 if both_ways else 1) * _KEPT[mode] * output.element_size()
    return output, hidden_state, cell_state, reserve.new_empty(size, dtype=torch.uint8), buffer


def _cudnn_backward(*args: Any, **_: Any) -> Any:
    inputs, weights, hidden_state, cell_state = args[0], args[1], args[4], args[5]
    return (
        torch.empty_like(inputs),
        torch.empty_like(hidden_state),
        None if cell_state is None else torch.empty_like(cell_state),
        [torch.empty_like(weight) for weight in weights],
    )


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor | None = None, _bias: Any = None, out_dtype: Any = None
) -> torch.Tensor:
    """The product of a mixture of experts. PyTorch's fake supports bf16 only, its kernels fp32 and fp16 too."""
    groups = [] if ends is None else [ends.shape[0]]
    if a.dim() != b.dim():  # the groups divide the rows of one
        shape = [a.shape[0] if a.dim() == 2 else a.shape[1], b.shape[-1]]
    else:
        shape = [*(groups if a.dim() == 2 else a.shape[:1]), a.shape[-2], b.shape[-1]]
    return a.new_empty(shape, dtype=out_dtype or a.dtype)


def _layer(name: str) -> Callable[..., Any]:
    def run(  # noqa: PLR0913, PLR0917 - the operation's own parameters
        inputs: torch.Tensor,
        state: Any,
        weights: list[torch.Tensor],
        has_biases: bool,  # noqa: FBT001 - likewise
        num_layers: int,
        dropout: float,
        train: bool,  # noqa: FBT001 - likewise
        bidirectional: bool,  # noqa: FBT001 - likewise
        batch_first: bool,  # noqa: FBT001 - likewise
    ) -> Any:
        hidden_state, cell_state = state if name == "lstm" else (state, None)
        hidden = (hidden_state if cell_state is None else cell_state).shape[-1]
        projected = hidden_state.shape[-1] if hidden_state.shape[-1] != hidden else 0
        per_layer = (4 if has_biases else 2) + (1 if projected else 0)
        tensors = (inputs, hidden_state, cell_state, *weights)
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            tensors = tuple(None if tensor is None else tensor.to(dtype) for tensor in tensors)
        inputs, hidden_state, cell_state, *weights = tensors
        no_buffer = inputs.new_empty(0)
        with torch.autocast("cuda", enabled=False):  # it has a kernel for this operation that asks cuDNN
            output, hidden_out, cell_out, _, _ = aten._cudnn_rnn(
                inputs,
                weights,
                per_layer,
                no_buffer,
                hidden_state,
                cell_state,
                _MODES[name],
                hidden,
                projected,
                num_layers,
                batch_first,
                dropout,
                train,
                bidirectional,
                [],
                None,
            )
        return (output, hidden_out, cell_out) if name == "lstm" else (output, hidden_out)

    return run


def _onednn_flops(args: tuple[Any, ...], _out: Any) -> int:
    inputs, input_weight, hidden_weight = args[:3]
    return int(2 * inputs.shape[0] * inputs.shape[1]) * int(input_weight.numel() + hidden_weight.numel())


def _cudnn_flops(args: tuple[Any, ...], _out: Any) -> int:
    inputs, weights = args[:2]
    matrices = sum(weight.numel() for weight in weights if weight.dim() > 1)
    return int(2 * inputs.shape[0] * inputs.shape[1] * matrices)


_COMPLETE: dict[Any, Callable[[tuple[Any, ...], Any], Any]] = {
    aten.mkldnn_rnn_layer.default: _with_onednn_workspace,
    aten._cudnn_rnn.default: _with_cudnn_reserve,
}
_STAND_INS: dict[Any, Callable[..., Any]] = {
    aten._cudnn_rnn_backward.default: _cudnn_backward,
    aten._grouped_mm.default: _grouped_product,
}
_FLOPS: dict[Any, Callable[[tuple[Any, ...], Any], int]] = {
    aten.mkldnn_rnn_layer.default: _onednn_flops,
    aten.mkldnn_rnn_layer_backward.default: lambda args, out: 2 * _onednn_flops(args, out),
    aten._cudnn_rnn.default: _cudnn_flops,
    aten._cudnn_rnn_backward.default: lambda args, out: 2 * _cudnn_flops(args, out),
}
