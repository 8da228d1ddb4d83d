"""Values that a model and its loss keep in Python between passes: counters, factors, lists of numbers.

What: attributes of modules, of a loss that is an object, and of objects of the user's own classes that these hold
(three levels deep); variables outside `forward` and the loss that their code names. Plain values (numbers, texts, None,
and lists, tuples, dicts, sets and deques of them) that training changed are kept in checkpoints and restored; changes
of tensors and arrays in attributes are only detected.
Use when: a step is made, saved and restored, and when a job is probed. Costs: a walk over the modules for each
checkpoint, nothing in an update.
Not seen: collections of more than 10,000 items, modules that are not registered, iterators, objects of C.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.jobs.code_digest import is_installed, name_of
from stoker.records.codec import JSON
from stoker.stepping.distributed_tensors import as_real
from stoker.stepping.own_step import CombinedOptimizer

_MOST_ITEMS, _MOST_ELEMENTS, _DEPTH = 10_000, 2**22, 3
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_NOT_USERS = frozenset({*sys.stdlib_module_names, "torch", "numpy", "stoker"})
_TENSORS = (torch.Tensor, np.ndarray)
_OPAQUE = "an object that is not looked into"
_COLLECTIONS = {kind.__name__: kind for kind in (list, tuple, dict, set, frozenset, deque)}


@functools.cache
def _of_every_optimizer() -> frozenset[str]:
    """Names of the attributes that each optimiser has. Making one as a module is imported would import the compiler."""
    return frozenset(vars(torch.optim.Optimizer([torch.zeros(1)], {})))


@dataclass(frozen=True)
class _Tensor:
    """The fingerprint of a tensor or an array: its shape and two sums over its elements, as texts."""

    shape: tuple[int, ...]
    sums: tuple[str, str]


@dataclass(frozen=True)
class _Holder:
    """A place that keeps values: an object, or the variables outside a function."""

    name: str
    kind: str
    values: Mapping[str, Any]
    put: Callable[[str, Any], None]
    owner: object = None
    """The object that has the values as attributes."""


@dataclass(frozen=True)
class PythonState:
    """The values that a model and a loss keep, by holder and name, in a form that can be compared."""

    values: dict[tuple[str, str], Any]
    kinds: dict[str, str]

    def changed_since(self, before: PythonState) -> set[tuple[str, str]]:
        """The places whose values have changed or are new."""
        return {
            place
            for place, value in self.values.items()
            if value is not _OPAQUE and before.values.get(place, _OPAQUE) != value
        }

    @property
    def has_tensors(self) -> bool:
        """Whether tensors or arrays are among them, also within lists, tuples and dicts."""
        return any(map(_is_of_tensors, self.values.values()))

    def is_plain(self, place: tuple[str, str]) -> bool:
        """Whether a checkpoint can hold the value there."""
        return _is_plain(self.values[place])

    def is_count(self, place: tuple[str, str]) -> bool:
        """Whether the value there is a whole number of a model's own."""
        return type(self.values[place]) is int and not is_shared(place[0])

    def in_words(self, place: tuple[str, str]) -> str:
        """The place as a user calls it: `the attribute 'calls' of Net`."""
        return f"the {'variable' if is_outside(place) else 'attribute'} {place[1]!r} of {self.kinds[place[0]]}"


def _is_of_tensors(form: Any) -> bool:
    """Whether a value in the form of `_form` is, or has in it, a tensor or an array."""
    return isinstance(form, _Tensor) or (isinstance(form, tuple | list) and any(map(_is_of_tensors, form)))


def is_outside(place: tuple[str, str]) -> bool:
    """Whether a place is outside the model and the loss: a variable of a function's surroundings."""
    return place[0].endswith("()")


def is_shared(holder: str) -> bool:
    """Whether copies of a model share the values there: they are the loss's, the optimiser's, or outside."""
    return holder.endswith("()") or holder.startswith(("loss:", "optimizer:"))


