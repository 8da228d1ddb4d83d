"""Additions that PyTorch makes in place on real tensors, and out of place on fake ones, as on any subclass.

They decide what is allocated at a peak: a gradient that reaches a tensor on a second way is added to the first, and the
bias of a linear layer whose input is not contiguous is added to the product.
Source: torch/csrc/autograd/input_buffer.cpp (`can_accumulate_inplace`) and aten/src/ATen/native/Linear.cpp (`linear`)
of PyTorch 2.13.
"""

from __future__ import annotations

from typing import Any

import torch

from stoker.profiling.tracing.fake_device import (
    calling_instruction,
    is_in_backward,
    references,
    references_of_engine,
    storage_key,
)

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.bmm.default)


class Additions:
    """Tells which additions are in place; sees every operation on its way."""

    def __init__(self) -> None:
        self._product: tuple[tuple[int, int] | None, int] = None, 0

    def note(self, func: Any, out: Any) -> None:
        """Remember a matrix product: which instruction called for it, and its storage."""
        if func in _PRODUCTS:
            self._product = calling_instruction(), storage_key(out.untyped_storage())

    def as_executed(self, func: Any, args: tuple[Any, ...]) -> Any:
        """The operation that real tensors would see in place of `func`."""
        if func is aten.add.Tensor and (self._is_second_gradient(args) or self._is_bias(args)):
            return aten.add_.Tensor
        return func

    def _is_second_gradient(self, args: tuple[Any, ...]) -> bool:
        """Whether autograd's engine adds a gradient to one that nobody else holds."""
        return (
            is_in_backward()
            and not torch.is_grad_enabled()
            and calling_instruction() is None
            and references(args[0]) == references_of_engine()
            and args[0].shape == args[1].shape
        )

    def _is_bias(self, args: tuple[Any, ...]) -> bool:
        """Whether a linear layer adds its bias: the instruction that adds is the one that multiplied."""
        instruction, product = self._product
        if instruction is None or not isinstance(args[1], torch.Tensor) or args[1].dim() != 1:
            return False
        return storage_key(args[0].untyped_storage()) == product and calling_instruction() == instruction
