"""A module as exporters and engines take it: tensors in by position, a tuple of tensors out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from stoker.errors import BadArtifact

Call = Callable[..., Any]
"""`call(module, *inputs)` gives the module's output."""


class Flat(nn.Module):
    """A module, and how it is called with its inputs in order.

    Args:
        module: whose weights these are.
        call: takes the module and the inputs by position, and calls it.
    """

    def __init__(self, module: nn.Module, call: Call) -> None:
        super().__init__()
        self.train(module.training)
        self.module = module
        self._call = call

    def call(self, *inputs: torch.Tensor) -> Any:
        """What the module itself returns."""
        return self._call(self.module, *inputs)

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Every output, in the order of `named_outputs`."""
        return tuple(named_outputs(self.call(*inputs)).values())


def named_outputs(found: Any) -> dict[str, torch.Tensor]:
    """What a module returned, by name: `output`, `output_0` and on of several, or the keys of a dict; None is left out.

    Raises:
        BadArtifact: something in it is no tensor.
    """
    if isinstance(found, torch.Tensor):
        return {"output": found}
    if isinstance(found, Mapping):
        named = {str(name): value for name, value in found.items()}
    elif isinstance(found, tuple | list):
        named = {f"output_{at}": value for at, value in enumerate(found)}
    else:
        raise BadArtifact(
            f"The model returns a {type(found).__name__}; an exported one gives tensors",
            remedy="Return a tensor, a tuple of tensors, or a dict of them.",
        )
    named = {name: value for name, value in named.items() if value is not None}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise BadArtifact(
                f"The model's output {name!r} is a {type(value).__name__}; an exported one gives tensors",
                remedy="Return a tensor, a tuple of tensors, or a dict of them.",
            )
    return named


def by_position(module: nn.Module, *inputs: torch.Tensor) -> Any:
    """Call a module with its inputs in order."""
    return module(*inputs)


def by_name(names: tuple[str, ...]) -> Call:
    """How a module is called with keyword arguments of these names."""
    return lambda module, *inputs: module(**dict(zip(names, inputs, strict=True)))


def names_of_arguments(module: nn.Module, count: int) -> tuple[str, ...]:
    """What `forward` calls its first arguments; `input_0` and on where it does not name them."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    named = [one.name for one in parameters if one.kind in positional][:count]
    if len(named) == count:
        return tuple(named)
    return ("input",) if count == 1 else tuple(f"input_{at}" for at in range(count))