def python_state(
    model: nn.Module, loss: object = None, optimizer: object = None, *, with_tensors: bool = True
) -> PythonState:
    """The values that model, loss and optimiser keep in Python now, optionally without tensors and arrays."""
    values: dict[tuple[str, str], Any] = {}
    kinds: dict[str, str] = {}
    for holder in _holders(model, loss, optimizer):
        kinds[holder.name] = holder.kind
        for key, value in holder.values.items():
            values[holder.name, key] = _form(value, with_tensors=with_tensors)
    return PythonState(values, kinds)


def unsaved_tensors(optimizer: torch.optim.Optimizer) -> list[str]:
    """The attributes of users' optimisers in which these keep tensors besides their state, if no `state_dict` has them.

    An optimiser within another keeps such, unless both have one state.
    """

    def is_unsaved(part: torch.optim.Optimizer, value: object) -> bool:
        if isinstance(value, torch.optim.Optimizer):
            return value.state is not part.state
        return _has_tensors(value)

    return [
        key
        for part in _parts(optimizer)
        if _is_users(part) and type(part).state_dict is torch.optim.Optimizer.state_dict
        for key, value in vars(part).items()
        if key not in _of_every_optimizer() and is_unsaved(part, value)
    ]


def _parts(optimizer: object) -> Sequence[Any]:
    """The optimisers of a job's own step, or the one that it is."""
    return optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)


def _has_tensors(value: object) -> bool:
    """Whether it is, or a collection has, a tensor or an array that is no weight of the model's."""
    if isinstance(value, dict):
        return any(map(_has_tensors, value.values()))
    if isinstance(value, list | tuple | deque):
        return any(map(_has_tensors, value))
    return isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and not value.requires_grad)


def plain_changes(model: nn.Module, loss: object, before: PythonState, optimizer: object = None) -> dict[str, JSON]:
    """The plain values that differ from `before`, for a checkpoint: by holder, then by name.

    Without those that were None where a tensor was None, too: they describe it, as the length of a cached table, and
    a checkpoint does not have it.
    """
    now = python_state(model, loss, optimizer, with_tensors=False)
    changes: dict[str, JSON] = {}
    of_tensors = {
        holder.name
        for holder in _holders(model, loss, optimizer)
        for key, value in holder.values.items()
        if isinstance(value, _TENSORS) and before.values.get((holder.name, key), _OPAQUE) is None
    }
    for holder, key in sorted(now.changed_since(before)):
        describes_tensor = holder in of_tensors and before.values.get((holder, key), _OPAQUE) is None
        if now.is_plain((holder, key)) and not describes_tensor:
            changes.setdefault(holder, {})[key] = now.values[holder, key]
    return changes


def own_values(kept: Mapping[str, JSON]) -> dict[str, JSON]:
    """The values of `plain_changes` in attributes of the model, which its copies do not share."""
    return {holder: values for holder, values in kept.items() if not is_shared(holder)}


def put_plain(model: nn.Module, loss: object, kept: Mapping[str, JSON], optimizer: object = None) -> None:
    """Restore values of `plain_changes`; holders that no longer exist are skipped."""
    for holder in list(_holders(model, loss, optimizer)) if kept else ():
        for key, form in kept.get(holder.name, {}).items():
            value, current = _value(form), holder.values.get(key)
            if isinstance(current, list | dict | set | deque) and type(current) is type(value):
                current.clear()  # in place, since others may hold it
                _ = current.extend(value) if isinstance(current, list | deque) else current.update(value)
            else:
                holder.put(key, value)


@contextlib.contextmanager
def unchanged(model: nn.Module, loss: object) -> Iterator[None]:
    """Restores plain values of model and loss, as of a counter or a global, at the end.

    Tensors that were replaced are put back with the values that describe them, as a cached table and its length; not
    activations, and not what was changed in place.
    """
    before = python_state(model, loss, with_tensors=False)
    kept = {
        (holder.name, key): value
        for holder in _holders(model, loss)
        for key, value in holder.values.items()
        if value is None or (isinstance(value, _TENSORS) and not getattr(value, "requires_grad", False))
    }
    try:
        yield
    finally:
        undo_changes(model, loss, before)
        for holder in list(_holders(model, loss)):
            for key, value in list(holder.values.items()):
                old = kept.get((holder.name, key), value)
                if old is not value and isinstance(value, _TENSORS):
                    holder.put(key, old)


