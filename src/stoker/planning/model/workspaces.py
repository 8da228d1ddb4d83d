"""Memory that no trace has: workspaces of kernels within an operation, cuBLAS's workspace, and the CUDA context.

CPU, measured (PyTorch 2.13, AVX-512, one thread): convolutions and products in bf16 copy tensors into oneDNN's
formats, LSTMs their gates, the backward pass of batch norm its input. The workspace that an LSTM keeps for its backward
pass is in the trace.
- oneDNN copies contiguous tensors into blocks of 16 channels (weights into blocks of 16 × 16), and results back; in
  channels-last only weights. A backward pass does so twice, for the gradient of the input and for that of the weight.
  The functions follow the allocations in their order, and take the largest sum less the outputs. Measured, since
  oneDNN's documentation leaves the choice of formats open, on 1388 convolutions of 17 architectures (oneDNN 3, AVX-512
  and AMX): exact in the median, at most 0.3 MB off in 99 of 100, since scratch memory of single kernels is left out.

CUDA, read from PyTorch's source, and compared with peaks on an H100 (`bench/forecast/verify_device.py`):
- cuBLAS gets one workspace per handle through the caching allocator, at the first product, permanently, and each thread
  has a handle: the backward pass is autograd's thread. cuBLASLt shares it (aten/src/ATen/cuda/CublasHandlePool.cpp,
  `parseChosenWorkspaceSize`, `unified_cublas_and_lt_workspaces`).
- Flash attention's backward pass sums dQ in fp32 (FlashAttention-2, csrc/flash_attn/flash_api.cpp, `mha_bwd`).
- The backward pass of an embedding with more than 3072 indices sorts them, and sums runs of equal ones in fp32
  (aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu).
- A sum over rows, such as the gradient of a bias, adds up in blocks where rows are many and columns few; each block has
  fp32 sums in memory, for every column so many times as it has threads (aten/src/ATen/native/cuda/Reduce.cuh,
  `setReduceConfig`, `global_memory_size`). Exact for 8192 × 8192 on an H100: 132 MiB.
- cuDNN's workspace for a convolution depends on the algorithm that it picks. In the contiguous format the gradient of
  the input, and after it that of the weights, are computed on copies in channels-last, the latter summed in fp32; in
  channels-last there are these sums alone. Measured on an H100 (PyTorch 2.11, a ResNet-9 in bf16 and tf32): peak of
  allocated memory exact to 2 MiB of 9 and 15 GiB, of reserved memory to 0.3 %. In fp32 outside of tensor cores, which
  a trace cannot distinguish from tf32, one convolution took 4.4 GiB more, and the allocator held 3 % more.
- The context and the loaded kernels are outside of the allocator.

Shapes: x [B, C, pixels…], y [B, O, pixels…], w [O, C / groups, kernel…].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from stoker.planning.model.optimizer_states import STEP, between_bytes
from stoker.records import Estimate
from stoker.records.trace import Operation, TensorShape

_BLOCK = 16
_ALWAYS_PLAIN = 3
"""Inputs of no more channels, such as images, are read as they are."""
_ONEDNN_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_LARGE_KERNEL = 3
"""Side of the kernel [pixels] above which depthwise weight gradients use other kernels."""
_FEWEST_BLOCKED = {"fp32": 8, "bf16": 16}
"""Channels per group from which the gradient of a grouped weight is computed on copies."""

_ROWS, _DEPTH, _COLUMNS, _MOST_COLUMNS, _FIXED = 256, 544, 64, 1024, 66_688
"""Products in bf16: largest block [rows, columns of the first operand], padding of the second's columns, most of them
summed at once, and fixed bytes."""


@dataclass(frozen=True)
class _Convolution:
    """Bytes of a convolution's tensors, plain and in blocks."""

    x: TensorShape
    y: TensorShape
    w: TensorShape
    groups: int
    is_strided: bool
    is_transposed: bool
    is_channels_last: bool

    @property
    def item(self) -> int:
        return _ONEDNN_ITEM_BYTES.get(self.w.dtype, 4)

    @property
    def kernel(self) -> int:
        """Number of weights for each pair of channels."""
        return math.prod(self.w.shape[2:])

    @property
    def is_depthwise(self) -> bool:
        return 1 < self.groups == self.w.shape[0] and self.w.shape[1] == 1

    @property
    def is_plain_product(self) -> bool:
        """True if it is a matrix product in place: 1×1, stride 1, fp32."""
        return self.kernel == 1 and not self.is_strided and self.w.dtype == "fp32"

    @property
    def is_contraction(self) -> bool:
        """True if the kernel covers the input, so that one pixel is left: computed in channels-last."""
        return self.kernel > 1 and math.prod(self.y.shape[2:]) == 1 and math.prod(self.x.shape[2:]) > 1

    def size(self, tensor: TensorShape) -> int:
        return tensor.numel * self.item

    def blocked(self, tensor: TensorShape) -> int:
        """Bytes of an input or output in blocks of channels; the groups of a grouped convolution are not padded."""
        if self.groups > 1 and not self.is_depthwise:
            return self.size(tensor)
        return self.size(tensor) // tensor.shape[1] * _filled(tensor.shape[1])

    @property
    def copied_x(self) -> int:
        return 0 if self.x.shape[1] <= _ALWAYS_PLAIN else self.blocked(self.x)

    @property
    def blocked_w(self) -> int:
        """Bytes of the weight in blocks, for an input that is read in place or copied."""
        if self.groups == 1 and self.w.shape[1] <= _ALWAYS_PLAIN:
            return _filled(self.w.shape[0]) * self.w.shape[1] * self.kernel * self.item
        return self.full_w

    @property
    def full_w(self) -> int:
        """Bytes of the weight in blocks on both sides."""
        first, second = self.w.shape[:2]
        if self.groups > 1:
            return (_filled(first) if self.is_depthwise else first) * second * self.kernel * self.item
        return _filled(first) * _filled(second) * self.kernel * self.item

    @property
    def sums(self) -> int:
        """Bytes of fp32 sums for the weight's gradient in a reduced precision."""
        return self.blocked_w // self.item * 4 if self.item < 4 else 0


