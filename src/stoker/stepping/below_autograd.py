"""Operations called without autograd's part in each call.

What: within the block, operations go past the layer that would note them for a backward pass; what they give requires
no gradient, what they write to counts its version up as ever. Use when: many short operations follow each other:
`torch.no_grad` lets each of them ask that layer, 5 % of a pass of a small MLP (docs/log.md, 2026-11-22).
Costs: nothing. Does not combine with: anything that is to be differentiated.
Source: `at::AutoDispatchBelowAutograd` in `ATen/core/LegacyTypeDispatch.h`. Its binding is not public: where it is gone
this is `torch.no_grad`, which gives the same.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

_native: Any = torch._C  # noqa: SLF001 - the one place that does
below_autograd: Callable[[], AbstractContextManager[Any]] = getattr(
    _native, "_AutoDispatchBelowAutograd", torch.no_grad
)
"""Makes a context manager to be entered once."""
