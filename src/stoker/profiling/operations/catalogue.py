"""Which calls the micro-benchmark makes on a device."""

from __future__ import annotations

import torch

from stoker.profiling.operations.attention import attention_calls, recurrent_calls
from stoker.profiling.operations.call import Call
from stoker.profiling.operations.convolutions import convolution_calls
from stoker.profiling.operations.memory_bound import (
    elementwise_calls,
    fresh_calls,
    image_calls,
    row_calls,
    table_calls,
)
from stoker.profiling.operations.optimizers import optimizer_calls
from stoker.profiling.operations.products import batched_product_calls, product_calls, thin_product_calls
from stoker.profiling.operations.shapes import Limits
from stoker.units import MIB

LARGEST_CALL_S = 1e-2
"""About what the longest calls should take [s]: more would leave no time for others."""


def benchmark_calls(device_kind: str, flops_per_s: float) -> list[Call]:
    """All calls for a device of that kind which multiplies fp32 matrices at `flops_per_s`."""
    is_cpu = device_kind == "cpu"
    # A CPU's allocator gives blocks of 32 MiB and more back to the system at once, and has to ask for them again: what
    # that costs is timed apart.
    limits = Limits(flops_per_s * LARGEST_CALL_S, 2**22 if is_cpu else 2**28)
    calls: list[Call] = []
    # In bf16 a CPU trains without the fused kernel (`stepping/attention.py`), and needs it where it only infers.
    for dtype, num, num_attention in ((torch.float32, 39, 10), (torch.bfloat16, 30, 6 if is_cpu else 16)):
        calls += product_calls(dtype, limits, num)
        calls += batched_product_calls(dtype, limits, num // 4)
        calls += thin_product_calls(dtype, 6)
        calls += attention_calls(dtype, limits, num_attention, device_kind)
    calls += convolution_calls(torch.float32, limits, 18, channels_last=False)
    calls += convolution_calls(torch.float32, limits, 12, channels_last=True)
    calls += convolution_calls(torch.bfloat16, limits, 14, channels_last=True)
    calls += convolution_calls(torch.bfloat16, limits, 6, channels_last=False)
    if is_cpu:
        calls += recurrent_calls(limits, 6)
    sizes = (2**8, 2**13, 2**16, 2**18, 2**20, 2**22) if is_cpu else (2**8, 2**16, 2**20, 2**23, 2**26)
    calls += elementwise_calls(sizes)
    calls += row_calls(sizes[-1] // 2, 7)
    calls += image_calls(sizes[-1] // 2, 5, channels_last=False)
    calls += image_calls(sizes[-1] // 2, 5, channels_last=True)
    calls += table_calls(sizes[-1] // 2, 5)
    calls += optimizer_calls(((1, 100), (40, 100), (4, 2**15), (20, 2**15), (2, sizes[-1] // 2)))
    # 64 MiB are beyond what any allocator of a CPU keeps for reuse (glibc: 32 MiB at most).
    return [*calls, *fresh_calls(64 * MIB)] if is_cpu else calls
