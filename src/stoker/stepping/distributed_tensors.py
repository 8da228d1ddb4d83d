"""What a process holds of tensors that are spread over several.

The norm of gradients that lie in parts on several processes, some of them whole on each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


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


_LEAST = 1e-6
"""Added to the norm that is divided by, as in `torch.nn.utils.clip_grad_norm_`."""


def clip_to_global_norm(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients to a global norm of at most `max_norm`, in place; returns the norm before.

    As `torch.nn.utils.clip_grad_norm_`, which cannot take DTensors beside plain tensors, nor those of several meshes.
    Processes that hold the same parameters call it together.
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
    alike: defaultdict[tuple[Any, ...], list[torch.Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[_groups_of(tensor)].append(local(tensor))
    first = local(tensors[0])
    total = torch.zeros((), dtype=torch.float64, device=first.device)
    for groups, parts in alike.items():
        square = _sum_of_squares(parts)
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    return total.sqrt().to(first.dtype)


def _sum_of_squares(parts: list[torch.Tensor]) -> torch.Tensor:
    filled = [part for part in parts if part.numel()]  # of a short tensor some processes hold no row
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=parts[0].device)
    norms: Any = torch._foreach_norm(filled)  # noqa: SLF001 - PyTorch's own for lists of tensors
    return torch.stack(norms).double().square().sum()


def _groups_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The groups of processes over which a tensor lies in parts; none for a whole one."""
    if not is_spread(tensor):
        return ()
    whole: Any = tensor
    mesh, placements = whole.device_mesh, whole.placements
    assert not any(placement.is_partial() for placement in placements), "gradients are added up before"
    return tuple(mesh.get_group(at) for at, placement in enumerate(placements) if not placement.is_replicate())
