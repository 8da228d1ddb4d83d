"""Operations that memory bounds: how often each byte crosses it.

An element-wise operation reads and writes everything once. A norm or softmax goes over a row more than once; the later
passes find it in the L2 cache if the rows that all multiprocessors have at hand fit there together. Which kernel runs
and how often it reads was told from PyTorch 2.1's sources (`SoftMax.cu`, `layer_norm_kernel.cu`, `Normalization.cuh`)
and checked against the public measurements of NeuSight (ASPLOS 2025): an A100 does layer norms of up to 2048 columns at
0.86 of its bandwidth and of more at 0.58, two thirds of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker.records.hardware import Hardware
from stoker.records.trace import Operation

_RESIDENT_THREADS = {"6.0": 2048, "6.1": 2048, "7.0": 2048, "7.5": 1024, "8.0": 2048, "9.0": 2048, "10.0": 2048}
_OTHER_RESIDENT_THREADS = 1536
"""Threads a multiprocessor holds. Source: CUDA programming guide, table "Technical Specifications"."""
_L2_BEGINS_TO_MISS, _L2_ALWAYS_MISSES = 0.2, 0.6
"""Share of the L2 cache that rows at hand may take before later passes miss it, and from which all do."""
_DEFAULT_L2_BYTES = 4 * 2**20
_WARP_SOFTMAX = 1024
"""Columns up to which a warp holds a row of a softmax in registers."""
_SECTOR_RATIO = 8
"""A read of 4 bytes brings a sector of 32."""


@dataclass(frozen=True)
class RowKernel:
    """A kernel over rows.

    `passes` over the tensor when everything is cached, `again` how many cross memory anew when it is not, `threads` per
    row.
    """

    passes: float
    again: float
    threads: int


ROW_KERNELS = {
    "native_layer_norm": RowKernel(2, 1, 128),
    "native_layer_norm_backward": RowKernel(5, 2, 128),
    "_fused_rms_norm": RowKernel(2, 1, 128),
    "_fused_rms_norm_backward": RowKernel(5, 2, 128),
    "_softmax": RowKernel(2, 2, 1024),
    "_log_softmax": RowKernel(2, 2, 1024),
    "_softmax_backward_data": RowKernel(3, 2, 1024),
    "_log_softmax_backward_data": RowKernel(3, 2, 1024),
    "native_group_norm": RowKernel(3, 0, 512),
    "native_group_norm_backward": RowKernel(5, 0, 512),
    "native_batch_norm": RowKernel(3, 0, 512),
    "cudnn_batch_norm": RowKernel(3, 0, 512),
    "native_batch_norm_backward": RowKernel(5, 0, 512),
    "cudnn_batch_norm_backward": RowKernel(5, 0, 512),
}
"""By ATen's name."""


def row_sizes(operation: Operation) -> tuple[int, int]:
    """Rows and columns of a row kernel's tensor: what it normalises over are the columns."""
    largest = max(operation.inputs, key=lambda tensor: tensor.numel)
    if "layer_norm" in operation.name or "rms_norm" in operation.name:
        weights = [tensor.numel for tensor in operation.inputs if 1 < tensor.numel < largest.numel]
        columns = largest.shape[-1] if not weights else min(weights, key=lambda n: abs(n - largest.shape[-1]))
    else:
        dim = operation.attribute("dim", -1)
        columns = largest.shape[dim if isinstance(dim, int) else -1] if largest.shape else 1
    return max(1, largest.numel // max(1, columns)), max(1, columns)


def row_bytes(operation: Operation, hardware: Hardware, element_bytes: float) -> float:
    """Bytes that cross memory in a row kernel."""
    kernel = ROW_KERNELS[operation.name]
    rows, columns = row_sizes(operation)
    is_softmax = "softmax" in operation.name
    again = (
        0.0
        if is_softmax and columns <= _WARP_SOFTMAX
        else kernel.again * _missing(kernel, columns, element_bytes, hardware)
    )
    # Blocks of a softmax are powers of two times four elements: other widths leave threads idle.
    idle = 1.25 if is_softmax and _WARP_SOFTMAX < columns < 4096 and columns & (columns - 1) else 1.0
    return rows * columns * element_bytes * (kernel.passes + again) * idle


def _missing(kernel: RowKernel, columns: int, element_bytes: float, hardware: Hardware) -> float:
    """Share of the later passes that miss the L2 cache."""
    threads = _RESIDENT_THREADS.get(hardware.compute_capability or "", _OTHER_RESIDENT_THREADS)
    at_hand = (hardware.multiprocessors or 1) * max(1, threads // kernel.threads) * columns * element_bytes
    share = at_hand / (hardware.l2_bytes or _DEFAULT_L2_BYTES)
    return min(1.0, max(0.0, (share - _L2_BEGINS_TO_MISS) / (_L2_ALWAYS_MISSES - _L2_BEGINS_TO_MISS)))


def stream_bytes(operation: Operation, hardware: Hardware) -> float:
    """Bytes that cross memory in an operation that goes over its tensors once.

    Attribute `strided_bytes` are those of operands that lie in another order than the result, `strided_reach_bytes`
    what is read until the rest of a sector is wanted: where the L2 cache holds less than that, each sector comes anew.
    """
    total = float(operation.bytes_read + operation.bytes_written)
    strided, reach = (operation.attribute(f"strided_{what}") for what in ("bytes", "reach_bytes"))
    is_known = isinstance(strided, int | float) and isinstance(reach, int | float)
    if is_known and reach > (hardware.l2_bytes or _DEFAULT_L2_BYTES):
        total += (_SECTOR_RATIO - 1) * strided
    return total
