"""Starting without PyTorch's compiler, whose import takes a second, where nothing is compiled."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.utils.checkpoint

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

_INSTEAD = "__dynamo_disable"
"""The attribute of a wrapped function in which its wrapper keeps what it calls instead."""


def without_compiler(wrapper: FunctionT) -> FunctionT:
    """The wrapper, which from now on calls its function without importing the compiler: for what is never compiled.

    PyTorch wraps methods of optimisers, and those that see every operation, so that its compiler does not trace them. A
    wrapper imports the compiler at its first call, which takes a second of every start, asks it for a function to call
    instead, and keeps that in an attribute of the function.
    Source: `_disable_dynamo` in torch/_compile.py. In a version without the attribute the compiler is imported.
    """
    plain = inspect.getclosurevars(wrapper).nonlocals.get("fn")  # its `__wrapped__` may name another
    if plain is not None and not hasattr(plain, _INSTEAD):
        setattr(plain, _INSTEAD, plain)
    return wrapper


@contextlib.contextmanager
def checkpointing_without_compiler() -> Iterator[None]:
    """Within the block PyTorch's activation checkpointing does without the compiler; no step is compiled in it."""
    names = ("checkpoint", "_run_fn_with_dynamo_disabled")
    wrappers = [getattr(torch.utils.checkpoint, name) for name in names if hasattr(torch.utils.checkpoint, name)]
    functions = [inspect.getclosurevars(wrapper).nonlocals.get("fn") for wrapper in wrappers]
    new = [function for function in functions if function is not None and not hasattr(function, _INSTEAD)]
    for function in new:
        setattr(function, _INSTEAD, function)
    try:
        yield
    finally:
        for function in new:
            delattr(function, _INSTEAD)


def _operations_without_compiler() -> None:
    """`without_compiler` for PyTorch's operations in Python, which run on tensors without memory.

    Initial weights are drawn by one of them where a model's outline is made: that alone would import the compiler.
    """
    names = ("torch._refs", "torch._refs.nn.functional", "torch._refs.special", "torch._refs.linalg")
    pending = [value for name in names if name in sys.modules for value in vars(sys.modules[name]).values()]
    known: set[int] = set()
    while pending:
        function = pending.pop()
        if isinstance(function, types.FunctionType) and id(function) not in known:
            known.add(id(function))
            if function.__code__.co_filename.endswith("torch/_compile.py"):
                without_compiler(function)
            pending += [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]


_operations_without_compiler()
