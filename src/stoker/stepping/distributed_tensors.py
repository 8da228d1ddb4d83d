"""DTensors next to plain tensors: this process's part of each, the norm of all gradients, and collectives."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

Runs = tuple[tuple[int, int], ...]
"""Start and stop of each run of indices held of a dimension."""


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


def spread_as(like: Any, own: torch.Tensor, *, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
    """A DTensor of `shape` with the placements of `like`, of which `own` is this process's part."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415 - slow to import; loaded already where there are any

    return DTensor.from_local(own, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride)


Item = TypeVar("Item")


def buckets(items: Iterable[Item], num_bytes: Callable[[Item], int], limit: int) -> Iterator[list[Item]]:
    """Runs of items with at most `limit` bytes together, or a single one that has more.

    >>> list(buckets([3, 4, 9, 1, 1], int, 8))
    [[3, 4], [9], [1, 1]]
    """
    bucket: list[Item] = []
    held = 0
    for item in items:
        size = num_bytes(item)
        if bucket and held + size > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += size
    if bucket:
        yield bucket


Exchange = Callable[[torch.Tensor], torch.Tensor]
"""A linear map of what the processes of a group hold."""


def collective(x: torch.Tensor, exchange: Exchange, adjoint: Exchange) -> torch.Tensor:
    """`exchange(x)`, a collective through which gradients flow backwards, by its adjoint."""
    result: torch.Tensor = _Collective.apply(x, exchange, adjoint)  # type: ignore[no-untyped-call]
    return result


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: Exchange, adjoint: Exchange) -> torch.Tensor:
        ctx.adjoint = adjoint
        return exchange(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.adjoint(gradient), None, None


def all_local(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`local` of each tensor."""
    return [local(tensor) for tensor in tensors]


def norm_of(parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, a scalar; the gradients stay as they are.

    Assumes whole gradients: parts of DTensors are not put together. Sparse ones are coalesced for it.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    return nn.utils.get_total_norm(values).detach()


_LEAST = 1e-6
"""Added to the norm that is divided by, as in `torch.nn.utils.clip_grad_norm_`."""


def clip_with_sparse(parameters: Sequence[nn.Parameter], max_norm: float) -> torch.Tensor:
    """As `torch.nn.utils.clip_grad_norm_`, which takes no sparse gradients; these are coalesced."""
    values: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        if parameter.grad is not None:
            values.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
    norm = nn.utils.get_total_norm(values)
    factor = (max_norm / (norm + _LEAST)).clamp(max=1.0)
    for value in values:
        value.mul_(factor)
    return norm


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


def runs_of(tensor: torch.Tensor) -> tuple[Runs, ...]:
    """The indices that this process holds of each dimension of a tensor, all of them of one that is no DTensor."""
    if not is_spread(tensor):
        return tuple(((0, size),) for size in tensor.shape)
    spread: Any = tensor
    mesh = spread.device_mesh
    return _runs(mesh, tuple(mesh.get_coordinate()), tuple(spread.placements), tuple(tensor.shape))


@functools.lru_cache(maxsize=1024)
def _runs(
    mesh: Any, coordinate: tuple[int, ...], placements: tuple[Any, ...], shape: tuple[int, ...]
) -> tuple[Runs, ...]:
    """The indices of each dimension that the process at `coordinate` of the mesh holds.

    Placements cut one after the other. An FSDP2 shard of a layer that tensor parallel has divided cuts last: its
    `_StridedShard` has the number of tensor processes as its factor.
    """

    def cuts_last(dim: int) -> bool:
        factor = getattr(placements[dim], "split_factor", 1)
        if factor == 1:
            return False
        inner = [
            mesh.size(other)
            for other in range(dim + 1, len(placements))
            if not placements[other].is_replicate() and placements[other].dim == placements[dim].dim
        ]
        return bool(factor == math.prod(inner))

    held: dict[int, torch.Tensor] = {}
    later = [dim for dim in range(len(placements)) if cuts_last(dim)]
    for dim in [*(dim for dim in range(len(placements)) if dim not in later), *later]:
        placement = placements[dim]
        if placement.is_replicate():
            continue
        axis, count, number = placement.dim, mesh.size(dim), coordinate[dim]
        indices = held.get(axis, torch.arange(shape[axis]))
        factor = 1 if dim in later else getattr(placement, "split_factor", 1)
        held[axis] = torch.cat([_chunks(whole, count)[number] for whole in _chunks(indices, factor)])
    return tuple(_runs_in(held[axis]) if axis in held else ((0, size),) for axis, size in enumerate(shape))


def _chunks(indices: torch.Tensor, count: int) -> list[torch.Tensor]:
    """`count` parts as `torch.chunk` cuts: earlier ones are the larger, and the last ones may be empty."""
    size = max(1, math.ceil(len(indices) / count))
    return [indices[start * size : (start + 1) * size] for start in range(count)]


def _runs_in(indices: torch.Tensor) -> Runs:
    if not len(indices):
        return ((0, 0),)
    ends = (indices[1:] != indices[:-1] + 1).nonzero().flatten()
    firsts, lasts = [0, *(ends + 1).tolist()], [*ends.tolist(), len(indices) - 1]
    return tuple((int(indices[a]), int(indices[b]) + 1) for a, b in zip(firsts, lasts, strict=True))