def _filled(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def forward_bytes(operation: Operation) -> int:
    """Hidden bytes of `convolution`."""
    one = _read(operation, operation.inputs[0], operation.inputs[1], operation.outputs[0])
    if one.is_plain_product:
        return 0
    if one.is_channels_last:
        return one.blocked_w
    y = one.blocked(one.y)
    results = 2 * one.size(one.y) if one.is_transposed else y
    return max(_scratch(one, one.y, one.x) + one.copied_x + one.blocked_w + y - one.size(one.y), results)


def backward_bytes(operation: Operation) -> int:
    """Hidden bytes of `convolution_backward`."""
    grad, x, w = operation.inputs[:3]
    one = _read(operation, x, w, grad)
    if one.is_plain_product:
        return 0
    mask = operation.attribute("output_mask")
    needs_x = not (isinstance(mask, list | tuple) and not mask[0])
    of_weight = _of_weight(one)
    if one.is_channels_last:
        return max(of_weight, one.blocked_w - one.size(w) if needs_x else 0)
    if not needs_x:
        return of_weight
    is_brgemm = one.is_strided and not one.is_transposed and (one.groups == 1 or (one.is_depthwise and one.item == 2))
    weight = w.shape[0] * one.kernel * 64 if is_brgemm and one.is_depthwise else one.full_w
    made = _scratch(one, x, grad) if not one.is_strided else 0
    copies = one.blocked(grad) + weight + one.blocked(x) + made - one.size(x) - one.size(w)
    returned = one.blocked(x) + (one.size(x) if is_brgemm or one.is_contraction else 0) - one.size(w)
    return max(copies, returned, of_weight)


def product_bytes(operation: Operation) -> int:
    """Hidden bytes of `mm`, `addmm` and `bmm`: a transposed first operand in bf16 is transposed back block by block.

    That is the gradient of a linear layer's weight. A block has at most 256 rows and 544 columns; with more columns
    sums are kept in fp32. Other products hide less than 0.2 MB.
    """
    a, b = operation.inputs[-2:]
    if a.dtype != "bf16" or not operation.attribute("transpose_a"):
        return 0
    rows, depth = a.shape[-2:]
    block = -(-rows // -(-rows // _ROWS))
    width = b.shape[-1]
    columns = min(width if width < _COLUMNS else -(-width // _COLUMNS) * _COLUMNS, _MOST_COLUMNS)
    return block * (2 * min(depth, _DEPTH) + (4 * columns if depth > _DEPTH else 0)) + _FIXED


def _of_weight(one: _Convolution) -> int:
    """Hidden bytes of the gradient of the weight, which is the second part of a backward pass."""
    plain, in_blocks, sums = one.size(one.w), one.blocked_w, one.sums
    if one.is_depthwise and one.kernel > _LARGE_KERNEL**2:
        if not one.is_channels_last:
            return (_BLOCK * one.kernel + 1) * one.w.shape[0]
        in_blocks = one.groups * _BLOCK**2 * one.kernel * one.item  # each group filled up to a whole block
        sums = in_blocks // one.item * 4 if one.item < 4 else 0
    if one.is_channels_last:
        return max(in_blocks + sums - plain, in_blocks + plain)
    is_blocked = one.groups == 1 or one.is_depthwise or one.w.shape[1] >= _FEWEST_BLOCKED.get(one.w.dtype, 8)
    copies = one.blocked(one.y) + one.copied_x if is_blocked else 0
    return max(copies + in_blocks + sums - plain, in_blocks + (plain if one.is_contraction else 0))


def _scratch(one: _Convolution, result: TensorShape, source: TensorShape) -> int:
    """Scratch bytes of 1×1 convolutions: fp32 sums of one image in a reduced precision, and its strided pixels."""
    if one.kernel > 1:
        return 0
    pixels = math.prod(result.shape[2:])
    sums = pixels * _filled(result.shape[1]) * 4 if one.item < 4 else 0
    return sums + (pixels * _filled(source.shape[1]) * one.item if one.is_strided else 0)


def _read(operation: Operation, x: TensorShape, w: TensorShape, y: TensorShape) -> _Convolution:
    stride, groups = operation.attribute("stride") or [1], operation.attribute("groups")
    return _Convolution(
        x=x,
        y=y,
        w=w,
        groups=groups if isinstance(groups, int) else 1,
        is_strided=isinstance(stride, list | tuple) and any(step != 1 for step in stride),
        is_transposed=bool(operation.attribute("transposed")),
        is_channels_last=bool(operation.attribute("channels_last")),
    )


_SORTED_FROM = 3072
"""More indices than this are sorted in an embedding's backward pass on CUDA."""
_ROWS_PER_THREAD = 10
"""Gradients of an embedding's row that a thread sums; `NROWS_PER_THREAD`."""

_RNN_TEMPORARY = 4.2
"""An LSTM layer's temporaries, in each direction, in multiples of its output in fp32; measured 4.0 to 4.2."""

_ITEM_BYTES = {
    "fp64": 8,
    "int64": 8,
    "fp32": 4,
    "tf32": 4,
    "int32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "bool": 1,
    "uint8": 1,
}

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "_scaled_mm", "addbmm"})


def hidden_blocks(operation: Operation, *, target: Literal["cpu", "cuda"], capability: str = "") -> tuple[int, ...]:
    """Temporaries of `operation` beyond its outputs, one after the other [bytes].

    On CUDA those of a sum go by compute capability, such as `8.9`.
    """
    law = _LAWS[target].get(operation.name)
    if operation.name == STEP:
        return (between_bytes(operation, target),)
    if target == "cuda" and operation.name == "convolution_backward":
        blocks = _cuda_convolution_backward(operation)
    elif target == "cuda" and operation.name == "sum":
        blocks = (_cuda_sum(operation, capability),)
    else:
        blocks = () if law is None else (law(operation),)
    return tuple(num_bytes for num_bytes in blocks if num_bytes)


def hidden_bytes(operation: Operation, *, target: Literal["cpu", "cuda"], capability: str = "") -> int:
    """The largest of `hidden_blocks`; 0 if there are none."""
    return max(hidden_blocks(operation, target=target, capability=capability), default=0)


def is_product(operation: Operation) -> bool:
    """True if cuBLAS computes the operation."""
    return operation.name in _PRODUCTS


def cublas_workspace_bytes(capability: str) -> int:
    """Size of cuBLAS's workspace [bytes], by compute capability such as `8.9`."""
    major = int(capability.partition(".")[0] or 0)
    return 32 << 20 if major in {9, 10, 12} else (8 << 20) + (128 << 10)


def context_bytes() -> Estimate:
    """Memory outside of the allocator [bytes]: a CUDA context with PyTorch's kernels, and what the driver keeps.

    300 to 600 MB of context in reports for GPUs of capability 7.0 to 9.0; kernels are loaded when first used. The
    driver offers 0.3 to 0.7 GiB less than `nvidia-smi` shows: PyTorch's errors say "23.69 GiB total capacity" of an RTX
    3090 of 24, "79.15 GiB" of an A100 of 80.
    """
    return Estimate(value=800e6, low=600e6, high=1.3e9, unit="bytes", basis="datasheet")


def _size(tensor: TensorShape) -> int:
    return tensor.numel * _ITEM_BYTES.get(tensor.dtype, 4)


def _cuda_convolution_backward(operation: Operation) -> tuple[int, ...]:
    """Workspaces of the input's gradient and of the weight's [bytes]."""
    grad_BCHW, x_BCHW, weight, *_ = operation.inputs
    sums, mask = weight.numel * 4, operation.attribute("output_mask")
    is_plain = weight.dtype == "fp32" and operation.attribute("groups", 1) != 1
    if is_plain or operation.attribute("channels_last"):
        return (sums,)
    copies = _size(grad_BCHW) + _size(x_BCHW) + _size(weight)
    needs_x = not (isinstance(mask, list | tuple) and not mask[0])
    return (copies, copies + sums) if needs_x else (copies + sums,)


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


_RESIDENT_THREADS = {
    "6.0": 56 * 2048,
    "7.0": 80 * 2048,
    "7.5": 40 * 1024,
    "8.0": 108 * 2048,
    "8.6": 82 * 1536,
    "8.9": 128 * 1536,
    "9.0": 132 * 2048,
    "10.0": 148 * 2048,
}
"""Resident threads of the usual board of a compute capability: multiprocessors × threads on each."""
_USUAL_RESIDENT_THREADS = 108 * 2048
_SUMMING_THREADS, _WARP, _VECTOR = 512, 32, 4
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Values that a thread sums, at least and at most, where rows are split over blocks."""


def _cuda_sum(operation: Operation, capability: str) -> int:
    """Sums of blocks where leading dimensions are summed; over others they are few."""
    shape, dims = operation.inputs[0].shape, operation.attribute("dim")
    if not isinstance(dims, list | tuple) or sorted(dims) != list(range(len(dims))) or len(dims) >= len(shape):
        return 0
    rows, columns = math.prod(shape[: len(dims)]), math.prod(shape[len(dims) :])
    vector = math.gcd(columns, _VECTOR)
    most = _SUMMING_THREADS // vector
    across, down = (min(most, 1 << max(1, size).bit_length() - 1) for size in (columns // vector, rows))
    height = min(down, most // min(across, _WARP))
    width = min(across, most // height)
    values = -(-rows // height)
    blocks = -(-(columns // vector) // width)
    fitting = _RESIDENT_THREADS.get(capability, _USUAL_RESIDENT_THREADS) // (width * height)
    if rows < min(height * _LEAST_VALUES, _MOST_VALUES) or values < _MOST_VALUES or blocks > fitting:
        return 0
    splits = max(min(-(-fitting // blocks), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    return 4 * columns * splits * width * vector if splits > 1 else 0


_LAWS: dict[str, dict[str, Callable[[Operation], int]]] = {
    "cpu": {
        # A second tensor like the input, in either memory format; measured.
        "native_batch_norm_backward": lambda operation: _size(operation.inputs[1]),
        "mm": product_bytes,
        "addmm": product_bytes,
        "bmm": product_bytes,
        "convolution": forward_bytes,
        "convolution_backward": backward_bytes,
        "mkldnn_rnn_layer": lambda operation: round(_RNN_TEMPORARY * operation.outputs[0].numel * 4),
        "mkldnn_rnn_layer_backward": lambda operation: round(_RNN_TEMPORARY * operation.inputs[0].numel * 4),
    },
    "cuda": {
        "_scaled_dot_product_flash_attention_backward": _cuda_flash_attention_backward,
        "embedding_dense_backward": _cuda_embedding_backward,
    },
}
