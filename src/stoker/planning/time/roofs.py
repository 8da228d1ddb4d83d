"""What bounds an operation on a GPU, and how long it takes at the rates given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stoker.planning.time import products
from stoker.planning.time.bandwidth import ROW_KERNELS, row_bytes, row_sizes, stream_bytes
from stoker.planning.time.datasheet import Sustained
from stoker.planning.time.recurrent import STEP_S, recurrent_work
from stoker.planning.time.tiles import Rates, product_seconds
from stoker.records.trace import Operation

Floats = NDArray[np.float64]
Kind = Literal["product", "batched product", "convolution", "attention", "recurrent", "row", "stream"]

_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0}
_FUSED_SHARES = {"8.0": 0.83, "8.6": 0.80, "8.9": 0.80, "9.0": 0.45, "10.0": 0.40}
"""What flash attention's forward pass reaches, of what products of its dtype reach. Source: Dao, FlashAttention-2
(2023): 225 TFLOP/s on an A100, 335 to 400 on an H100, of 271 and 795 for products; 8.6 and 8.9 are taken from 8.0."""
_OTHER_FUSED_SHARE = 0.6
_BACKWARD_SHARE = 0.85
"""The backward pass relative to the forward pass. Source: as above, 63 % of the peak against 73 %."""
_SIMT_SHARE = 0.6
"""Memory-efficient attention in fp32, outside of tensor cores; a judgement."""
_DEPTHWISE_SHARE = 0.5
"""Of the bandwidth, in a depthwise convolution; a judgement."""
_WINOGRAD_SHARE, _WINOGRAD_S = 0.7, 3e-5
"""What Winograd's products reach of single ones, and what its transforms take to start [s]. Fitted on 3 x 3
convolutions of random sizes (NeuSight; P4, P100, V100, T4, A100): the median error is 18 to 33 %, by device."""


@dataclass(frozen=True)
class Scales:
    """What a micro-benchmark found of the datasheet's expectation: factors on arithmetic and on memory."""

    flops: float = 1.0
    bandwidth: float = 1.0


def kind_of(operation: Operation) -> tuple[Kind, str]:
    """What bounds it, and the dtype it computes in (rows and streams: none, their bytes say all)."""
    name = operation.name
    dtype = next((tensor.dtype for tensor in reversed(operation.inputs) if tensor.dtype in _BYTES), "fp32")
    if name in products.SINGLE and products.product_sizes(operation):
        return "product", dtype
    if name in products.BATCHED and products.product_sizes(operation):
        return "batched product", dtype
    if "convolution" in name and not products.is_depthwise(operation) and products.convolution_products(operation):
        return "convolution", dtype
    if "attention" in name and products.attention_sizes(operation):
        return "attention", operation.inputs[0].dtype
    if recurrent_work(operation) is not None:
        return "recurrent", operation.inputs[0].dtype
    if name in ROW_KERNELS and operation.inputs:
        return "row", name.removesuffix("_backward").removesuffix("_backward_data").strip("_")
    return "stream", ""


def point_of(operation: Operation, kind: Kind) -> Floats:
    """Where an operation lies among others of its kind, in doublings of its sizes."""
    # Backward passes keep apart from forward passes by a factor of four, operations of two operands from those of one.
    way = 4.0 if "backward" in operation.name else 1.0
    if kind == "row":
        sizes: tuple[float, ...] = (*row_sizes(operation), way)
    elif kind == "attention":
        sizes = (*(products.attention_sizes(operation) or ()), way)
    elif kind == "recurrent":
        work = recurrent_work(operation)
        sizes = (work.steps, work.batch, work.width, way) if work is not None else (1.0,)
    elif kind == "convolution":
        ways = products.convolution_products(operation)
        sizes = (*(ways[0][0][0] if ways else ()), way)
    elif kind == "stream":
        operands = sum(1 for tensor in operation.inputs if tensor.numel > 1)
        sizes = (operation.bytes_read + operation.bytes_written, 1.0 if operands < 2 else 4.0)
    else:
        batch, rows, columns, depth = products.product_sizes(operation) or (1, 1, 1, 1)
        # Operands that lie transposed, and rows of a length that four does not divide (they cannot be loaded 16 bytes
        # at a time), have kernels of their own: what was measured of one kind says half as much of another.
        layout = (operation.attribute("transpose_a"), operation.attribute("transpose_b"), depth % 4)
        sizes = (batch, rows, columns, depth, *(4.0 if differs else 1.0 for differs in layout))
    return np.log2(np.maximum(np.asarray(sizes, dtype=np.float64), 1.0)).astype(np.float64)


