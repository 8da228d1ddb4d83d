"""Dropout on a CPU with two draws from each number of the generator.

What: `torch.nn.functional.dropout` keeps an element where 31 random bits are at least p * 2**31; one call of PyTorch's
generator gives those of two elements. The law is that of PyTorch's own, and the same elements are dropped whatever
the precision and the memory format, so that plans learn the same. Use when: training on a CPU; PyTorch draws one
element after another there, on one thread, in 4 to 5 ns each, a third of the time of an update of a small BERT. Costs:
nothing; 0.4 of that time (docs/log.md, 2026-11-24). Does not combine with: dropout in place, tensors of processes, and
function transforms, which go to PyTorch's own as before; so do compiled plans and proofs in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional

_PYTORCHS = functional.dropout
_SPAN = 2**31
"""Values of the random bits of an element."""


def has_dropout(model: nn.Module) -> bool:
    """Whether a module of the model drops anything."""
    return any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in model.modules())  # noqa: SLF001


def kept(like: torch.Tensor, p: float) -> torch.Tensor:
    """Factors of the shape and dtype of `like`: 0 with probability p, else 1 / (1 - p)."""
    count = like.numel()
    numbers = torch.empty((count + 1) // 2, dtype=torch.int64).random_()  # 63 random bits each
    bits = numbers.view(torch.int32)[:count].view(like.shape).bitwise_and_(_SPAN - 1)
    return (bits >= round(p * _SPAN)).to(like.dtype).mul_(1 / (1 - p))


@contextmanager
def fewer_draws() -> Iterator[None]:
    """Within the block, dropout of tensors on a CPU takes half as many numbers of the generator."""
    functional.dropout = _dropout
    try:
        yield
    finally:
        functional.dropout = _PYTORCHS


def _dropout(
    input: torch.Tensor,  # noqa: A002 - PyTorch's own signature
    p: float = 0.5,
    training: bool = True,  # noqa: FBT001, FBT002 - as above
    inplace: bool = False,  # noqa: FBT001, FBT002 - as above
) -> torch.Tensor:
    """As `torch.nn.functional.dropout`, which it replaces."""
    if not (training and 0 < p < 1) or inplace or not _suits(input):
        return _PYTORCHS(input, p, training, inplace)
    return input * kept(input, p)


def _suits(tensor: Any) -> bool:
    is_transformed = torch._C._are_functorch_transforms_active()  # noqa: SLF001 - no public way
    # A trace's tensors stand for plain ones; their class comes with the compiler, and is known by its name.
    is_plain = type(tensor) in {torch.Tensor, nn.Parameter} or type(tensor).__name__ == "FakeTensor"
    if is_transformed or not is_plain:
        return False
    return bool(tensor.device.type == "cpu" and tensor.is_floating_point())
