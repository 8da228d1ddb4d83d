"""Whether modules are the same but for the values of their weights, so that they do the same."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

_PLUMBING = {"_parameters", "_buffers", "_modules"}
_DEPTH = 6
_BY_VALUE = (bool, int, float, complex, str, bytes, type, torch.dtype, types.BuiltinFunctionType)


def are_equal(modules: Sequence[nn.Module]) -> bool:
    """Whether all of `modules` are built alike, weights apart.

    The same classes under the same names, parameters and buffers of the same shapes and dtypes, and the same attributes
    otherwise; but a whole number may be the module's own place in the list, counted from anywhere.
    Not checked: what functions that are attributes do, beyond their code.
    """
    first, *others = (_configuration(module) for module in modules)
    for place, other in enumerate(others, start=1):
        if first.keys() != other.keys():
            return False
        for name, value in first.items():
            if other[name] != value and not _is_own_place(value, other[name], place):
                return False
    return True


def _is_own_place(first: object, value: object, place: int) -> bool:
    return type(first) is int and type(value) is int and value - first == place


def _configuration(module: nn.Module) -> dict[str, object]:
    """What `module` is made of, by dotted names."""
    found: dict[str, object] = {}
    for name, part in module.named_modules():
        found[f"{name}:class"] = type(part)
        for own, tensor in (*part._parameters.items(), *part._buffers.items()):  # noqa: SLF001 - those that are None too
            found[f"{name}:{own}"] = None if tensor is None else _form(tensor)
        for own, value in vars(part).items():
            if own not in _PLUMBING:
                found.update(_leaves(f"{name}:{own}", value, _DEPTH))
    return found


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad


def _leaves(name: str, value: Any, depth: int) -> Iterator[tuple[str, object]]:
    """An attribute's parts that compare by value; an object without any is told by its class alone."""
    if value is None or isinstance(value, _BY_VALUE):
        yield name, value
    elif isinstance(value, torch.Tensor):
        yield name, _form(value)
    elif isinstance(value, Mapping):
        yield f"{name}:len", (type(value), len(value))
        for key, item in value.items():
            yield from _leaves(f"{name}[{key if isinstance(key, str | int) else type(key).__name__}]", item, depth)
    elif isinstance(value, list | tuple | set | frozenset):
        yield f"{name}:len", (type(value), len(value))
        for place, item in enumerate(value):
            yield from _leaves(f"{name}[{place}]", item, depth)
    elif isinstance(value, types.FunctionType | types.MethodType):
        yield name, value.__code__
    elif isinstance(value, functools.partial):
        yield from _leaves(f"{name}()", (value.func, value.args, value.keywords), depth)
    elif isinstance(value, nn.Module) or not hasattr(value, "__dict__") or depth == 0:
        yield name, type(value)
    else:
        yield f"{name}:class", type(value)
        for own, item in vars(value).items():
            yield from _leaves(f"{name}.{own}", item, depth - 1)
