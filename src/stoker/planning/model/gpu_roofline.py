"""Roofline of a GPU: what bounds an operation, its time at sustained rates, and the power limit's effect on the clock.

Sustained shares of the peak were fitted once on the public measurements of NeuSight (ASPLOS 2025: P4, P100, V100, T4,
A100, L4, H100; fp32 outside of tensor cores), or, for tensor cores, are as published by others.
`bench/forecast/gpu_constants.py` fits them again with a device left out, and `bench/forecast/gpu_operations.py` shows
the error for that device: one that differs from all others is forecast wrong by as much as they differ from each other.

A product on large tiles draws `idle + energy per FLOP x rate`. If that is above the limit the driver lowers clock and
voltage together, and power falls with a power of the clock; the clock settles where the two meet. Boards of 70 W run
there (an L4 sustains two fifths of its peak), boards of 300 W and more hardly ever.

Energies per FLOP are in pJ, which is W per TFLOP/s. Sources: fp32 of capability 8.0 makes an A100 of 250 W sustain 0.9
of the rate at 300 W; 6.1, 7.5 and 8.9 make P4, T4 and L4 sustain 0.6, 0.55 and 0.4 of their peaks, all in the public
measurements of NeuSight; 6.0, 7.0 and 9.0 let P100, V100 and H100 run unthrottled there; 10.0 and 12.0 let B200 and
RTX 5090 near their peaks. 8.6 makes A40, A6000 and A4000 sustain 23.7, 23.9 and 11.5 TFLOP/s (`_TENSOR_PICOJOULE`).

Tensor cores: `_TENSOR_PICOJOULE`, or one share of these energies (V100, T4, B200). In the published language-model
steps products run at 0.74 of the peak on an A100, at 0.57 on several H100s. Single products of random numbers are
published at 0.83 (A100, 257 TFLOP/s) and 0.72 (H100, 716), of zeros at 0.95: H. He, "Strangely, Matrix Multiplications
on GPUs Run Faster When Given Predictable Data" (2024); P. Shankhdhar, "Outperforming cuBLAS on H100" (2024). In steps
of one H100 and one H200 measured by `bench.forecast.measure_cases` they run at 0.72 to 0.84, and for seconds on end,
alone, at 0.67 (`bench.forecast.sustained`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stoker.planning.model import gpu_kernels
from stoker.planning.model.gpu_kernels import (
    ROW_KERNELS,
    STEP_S,
    Rates,
    TileShape,
    product_seconds,
    recurrent_work,
    row_bytes,
    row_sizes,
    stream_bytes,
)
from stoker.records.hardware import Hardware
from stoker.records.trace import Operation

Floats = NDArray[np.float64]
Kind = Literal["product", "batched product", "convolution", "attention", "recurrent", "row", "stream"]

_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
_FUSED_SHARES = {
    "7.0": 0.83,
    "7.5": 0.83,
    "8.0": 0.83,
    "8.6": 0.80,
    "8.9": 0.80,
    "9.0": 0.45,
    "10.0": 0.40,
    "10.3": 0.40,
    "12.0": 0.80,
}
"""Rate of flash attention's forward pass over that of products of its dtype. Source: Dao, FlashAttention-2
(2023): 225 TFLOP/s on an A100, 335 to 400 on an H100, of 271 and 795 for products; 8.6, 8.9 and 12.0, which run its
kernels, are taken from 8.0, and 10.3 is taken from 10.0. 7.0 and 7.5 have the memory-efficient kernel alone."""
_OTHER_FUSED_SHARE = 0.6
_EFFICIENT_SHARE = 0.5
"""Rate of the memory-efficient kernel on tensor cores, which attention with a mask takes, over that of flash attention.
Source: as above, figure 5: xformers' kernel, which is this one, at 90 to 125 TFLOP/s on an A100."""
_SPLIT_PRODUCTS, _SPLIT_SHARE = 3, 0.72
"""From capability 8.0 on the memory-efficient kernel computes fp32 on tensor cores, whether or not tf32 is allowed: a
product is the sum of so many tf32 products. Its rate then, over that of flash attention: arithmetic hides more of the
rest. Source: PyTorch's transformers/cuda/mem_eff_attention/gemm_kernel_utils.h (`OpMultiplyAddFastF32`); CUTLASS 2.8's
changelog: such products reach 45 of 52 TFLOP/s on an A100. The share is a judgement."""
_BACKWARD_SHARE = 0.85
"""The backward pass relative to the forward pass. Source: as above, 63 % of the peak against 73 %."""
_ATTENTION_TILE = 128
"""Tokens that a kernel of fused attention computes at once, needed or not."""
_ATTENTION_DROPOUT = 1.6
"""Time of fused attention that drops weights over that of one without. Measured on an H100: BERT-large's."""
_SIMT_SHARE = 0.6
"""Memory-efficient attention in fp32, outside of tensor cores; a judgement."""
_DEPTHWISE_SHARE, _DEPTHWISE_FLOPS_SHARE = 0.4, 0.2
"""Share of the bandwidth, and of the fp32 rate, in a depthwise convolution: each result is a short sum, whose addresses
cost as much as its arithmetic. Fitted on the family of MobileNet (3 x 3), EfficientNet (3 x 3, 5 x 5) and ConvNeXt
(7 x 7) among the published steps."""
_GROUPED_SHARE, _GENERIC_GROUPED_SHARE = 0.5, 0.165
"""Share of the bandwidth where cuDNN has kernels for groups of a few channels (powers of two up to 32, in
channels-last), and share of the fp32 rate where it has none. From ResNeXt (groups of 4 to 32) and RegNet (of 24).
Larger groups are products of their own, whose tiles are padded."""
_FEW_CHANNELS = 32
_MISALIGNED = {8: 1.1, 4: 1.6, 2: 3.0}
"""Time of a single product on tensor cores over that of one whose rows are whole 16-byte words, by the bytes that rows
are a multiple of; where only the result's rows are not whole words, its third root. Source: NVIDIA, "Matrix
Multiplication Background", section 4.1, for the order; A. Karpathy: padding a vocabulary of 50,257 to 50,304 made a
GPT-2 step 25 % faster (2023), which 3.0 gives. Batches of small products are bound by memory, and unaffected."""
_WINOGRAD_SHARE, _WINOGRAD_S = 0.7, 3e-5
"""Rate of Winograd's products over that of single ones, and time to start its transforms [s]. Fitted on 3 x 3
convolutions of random sizes (NeuSight; P4, P100, V100, T4, A100): the median error is 18 to 33 %, by device."""


