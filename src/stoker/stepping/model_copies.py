"""Copies of a model that compute what it computes: with its hooks, and with what users note at its parameters.

`copy.deepcopy` makes parameters without their hooks and attributes, and shares functions. A hook, or another function
among a module's attributes, whose closure names the model would then read and change the original.

Not followed: functions within objects of other kinds, and methods replaced in a class.
"""

from __future__ import annotations

import contextlib
import copy
import functools
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
        self._functions: dict[int, types.FunctionType] = {}

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
        if not self._names_part(value, set()):
            return value
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._memo[id(value.__self__)])
        if id(value) not in self._functions:
            cells = tuple(map(self._cell, value.__closure__ or ()))
            function = types.FunctionType(value.__code__, value.__globals__, closure=cells or None)
            self._functions[id(value)] = function  # before its cells are filled: it may name itself
            for cell, own in zip(value.__closure__ or (), cells, strict=True):
                if own == types.CellType():
                    own.cell_contents = self._of_copy(cell.cell_contents)
            function.__defaults__ = tuple(map(self._of_copy, value.__defaults__ or ())) or None
            named = {name: self._of_copy(default) for name, default in (value.__kwdefaults__ or {}).items()}
            function.__kwdefaults__ = named or None
            function.__dict__.update(vars(value))
            for name in functools.WRAPPER_ASSIGNMENTS:
                setattr(function, name, getattr(value, name))
        return self._functions[id(value)]

    def _cell(self, cell: types.CellType) -> types.CellType:
        """The cell that stands for one in the copy, empty at first; functions that shared it share its copy."""
        if cell == types.CellType() or not self._names_part(cell.cell_contents, set()):
            return cell
        return self._cells.setdefault(id(cell), types.CellType())

    def _names_part(self, value: Any, seen: set[int]) -> bool:
        """Whether a value is a part of the model that has a copy, or a function that names one, through others too."""
        if self._memo.get(id(value), value) is not value:
            return True
        if isinstance(value, types.MethodType):
            return self._memo.get(id(value.__self__), value.__self__) is not value.__self__
        if not isinstance(value, types.FunctionType) or id(value) in seen:
            return False
        seen.add(id(value))
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        named = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return any(self._names_part(each, seen) for each in named)
