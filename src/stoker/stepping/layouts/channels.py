"""What neighbouring stages send each other: activations one way, their gradients the other way.

Each way has a process group of its own, so that over NCCL, which takes what a group sends and receives in order, a
stage that sends and one that receives never wait for each other. Sends are not waited for until an update's end.
"""

from __future__ import annotations

from collections.abc import Hashable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from stoker.stepping.world import AXES, World

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_MOST_DIMENSIONS = 8


class Channel:
    """One way between neighbouring stages: what `send` puts in at one end, `receive` takes out at the other, in order.

    Args:
        group: the stages of one pipeline, in order.
        step: 1 for what goes to the next stage, -1 for what goes back.
    """

    def __init__(self, group: dist.ProcessGroup, step: int, device: torch.device) -> None:
        self._group, self._device = group, device
        rank = group.rank()
        self._to = _global(group, rank + step)
        self._of = _global(group, rank - step)
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._told: set[Hashable] = set()
        self._forms: dict[Hashable, tuple[torch.Size, torch.dtype]] = {}

    def send(self, tensor: torch.Tensor, kind: Hashable | None) -> None:
        """Send a tensor; those of one `kind`, as both ends call it, have one shape and dtype. None: any."""
        assert self._to is not None, "the last stage has nobody to send to"
        if kind not in self._told:
            self._put(_form_of(tensor, self._device))
        if kind is not None:
            self._told.add(kind)
        self._put(tensor.detach().contiguous())

    def receive(self, kind: Hashable | None) -> torch.Tensor:
        """The next tensor, which is of `kind`."""
        form = self._forms.get(kind)
        if form is None:
            form = _form_in(self._take(torch.empty(_MOST_DIMENSIONS + 2, dtype=torch.int64, device=self._device)))
        if kind is not None:
            self._forms[kind] = form
        shape, dtype = form
        return self._take(torch.empty(shape, dtype=dtype, device=self._device))

    def receive_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """The next tensor, which has the shape and dtype of `tensor`."""
        return self._take(torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device))

    def send_back(self, tensor: torch.Tensor) -> None:
        """Send a tensor whose shape and dtype the other end knows."""
        self._put(tensor.detach().contiguous())

    def settle(self) -> None:
        """Wait until everything that was sent is taken."""
        sent, self._sent = self._sent, []
        for work, _ in sent:
            work.wait()

    def _put(self, tensor: torch.Tensor) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        work = dist.isend(tensor, dst=self._to, group=self._group)
        self._sent.append((work, tensor))  # until it has arrived, nobody else may have its memory

    def _take(self, empty: torch.Tensor) -> torch.Tensor:
        dist.recv(empty, src=self._of, group=self._group)
        return empty


def channels(world: World, device: torch.device) -> tuple[Channel, Channel]:
    """The way to the next stage, and the way back; every process of the world asks for them together."""
    assert world.mesh is not None
    ways = [_own_line(world) for _ in range(2)]
    return Channel(ways[0], 1, device), Channel(ways[1], -1, device)


def _own_line(world: World) -> dist.ProcessGroup:
    """A new group of the processes that hold the stages of the same samples."""
    assert world.mesh is not None
    lines = world.mesh.mesh.movedim(AXES.index("stages"), -1).flatten(0, -2).tolist()
    patience = _patience(world)
    found: list[dist.ProcessGroup] = []
    for line in lines:  # everybody makes every group, in the same order
        group = dist.new_group(line, timeout=patience)
        if world.rank in line:
            found.append(group)
    return found[0]


def _patience(world: World) -> timedelta | None:
    """How long processes wait for each other, which new groups do not take over by themselves; None: unknown."""
    assert world.mesh is not None
    everybody: Any = dist.group.WORLD
    try:
        options = everybody._get_backend(torch.device(world.mesh.device_type)).options  # noqa: SLF001 - no public way
    except (AttributeError, RuntimeError):
        return None
    patience: timedelta | None = getattr(options, "_timeout", None)
    return patience


def _global(group: dist.ProcessGroup, rank: int) -> int | None:
    """The process's number in the world; None where there is no such stage."""
    return dist.get_global_rank(group, rank) if 0 <= rank < group.size() else None


def _form_of(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Shape and dtype as numbers."""
    assert tensor.dim() <= _MOST_DIMENSIONS, "activations have a few dimensions"
    filled = [*tensor.shape, *[0] * (_MOST_DIMENSIONS - tensor.dim())]
    return torch.tensor([_DTYPES.index(tensor.dtype), tensor.dim(), *filled], dtype=torch.int64, device=device)


def _form_in(numbers: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    dtype, dims, *shape = numbers.tolist()
    return torch.Size(shape[:dims]), _DTYPES[dtype]
