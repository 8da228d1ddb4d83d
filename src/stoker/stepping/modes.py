"""Training and evaluation mode of modules; a frozen part of a model keeps the mode that it was given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn


def to_training(model: nn.Module) -> nn.Module:
    """`model` in training mode, in place, but for what was put into evaluation mode within a frozen part.

    A part is frozen if it has parameters and none of them requires a gradient. In evaluation mode its batch norms
    normalise by their running statistics, which then do not move, and its dropout is off: what is usually meant by a
    frozen backbone, and stays as the user set it. Anywhere else evaluation mode is what loading left, and is undone.
    """
    kept = [part for frozen in _frozen_parts(model) for part in frozen.modules() if not part.training]
    model.train()
    for part in kept:
        part.training = False
    return model


@contextlib.contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Within the block `model` is in evaluation mode; afterwards each module is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _frozen_parts(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            yield module
