"""Copies of a model that compute what it computes: with its hooks, and with what users note at its parameters.

`copy.deepcopy` makes parameters without their hooks and attributes, and shares functions. A hook, or another function
among a module's attributes, whose closure names the model would then read and change the original.

Not followed: functions within objects of other kinds, and methods replaced in a class.
"""

from __future__ import annotations

import contextlib
import copy
import types
from typing import Any

from torch import nn


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A copy of `model`, whose hooks refer to the copy where they refer to a part of the model.

    Args:
        model: what to copy.
        memo: as of `copy.deepcopy`; what it has by the id of a part takes the place of a copy of that part.

    Raises:
        Exception: an attribute cannot be copied, such as a result of a pass with its graph, a lock or a generator.
    """
    memo = {} if memo is None else memo
    copy_ = copy.deepcopy(model, memo)
    rebinding = _Rebinding(memo)
    for module in copy_.modules():
        rebinding.rebind(vars(module))
    for parameter in model.parameters():
        own = memo.get(id(parameter), parameter)
        if own is not parameter:
            rebinding.note_at(parameter, own)
    return copy_


class _Rebinding:
    """Makes functions that name parts of a model name those of its copy, which `memo` has by the ids of the parts."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._cells: dict[int, types.CellType] = {}
        self._within: set[int] = set()

    def rebind(self, holder: dict[Any, Any]) -> None:
        """Replace functions among the values of a copied dict, and of dicts among them such as those of hooks."""
        for key, value in holder.items():
            if isinstance(value, types.FunctionType):
                holder[key] = self._of_copy(value)
            elif isinstance(value, dict) and value is not holder:
                for name, item in value.items():
                    if isinstance(item, types.FunctionType):
                        value[name] = self._of_copy(item)

    def note_at(self, parameter: nn.Parameter, own: nn.Parameter) -> None:
        """Give a copied parameter the attributes and the hooks of the original."""
        for name, value in vars(parameter).items():
            if name not in vars(own):
                kept = value
                with contextlib.suppress(Exception):  # what cannot be copied is shared
                    kept = copy.deepcopy(value, self._memo)
                setattr(own, name, self._of_copy(kept))
        if own.requires_grad:
            for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
                own.register_hook(self._of_copy(hook))
            for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
                own.register_post_accumulate_grad_hook(self._of_copy(hook))

    def _of_copy(self, value: Any) -> Any:
        """What stands for a value in the copy: a part's copy, a function that names these, else the value itself."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, types.MethodType) and id(value.__self__) in self._memo:
            return types.MethodType(value.__func__, self._memo[id(value.__self__)])
        if not isinstance(value, types.FunctionType) or id(value) in self._within:
            return value
        self._within.add(id(value))
        cells = tuple(map(self._cell, value.__closure__ or ()))
        defaults = tuple(map(self._of_copy, value.__defaults__ or ()))
        named = {name: self._of_copy(default) for name, default in (value.__kwdefaults__ or {}).items()}
        self._within.discard(id(value))
        before = (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        if all(now is old for now, old in zip((*cells, *defaults, *named.values()), before, strict=True)):
            return value
        function = types.FunctionType(
            value.__code__, value.__globals__, value.__name__, defaults or None, cells or None
        )
        function.__kwdefaults__ = named or None
        function.__dict__.update(vars(value))
        function.__annotations__ = value.__annotations__
        function.__module__, function.__qualname__, function.__doc__ = (
            value.__module__,
            value.__qualname__,
            value.__doc__,
        )
        return function

    def _cell(self, cell: types.CellType) -> types.CellType:
        """The cell that stands for one in the copy; functions that shared it share its copy."""
        if id(cell) not in self._cells:
            is_empty = cell == types.CellType()
            own = cell if is_empty else self._of_copy(cell.cell_contents)
            self._cells[id(cell)] = cell if is_empty or own is cell.cell_contents else types.CellType(own)
        return self._cells[id(cell)]