class _Tally:
    """Stands for a whole number: others can be added to it, and any other use is noted, and may fail."""

    __class__ = property(lambda _: int)  # to code that asks `isinstance(count, int)`

    def __init__(self, uses: list[str]) -> None:
        self._uses = uses

    def __add__(self, other: object) -> _Tally:
        if type(other) is not int:
            self._uses.append("+")
        return self

    __radd__ = __add__

    def __getattr__(self, name: str) -> Any:
        self._uses.append(name)
        raise AttributeError(name)


def _noted(name: str) -> Callable[..., Any]:
    def use(self: _Tally, *_: object) -> Any:
        self._uses.append(name)
        raise TypeError(f"{name} of a counter that nothing should read")

    return use


for _name in (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "repr", "str", "format", "int", "index", "float", "complex"),
    *(f"{side}{name}" for side in ("", "r") for name in ("sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow")),
    *("neg", "pos", "abs", "invert", "round", "trunc", "floor", "ceil", "reduce_ex", "deepcopy", "copy"),
    *(f"{side}{name}" for side in ("", "r") for name in ("and", "or", "xor", "lshift", "rshift")),
):
    setattr(_Tally, f"__{_name}__", _noted(_name))


@contextlib.contextmanager
def tallies(model: nn.Module, places: set[tuple[str, str]]) -> Iterator[list[str]]:
    """Within the block, the numbers at these places of a model can be added to, but not read; gives the reads.

    What else a pass does with them shows, whatever their values: a comparison with a number not yet reached, too.
    Afterwards they are as before, since copies of a model may share an object.
    """
    uses: list[str] = []
    put = [(holder, key) for holder in _holders(model, None) for key in holder.values if (holder.name, key) in places]
    before = [holder.values[key] for holder, key in put]
    for holder, key in put:
        holder.put(key, _Tally(uses))
    try:
        yield uses
    finally:
        for (holder, key), value in zip(put, before, strict=True):
            holder.put(key, value)


def undo_changes(model: nn.Module, loss: object, before: PythonState, *, with_shared: bool = True) -> None:
    """Restore the plain values of `before`, without tensors; those set since over a class's own are removed.

    Without those that copies of the model share, only its own attributes are restored.
    """
    changed = python_state(model, loss, with_tensors=False).changed_since(before)
    changed = {place for place in changed if with_shared or not is_shared(place[0])}
    kept: dict[str, JSON] = {}
    for place in changed & before.values.keys():
        if before.is_plain(place):
            kept.setdefault(place[0], {})[place[1]] = before.values[place]
    put_plain(model, loss, kept)
    made = changed - before.values.keys()
    for holder in list(_holders(model, loss)) if made else ():
        for key in holder.values:
            if (holder.name, key) in made and hasattr(type(holder.owner), key):
                vars(holder.owner).pop(key)


def _holders(model: nn.Module, loss: object, optimizer: object = None) -> Iterator[_Holder]:
    """Every place to look at, each once."""
    seen: set[int] = set()
    roots: list[tuple[str, Any]] = list(model.named_modules())
    called = loss.func if isinstance(loss, functools.partial) else loss
    owner = called.__self__ if inspect.ismethod(called) else called
    if isinstance(owner, nn.Module):
        roots += [(f"loss:{name}", module) for name, module in owner.named_modules()]
    elif _is_users(owner):
        roots.append(("loss:", owner))
    for name, value in roots:
        yield from _within(name, value, seen, _DEPTH)
    for number, part in enumerate(_parts(optimizer)):
        if _is_users(part):
            yield from _within(f"optimizer:{number or ''}", part, seen, _DEPTH)
    kinds = dict.fromkeys(type(value) for _, value in roots)
    functions = [getattr(kind, "forward", None) or getattr(kind, "__call__", None) for kind in kinds]  # noqa: B004 - the function itself is needed
    functions.append(called.__func__ if inspect.ismethod(called) else called)
    for function in functions:
        if isinstance(function, types.FunctionType) and _is_own_code(function.__module__):
            yield _outside(function)


