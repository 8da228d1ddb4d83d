"""FLOPs that training takes by its formula, and the peak of matrix products that the device reaches: what MFU is of.

A multiply and an add count as two. What is computed again, or by a slower kernel, does not count: MFU is of the model's
own arithmetic, as in A. Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.train.cases import Case, build, loss_of

_SIZES = (4096, 8192, 16384)
_READINGS = 5
_COUNTED_SAMPLES = 2


def flops_per_sample(case: Case) -> float:
    """FLOPs to train on one sample: of a GPT by the formula in its docstring, of a CNN as PyTorch counts its products.

    The formula counts all pairs of tokens, the masked half included, as published MFUs of GPTs do.
    """
    if case.architecture == "gpt":
        L, D, T, V = (case.sizes[name] for name in ("layers", "width", "context", "vocab"))
        return 6 * T * (12 * L * D**2 + V * D) + 12 * L * D * T**2
    with torch.device("meta"):
        model = build(case)
        inputs = torch.zeros(_COUNTED_SAMPLES, *case.image, dtype=torch.uint8)
        targets = torch.zeros(_COUNTED_SAMPLES, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        loss_of(case, model(inputs), targets).backward()
    return float(counter.get_total_flops()) / _COUNTED_SAMPLES


def peak_flops(device: torch.device, sizes: tuple[int, ...] = _SIZES) -> float:
    """The most FLOP/s that products of square bf16 matrices reach on `device`, the best of a few readings and sizes."""
    return max(_product_rate(device, size) for size in sizes)


def _product_rate(device: torch.device, size: int) -> float:
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    wait: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    best_s = float("inf")
    for reading in range(_READINGS + 1):
        started = time.perf_counter()
        torch.mm(left, right, out=out)
        wait()
        if reading:  # the first chooses kernels
            best_s = min(best_s, time.perf_counter() - started)
    return 2 * size**3 / best_s
