"""Memory that no trace shows: what kernels and libraries allocate inside of an operation, and beside all of them.

CPU, measured (PyTorch 2.13, AVX-512, one thread): convolutions and products in bf16 copy tensors into oneDNN's
formats (`onednn.py`), LSTMs their gates, the backward pass of batch norm its input. The workspace that an LSTM keeps
for its backward pass is in the trace.

CUDA, read from PyTorch's source, not measured here:
- cuBLAS gets one workspace per handle through the caching allocator, at the first product, for good; cuBLASLt shares it
  (aten/src/ATen/cuda/CublasHandlePool.cpp, `parseChosenWorkspaceSize`, `unified_cublas_and_lt_workspaces`).
- Flash attention's backward pass sums dQ in fp32 (FlashAttention-2, csrc/flash_attn/flash_api.cpp, `mha_bwd`).
- The backward pass of an embedding with more than 3072 indices sorts them, and sums runs of equal ones in fp32
  (aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu).
- What cuDNN takes for a convolution depends on the algorithm that it picks. Assumed: in bf16 and the contiguous format
  copies of all tensors in channels-last, else the gradient of the weights in fp32.
- The context and the loaded kernels lie outside of the allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from stoker.planning.memory import onednn
from stoker.records import Estimate
from stoker.records.trace import Operation, TensorShape

_SORTED_FROM = 3072
"""More indices than this are sorted in an embedding's backward pass on CUDA."""
_ROWS_PER_THREAD = 10
"""How many gradients of an embedding's row a thread sums; `NROWS_PER_THREAD`."""

_RNN_TEMPORARY = 4.2
"""An LSTM layer's temporaries, in each direction, in multiples of its output in fp32; measured 4.0 to 4.2."""

_ITEM_BYTES = {"fp64": 8, "int64": 8, "fp32": 4, "tf32": 4, "int32": 4, "bf16": 2, "fp16": 2, "bool": 1, "uint8": 1}

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "_scaled_mm", "addbmm"})


def hidden_bytes(operation: Operation, *, target: Literal["cpu", "cuda"]) -> int:
    """Bytes that `operation` takes beyond its outputs while it runs, and gives back."""
    law = _LAWS[target].get(operation.name)
    return law(operation) if law is not None else 0


def is_product(operation: Operation) -> bool:
    """Whether cuBLAS computes the operation."""
    return operation.name in _PRODUCTS


def cublas_workspace_bytes(capability: str) -> int:
    """What cuBLAS's workspace takes from the first product on [bytes], by compute capability such as `8.9`."""
    major = int(capability.partition(".")[0] or 0)
    return 32 << 20 if major in {9, 10, 12} else (8 << 20) + (128 << 10)


def context_bytes() -> Estimate:
    """What a CUDA context with PyTorch's kernels takes of a device, outside of the allocator.

    300 to 600 MB in reports for GPUs of capability 7.0 to 9.0; kernels are loaded when first used. Replaced where a
    measurement of the device is at hand.
    """
    return Estimate(value=450e6, low=300e6, high=600e6, unit="bytes", basis="datasheet")


def _size(tensor: TensorShape) -> int:
    return tensor.numel * _ITEM_BYTES.get(tensor.dtype, 4)


def _cpu_rnn(operation: Operation) -> int:
    return round(_RNN_TEMPORARY * operation.outputs[0].numel * 4)


def _cpu_rnn_backward(operation: Operation) -> int:
    layer_input = operation.inputs[0]
    return round(_RNN_TEMPORARY * layer_input.numel * 4)


def _cpu_batch_norm_backward(operation: Operation) -> int:
    """A second tensor like the input, in either memory format; measured."""
    return _size(operation.inputs[1])


def _cuda_convolution(operation: Operation) -> int:
    x_BCHW, weight, *_ = operation.inputs
    if weight.dtype == "fp32" or operation.attribute("channels_last"):
        return 0
    return _size(x_BCHW) + _size(weight) + _size(operation.outputs[0])


def _cuda_convolution_backward(operation: Operation) -> int:
    grad_BCHW, x_BCHW, weight, *_ = operation.inputs
    if weight.dtype == "fp32" or operation.attribute("channels_last"):
        return weight.numel * 4
    return _size(grad_BCHW) + _size(x_BCHW) + weight.numel * 4


def _cuda_flash_attention_backward(operation: Operation) -> int:
    batch, heads, seq, head_dim = operation.inputs[1].shape
    rows = batch * heads * -(-seq // 128) * 128
    rounded_dim = -(-head_dim // 32) * 32
    return rows * rounded_dim * 4 + rows * 4


def _cuda_embedding_backward(operation: Operation) -> int:
    grad, indices = operation.inputs[:2]
    if indices.numel <= _SORTED_FROM:
        return 0
    rows, width = operation.outputs[0].shape[0], grad.shape[-1]
    runs = min(indices.numel, rows)
    sort = 4 * indices.numel * 8  # indices and their order, each twice
    return sort + (indices.numel // _ROWS_PER_THREAD + runs) * width * 4


_LAWS: dict[str, dict[str, Callable[[Operation], int]]] = {
    "cpu": {
        "native_batch_norm_backward": _cpu_batch_norm_backward,
        "mm": onednn.product_bytes,
        "addmm": onednn.product_bytes,
        "bmm": onednn.product_bytes,
        "convolution": onednn.forward_bytes,
        "convolution_backward": onednn.backward_bytes,
        "mkldnn_rnn_layer": _cpu_rnn,
        "mkldnn_rnn_layer_backward": _cpu_rnn_backward,
    },
    "cuda": {
        "convolution": _cuda_convolution,
        "cudnn_convolution": _cuda_convolution,
        "convolution_backward": _cuda_convolution_backward,
        "_scaled_dot_product_flash_attention_backward": _cuda_flash_attention_backward,
        "embedding_dense_backward": _cuda_embedding_backward,
    },
}