def _within(name: str, value: Any, seen: set[int], depth: int) -> Iterator[_Holder]:
    """An object, and the user's objects that it holds."""
    if id(value) in seen:
        return
    seen.add(id(value))
    hidden = _OF_EVERY_MODULE if isinstance(value, nn.Module) else frozenset[str]()
    hidden = _of_every_optimizer() if isinstance(value, torch.optim.Optimizer) else hidden
    values = {key: item for key, item in vars(value).items() if key not in hidden}
    yield _Holder(name, type(value).__name__, values, vars(value).__setitem__, value)
    for key, item in values.items() if depth else ():
        if _is_users(item) and not isinstance(item, nn.Module):
            yield from _within(f"{name}.{key}", item, seen, depth - 1)


def _outside(function: types.FunctionType) -> _Holder:
    """The variables that a function's code names and that are not its own."""
    code, names = function.__code__, function.__globals__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    values = {key: names[key] for key in code.co_names if key in names}
    values |= {key: cell.cell_contents for key, cell in cells.items() if cell != types.CellType()}

    def put(key: str, value: Any) -> None:
        if key in cells:
            cells[key].cell_contents = value
        else:
            names[key] = value

    return _Holder(f"{name_of(function)}()", function.__qualname__, values, put)


def _is_users(value: object) -> bool:
    """Whether it is an object, with attributes, of a user's class."""
    is_other = isinstance(value, type | types.FunctionType | types.ModuleType | torch.Tensor | np.ndarray)
    return not is_other and hasattr(value, "__dict__") and _is_own_code(type(value).__module__)


@functools.lru_cache(maxsize=1024)
def _is_own_code(module: str | None) -> bool:
    """Whether a module of that name is the user's: neither the standard library's, nor Stoker's, nor installed."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    is_known = (module or "").split(".")[0] in _NOT_USERS
    return not (is_known or (file is not None and is_installed(Path(file))))


def _form(value: Any, *, with_tensors: bool) -> Any:
    """An immutable form of a value for later comparison; plain ones as in JSON, collections as (type, items)."""
    if isinstance(value, float) and not math.isfinite(value):
        return ("float", [str(value)])
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return _form(value.item(), with_tensors=with_tensors)
    if isinstance(value, torch.Tensor | np.ndarray):
        return _fingerprint(value) if with_tensors else _OPAQUE
    kind = type(value).__name__
    if type(value) is not _COLLECTIONS.get(kind) or len(value) > _MOST_ITEMS:
        return _OPAQUE
    if not isinstance(value, dict):
        items = [_form(item, with_tensors=with_tensors) for item in value]
        return (kind, sorted(items, key=repr) if isinstance(value, set | frozenset) else items)
    if not all(isinstance(key, str | int) for key in value):
        return _OPAQUE
    return (kind, [[key, _form(item, with_tensors=with_tensors)] for key, item in value.items()])


def _fingerprint(tensor: Any) -> Any:
    """Sums over a tensor or an array; opaque for an activation that is kept with its graph."""
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.kind not in "biufc" or tensor.dtype.itemsize > 16 or tensor.size > _MOST_ELEMENTS:
            return _OPAQUE
        tensor = torch.from_numpy(np.array(tensor))
    if tensor.requires_grad or tensor.numel() > _MOST_ELEMENTS or tensor.layout != torch.strided or tensor.is_meta:
        return _OPAQUE
    flat = as_real(tensor.detach()).double().flatten()
    order = torch.arange(1, len(flat) + 1, dtype=torch.float64, device=flat.device)
    return _Tensor(tuple(tensor.shape), (repr(float(flat.sum())), repr(float(flat @ order))))


def _is_plain(form: Any) -> bool:
    if isinstance(form, tuple):
        kind, items = form
        return all(_is_plain(item[1] if kind == "dict" else item) for item in items)
    return form is not _OPAQUE and not isinstance(form, _Tensor)


def _value(form: Any) -> Any:
    """The value of a plain form that was read from JSON."""
    if not isinstance(form, list | tuple):
        return form
    kind, items = form
    if kind == "float":
        return float(items[0])
    if kind == "dict":
        return {key: _value(item) for key, item in items}
    return _COLLECTIONS[kind](map(_value, items))