_CONVOLUTION_SHARES = {"8.0": 0.8}
"""Rate of convolutions on tensor cores over that of products, where it is less: the tensor cores of an A100 take
operands from shared memory four times as fast as those of an RTX 3090, and convolutions gather them. From the U-Net
among the published layers (`bench/forecast/published_layers.py`) and a ResNet-50, which came out 9 % too fast."""
_NEGLECTED_SHARE = {"9.0": 0.75}
"""Rate of convolutions in fp32 outside of tensor cores over that of products, where cuDNN has no Winograd kernels.
Measured on an H100: 0.76 in the median of 25 convolutions of 0.15 ms and more, 0.75 in a ResNet-9's update."""
_POINTWISE_BACKWARD = 2.1
"""Time of the gradients of such a convolution of 1 x 1 over what that gives. Measured on an H100: a ResNet-50's."""
_FEW_IMAGE_CHANNELS = 4
_IMAGE_SHARE, _IMAGE_READS = {"9.0": 0.1}, 3.0
"""Convolutions on tensor cores of images of so few channels: share of the rate, channels padded to 8, and how often
tensors cross memory. Measured on an H100 and an H200: the first layers of six networks, all 0.15 to 0.4 of this off."""
_PADDED_CHANNELS = 8
_CONVOLUTION_S = {False: 4e-6, True: 12e-6}
"""Time of the kernels before and after a convolution, and (True) its gradients [s]. Measured on an H200: those of a
DenseNet."""


@dataclass(frozen=True)
class Scales:
    """Factors on the datasheet's arithmetic and memory rates, from a micro-benchmark."""

    flops: float = 1.0
    bandwidth: float = 1.0


