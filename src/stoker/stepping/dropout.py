"""Dropout on a CPU with two draws from each number of the generator.

What: `torch.nn.functional.dropout` keeps an element where 31 random bits are at least p * 2**31; one call of PyTorch's
generator gives those of two elements. The law is that of PyTorch's own, and the same elements are dropped whatever
the precision and the memory format, so that plans learn the same. Use when: training on a CPU; PyTorch draws one
element after another there, on one thread, in 4 to 5 ns each, a third of the time of an update of a small BERT. Costs:
nothing; 0.4 of that time (docs/log.md, 2026-11-24). Does not combine with: dropout in place, tensors of processes, and
function transforms, which go to PyTorch's own as before; so do compiled plans and proofs in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
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
    """Within the block, dropout of tensors on a CPU, also of attention, takes half as many numbers of the generator."""
    attention = functional.scaled_dot_product_attention
    functional.dropout, functional.scaled_dot_product_attention = _dropout, functools.partial(_attention, attention)
    try:
        yield
    finally:
        functional.dropout, functional.scaled_dot_product_attention = _PYTORCHS, attention


def draws_fewer() -> bool:
    """Whether dropout is within the block of `fewer_draws`."""
    return functional.dropout is _dropout


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


def _attention(  # noqa: PLR0913, PLR0917 - PyTorch's own signature
    own: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - as above
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002 - as above
) -> torch.Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, which it replaces: on a CPU that has no kernel either."""
    if not 0 < dropout_p < 1 or enable_gqa or not _suits(query):
        return own(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch._safe_softmax(scores, -1).to(value.dtype)  # noqa: SLF001 - of PyTorch's own: 0 where no key is seen
    return weights * kept(weights, dropout_p) @ value


def _suits(tensor: Any) -> bool:
    is_transformed = torch._C._are_functorch_transforms_active()  # noqa: SLF001 - no public way
    # A trace's tensors stand for plain ones; their class comes with the compiler, and is known by its name.
    is_plain = type(tensor) in {torch.Tensor, nn.Parameter} or type(tensor).__name__ == "FakeTensor"
    if is_transformed or not is_plain:
        return False
    return bool(tensor.device.type == "cpu" and tensor.is_floating_point())
