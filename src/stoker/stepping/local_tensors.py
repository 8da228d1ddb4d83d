"""What a process holds of tensors that are spread over several."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor, sharing its memory; any other tensor as it is. Without gradient."""
    # Told by the method: `torch.distributed.tensor` takes long to import, and one process alone never needs it.
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        part: torch.Tensor = to_local()
    return part


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; of a complex one its real and imaginary parts, in one more dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def all_local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """As `local`, of each."""
    return [local(tensor) for tensor in tensors]


def norm_of(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, a scalar; the gradients stay as they are.

    Of gradients that lie here whole: parts of DTensors are not put together.
    """
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).detach()
