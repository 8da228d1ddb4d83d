"""A model's trained parameters as one long row of numbers, cut into equal fragments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from stoker.errors import BadJob


@dataclass(frozen=True)
class _Piece:
    """Elements start..stop of a parameter."""

    parameter: torch.Tensor
    start: int
    stop: int


class Fragment:
    """A run of elements of several parameters, in the model's order; read and written as one tensor of `dtype`."""

    def __init__(self, pieces: Sequence[_Piece], dtype: torch.dtype) -> None:
        self._pieces, self._dtype = tuple(pieces), dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(piece.stop - piece.start for piece in self._pieces)

    def read(self) -> torch.Tensor:
        """A copy of the elements."""
        rows = [piece.parameter.detach().reshape(-1)[piece.start : piece.stop] for piece in self._pieces]
        return torch.cat([row.to(self._dtype) for row in rows])

    def write(self, values: torch.Tensor) -> None:
        """Put `values` in their places."""
        for piece, part in zip(self._pieces, self._parted(values), strict=True):
            parameter = piece.parameter.detach()
            row = parameter.reshape(-1)  # of another memory format than rows of rows: a copy
            row[piece.start : piece.stop] = part
            if not parameter.is_contiguous():
                parameter.copy_(row.view(parameter.shape))

    def into(self, tensors: dict[int, torch.Tensor], values: torch.Tensor) -> None:
        """Put `values` in the places of tensors [N] that stand for parameters, by the parameters' ids."""
        for piece, part in zip(self._pieces, self._parted(values), strict=True):
            tensors[id(piece.parameter)][piece.start : piece.stop] = part

    def _parted(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts: tuple[torch.Tensor, ...] = values.split([piece.stop - piece.start for piece in self._pieces])
        return parts


def fragments_of(parameters: Iterable[nn.Parameter], count: int) -> tuple[Fragment, ...]:
    """All elements of the parameters in `count` fragments, which differ by one element at most.

    Their common dtype is float64 where one of the parameters has it, else float32.

    Raises:
        BadJob: there are fewer elements than fragments.
    """
    every = list(parameters)
    total = sum(p.numel() for p in every)
    if total < count:
        raise BadJob(f"{total} trained parameters cannot be cut into {count} fragments that are exchanged in turn")
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in every) else torch.float32
    edges = [total * number // count for number in range(count + 1)]
    return tuple(Fragment(_between(every, first, last), dtype) for first, last in pairwise(edges))


def _between(parameters: Sequence[nn.Parameter], first: int, last: int) -> list[_Piece]:
    """The pieces of elements first..last of all of them."""
    pieces, offset = [], 0
    for parameter in parameters:
        start, stop = max(first - offset, 0), min(last - offset, parameter.numel())
        if start < stop:
            pieces.append(_Piece(parameter, start, stop))
        offset += parameter.numel()
    return pieces