def kind_of(operation: Operation) -> tuple[Kind, str]:
    """The kind of an operation, which decides what bounds it, and the dtype it computes in (streams: none)."""
    name = operation.name
    operands = operation.inputs[:2] if name == "_scaled_mm" else operation.inputs  # scales and bias come after them
    dtype = next((tensor.dtype for tensor in reversed(operands) if tensor.dtype in _BYTES), "fp32")
    if name in gpu_kernels.SINGLE and gpu_kernels.product_sizes(operation):
        return "product", dtype
    if name in gpu_kernels.BATCHED and gpu_kernels.product_sizes(operation):
        return "batched product", dtype
    if (
        "convolution" in name
        and not gpu_kernels.is_depthwise(operation)
        and gpu_kernels.convolution_products(operation)
    ):
        return "convolution", dtype
    if "attention" in name and gpu_kernels.attention_sizes(operation):
        return "attention", operation.inputs[0].dtype
    if recurrent_work(operation) is not None:
        return "recurrent", operation.inputs[0].dtype
    if name in ROW_KERNELS and operation.inputs:
        return "row", name.removesuffix("_backward").removesuffix("_backward_data").strip("_")
    return "stream", ""


def point_of(operation: Operation, kind: Kind) -> Floats:
    """The point of an operation among others of its kind [doublings of its sizes]."""
    # A factor of four separates backward passes from forward passes, and operations of two operands from those of one.
    way = 4.0 if "backward" in operation.name else 1.0
    if kind == "row":
        sizes: tuple[float, ...] = (*row_sizes(operation), way)
    elif kind == "attention":
        sizes = (*(gpu_kernels.attention_sizes(operation) or ()), way)
    elif kind == "recurrent":
        work = recurrent_work(operation)
        sizes = (work.steps, work.batch, work.width, way) if work is not None else (1.0,)
    elif kind == "convolution":
        ways = gpu_kernels.convolution_products(operation)
        sizes = (*(ways[0][0][0] if ways else ()), way)
    elif kind == "stream":
        operands = sum(1 for tensor in operation.inputs if tensor.numel > 1)
        sizes = (operation.bytes_read + operation.bytes_written, 1.0 if operands < 2 else 4.0)
    else:
        batch, rows, columns, depth = gpu_kernels.product_sizes(operation) or (1, 1, 1, 1)
        # Transposed operands, and rows of a length that four does not divide (they cannot be loaded 16 bytes at a
        # time), have kernels of their own: the factor of four separates their measurements.
        layout = (operation.attribute("transpose_a"), operation.attribute("transpose_b"), depth % 4)
        sizes = (batch, rows, columns, depth, *(4.0 if differs else 1.0 for differs in layout))
    return np.log2(np.maximum(np.asarray(sizes, dtype=np.float64), 1.0)).astype(np.float64)


def roof_seconds(operation: Operation, kind: Kind, dtype: str, sustained: Sustained, scales: Scales) -> float:
    """Time of an operation at the sustained rates, times `scales` [s], without its launch."""
    bandwidth = sustained.bandwidth * scales.bandwidth
    if kind == "stream":
        seconds, arithmetic = (
            stream_bytes(operation, sustained.hardware) / bandwidth,
            sustained.flops("fp32") * scales.flops,
        )
        if gpu_kernels.is_depthwise(operation):
            seconds, arithmetic = seconds / _DEPTHWISE_SHARE, arithmetic * _DEPTHWISE_FLOPS_SHARE
        issued = sustained.peak_flops("fp32")[0] * scales.bandwidth  # a measured factor is of the kernel as it is
        capability = sustained.hardware.compute_capability or ""
        instructions_s = gpu_kernels.instruction_seconds(operation, issued, capability)
        seconds = max(seconds / gpu_kernels.stream_share(operation), instructions_s)
        seconds = max(seconds + gpu_kernels.column_sum_s(operation), operation.flops / arithmetic)
        return seconds + (gpu_kernels.bias_bytes(operation) / bandwidth if "convolution" in operation.name else 0.0)
    if kind == "row":
        size = _BYTES.get(max(operation.inputs, key=lambda tensor: tensor.numel).dtype, 4.0)
        seconds = row_bytes(operation, sustained.hardware, size) / bandwidth
        seconds += gpu_kernels.row_latency_s(operation, sustained.hardware)
        return max(seconds, gpu_kernels.channel_seconds(operation, sustained.hardware))
    if kind == "attention":
        return _attention_seconds(operation, dtype, sustained, scales)
    rates = sustained.rates(dtype).scaled(flops=scales.flops, bandwidth=scales.bandwidth)
    size = _BYTES[dtype]
    if kind == "recurrent":
        return _recurrent_seconds(operation, dtype, sustained, rates)
    if kind == "convolution":
        copied = operation.attribute("reordered_bytes", 0)
        assert isinstance(copied, int), "the tracer counts them"
        indexed_s = gpu_kernels.indexed_seconds(
            copied / size, sustained.peak_flops("fp32")[0], sustained.hardware.compute_capability or ""
        )
        seconds = _convolution_seconds(operation, dtype, sustained, rates)
        seconds += gpu_kernels.bias_bytes(operation) / rates.bytes_per_s
        return seconds + max(2 * copied / rates.bytes_per_s, indexed_s)
    sizes = np.array([gpu_kernels.product_sizes(operation)], dtype=float)
    seconds = float(product_seconds(sizes, size, sustained.tiles(dtype, is_batched=kind != "product"), rates)[0])
    return seconds * (_misalignment(operation, size) if kind == "product" and sustained.peak_flops(dtype)[1] else 1.0)


