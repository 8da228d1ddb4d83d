"""Collectives through which gradients pass: what a tensor group says to itself within a layer.

Each process holds a part of a tensor, or all of it; gradients go the other way. Everything that is sent or received is
contiguous: gloo takes wrong values from other tensors without a word.
Source: M. Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3 (f and g); V. Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2.2 (along the sequence).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup

# PyTorch 2.13 calls them so, and warns of the names they had before.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def shared(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x` itself, of which each process uses a part only: its gradient is the sum of theirs."""
    out: torch.Tensor = _Shared.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the processes, each of which goes on with it in the same way."""
    out: torch.Tensor = _Summed.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gathered(x: torch.Tensor, dim: int, group: Group, *, is_shared: bool) -> torch.Tensor:
    """The processes' parts put together along `dim`.

    With `is_shared` each goes on with it in its own way, so that its gradient is the sum of theirs; else all do the
    same, and each takes its part of the gradient.
    """
    out: torch.Tensor = _Gathered.apply(x, dim, group, is_shared)  # type: ignore[no-untyped-call]
    return out


def part(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This process's part along `dim`, which the number of processes divides, of what all of them have."""
    out: torch.Tensor = _Part.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


def part_of_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """This process's part along `dim`, which the number of processes divides, of the sum over them."""
    out: torch.Tensor = _PartOfSum.apply(x, dim, group)  # type: ignore[no-untyped-call]
    return out


class _Shared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, ctx.group), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return _sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(_ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group, is_shared: bool) -> torch.Tensor:  # noqa: FBT001 - `apply` takes no names
        ctx.dim, ctx.group, ctx.is_shared = dim, group, is_shared
        return _gather(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        take = _scatter_sum if ctx.is_shared else _own
        return take(gradient, ctx.dim, ctx.group), None, None, None


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _own(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gather(gradient, ctx.dim, ctx.group), None, None


class _PartOfSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _scatter_sum(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _gather(gradient, ctx.dim, ctx.group), None, None


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _own(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    return x.chunk(group.size(), dim)[group.rank()].clone(memory_format=torch.contiguous_format)


def _gather(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    mine = x.movedim(dim, 0).contiguous()
    found = mine.new_empty((group.size() * mine.shape[0], *mine.shape[1:]))
    _ALL_GATHER(found, mine, group=group)
    return found.movedim(0, dim).contiguous()


def _scatter_sum(x: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    whole = x.movedim(dim, 0).contiguous()
    found = whole.new_empty((whole.shape[0] // group.size(), *whole.shape[1:]))
    _REDUCE_SCATTER(found, whole, group=group)
    return found.movedim(0, dim).contiguous()
