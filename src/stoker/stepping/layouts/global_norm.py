"""The norm of gradients that lie in parts on several processes, some of them whole on each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from stoker.stepping.local_tensors import all_local, is_spread, local

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