_WORD_BYTES = 16
"""Bytes that a load for tensor cores takes at once."""


def _misalignment(operation: Operation, size: float) -> float:
    """Factor on the time of a product on tensor cores for rows that are not whole words, as they lie in memory."""
    *_, a, b = (tensor for tensor in operation.inputs if len(tensor.shape) >= 2)
    operands = [
        matrix.shape[-2 if operation.attribute(name) is True else -1]
        for matrix, name in ((a, "transpose_a"), (b, "transpose_b"))
    ]

    def factor(rows: Sequence[int]) -> float:
        multiple = min(math.gcd(int(row * size), _WORD_BYTES) for row in rows)
        return _MISALIGNED.get(multiple, 1.0)

    return max(factor(operands), math.cbrt(factor([operation.outputs[0].shape[-1]])))


def _convolution_seconds(operation: Operation, dtype: str, sustained: Sustained, rates: Rates) -> float:
    """Time of the fastest algorithm for each part [s]. Winograd's is for fp32: tensor cores are faster without it."""
    capability = sustained.hardware.compute_capability or ""
    neglected = _NEGLECTED_SHARE.get(capability) if dtype == "fp32" else None
    is_backward = operation.name.endswith("_backward")
    tensors = gpu_kernels.convolved(operation)
    image, weight = tensors[1:] if is_backward else tensors[:2]
    size, seconds, each = _BYTES[dtype], 0.0, None
    reached = neglected or 1.0
    if neglected is not None:
        reached /= _POINTWISE_BACKWARD if is_backward and set(weight.shape[2:]) == {1} else 1.0
        # Slower arithmetic draws less power: the clock need not fall as for products at the full rate.
        rates = rates.scaled(flops=sustained.flops(dtype, reached) / (reached * sustained.flops(dtype)), bandwidth=1)
    if sustained.peak_flops(dtype)[1]:
        channels = gpu_kernels.channels_of_groups(operation)
        if channels <= _FEW_CHANNELS and channels & (channels - 1):
            # There is no kernel for them on tensor cores.
            arithmetic = sustained.flops("fp32") * rates.flops / sustained.flops(dtype) * _GENERIC_GROUPED_SHARE
            return operation.flops / arithmetic
        moved = float(operation.bytes_read + operation.bytes_written)
        share = _IMAGE_SHARE.get(capability)
        if share is not None and image.shape[1] <= _FEW_IMAGE_CHANNELS:
            padded = operation.flops * _PADDED_CHANNELS / image.shape[1]
            return padded / (rates.flops * share) + _IMAGE_READS * moved / rates.bytes_per_s
        if channels and channels <= _FEW_CHANNELS:
            return max(
                moved / (rates.bytes_per_s * _GROUPED_SHARE),
                operation.flops * 2 * _FEW_CHANNELS / channels / rates.flops,
            )
        rates = rates.scaled(flops=_CONVOLUTION_SHARES.get(capability, 1.0), bandwidth=1)
        # Pixels that neighbouring results share are found in the caches.
        each = size * float(sum(tensor.numel for tensor in tensors))
        if operation.attribute("channels_last") is not True and (is_backward or dtype == "tf32"):
            # Most kernels take channels-last: for each result, two images are copied there or back.
            first, second, third = tensors
            copied = 2.0 * size * (first.numel + (second if is_backward else third).numel)
            seconds += len(gpu_kernels.convolution_products(operation) or []) * copied / rates.bytes_per_s
    shapes = {is_batched: sustained.tiles(dtype, is_batched=is_batched) for is_batched in (False, True)}
    for ways in gpu_kernels.convolution_products(operation) or []:
        usable = ways if dtype == "fp32" and neglected is None else ways[:1]
        seconds += min(
            float(
                product_seconds(np.array([sizes], dtype=float), size, shapes[sizes[0] > 1 and not extra], rates, each)[
                    0
                ]
            )
            * (1 / _WINOGRAD_SHARE if extra else 1)
            + (_WINOGRAD_S + extra * size / rates.bytes_per_s if extra else 0)
            for sizes, extra in usable
        )
    return seconds / reached + _CONVOLUTION_S[is_backward]


