"""Kernels on a GPU: the products that operations are made of, their times in tiles, and bytes across memory.

Products: a kernel cuts the result into tiles; each multiprocessor works through its share of them, so that the time is
that of the multiprocessor with the most. Small tiles leave fewer idle, but load more operands per FLOP; if the result
has few tiles, the depth is split and the parts are added up. The libraries are assumed to choose the best of these.
Operands that do not fit into the caches cross memory, in parallel with the arithmetic.
Source: the tile decomposition is that of NeuSight (Lee et al., ASPLOS 2025) and of NVIDIA's guide "Matrix
Multiplication Background" (tile and wave quantisation); here the utilisation is a closed form, not a network.

Memory: an element-wise operation reads and writes everything once. A norm or softmax goes over a row more than once;
later passes find it in the L2 cache if the rows of all multiprocessors fit there together. The kernels and their reads
are from PyTorch 2.1's sources (`SoftMax.cu`, `layer_norm_kernel.cu`, `Normalization.cuh`), checked against the public
measurements of NeuSight: an A100 does layer norms of up to 2048 columns at 0.86 of its bandwidth and of more at 0.58,
two thirds of that.

Recurrent layers: cuDNN multiplies a layer's inputs for all steps together. The state's product and its element-wise
operations are two kernels for each step, of which none begins before the last one has ended. Backward likewise; the
gradients of the weights are products over all steps. The overhead of a step is a judgement, not measured. Left out:
cuDNN's persistent kernels, which keep small weights in registers, and layers that run in parallel; both are faster.
Source: Appleyard, Kocisky and Blunsom, "Optimizing Performance of Recurrent Neural Networks on GPUs" (2016),
arXiv:1604.01946, sections 3.1 to 3.3; their streaming of layers is left out.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.records.hardware import Hardware
from stoker.records.trace import Operation, TensorShape

Sizes = tuple[int, int, int, int]

SINGLE = ("mm", "addmm", "linear", "_addmm_activation", "_scaled_mm")
BATCHED = ("bmm", "baddbmm", "_grouped_mm")


def product_sizes(operation: Operation) -> Sizes | None:
    """Sizes (batch, rows, columns, depth) of a matrix product; None if its shapes do not determine them."""
    matrices = [tensor.shape for tensor in operation.inputs if len(tensor.shape) >= 2]
    if operation.name == "linear" and len(matrices) >= 2:
        (*rows, depth), (columns, _) = matrices[:2]
        return 1, math.prod(rows), columns, depth
    if len(matrices) < 2:
        return None
    a, b = matrices[-2:]
    if operation.name == "_grouped_mm":
        return _grouped_sizes(a, b, operation.outputs[0].shape)
    if operation.name in BATCHED and len(a) == len(b) == 3:
        return a[0], a[1], b[2], a[2]
    return (1, a[0], b[1], a[1]) if len(a) == len(b) == 2 else None


def _grouped_sizes(a: tuple[int, ...], b: tuple[int, ...], result: tuple[int, ...]) -> Sizes:
    """Sizes of products of equal groups: the rows, columns or depth that are shared are divided."""
    groups = next((shape[0] for shape in (a, b, result) if len(shape) == 3), 1)
    rows, columns, depth = a[-2], b[-1], a[-1]
    if len(a) == len(b) == 2:
        depth = max(1, depth // groups)
    elif len(a) == 2:
        rows = max(1, rows // groups)
    elif len(b) == 2:
        columns = max(1, columns // groups)
    return groups, rows, columns, depth


def convolution_products(operation: Operation) -> list[list[tuple[Sizes, float]]] | None:
    """The algorithms for each part of a convolution; None if its shapes do not determine them.

    A part is the result, the input's gradient or the weight's. An algorithm is the sizes of its product and the number
    of extra elements that cross memory: implicit products gather the input as they go; Winograd's transforms write and
    read it.
    Source: Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016): F(m x m, 3 x 3) does
    (m + 2)^2 products per tile of m x m results, which an implicit product needs 9 m^2 for.
    """
    is_backward = operation.name.endswith("_backward")
    tensors = [tensor.shape for tensor in operation.inputs if len(tensor.shape) >= 3]
    if len(tensors) < (3 if is_backward else 2):
        return None
    image, weight = tensors[1:3] if is_backward else tensors[:2]
    result = tensors[0] if is_backward else operation.outputs[0].shape
    if operation.attribute("transposed") is True:
        image, result = result, image
    groups_attribute = operation.attribute("groups", 1)
    groups = groups_attribute if isinstance(groups_attribute, int) else 1
    mask = operation.attribute("output_mask") if is_backward else None
    needed = mask if isinstance(mask, list) and len(mask) >= 2 else [True, True]
    sizes = _Convolution(image, weight, result, groups)
    if not is_backward:
        return [sizes.forward()]
    return [ways for ways, is_needed in zip((sizes.of_input(), sizes.of_weight()), needed, strict=False) if is_needed]


class _Convolution:
    """Shapes of one convolution: image (N, C, ...), weight (K, C / groups, ...), result (N, K, ...)."""

    def __init__(self, image: tuple[int, ...], weight: tuple[int, ...], result: tuple[int, ...], groups: int) -> None:
        self.image, self.weight, self.result, self.groups = image, weight, result, groups
        self.window = math.prod(weight[2:])
        self.channels, self.kernels = image[1] // groups, result[1] // groups
        self.pixels, self.results = image[0] * math.prod(image[2:]), result[0] * math.prod(result[2:])

    def forward(self) -> list[tuple[Sizes, float]]:
        """The result."""
        implicit = (self.groups, self.results, self.kernels, self.channels * self.window)
        return [(implicit, 0.0), *self._winograd(self.result, self.kernels, self.channels)]

    def of_input(self) -> list[tuple[Sizes, float]]:
        """The image's gradient: as many FLOPs as the result."""
        depth = max(1, self.kernels * self.window * self.results // max(1, self.pixels))
        implicit = (self.groups, self.pixels, self.channels, depth)
        return [(implicit, 0.0), *self._winograd(self.image, self.channels, self.kernels)]

    def of_weight(self) -> list[tuple[Sizes, float]]:
        """The weight's gradient: the sum over all pixels is the depth."""
        return [((self.groups, self.kernels, self.channels * self.window, self.results), 0.0)]

    def _winograd(self, out: tuple[int, ...], columns: int, depth: int) -> list[tuple[Sizes, float]]:
        """Only 3 x 3 windows at stride 1."""
        if self.weight[2:] != (3, 3) or self.groups != 1 or self.pixels > 1.5 * self.results:
            return []
        ways = []
        for tile in (2, 4):
            products = (tile + 2) ** 2
            tiles = out[0] * math.prod(-(-size // tile) for size in out[2:])
            # The transformed image and kernels, and the products: written, and found in the cache for the most part.
            extra = 1.0 * products * (tiles * depth + tiles * columns + columns * depth)
            ways.append(((products, tiles, columns, depth), extra))
        return ways


def convolved(operation: Operation) -> tuple[TensorShape, ...]:
    """The image, the weight and the result of a convolution, or of the one whose gradients it computes."""
    if operation.name.endswith("_backward"):
        return operation.inputs[:3]
    return (*operation.inputs[:2], operation.outputs[0])


def bias_bytes(operation: Operation) -> float:
    """Bytes that cross memory for a convolution's bias, which PyTorch adds, and whose gradient it sums, by itself."""
    if operation.name.endswith("_backward"):
        mask = operation.attribute("output_mask")
        has_bias = isinstance(mask, list) and len(mask) > 2 and bool(mask[2])
        passes, result = 1.0, operation.inputs[0]
    else:
        has_bias = len(operation.inputs) > 2 and len(operation.inputs[2].shape) == 1
        passes, result = 2.0, operation.outputs[0]
    element_bytes = 2 if result.dtype in ("bf16", "fp16") else 4
    return passes * result.numel * element_bytes if has_bias else 0.0


def is_depthwise(operation: Operation) -> bool:
    """True if each channel is convolved by itself: then memory bounds it."""
    groups = operation.attribute("groups", 1)
    weights = [tensor.shape for tensor in operation.inputs if len(tensor.shape) >= 3]
    return isinstance(groups, int) and groups > 1 and any(shape[1] == 1 for shape in weights[1:])


def channels_of_groups(operation: Operation) -> int:
    """Input channels of each group of a grouped convolution; 0 if there is one group."""
    groups = operation.attribute("groups", 1)
    weights = [tensor.shape for tensor in operation.inputs if len(tensor.shape) >= 3]
    if not isinstance(groups, int) or groups <= 1 or len(weights) < 2:
        return 0
    return weights[2 if operation.name.endswith("_backward") and len(weights) > 2 else 1][1]


def attention_sizes(operation: Operation) -> tuple[int, int, int, int] | None:
    """Heads of all samples, queries, keys and width of a fused attention; None if its shapes do not determine them."""
    shapes = [tensor.shape for tensor in operation.inputs if len(tensor.shape) == 4]
    first = 1 if operation.name.endswith("_backward") else 0
    if len(shapes) < first + 2:
        return None
    query, key = shapes[first], shapes[first + 1]
    return query[0] * query[1], query[2], key[2], query[3]


_HEAD_STEP = 32
"""Fused attention has kernels for heads of 32, 64, 96, ... components; others are padded.
Source: `HEADDIM_SWITCH` in csrc/flash_attn/src/static_switch.h of FlashAttention 2."""


def padding_of_heads(operation: Operation) -> float:
    """Width of a fused attention's heads in its kernel over their own."""
    sizes = attention_sizes(operation)
    if sizes is None or sizes[3] < 1:
        return 1.0
    return math.ceil(sizes[3] / _HEAD_STEP) * _HEAD_STEP / sizes[3]


Floats = NDArray[np.float64]

_TILES = (
    (256, 128),
    (128, 256),
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (64, 32),
    (32, 64),
    (32, 32),
    (8, 128),
    (128, 8),
)
_SPLITS = (1, 2, 4, 8, 16)
_LARGEST_AREA = 128 * 128
_CHOICES = np.array(
    [(*tile, split) for tile in _TILES for split in _SPLITS if split == 1 or tile[0] * tile[1] <= _LARGEST_AREA]
)
_DEPTH_STEP = 8
"""Kernels go through the depth in steps of this many elements, so a depth of 65 costs as much as one of 72."""


@dataclass(frozen=True, kw_only=True)
class TileShape:
    """Efficiency of tiles, the same on every device.

    The efficiencies are of tiles (rows x columns) relative to 128 x 128 [fraction]. `prologue` is the cost of filling
    and draining a tile [elements of depth]. `resident` is the number of 128 x 128 tiles that keep a multiprocessor
    busy. `tail` is the share of a started wave that other multiprocessors take over [fraction]. `split_traffic` scales
    the bytes that a split depth adds, `split_s` is the time of adding up [s]. `overlap` is the exponent of the norm
    that joins arithmetic and memory: 1 would be their sum, infinity their maximum.
    """

    large: float
    half_columns: float
    half_rows: float
    quarter: float
    eighth: float
    sixteenth: float
    prologue: float
    resident: float
    tail: float
    split_traffic: float
    split_s: float
    overlap: float


@dataclass(frozen=True)
class Rates:
    """Sustained rates of a device: `flops` on large tiles [FLOP/s], `bytes_per_s` of memory; its multiprocessors."""

    flops: float
    bytes_per_s: float
    multiprocessors: int

    def scaled(self, *, flops: float, bandwidth: float) -> Rates:
        """The rates times these factors."""
        return Rates(self.flops * flops, self.bytes_per_s * bandwidth, self.multiprocessors)


@functools.lru_cache(maxsize=64)
def _efficiencies(shape: TileShape) -> Floats:
    """Efficiency of every choice of tile and split, in the order of `_CHOICES`."""
    by_tile = {
        (256, 128): shape.large,
        (128, 256): shape.large,
        (128, 128): 1.0,
        (128, 64): shape.half_columns,
        (64, 128): shape.half_rows,
        (64, 64): shape.quarter,
        (64, 32): shape.eighth,
        (32, 64): shape.eighth,
        (32, 32): shape.sixteenth,
        (8, 128): shape.sixteenth,
        (128, 8): shape.sixteenth,
    }
    return np.array([by_tile[rows, columns] for rows, columns, _ in _CHOICES.tolist()])


def product_seconds(
    sizes: Floats, element_bytes: float, shape: TileShape, rates: Rates, moved_bytes: float | None = None
) -> Floats:
    """Time of each product [s], without its launch.

    Args:
        sizes: rows of (batch, rows, columns, depth), shape (n, 4).
        element_bytes: size of an operand's element [bytes].
        shape: efficiency of tiles.
        rates: sustained by the device.
        moved_bytes: that cross memory; None: the operands and the result.
    """
    batch, rows, columns, depth = (sizes[:, [i]] for i in range(4))
    tile_rows, tile_columns, splits = (_CHOICES[:, i].astype(float) for i in range(3))
    area = tile_rows * tile_columns
    tiles = batch * np.ceil(rows / tile_rows) * np.ceil(columns / tile_columns) * splits
    per_multiprocessor = tiles / rates.multiprocessors
    waves = (1 - shape.tail) * np.ceil(per_multiprocessor) + shape.tail * np.maximum(per_multiprocessor, 1)
    steps = np.ceil(np.ceil(depth / splits) / _DEPTH_STEP) * _DEPTH_STEP + shape.prologue
    tile_s = 2 * area * steps / (rates.flops / rates.multiprocessors * _efficiencies(shape))
    arithmetic = np.maximum(waves, np.maximum(1, shape.resident * _LARGEST_AREA / area)) * tile_s
    operands = batch * (rows * depth + depth * columns + rows * columns) * element_bytes / rates.bytes_per_s
    if moved_bytes is not None:
        operands = np.full_like(operands, moved_bytes / rates.bytes_per_s)
    together = (arithmetic**shape.overlap + operands**shape.overlap) ** (1 / shape.overlap)
    partial_sums = splits * batch * rows * columns * element_bytes / rates.bytes_per_s * shape.split_traffic
    adding = np.where(splits > 1, partial_sums + shape.split_s, 0.0)
    best: Floats = np.min(together + adding, axis=1)
    return best


_RESIDENT_THREADS = {
    "6.0": 2048,
    "6.1": 2048,
    "7.0": 2048,
    "7.5": 1024,
    "8.0": 2048,
    "9.0": 2048,
    "10.0": 2048,
    "10.3": 2048,
}
_OTHER_RESIDENT_THREADS = 1536
"""Resident threads of a multiprocessor. Source: CUDA programming guide, table "Technical Specifications"."""
_L2_BEGINS_TO_MISS, _L2_ALWAYS_MISSES = 0.2, 0.6
"""Share of the L2 cache taken by rows in flight at which later passes begin to miss it, and at which all miss."""
_DEFAULT_L2_BYTES = 4 * 2**20
_WARP_SOFTMAX = 1024
"""Columns up to which a warp holds a row of a softmax in registers."""
_SECTOR_RATIO = 8
"""A read of 4 bytes brings a sector of 32."""


@dataclass(frozen=True)
class RowKernel:
    """A kernel over rows.

    `passes` over the tensor if everything is cached, `again` the passes that cross memory once more if it is not,
    `threads` per row.
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
    "native_group_norm": RowKernel(5.2, 0, 512),
    "native_group_norm_backward": RowKernel(6, 0, 512),
    "native_batch_norm": RowKernel(3, 0, 512),
    "cudnn_batch_norm": RowKernel(3, 0, 512),
    "native_batch_norm_backward": RowKernel(5, 0, 512),
    "cudnn_batch_norm_backward": RowKernel(5, 0, 512),
}
"""By ATen's name. Group norms: measured in a U-Net's update on an H100."""
_ROW_WAVE_S = {"9.0": 2.6e-6}
"""Time in which a multiprocessor's resident blocks of a layer norm, one for each row, begin and end [s]. Measured on an
H200 for rows of 96 to 768 numbers: 2.9 µs, on an H100, which is slower to bring the numbers, 1.6 to 2.2. An A100, at
0.86 of its bandwidth, shows nothing of it (see this module)."""
_WEIGHT_ROW_S, _LONG_WEIGHT_ROW_S, _MANY_ROWS, _WARP_COLUMNS = 3.3e-9, 0.45e-9, 65_536, 32
"""Time for each row of the gradients of a norm's weights, which few blocks sum row by row: one for each warp's width of
columns [s]. Of more than so many rows, where that leaves half of the multiprocessors idle, more blocks sum parts.
Measured on an H100 and an H200 for rows of 96 to 2048 numbers. Source: `LaunchGammaBetaBackwardCUDAKernel` in
PyTorch's layer_norm_kernel.cu."""

OWN_BATCH_NORM = {"native_batch_norm": RowKernel(8, 0, 512), "native_batch_norm_backward": RowKernel(6.7, 0, 512)}
"""Batch norm in bf16, which cuDNN is not asked for, of channels-last tensors: PyTorch's kernel for the moments reads at
a fifth of the bandwidth. Measured on an H100: kernels of a ResNet-9's update, 1024 images of 64 × 64."""
_CHANNEL_THREADS = 512
_CHANNEL_ROUND_S = {"native_batch_norm": 0.66e-6, "native_batch_norm_backward": 0.98e-6}
"""Of contiguous tensors a block of so many threads goes over all pixels of a channel, one of them each, in so long [s]:
waiting for memory, whatever the bandwidth. Measured on an H100: single calls take 1.1 times as long, a ResNet-9's
update as long as this."""


def is_own_batch_norm(operation: Operation) -> bool:
    """True if PyTorch's own kernels compute a batch norm."""
    return operation.name in OWN_BATCH_NORM and operation.inputs[0].dtype == "bf16"


def channel_seconds(operation: Operation, hardware: Hardware) -> float:
    """Time of a kernel with one block for each channel [s]; 0 for others."""
    if not is_own_batch_norm(operation) or operation.attribute("channels_last") is True:
        return 0.0
    shape = operation.inputs[0].shape
    threads = _RESIDENT_THREADS.get(hardware.compute_capability or "", _OTHER_RESIDENT_THREADS)
    at_once = (hardware.multiprocessors or 1) * (threads // _CHANNEL_THREADS)
    rounds = math.ceil(shape[1] / at_once) * shape[0] * math.prod(shape[2:]) / _CHANNEL_THREADS
    return rounds * _CHANNEL_ROUND_S[operation.name]


def row_latency_s(operation: Operation, hardware: Hardware) -> float:
    """Time of a kernel over rows that is spent on beginning rows and on waiting for sums [s]."""
    if operation.name not in ("native_layer_norm", "native_layer_norm_backward", "_fused_rms_norm_backward"):
        return 0.0
    (rows, columns), multiprocessors = row_sizes(operation), hardware.multiprocessors or 1
    if operation.name.endswith("_backward"):
        mask = operation.attribute("output_mask")
        if isinstance(mask, list) and not any(mask[1:]):
            return 0.0  # no weights, or frozen ones
        is_split = rows > _MANY_ROWS and columns // _WARP_COLUMNS < multiprocessors // 2
        return rows * (_LONG_WEIGHT_ROW_S if is_split else _WEIGHT_ROW_S)
    capability = hardware.compute_capability or ""
    blocks = _RESIDENT_THREADS.get(capability, _OTHER_RESIDENT_THREADS) / ROW_KERNELS[operation.name].threads
    return rows / (multiprocessors * blocks) * _ROW_WAVE_S.get(capability, 0.0)


def row_sizes(operation: Operation) -> tuple[int, int]:
    """Rows and columns of a row kernel's tensor; it normalises over the columns."""
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
    kernel = (OWN_BATCH_NORM if is_own_batch_norm(operation) else ROW_KERNELS)[operation.name]
    rows, columns = row_sizes(operation)
    is_softmax = "softmax" in operation.name
    again = 0.0
    if not is_softmax or columns > _WARP_SOFTMAX:
        threads = _RESIDENT_THREADS.get(hardware.compute_capability or "", _OTHER_RESIDENT_THREADS)
        in_flight = (hardware.multiprocessors or 1) * max(1, threads // kernel.threads) * columns * element_bytes
        share = in_flight / (hardware.l2_bytes or _DEFAULT_L2_BYTES)
        missing = min(1.0, max(0.0, (share - _L2_BEGINS_TO_MISS) / (_L2_ALWAYS_MISSES - _L2_BEGINS_TO_MISS)))
        again = kernel.again * missing
    # Blocks of a softmax are powers of two times four elements: other widths leave threads idle.
    idle = 1.25 if is_softmax and _WARP_SOFTMAX < columns < 4096 and columns & (columns - 1) else 1.0
    return rows * columns * element_bytes * (kernel.passes + again) * idle


def stream_bytes(operation: Operation, hardware: Hardware) -> float:
    """Bytes that cross memory in an operation that goes over its tensors once.

    Attribute `strided_bytes` are the bytes of operands in another order than the result, `strided_reach_bytes` the
    bytes read until the rest of a sector is used: if the L2 cache holds less than that, each sector is read again.
    """
    total = float(operation.bytes_read + operation.bytes_written)
    strided, reach = (operation.attribute(f"strided_{what}") for what in ("bytes", "reach_bytes"))
    is_known = isinstance(strided, int | float) and isinstance(reach, int | float)
    if is_known and reach > (hardware.l2_bytes or _DEFAULT_L2_BYTES):
        total += (_SECTOR_RATIO - 1) * strided
    if operation.name == "masked_fill":  # a copy, which is then written to
        total *= 2
    return total


_STREAM_SHARES = {
    "_to_copy": 0.82,
    "stack": 0.37,
    "max_pool2d_with_indices": 0.52,
    "max_pool2d_with_indices_backward": 0.45,
    "adaptive_max_pool2d": 0.04,
    "adaptive_max_pool2d_backward": 0.15,
    "_fused_adam_": 0.87,
    "_fused_adamw_": 0.87,
    "_fused_sgd_": 0.85,
    "_foreach_mul_": 0.9,
    "_foreach_norm": 0.87,
}
"""Share of the bandwidth of streams that some kernels reach. Measured on an H100: kernels of updates of a ResNet-9 in
bf16 and channels-last, and of transformers, which stack the gradients of queries, keys and values: these lie in another
order than their shapes, for which PyTorch has a kernel that is slower along each dimension."""
_CAT_ROWS_SHARE, _CAT_SHARE = 0.62, 0.37
"""The same where tensors are joined along the first dimension of the result, and along others."""
_SCAN_SHARE = 0.07
"""The same of running sums along a dimension whose elements are not neighbours in memory."""


def stream_share(operation: Operation) -> float:
    """Share of the bandwidth of streams that an operation reaches [fraction]."""
    dim = operation.attribute("dim", 0)  # the default of `cat`
    num_dims = len(operation.outputs[0].shape) if operation.outputs else 1
    if operation.name == "cat":
        return _CAT_ROWS_SHARE if dim in (0, -num_dims) else _CAT_SHARE
    if operation.name == "cumsum" and dim not in (-1, num_dims - 1):
        return _SCAN_SHARE
    return _STREAM_SHARES.get(operation.name, 1.0)


_COLUMN_SUM_S, _COLUMN_SUM_ROW_S = 22e-6, 4e-9
"""Time in which the parts of a sum over rows are summed once more, at most, and for each row [s]. Measured on an H100
and an H200, of 2,000 to 16,000 rows of 768 to 4096 numbers."""


def column_sum_s(operation: Operation) -> float:
    """Time of a sum over rows, of which the result is a row, beyond that of reading them [s]; 0 of other operations."""
    if operation.name != "sum" or not operation.inputs:
        return 0.0
    summed, dim = operation.inputs[0], operation.attribute("dim")
    if not isinstance(dim, list) or not dim or (len(summed.shape) - 1) in dim or -1 in dim:
        return 0.0
    return min(_COLUMN_SUM_S, _COLUMN_SUM_ROW_S * summed.numel / max(1, operation.outputs[0].numel))


_INSTRUCTIONS, _MANY_INSTRUCTIONS = 40, 80
"""Instructions that an elementwise kernel executes for each element of 16 bits, by whether it has a transcendental
function or random numbers: loads of 8 bytes, casts to fp32 and back, addresses. At one for each fp32 unit in a cycle,
an A100 does not keep up with its memory (1.0 and 0.5 TB/s of what enters and leaves), a V100 hardly; graphics chips,
with three times the instructions for each byte, do. Judgements within what layers of transformers and a U-Net show on
five GPUs each (`bench/forecast/published_layers.py`): on an A100 their memory-bound kernels took about twice as long as
their bytes alone, forward passes with dropout most, and compiling saved as much; not so on RTX 3090 Ti, 4090 and
A6000."""
_OF_MANY_INSTRUCTIONS = frozenset(
    {
        "cos",
        "erf",
        "exp",
        "gelu",
        "gelu_backward",
        "log",
        "native_dropout",
        "pow",
        "rsqrt",
        "sigmoid",
        "sigmoid_backward",
        "silu",
        "silu_backward",
        "sin",
        "softplus",
        "sqrt",
        "tanh",
        "tanh_backward",
    }
)


_WITH_WIDE_LOADS, _WIDE_SHARE = ("9.0", "10.0"), 0.6
"""Compute capabilities for which PyTorch loads 16 bytes of 16-bit elements at once (8 of them, since 2.7), and the
share of `_MANY_INSTRUCTIONS` that is left. Measured: GELU and SiLU on an H100 and an H200, at 3.0 TB/s on both. Source:
`launch_vectorized_kernel` in PyTorch's CUDALoops.cuh."""
_INDEX_INSTRUCTIONS = 65
"""Integer instructions for each element of a kernel that computes addresses from indices. Measured: 2.2 to 3.4e11
elements/s on an H100 and an H200, of 2 and of 4 bytes, of copies and of sums."""
_INDEXED_COPIES = {"roll": 3}
"""Operations that PyTorch does with so many such kernels."""


_FULL_INTEGER_RATE = ("6.0", "6.1", "7.0", "7.2", "7.5", "8.0")
"""Compute capabilities that issue as many integer as fp32 instructions; others half as many. Source: CUDA C++
Programming Guide, "Throughput of Native Arithmetic Instructions"."""


def indexed_seconds(elements: float, fp32_flops: float, capability: str) -> float:
    """Time of so many elements whose addresses are computed from indices [s]; see `instruction_seconds`."""
    issued = fp32_flops / 2
    return elements * _INDEX_INSTRUCTIONS / (issued if capability in _FULL_INTEGER_RATE else issued / 2)


def instruction_seconds(operation: Operation, fp32_flops: float, capability: str) -> float:
    """Time of an elementwise kernel's instructions [s]; 0 where they are few for each byte.

    Args:
        operation: elementwise.
        fp32_flops: the GPU's peak in fp32 [FLOP/s].
        capability: its compute capability.
    """
    result = max(operation.outputs, key=lambda tensor: tensor.numel, default=None)
    if result is None:
        return 0.0
    issued = fp32_flops / 2
    copies = _INDEXED_COPIES.get(operation.name, 1)
    if operation.attribute("is_indexed") is True or copies > 1:
        return indexed_seconds(copies * result.numel, fp32_flops, capability)
    if result.dtype not in ("bf16", "fp16"):
        return 0.0
    if operation.name.strip("_") not in _OF_MANY_INSTRUCTIONS:
        return result.numel * _INSTRUCTIONS / issued
    return result.numel * _MANY_INSTRUCTIONS * (_WIDE_SHARE if capability in _WITH_WIDE_LOADS else 1.0) / issued


STEP_S = 5e-6
"""Overhead of each step: two kernels that start, and wait for each other [s]. A judgement."""
_LAYERS = ("_cudnn_rnn", "_cudnn_rnn_backward")


@dataclass(frozen=True)
class RecurrentWork:
    """Products of recurrent layers, each with its count, and the number of consecutive `steps`.

    Steps count all layers and directions; `batch` and `width` are those of a state.
    """

    products: tuple[tuple[Sizes, int], ...]
    steps: int
    batch: int
    width: int


def recurrent_work(operation: Operation) -> RecurrentWork | None:
    """Work of recurrent layers; None for other operations, and if the shapes do not determine it."""
    matrices = [tensor.shape for tensor in operation.inputs[1:] if len(tensor.shape) == 2]
    states = [tensor.shape for tensor in operation.inputs[1:] if len(tensor.shape) == 3]
    if operation.name not in _LAYERS or not matrices or not states:
        return None
    cells, batch, width = states[0]
    rows = operation.inputs[0].numel // max(1, operation.inputs[0].shape[-1])
    if not cells or not batch or not rows:
        return None
    length, each = rows // batch, len(matrices) // cells
    products: list[tuple[Sizes, int]] = []
    for place, (outputs, inputs) in enumerate(matrices):
        # The first matrix of each cell is its inputs'.
        at_once, times = (rows, 1) if place % each == 0 else (batch, length)
        if operation.name.endswith("_backward"):
            products += [((1, at_once, inputs, outputs), times), ((1, outputs, inputs, rows), 1)]
        else:
            products.append(((1, at_once, outputs, inputs), times))
    return RecurrentWork(tuple(products), length * cells, batch, width)
