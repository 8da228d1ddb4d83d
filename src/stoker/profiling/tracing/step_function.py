"""Any training step, traced: a function of a batch that finds its model and optimiser around it.

The function and what it reaches are copied with fakes in place of tensors: the variables it closes over, the globals it
and the user's own functions name, the object it is bound to. The originals, and their memory, are left alone.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.loading import map_tensors
from stoker.profiling.tracing.answers import NO_HINTS, Hints
from stoker.profiling.tracing.fakes import Fakes
from stoker.profiling.tracing.lines import is_users_code
from stoker.profiling.tracing.operations import tensors_in
from stoker.profiling.tracing.session import Session, session
from stoker.records import Trace, TraceSettings


def trace_step(
    step_fn: Callable[[Any], Any], example_batch: Any, settings: TraceSettings, *, hints: Hints = NO_HINTS
) -> Trace:
    """The second of two calls of `step_fn(example_batch)`, as the target of `settings` would execute it.

    Of the settings, the target and the number of parts count: the batch, the precision and all else are as the function
    has them. Nothing is computed, and neither the function's model nor its optimiser changes.

    Args:
        step_fn: one update: forward, backward, optimiser. Everything it holds lies on the CPU, or on one GPU.
        example_batch: a tensor, or a tuple, list or dict of tensors, of the shapes of every batch.
        settings: the target.
        hints: sizes that depend on the data, by the user's line.

    Raises:
        BadJob: the step cannot be traced, or sizes depend on the data.
    """
    with session(settings, hints) as traced:
        reached = _Reached(traced.fakes)
        step = reached.function(step_fn)
        batch = map_tensors(example_batch, traced.fakes.of)
        _name_modules(reached.modules, traced)
        trace, _ = traced.trace(lambda: step(batch), lambda: _hold(reached, batch, traced))
    return trace


class _Reached:
    """Copies, with fakes for tensors, of what a function reaches; each thing once."""

    def __init__(self, fakes: Fakes) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.tensors: list[torch.Tensor] = []
        self._fakes = fakes
        self._copied: dict[int, Any] = {}  # the memo of all deep copies: what two of them share stays shared
        self._functions: dict[int, Any] = {}
        self._globals: dict[int, dict[str, Any]] = {}

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` over copies."""
        if isinstance(function, types.MethodType):
            return types.MethodType(self._code(function.__func__), self._holder("self", function.__self__))
        if isinstance(function, types.FunctionType):
            return self._code(function)  # type: ignore[no-any-return]
        if isinstance(function, nn.Module):
            return self.value("step", function)  # type: ignore[no-any-return]
        return types.MethodType(self._code(type(function).__call__), self._holder("self", function))

    def value(self, name: str, value: Any) -> Any:
        """A copy of `value` if it holds tensors, else itself; `name` is the variable it was found in."""
        if isinstance(value, types.FunctionType | types.MethodType) and is_users_code(value.__code__):
            return self.function(value)
        if isinstance(value, torch.Tensor):
            self.tensors.append(self._fakes.of(value))
            return self.tensors[-1]
        if type(value) in (list, tuple, dict):
            return self._container(name, value)
        if not isinstance(value, _HOLDERS):
            return value
        copied = self._deep_copy(name, value)
        if isinstance(copied, nn.Module):
            self.modules.setdefault(name, copied)
        if isinstance(copied, torch.optim.Optimizer) and not any(copied is one for one in self.optimizers):
            self.optimizers.append(copied)
        return copied

    def _container(self, name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.value(f"{name}.{key}", item) for key, item in value.items()}
        return type(value)(self.value(f"{name}.{place}", item) for place, item in enumerate(value))

    def _deep_copy(self, name: str, value: Any) -> Any:
        try:
            with self._fakes.copying():
                return copy.deepcopy(value, self._copied)
        except (TypeError, RuntimeError) as error:
            raise BadJob(
                f"`{name}`, a {type(value).__name__} that the step uses, cannot be copied: {error}",
                remedy="Keep locks, files and generators out of it, or hand the step a fresh one.",
            ) from error

    def _holder(self, name: str, holder: Any) -> Any:
        """The object a method is bound to, with copies of what it holds."""
        if isinstance(holder, _HOLDERS):
            return self.value(name, holder)
        copied = copy.copy(holder)
        for key, value in vars(holder).items():
            vars(copied)[key] = self.value(key, value)
        return copied

    def _code(self, function: Any) -> Any:
        if not isinstance(function, types.FunctionType) or id(function) in self._functions:
            return self._functions.get(id(function), function)
        cells = tuple(types.CellType() for _ in function.__closure__ or ())
        copied = types.FunctionType(
            function.__code__, self._globals_of(function), function.__name__, function.__defaults__, cells
        )
        self._functions[id(function)] = copied  # before what it reaches, which may be itself
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__defaults__ = self.value("defaults", function.__defaults__)
        names = _names_in(function.__code__)
        for name in names & function.__globals__.keys():
            copied.__globals__[name] = self.value(name, function.__globals__[name])
        for name, cell, original in zip(function.__code__.co_freevars, cells, function.__closure__ or (), strict=True):
            if _is_filled(original):
                cell.cell_contents = self.value(name, original.cell_contents)
        return copied

    def _globals_of(self, function: types.FunctionType) -> dict[str, Any]:
        return self._globals.setdefault(id(function.__globals__), dict(function.__globals__))


_HOLDERS = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""What holds tensors and can be copied as a whole."""


def _is_filled(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # a variable that is assigned later, or never
        return False
    return True


def _names_in(code: types.CodeType) -> set[str]:
    """Global names that the code and the functions defined in it may use."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*inner)


def _name_modules(modules: Mapping[str, nn.Module], traced: Session) -> None:
    """A single model's modules by their own names, those of several after their variables'."""
    for name, module in modules.items():
        traced.recorder.name_modules(module, "" if len(modules) == 1 else name)


def _hold(reached: _Reached, batch: Any, traced: Session) -> None:
    """Tell what lives from update to update."""
    hold = traced.recorder.storages.hold
    map_tensors(batch, lambda tensor: hold(tensor, "input"))
    for optimizer in reached.optimizers:
        for values in optimizer.state.values():
            for value in tensors_in(values.values() if isinstance(values, dict) else ()):
                hold(value, "optimizer state")
    for tensor in reached.tensors:
        hold(tensor, "buffer")
    for module in reached.modules.values():
        for name, buffer in module.named_buffers():
            hold(buffer, "buffer", name.rpartition(".")[0])
        for name, parameter in module.named_parameters():
            hold(parameter, "parameter", name.rpartition(".")[0])
            if parameter.grad is not None:
                hold(parameter.grad, "gradient", name.rpartition(".")[0])
