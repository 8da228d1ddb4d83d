"""DTensors next to plain tensors: this process's part of each, and the norm of gradients over all processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor, sharing its memory; any other tensor as it is. Without gradient."""
    # Recognised by the method: `torch.distributed.tensor` takes long to import, and a single process never needs it.
    to_local = getattr(tensor, "to_local", None)
    if to_local is None:
        return tensor
    with torch.no_grad():
        part: torch.Tensor = to_local()
    return part


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor; for a complex one its real and imaginary parts, in one more dimension."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def is_spread(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor."""
    return hasattr(tensor, "to_local")


def all_local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`local` of each tensor."""
    return [local(tensor) for tensor in tensors]


def norm_of(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, a scalar; the gradients stay as they are.

    Assumes whole gradients: parts of DTensors are not put together.
    """
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]).detach()


_LEAST = 1e-6
"""Added to the norm that is divided by, as in `torch.nn.utils.clip_grad_norm_`."""


def clip_to_global_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients to a global norm of at most `max_norm`, in place; returns the norm before.

    As `torch.nn.utils.clip_grad_norm_`, which takes neither DTensors together with plain tensors nor those of several
    meshes. Processes that hold the same parameters call it together.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(gradients)
    if gradients:
        torch._foreach_mul_(all_local(gradients), torch.clamp(max_norm / (norm + _LEAST), max=1.0))
    return norm


def global_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The Euclidean norm over all of the tensors, DTensors whole, plain ones counted once; a scalar of their dtype."""
    if not tensors:
        return torch.zeros(())
    by_groups: defaultdict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        groups: tuple[Any, ...] = ()  # over which the tensor is divided
        if is_spread(tensor):
            spread: Any = tensor
            mesh, placements = spread.device_mesh, spread.placements
            assert not any(placement.is_partial() for placement in placements), "gradients are added up before"
            groups = tuple(mesh.get_group(axis) for axis, held in enumerate(placements) if not held.is_replicate())
        by_groups[groups].append(local(tensor))
    first = local(tensors[0])
    total = torch.zeros((), dtype=torch.float64, device=first.device)
    for groups, parts in by_groups.items():
        square = torch.zeros((), dtype=torch.float64, device=first.device)
        if filled := [part for part in parts if part.numel()]:  # of a short tensor some processes hold no row
            norms: Any = torch._foreach_norm(filled)  # noqa: SLF001 - PyTorch's own for lists of tensors
            square = torch.stack(norms).double().square().sum()
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    return total.sqrt().to(first.dtype)
