"""Compiling a model with `torch.compile`, one region at a time.

What: forward and backward pass of each region become kernels of inductor, fused, for inputs of one shape. Where a model
repeats a block, the blocks are the regions: code compiled for one serves all that are alike, and what lies between them
runs as it is. Elsewhere the region is the whole model.
Use when: many small operations follow each other, and training is long enough to pay for compilation (seconds to
minutes). Costs: that time in the first update; roundings differ, so a compiled plan's gradient is compared with fp32's.
Does not combine with: fake tensors, machines without a compiler, code that cannot be captured as one graph: such a
model runs as it would uncompiled, and `Compilation.problem` names the line; so does one whose inputs go on changing
their shape (`MOST_SHAPES`). Micro-batches of another size and evaluation run uncompiled as well, since each new shape
would be compiled again.
Source: J. Ansel et al., "PyTorch 2", ASPLOS 2024; https://docs.pytorch.org/docs/stable/generated/torch.compile.html;
regions as in https://docs.pytorch.org/tutorials/recipes/regional_compilation.html.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import nn

from stoker.errors import DoesNotFit
from stoker.stepping.activation_checkpointing import Checkpointed
from stoker.stepping.blocks import alike_blocks

_RUNS_AS_IT_IS = "the model cannot be compiled and runs as it is"
_CPP_COMPILERS = ("g++", "clang++", "c++")
_C_COMPILERS = ("gcc", "clang", "cc")

MOST_SHAPES = 64
"""Times that one piece of code is compiled, as for other shapes of its inputs. Plans tried in one process share their
code: a few of them would spend PyTorch's own 8."""

_SWITCHES: dict[str, dict[str, Any]] = {
    # The backward pass is compiled with its forward pass: what cannot be compiled shows before anything is computed.
    "torch._functorch.config": {"force_non_lazy_backward_lowering": True},
    # For versions in which `_limits` finds no option: there the first call at least is made with room for it.
    "torch._dynamo.config": {"recompile_limit": MOST_SHAPES},
}
"""PyTorch's settings while a region is compiled for the first time; a version that lacks one goes without."""


@dataclass(eq=False)
class Compilation:
    """How a model was compiled.

    `regions` are the modules compiled, one after the other as they are first called. `problem` says why, and at which
    of the user's lines, the model runs uncompiled after all; None as long as it does not.
    """

    regions: tuple[nn.Module, ...]
    problem: str | None = field(default=None, init=False)


def compile_in_place(model: nn.Module, device: torch.device) -> Compilation:
    """Compile `model` for `device` at its next call; the names of weights stay.

    Raises:
        DoesNotFit: this machine lacks a compiler.
    """
    if missing := compiler_missing(device):
        raise DoesNotFit(
            f"the plan is compiled, but {missing}",
            remedy="Install it (on Debian: `apt install g++`), or use a plan with compile false.",
        )
    compilation = Compilation(tuple(compiled_regions(model)))
    for region in compilation.regions:
        # Not `region.compile()`: without a word it does nothing to a module of PyTorch's own class, as nn.Sequential.
        if isinstance(region.forward, Checkpointed):  # what is checkpointed is compiled, so that it is shared as well
            region.forward.forward = _Region(region.forward.forward, compilation)
        else:
            region.forward = _Region(region.forward, compilation)
    return compilation


def compiled_regions(model: nn.Module) -> list[nn.Module]:
    """The modules that are compiled each by itself: blocks that are alike, or the model where they would be a part.

    Blocks are taken where the code of one serves three at least, and where they hold most of the model's layers: what
    lies outside of them stays as it is.
    """
    blocks = alike_blocks(model)
    inside = sum(_num_layers(block) for block in blocks)
    return blocks if 2 * inside > _num_layers(model) else [model]


def uncompiled() -> contextlib.AbstractContextManager[Any]:
    """Within the block, compiled models run as they would without."""
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def is_double_backward(problem: RuntimeError) -> bool:
    """Whether PyTorch refuses to differentiate a compiled pass twice."""
    return "create_graph=" in str(problem) or "double backward" in str(problem)