def _recurrent_seconds(operation: Operation, dtype: str, sustained: Sustained, rates: Rates) -> float:
    """Time of all products, and of the overhead of steps [s]."""
    work = recurrent_work(operation)
    assert work is not None, "its kind says that it is one"
    sizes = np.array([sizes for sizes, _ in work.products], dtype=float)
    times = np.array([times for _, times in work.products], dtype=float)
    seconds = product_seconds(sizes, _BYTES[dtype], sustained.tiles(dtype, is_batched=False), rates)
    return float(seconds @ times) + work.steps * STEP_S


def _attention_seconds(operation: Operation, dtype: str, sustained: Sustained, scales: Scales) -> float:
    """Time by FLOPs, or by bytes if the sequence is short [s]."""
    share = _BACKWARD_SHARE if operation.name.endswith("_backward") else 1.0
    reached = _attention_flops(operation, dtype, sustained, share) * scales.flops  # slower arithmetic draws less power
    # Half of the scores are masked; less in short sequences, because tiles on the diagonal are computed whole.
    _, queries, keys, _ = gpu_kernels.attention_sizes(operation) or (1, 1, 1, 1)
    causal = 0.5 + 0.5 * min(1.0, _ATTENTION_TILE / max(1, queries))
    done = causal if operation.attribute("is_causal") is True else 1.0
    tiles = math.prod(
        math.ceil(tokens / _ATTENTION_TILE) * _ATTENTION_TILE / max(1, tokens) for tokens in (queries, keys)
    )
    arithmetic = operation.flops * done * tiles * gpu_kernels.padding_of_heads(operation) / reached
    if operation.attribute("dropout_p"):
        arithmetic *= _ATTENTION_DROPOUT
    return max(arithmetic, (operation.bytes_read + operation.bytes_written) / (sustained.bandwidth * scales.bandwidth))


def _attention_flops(operation: Operation, dtype: str, sustained: Sustained, share: float) -> float:
    """Rate of a fused attention's arithmetic, at `share` of its forward pass's [FLOP/s]."""
    flash = share * _FUSED_SHARES.get(sustained.hardware.compute_capability or "", _OTHER_FUSED_SHARE)
    if sustained.peak_flops(dtype)[1]:
        return sustained.flops(dtype, flash * (_EFFICIENT_SHARE if "efficient" in operation.name else 1.0))
    if dtype == "fp32" and sustained.peak_flops("tf32")[1]:
        return sustained.flops("tf32", flash * _SPLIT_SHARE) / _SPLIT_PRODUCTS
    return sustained.flops(dtype, share * _SIMT_SHARE)


PRODUCT = TileShape(
    large=1.0,
    half_columns=1.0,
    half_rows=0.81,
    quarter=0.88,
    eighth=0.8,
    sixteenth=0.4,
    prologue=25.0,
    resident=0.08,
    tail=0.39,
    split_traffic=0.05,
    split_s=0.3e-6,
    overlap=3.4,
)
"""One product at a time."""
BATCHED = TileShape(
    large=0.974,
    half_columns=0.855,
    half_rows=0.667,
    quarter=0.593,
    eighth=0.8,
    sixteenth=0.4,
    prologue=26.7,
    resident=0.25,
    tail=0.01,
    split_traffic=1.6,
    split_s=3.1e-6,
    overlap=2.5,
)
"""Many equal products at once: the libraries have fewer kernels for them, and use larger tiles than needed."""

