"""What a traced step is told when it asks for a value that nobody computed.

A loss read by `.item()` is 0.0, a whole number 1, `any` is no and `all` is yes. Where the answer decides how large a
tensor gets, no guess will do: for a step function the user gives a hint, which is the number of elements at that line
of theirs; a Job has no place for one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from stoker.errors import BadJob

Hints = Mapping[str, int]
"""Sizes that depend on the data, by the line they come from: `{"train_me.py:42": 128}`."""

NO_HINTS: Hints = {}


class Answers:
    """Answers for one trace; `lines_of_numbers` are the lines that asked for whole numbers without a hint.

    `hints` are None where the user has no way to give any.
    """

    def __init__(self, hints: Hints | None = NO_HINTS) -> None:
        self.hints = NO_HINTS if hints is None else hints
        self._can_be_given = hints is not None
        self.number = 1
        self.lines_of_numbers: set[str] = set()

    def value(self, func: Any, args: tuple[Any, ...], line: str, *, is_all: bool) -> Any:
        """What a question about a tensor's values is answered.

        Raises:
            BadJob: a question other than for one scalar.
        """
        name = func.overloadpacket.__name__
        if name == "equal":
            return True
        if name != "_local_scalar_dense":
            raise self._asks_for_hint(name, line)
        dtype = args[0].dtype
        if dtype == torch.bool:
            return is_all
        if dtype.is_floating_point or dtype.is_complex:
            return 0.0
        if line in self.hints:
            return self.hints[line]
        if not line.startswith("stoker/"):
            self.lines_of_numbers.add(line)
        return self.number

    def result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], line: str) -> Any:
        """The result of an operation whose size depends on the data, in the size that the hint for `line` gives.

        Raises:
            BadJob: there is no hint, or the operation is not known.
        """
        name = func.overloadpacket.__name__
        make = _OF_SIZE.get(name)
        if line not in self.hints or make is None:
            raise self._asks_for_hint(name, line)
        return make(func, args, kwargs, self.hints[line])

    def _asks_for_hint(self, name: str, line: str) -> BadJob:
        where = line or "an unknown line"
        remedy = (
            self.remedy("Say how large it gets", where, "the number of elements there")
            if name in _OF_SIZE
            else "Rewrite that line so that shapes do not depend on values, for instance with torch.where."
        )
        return BadJob(f"`{name}` at {where} has a result whose size depends on the data", remedy=remedy)

    def remedy(self, ask: str, line: str, what: str) -> str:
        """What the user can do about a size that depends on the data: give the hint that `ask` asks for, or do without.

        `what` is the number that is wanted.
        """
        if self._can_be_given:
            return f'{ask}: hints={{"{line}": 128}}, {what}.'
        return (
            "On one attached device (`--on here`), a job like this is planned by trials. To forecast it for others or "
            "for several, rewrite that line so that sizes do not depend on the data, for instance with torch.where."
        )


def _nonzero(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], size: int) -> torch.Tensor:
    return torch.empty(size, args[0].dim(), dtype=torch.int64, device=args[0].device)


def _masked_select(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], size: int) -> torch.Tensor:
    return torch.empty(size, dtype=args[0].dtype, device=args[0].device)


def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: int) -> Any:
    """Each mask among the indices becomes as many index tensors as it has dimensions."""
    indices: list[torch.Tensor | None] = []
    for index in args[1]:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            indices += [torch.empty(size, dtype=torch.int64, device=index.device) for _ in range(index.dim())]
        else:
            indices.append(index)
    return func(args[0], indices, *args[2:], **kwargs)


def _repeat_interleave(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64, device=args[0].device)


def _unique(_func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any], size: int) -> tuple[torch.Tensor, ...]:
    values = torch.empty(size, dtype=args[0].dtype, device=args[0].device)
    inverse = torch.empty(args[0].shape, dtype=torch.int64, device=args[0].device)
    return values, inverse, torch.empty(size, dtype=torch.int64, device=args[0].device)


_OF_SIZE: dict[str, Callable[[Any, tuple[Any, ...], dict[str, Any], int], Any]] = {
    "_unique2": _unique,
    "index": _index,
    "masked_select": _masked_select,
    "nonzero": _nonzero,
    "repeat_interleave": _repeat_interleave,
}
"""Operations whose results can be made in a given size."""