def compiler_missing(device: torch.device) -> str | None:
    """What inductor would need and does not find here; None where nothing is missing."""
    if device.type == "cpu":
        return _absent("CXX", _CPP_COMPILERS, "C++")
    if importlib.util.find_spec("triton") is None:
        return "Triton, which writes kernels for a GPU, is not installed"
    return _absent("CC", _C_COMPILERS, "C")


class _Region:
    """A region's forward pass, compiled at its first call; uncompiled from the moment one region cannot be captured.

    A region is captured whole or not at all, forward and backward before anything is computed: a call that fails has
    changed nothing, and is made again as it would be without.
    """

    def __init__(self, forward: Callable[..., Any], compilation: Compilation) -> None:
        self._forward, self._compilation = forward, compilation
        self._compiled = torch.compile(forward, dynamic=False, fullgraph=True, **_limits())
        self._is_compiled = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._compilation.problem is not None:
            return self._forward(*args, **kwargs)
        from torch._dynamo.exc import (  # noqa: PLC0415 - seconds, for those alone who compile
            FailOnRecompileLimitHit,
            TorchDynamoException,
        )

        try:
            with contextlib.nullcontext() if self._is_compiled else _at_first():
                output = self._compiled(*args, **kwargs)
        except TorchDynamoException as problem:
            self._compilation.problem = _in_words(problem)
            return self._forward(*args, **kwargs)
        except FailOnRecompileLimitHit:  # is none of the above
            self._compilation.problem = (
                f"{_RUNS_AS_IT_IS}: it goes on meeting shapes, or values, that it was not yet compiled for "
                f"(at most {MOST_SHAPES} are)"
            )
            return self._forward(*args, **kwargs)
        self._is_compiled = True
        return output


def _limits() -> dict[str, Any]:
    """`MOST_SHAPES` for every call, where this PyTorch has that option; changing its setting takes 70 µs a call."""
    name = "recompile_limit"
    return {name: MOST_SHAPES} if name in inspect.signature(torch.compile).parameters else {}


@contextlib.contextmanager
def _at_first() -> Iterator[None]:
    """Within the block, `_SWITCHES` are set, and PyTorch does not warn of what it does itself: looking at gradients."""
    with contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        for module, switches in _SWITCHES.items():
            config: Any = importlib.import_module(module)
            known = {name: value for name, value in switches.items() if hasattr(config, name)}
            if known:
                stack.enter_context(config.patch(known))
        yield


def _in_words(problem: Exception) -> str:
    """What stood in the way, in PyTorch's first sentence, and the user's line."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    line = users_line(getattr(problem, "real_stack", None) or ())
    where = f", at {Path(line.filename).name}:{line.lineno} (`{line.line}`)" if line is not None else ""
    return f"{_RUNS_AS_IT_IS}: {said.rstrip('.')}{where}"


def users_line(stack: Iterable[FrameSummary]) -> FrameSummary | None:
    """The innermost line that is neither PyTorch's nor ours, or the innermost of all."""
    frames, libraries = list(stack), {Path(torch.__file__).parent, Path(__file__).parents[1]}
    theirs = [frame for frame in frames if libraries.isdisjoint(Path(frame.filename).parents)] or frames
    return theirs[-1] if theirs else None


def _num_layers(module: nn.Module) -> int:
    """Modules within that hold no others: a stand-in for how much is computed there."""
    return sum(next(inner.children(), None) is None for inner in module.modules())


def _absent(variable: str, names: tuple[str, ...], language: str) -> str | None:
    """None where a compiler is found."""
    candidates = (os.environ[variable],) if os.environ.get(variable) else names
    if any(shutil.which(name) for name in candidates):
        return None
    return f"no {language} compiler is found here (looked for {', '.join(candidates)})"
