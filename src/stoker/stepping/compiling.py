"""Compiling a model with `torch.compile`.

What: the model's forward and backward pass become kernels of inductor, fused, for inputs of one shape.
Use when: many small operations follow each other, and training is long enough to pay for compilation (seconds to
minutes). Costs: that time in the first update; roundings differ, so a compiled plan's gradient is compared with fp32's.
Does not combine with: fake tensors, machines without a compiler. Micro-batches of another size and evaluation run as
they would uncompiled, since each new shape would be compiled again.
Source: J. Ansel et al., "PyTorch 2", ASPLOS 2024; https://docs.pytorch.org/docs/stable/generated/torch.compile.html.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from typing import Any

import torch
from torch import nn

from stoker.errors import DoesNotFit

_CPP_COMPILERS = ("g++", "clang++", "c++")
_C_COMPILERS = ("gcc", "clang", "cc")


def compile_in_place(model: nn.Module, device: torch.device) -> None:
    """Compile `model` for `device` at its next call; the names of weights stay.

    Raises:
        DoesNotFit: this machine lacks a compiler.
    """
    if missing := _missing(device):
        raise DoesNotFit(
            f"the plan is compiled, but {missing}",
            remedy="Install it (on Debian: `apt install g++`), or use a plan with compile false.",
        )
    # Not `model.compile()`: without a word it does nothing to a model of PyTorch's own class, such as nn.Sequential.
    model.forward = torch.compile(model.forward, dynamic=False)


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Within the block, compiled models run as they would without."""
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def _missing(device: torch.device) -> str | None:
    """What inductor would need and does not find here."""
    if device.type == "cpu":
        return _absent("CXX", _CPP_COMPILERS, "C++")
    if importlib.util.find_spec("triton") is None:
        return "Triton, which writes kernels for a GPU, is not installed"
    return _absent("CC", _C_COMPILERS, "C")


def _absent(variable: str, names: tuple[str, ...], language: str) -> str | None:
    """None where a compiler is found."""
    candidates = (os.environ[variable],) if os.environ.get(variable) else names
    if any(shutil.which(name) for name in candidates):
        return None
    return f"no {language} compiler is found here (looked for {', '.join(candidates)})"