_TENSOR_PROLOGUE = 128.0
"""Cost of filling and draining a tile on tensor cores [elements of depth]; not measured, from about 1.5 µs per tile."""
_TENSOR_SHARES = {
    "7.0": 0.74,
    "7.5": 0.74,
    "8.0": 0.87,
    "8.6": 0.98,
    "8.9": 0.96,
    "9.0": 0.80,
    "10.0": 0.78,
    "10.3": 0.79,
    "12.0": 1.0,
}
"""Share of the dense bf16 peak on the best shapes. Source: Bekman, "Maximum Achievable Matmul FLOPS" (2024): A100 271
of 312 TFLOP/s, H100 795 of 989, B200 1745 of 2250, B300 1769 of 2250. Smaller chips clock above their datasheets:
single products reach 1.07 of the peak on an RTX 3090, 1.01 on a 3090 Ti, 0.97 to 1.04 on a 4090, 1.08 on a 4060 Ti,
1.12 on a 5090 (as `_TENSOR_PICOJOULE`), and layers and steps of transformers (`bench/forecast/published_layers.py`,
timm) nine tenths of these. Volta, in fp16: Markidis et al., "NVIDIA Tensor Core Programmability, Performance &
Precision" (2018), 83 TFLOP/s, of the 112 of a V100 PCIe; 7.5, of the same generation of units, is taken from it."""
_SHARED_SHARES = {"8.6": 0.70}
"""Share of the peak of fp32 products on large tiles, of chips with shared slots that differ from `Shares.shared`: RTX
3060, 3080 Ti and 3090 at 0.64, 0.71 and 0.69 (as `_TENSOR_PICOJOULE`)."""
_MOST_BYTES_PER_S = {"9.0": 3.63e12}
"""Most that elementwise kernels bring from memory [bytes/s]: on an H200 they reach 3.4 to 3.8 of 4.8 TB/s."""
_SEPARATE_INTEGERS = ("7.0", "7.2", "7.5", "8.0")
"""Capabilities with an integer unit for each fp32 unit. In the others addresses are computed in the slots of the
arithmetic, or twice as many fp32 units share the registers' ports. Source: NVIDIA's Volta and GA102 white papers."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Sustained shares of the peak [fraction].

    For fp32 products on large tiles, with separate integer units and with shared slots; for the bandwidth of stacked
    memory, of other memory with error correction, and of other memory without: an RTX 4090 was reported at 895 to 921
    of 1008 GB/s (github.com/krrishnarraj/clpeak, issue 106; github.com/JuliaGPU/CUDA.jl, issue 1860).
    """

    separate: float = 0.935
    shared: float = 0.77
    stacked: float = 0.89
    graphics: float = 0.77
    unprotected: float = 0.90


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """Rates that a device is expected to sustain, by dtype, before measurements."""

    hardware: Hardware
    power: PowerModel
    shares: Shares = Shares()
    product: TileShape = PRODUCT
    batched: TileShape = BATCHED

    def groups(self) -> tuple[str, str]:
        """Names of its `Shares` for arithmetic and for memory."""
        arithmetic = "separate" if self.hardware.compute_capability in _SEPARATE_INTEGERS else "shared"
        if has_stacked_memory(self.hardware):
            return arithmetic, "stacked"
        names = f"{self.hardware.device.name} {self.hardware.device.model}".lower()
        return arithmetic, "unprotected" if "rtx" in names or "geforce" in names else "graphics"

    @property
    def plain_share(self) -> float:
        """Share of the peak that fp32 products on large tiles reach outside of tensor cores [fraction]."""
        share: float = getattr(self.shares, self.groups()[0])
        return _SHARED_SHARES.get(self.hardware.compute_capability or "", share)

    @property
    def bandwidth(self) -> float:
        """Rate of long streams [bytes/s]."""
        peak = self.hardware.bandwidth_bytes_per_s
        assert peak is not None, "GpuTimes.of refuses devices without a bandwidth"
        share: float = getattr(self.shares, self.groups()[1])
        return min(peak * share, _MOST_BYTES_PER_S.get(self.hardware.compute_capability or "", math.inf))

    def peak_flops(self, dtype: str) -> tuple[float, bool]:
        """Peak of a dtype's products [FLOP/s], and whether they run on tensor cores; fp32's if it has none."""
        rates = self.hardware.dense_flops
        if dtype == "fp64":
            # Consumer and inference chips have fp64 units for tests only: 1/32 is the mildest ratio among them.
            return rates["fp32"] * (0.5 if has_stacked_memory(self.hardware) else 1 / 32), False
        if dtype == "fp32" or dtype not in rates:
            return rates["fp32"], False
        return rates[dtype], True

    def flops(self, dtype: str, reached: float = 1.0) -> float:
        """Rate on large tiles, at the clock that the power limit allows [FLOP/s].

        `reached` is the share of it that a kernel reaches at the same clock, such as fused attention.
        """
        peak, is_tensor = self.peak_flops(dtype)
        capability = self.hardware.compute_capability or ""
        share = _TENSOR_SHARES.get(capability, 0.8) if is_tensor else self.plain_share
        full = peak * share * reached
        return full * self.power.sustained_share(full, dtype if is_tensor else "fp32")

    def rates(self, dtype: str) -> Rates:
        """The rates that tiles run at."""
        multiprocessors = self.hardware.multiprocessors
        assert multiprocessors is not None, "GpuTimes.of refuses devices without a number of multiprocessors"
        return Rates(flops=self.flops(dtype), bytes_per_s=self.bandwidth, multiprocessors=multiprocessors)

    def tiles(self, dtype: str, *, is_batched: bool) -> TileShape:
        """Efficiency of tiles of this dtype."""
        shape = self.batched if is_batched else self.product
        if not self.peak_flops(dtype)[1]:
            return shape
        return replace(shape, prologue=_TENSOR_PROLOGUE)


