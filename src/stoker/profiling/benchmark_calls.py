"""Calls of single ATen operations for the micro-benchmark: operands, repeated calls, and fixed sets of shapes."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload

from stoker.loading.fields import tensors_of
from stoker.units import MIB

_MOST_SETS = 4
_LEAST_TENSORS = 4
"""The memory holds so many tensors at least: one overlaps neither of the two that were cut before it."""
_LONGEST_WARMING_S = 6e-3
_KEPT_BYTES = 32 * MIB
"""Small enough that a CPU's allocator reuses the memory of freed results instead of returning it."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def aten(name: str, overload: str = "default") -> OpOverload:
    """PyTorch's operation of that name, which may begin with an underscore."""
    operation: OpOverload = getattr(getattr(torch.ops.aten, name), overload)
    return operation


class OperandPool:
    """Random memory from which operands are cut in turn, so that a call finds its operands out of the cache.

    In a training step most operands were last touched long before; a loop over one set of operands would time the
    cache. Operands are views: nothing is filled for each call.

    Args:
        device: the device of the memory.
        num_bytes: size [bytes]; several times the last cache.
    """

    def __init__(self, device: str, num_bytes: int) -> None:
        self.device, self.num_bytes = device, num_bytes
        self._generator = torch.Generator(device=device).manual_seed(0)
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._next = 0

    def random(
        self, *shape: int, dtype: torch.dtype = torch.float32, channels_last: bool = False, transposed: bool = False
    ) -> torch.Tensor:
        """Normally distributed numbers; `transposed`: the last two dimensions are swapped in memory."""
        if transposed:
            return self.random(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)
        if channels_last:
            images, channels, *space = shape
            return self.random(images, *space, channels, dtype=dtype).movedim(-1, 1)
        if dtype not in self._memory:
            count = self.num_bytes // dtype.itemsize
            # A part is drawn and repeated: drawing is slow.
            drawn = torch.randn(min(count, 2**20 + 64), generator=self._generator, device=self.device)
            self._memory[dtype] = drawn.repeat(math.ceil(count / drawn.numel()))[:count].to(dtype)
        return self._cut(self._memory[dtype], shape)

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Memory to write to, never shared with operands: the speed of branches depends on the numbers."""
        if dtype not in self._scratch:
            self._scratch[dtype] = torch.ones(self.num_bytes // dtype.itemsize, dtype=dtype, device=self.device)
        return self._cut(self._scratch[dtype], shape)

    def _cut(self, memory: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        numel = math.prod(shape)
        if _LEAST_TENSORS * numel > memory.numel():
            return torch.ones(shape, dtype=memory.dtype, device=self.device)
        # Rounded to whole cache lines, as allocators do.
        start = -(-self._next // 64) * 64
        if start + numel > memory.numel():
            start = 0
        self._next = start + numel
        return memory[start : start + numel].view(shape)

    def indices(self, *shape: int, below: int) -> torch.Tensor:
        """Whole numbers from 0 to below `below`."""
        return torch.randint(0, below, shape, generator=self._generator, device=self.device)


@dataclass(frozen=True)
class Call:
    """`function` with `arguments` from a pool; each set of arguments is at another place in memory."""

    function: OpOverload
    arguments: Callable[[OperandPool], Arguments]


@dataclass
class Caller:
    """Repeats a call, with another set of operands each time."""

    call: Call
    sets: list[Arguments]
    most_kept: int = 1
    _turns: itertools.cycle[Arguments] = field(init=False)
    _kept: deque[object] = field(init=False)

    def __post_init__(self) -> None:
        self._turns, self._kept = itertools.cycle(self.sets), deque(maxlen=self.most_kept)

    def __call__(self) -> object:
        """Make the call once; returns the operation's result."""
        args, keywords = next(self._turns)
        result = self.call.function(*args, **keywords)
        # Freed only some calls later, so that the next result is not put into memory that is still in the cache.
        self._kept.append(result)
        return result

    def forget(self) -> None:
        """Free the kept results."""
        self._kept.clear()

    @contextlib.contextmanager
    def at_ease(self) -> Iterator[None]:
        """Within the block, memory for results is already mapped and rotates among the calls."""
        started = time.perf_counter()
        for _ in range(self.most_kept + 1):
            self()
            if time.perf_counter() - started > _LONGEST_WARMING_S:
                break
        try:
            yield
        finally:
            self.forget()


def prepare_call(call: Call, pool: OperandPool) -> tuple[Caller, Arguments, object]:
    """A caller with enough sets of operands to go once through the pool, four at most; arguments, and their result."""
    first = call.arguments(pool)
    result = call.function(*first[0], **first[1])
    touched = _num_bytes(first) or 1
    sets = max(1, min(_MOST_SETS, pool.num_bytes // touched))
    most_kept = max(1, min(sets, _KEPT_BYTES // (_num_bytes(result) or 1)))
    return Caller(call, [first, *(call.arguments(pool) for _ in range(sets - 1))], most_kept), first, result


def _num_bytes(value: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_of(value))


@dataclass(frozen=True)
class ShapeLimits:
    """Limits of a call: its FLOPs, and the elements of each tensor."""

    flops: float
    numel: int


def spread(num: int, *ranges: tuple[float, float]) -> list[tuple[int, ...]]:
    """`num` points of whole numbers, spread evenly over the logarithms of `ranges`.

    Additive recurrence with the generalised golden ratio: any first few points are already well spread.
    Source: M. Roberts, "The Unreasonable Effectiveness of Quasirandom Sequences" (2018).

    >>> spread(3, (1, 100), (16, 16))
    [(3, 16), (1, 16), (34, 16)]
    """
    ratio = 1.5
    for _ in range(50):
        ratio = (1 + ratio) ** (1 / (len(ranges) + 1))
    points = []
    for index in range(1, num + 1):
        point = []
        for axis, (low, high) in enumerate(ranges):
            share = (0.5 + index * ratio ** -(axis + 1)) % 1
            point.append(round(low * math.pow(high / low, share)))
        points.append(tuple(point))
    return points


def multiple(value: int, of: int) -> int:
    """The nearest positive multiple of `of` [unit of `value`].

    >>> [multiple(20, 8), multiple(3, 8), multiple(100, 64)]
    [24, 8, 128]
    """
    return of * max(1, math.floor(value / of + 0.5))


def limited(sizes: Sequence[int], most: float) -> tuple[int, ...]:
    """`sizes` with the first reduced so that their product is at most `most`.

    >>> limited((100, 10, 2), most=500)
    (25, 10, 2)
    """
    rest = math.prod(sizes[1:])
    return (max(1, min(sizes[0], int(most / rest))), *sizes[1:])