def roof_seconds(operation: Operation, kind: Kind, dtype: str, sustained: Sustained, scales: Scales) -> float:
    """Time at the sustained rates, times `scales` [s], without what it takes to start it."""
    bandwidth = sustained.bandwidth * scales.bandwidth
    if kind == "stream":
        seconds = stream_bytes(operation, sustained.hardware) / bandwidth
        if products.is_depthwise(operation):
            seconds /= _DEPTHWISE_SHARE
        return max(seconds, operation.flops / (sustained.flops("fp32") * scales.flops))
    if kind == "row":
        size = _BYTES.get(max(operation.inputs, key=lambda tensor: tensor.numel).dtype, 4.0)
        return row_bytes(operation, sustained.hardware, size) / bandwidth
    if kind == "attention":
        return _attention_seconds(operation, dtype, sustained, scales)
    rates = _scaled(sustained.rates(dtype), scales)
    size = _BYTES[dtype]
    if kind == "recurrent":
        return _recurrent_seconds(operation, dtype, sustained, rates)
    if kind == "convolution":
        return _convolution_seconds(operation, dtype, sustained, rates)
    sizes = np.array([products.product_sizes(operation)], dtype=float)
    return float(product_seconds(sizes, size, sustained.tiles(dtype, is_batched=kind != "product"), rates)[0])


def _scaled(rates: Rates, scales: Scales) -> Rates:
    return Rates(
        flops=rates.flops * scales.flops,
        bytes_per_s=rates.bytes_per_s * scales.bandwidth,
        multiprocessors=rates.multiprocessors,
    )


def _convolution_seconds(operation: Operation, dtype: str, sustained: Sustained, rates: Rates) -> float:
    """The fastest way of each part. Winograd's is for fp32: on tensor cores implicit products are faster."""
    size, seconds = _BYTES[dtype], 0.0
    shapes = {is_batched: sustained.tiles(dtype, is_batched=is_batched) for is_batched in (False, True)}
    for ways in products.convolution_products(operation) or []:
        usable = ways if dtype == "fp32" else ways[:1]
        seconds += min(
            float(product_seconds(np.array([sizes], dtype=float), size, shapes[sizes[0] > 1 and not extra], rates)[0])
            * (1 / _WINOGRAD_SHARE if extra else 1)
            + (_WINOGRAD_S + extra * size / rates.bytes_per_s if extra else 0)
            for sizes, extra in usable
        )
    return seconds


def _recurrent_seconds(operation: Operation, dtype: str, sustained: Sustained, rates: Rates) -> float:
    """Products of all steps at once and of one step after the other, and the time between steps."""
    work = recurrent_work(operation)
    assert work is not None, "its kind says that it is one"
    sizes = np.array([sizes for sizes, _ in work.products], dtype=float)
    times = np.array([times for _, times in work.products], dtype=float)
    seconds = product_seconds(sizes, _BYTES[dtype], sustained.tiles(dtype, is_batched=False), rates)
    return float(seconds @ times) + work.steps * STEP_S


def _attention_seconds(operation: Operation, dtype: str, sustained: Sustained, scales: Scales) -> float:
    """By FLOPs, or by bytes where the sequence is short."""
    capability = sustained.hardware.compute_capability or ""
    is_tensor = sustained.peak_flops(dtype)[1]
    share = _FUSED_SHARES.get(capability, _OTHER_FUSED_SHARE) if is_tensor else _SIMT_SHARE
    if operation.name.endswith("_backward"):
        share *= _BACKWARD_SHARE
    # Half of the scores are masked; of short sequences more, because tiles on the diagonal are done whole.
    queries = (products.attention_sizes(operation) or (1, 1, 1, 1))[1]
    done = 0.5 + 0.5 * min(1.0, 128 / max(1, queries)) if operation.attribute("is_causal") is True else 1.0
    arithmetic = operation.flops * done / (sustained.flops(dtype) * scales.flops * share)
    return max(arithmetic, (operation.bytes_read + operation.bytes_written) / (sustained.bandwidth * scales.bandwidth))