_CLOCK_EXPONENT = 1.5
"""Power above idle grows with this power of the clock: 1 at constant voltage, 3 if voltage follows the clock. The
measurements of A100, T4 and L4 do not decide between 1.2 and 2."""

_FP32_PICOJOULE = {
    "6.0": 22.0,
    "6.1": 23.0,
    "7.0": 14.5,
    "7.5": 20.0,
    "8.0": 13.9,
    "8.6": 11.4,
    "8.9": 10.0,
    "9.0": 9.5,
    "10.0": 6.0,
    "10.3": 6.0,
    "12.0": 5.5,
}
_UNKNOWN_PICOJOULE = 10.0
_TENSOR_PICOJOULE = {
    "8.0": {"tf32": 2.8, "bf16": 1.6},
    "8.6": {"tf32": 6.4, "bf16": 3.2, "int8": 1.8},
    "8.9": {"tf32": 3.8, "bf16": 1.9, "fp8": 1.06, "int8": 1.06},
    "9.0": {"tf32": 1.2, "bf16": 0.8, "fp8": 0.45, "int8": 0.45},
    "12.0": {"tf32": 4.0, "bf16": 2.0, "fp8": 1.1, "int8": 1.1},
}
"""Energy per operation of tensor cores where it is not their share of fp32's. 8.0: fitted on the families of published
language-model steps on A100; 9.0: on steps of one H100 and one H200. Graphics chips (8.6, 8.9, 12.0): 1.35 times (see
this module) what makes their boards sustain single products of 8192 and more at the published rates [TFLOP/s]: of 8.6
at 300 W 116 (A40, A6000) and at 140 W 58 (A4000); of 8.9 at 72 W 56 (L4) and at 350 W 266 (L40S); of 12.0 at 600 W 320
to 390 (RTX PRO 6000); in tf32, at half these rates, 60 on an A6000 and 25 on an L4. With 3.2 an A6000 comes out at 98
in a step; a warm one was published at 95. Source: `database.md` and issues 97, 120, 160, 161, 185 of
github.com/zzc0721/torch-performance-test-data; github.com/mli/transformers-benchmarks."""
_AMONG_SEVERAL = {"9.0": 1.56}
"""Factor on that energy by which products come out as slow as in published steps of several H100s."""
_TENSOR_SHARE = {"tf32": 0.2, "bf16": 0.125, "fp16": 0.125, "fp8": 0.07, "int8": 0.07}
"""Energy per operation of tensor cores, as a share of fp32's outside of them on the same chip: see this module."""
_DRAM_PICOJOULE_PER_BYTE = {"hbm": 40.0, "gddr": 90.0}
"""Memory and its interface together. Source: O'Connor et al., "Fine-Grained DRAM" (MICRO 2017): HBM2 3.9 pJ/bit, GDDR5
14 pJ/bit; here with the energy of the way on the chip, and between GDDR5 and GDDR6."""
_IDLE_SHARE = 0.15
"""Draw of a busy board without arithmetic and memory traffic, as a share of its limit, if it was not measured."""


