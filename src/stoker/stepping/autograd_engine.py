"""A backward pass from a given gradient of the loss, by PyTorch's engine itself.

What: `loss.backward(gradient)` compares the shapes of both through PyTorch's symbolic shapes. The first such call
imports them, and sympy: 0.4 s of the 2.7 s that a process of a small job takes to its first update (docs/log.md,
2026-11-27). Each call goes through these checks in Python. Here the engine is called with what `backward` gives it, so
that the gradients are the same bits. Use when: a plain tensor on a CPU, and a gradient of its shape and dtype.
Falls back to `loss.backward(gradient)` for all others, and where the engine cannot be called so.
Source: `backward` in `torch/autograd/__init__.py` of PyTorch 2.13; the engine is not public.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
_run: Callable[..., Any] | None = getattr(_engine, "run_backward", None)


def backward(loss: torch.Tensor, gradient: torch.Tensor) -> None:
    """Accumulate the gradients of `loss` in its leaves, from `gradient`, which is that of `loss` itself."""
    is_plain = type(loss) is torch.Tensor and type(gradient) is torch.Tensor and loss.device.type == "cpu"
    if _run is None or not is_plain or (loss.shape, loss.dtype) != (gradient.shape, gradient.dtype):
        loss.backward(gradient)
        return
    keep_graph = create_graph = False
    _run((loss,), (gradient,), keep_graph, create_graph, (), allow_unreachable=True, accumulate_grad=True)