@dataclass(frozen=True, kw_only=True)
class PowerModel:
    """Power and energy of a device [W, J]. `limit_w` is None if unknown: then it is never throttled.

    `dense_dtypes` are the dtypes whose products its datasheet rates; the others are computed as fp32.
    """

    limit_w: float | None
    floor_w: float
    capability: str
    is_hbm: bool
    dense_dtypes: frozenset[str]
    is_alone: bool = True

    @classmethod
    def of(cls, hardware: Hardware, *, is_alone: bool = True) -> PowerModel:
        """From the datasheet, of a device alone or of one of several in a run."""
        limit = hardware.power_w
        floor = max(hardware.idle_w or 0.0, _IDLE_SHARE * (limit or 100.0))
        capability = hardware.compute_capability or ""
        return cls(
            limit_w=limit,
            floor_w=floor,
            capability=capability,
            is_hbm=has_stacked_memory(hardware),
            dense_dtypes=frozenset(hardware.dense_flops),
            is_alone=is_alone,
        )

    def joules_per_flop(self, dtype: str) -> float:
        """Energy of a FLOP at full clock [J]."""
        known = _TENSOR_PICOJOULE.get(self.capability, {})
        if dtype in self.dense_dtypes and (own := known.get("bf16" if dtype == "fp16" else dtype)) is not None:
            return own * 1e-12
        fp32 = _FP32_PICOJOULE.get(self.capability, _UNKNOWN_PICOJOULE)
        return fp32 * (_TENSOR_SHARE.get(dtype, 1.0) if dtype in self.dense_dtypes else 1.0) * 1e-12

    def joules_per_byte(self) -> float:
        """Energy of a byte that crosses the device's memory interface [J]."""
        return _DRAM_PICOJOULE_PER_BYTE["hbm" if self.is_hbm else "gddr"] * 1e-12

    def sustained_share(self, full_flops: float, dtype: str) -> float:
        """Share of the full clock under the limit [0 to 1], for work of `full_flops` [FLOP/s] at full clock."""
        if self.limit_w is None:
            return 1.0
        needed_w = full_flops * self.joules_per_flop(dtype)
        if not self.is_alone and dtype in _TENSOR_PICOJOULE.get(self.capability, {}):
            needed_w *= _AMONG_SEVERAL.get(self.capability, 1.0)
        allowed_w = max(self.limit_w - self.floor_w, 0.1 * self.limit_w)
        return min(1.0, (allowed_w / needed_w) ** (1 / _CLOCK_EXPONENT)) if needed_w > 0 else 1.0

    def energy_j(self, seconds: float, flops: dict[str, float], num_bytes: float) -> float:
        """Energy of some work [J]: `seconds` busy, `flops` by dtype, bytes across memory; never above the limit."""
        arithmetic = sum(count * self.joules_per_flop(dtype) for dtype, count in flops.items())
        unlimited = self.floor_w * seconds + arithmetic + num_bytes * self.joules_per_byte()
        return unlimited if self.limit_w is None else min(unlimited, self.limit_w * seconds)


def flops_by_dtype(operations_with_counts: Iterable[tuple[Operation, float]]) -> dict[str, float]:
    """FLOPs of operations, each times its count, by the dtype that the time model computes them in."""
    flops: defaultdict[str, float] = defaultdict(float)
    for operation, count in operations_with_counts:
        if operation.flops:
            kind, dtype = kind_of(operation)
            # Memory-bound operations, such as a depthwise convolution, are computed outside of tensor cores.
            flops["fp32" if kind in {"row", "stream"} else dtype] += operation.flops * count
    return dict(flops)


def has_stacked_memory(hardware: Hardware) -> bool:
    """True if its memory is HBM: NVIDIA's data-centre chips have a capability that ends in 0, except 12.0."""
    capability = hardware.compute_capability or ""
    return capability.endswith((".0", ".3")) and not capability.startswith("12")
