"""Compiling a model with `torch.compile`, one region at a time.

What: forward and backward pass of each region become kernels of inductor, fused, for inputs of one shape. Where a model
repeats a block, the blocks are the regions: code compiled for one serves all of its kind, and the code between them
runs uncompiled. Elsewhere the region is the whole model. The loss is a region of its own: one of logits in half
precision is computed without a copy of them in full precision. Over several processes replicas and shards are compiled,
and what they send is not. A block that sends messages itself, to experts elsewhere, is compiled in parts: the modules
around its exchanges (`parts_around`), and what is computed between two exchanges, for any number of rows received.
Use when: many small operations follow each other, and training is long enough to pay for compilation (seconds to
minutes). Costs: that time in the first update; roundings differ, so a compiled plan's gradient is compared with fp32's.
Does not combine with: fake tensors, machines without a compiler, code that cannot be captured as one graph: such a
model, or part of a block, runs uncompiled, and `Compilation.problem` names the line; so does one whose inputs keep
changing their shape (`MOST_SHAPES`). Micro-batches of another size and evaluation run uncompiled as well, since each
new shape would be compiled again.
Source: J. Ansel et al., "PyTorch 2", ASPLOS 2024; https://docs.pytorch.org/docs/stable/generated/torch.compile.html;
regions as in https://docs.pytorch.org/tutorials/recipes/regional_compilation.html; parts of blocks with experts as in
TorchTitan's `apply_compile`, https://github.com/pytorch/torchtitan.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import FrameSummary
from typing import Any

import torch
from torch import nn

from stoker.activity import doing
from stoker.errors import DoesNotFit
from stoker.stepping.activation_checkpointing import (
    Checkpointed,
    selectively_checkpointed,
    separately_compiled_blocks,
    without_cached_casts,
)
from stoker.stepping.uncompiled import is_uncompiled

_RUNS_AS_IT_IS = "cannot be compiled and runs as it is"
_CPP_COMPILERS = ("g++", "clang++", "c++")
_C_COMPILERS = ("gcc", "clang", "cc")

MOST_SHAPES = 64
"""Largest number of compilations of one piece of code, as for other shapes of its inputs. Plans tried in one process
share their code: a few of them would exhaust PyTorch's own 8."""

_LEAST_ROWS = 2
"""Code for any number of rows is not for fewer: the compiler takes sizes of 0 and 1 for constants."""

_SWITCHES: dict[str, dict[str, Any]] = {
    # The backward pass is compiled with its forward pass: what cannot be compiled shows before anything is computed.
    "torch._functorch.config": {"force_non_lazy_backward_lowering": True},
    # For versions whose `torch.compile` lacks the option: at least the first call has room.
    "torch._dynamo.config": {"recompile_limit": MOST_SHAPES},
}
"""PyTorch's settings while a region is compiled for the first time; a version that lacks one goes without."""


@dataclass(eq=False)
class Compilation:
    """The result of compiling a model.

    `regions` are the compiled modules, each compiled at its first call. `problem` says why, and at which of the user's
    lines, the model runs uncompiled after all; None as long as it runs compiled. `is_in_parts`: regions are parts of
    blocks, of which one that cannot be compiled leaves the others compiled, since a block that is checkpointed has to
    do the same again.
    """

    regions: tuple[nn.Module, ...]
    is_in_parts: bool = False
    problem: str | None = field(default=None, init=False)

    def undo(self) -> None:
        """Let the regions run uncompiled again, as before `compile_in_place`."""
        for region in self.regions:
            forward: Any = region.forward
            if isinstance(forward, Exchanging):
                forward.uncompile()
            else:
                holder: Any = forward if isinstance(forward, Checkpointed) else region
                holder.forward = holder.forward.uncompiled


class Exchanging(abc.ABC):
    """A module's forward pass that sends messages, which compiled code cannot contain, and computes between them."""

    @abc.abstractmethod
    def compile(self, compilation: Compilation) -> None:
        """Compile what is computed between messages, by `compiled_part`."""

    @abc.abstractmethod
    def uncompile(self) -> None:
        """Let it run uncompiled again."""


def compile_in_place(
    model: nn.Module,
    device: torch.device,
    hooked_blocks: Sequence[nn.Module] = (),
    exchanging: Sequence[nn.Module] = (),
) -> Compilation:
    """Compile `model` for `device` at its next call; the names of weights stay.

    `hooked_blocks` have hooks of a layout, which compiled code cannot contain: they are the regions. Where modules
    within are `exchanging`, whose forward passes are `Exchanging`, the regions are the parts around these.

    Raises:
        DoesNotFit: this machine lacks a compiler.
    """
    if missing := compiler_missing(device):
        raise DoesNotFit(
            f"the plan is compiled, but {missing}",
            remedy="Install it (on Debian: `apt install g++`), or use a plan with compile false.",
        )
    if exchanging:
        parts = (part for block in hooked_blocks or (model,) for part in parts_around(exchanging, block))
        compilation = Compilation(tuple(parts), is_in_parts=True)
    else:
        compilation = Compilation(tuple(hooked_blocks or compiled_regions(model)))
    for region in compilation.regions:
        # Not `region.compile()`: it silently does nothing for a module of PyTorch's own class, such as nn.Sequential.
        if isinstance(region.forward, Checkpointed) and region.forward.is_selective:
            # What is kept is the compiler's to know: the checkpoint is in the graph.
            inside = functools.partial(selectively_checkpointed, region.forward.forward)
            region.forward = _Region(region.forward, compilation, inside)
        elif isinstance(region.forward, Checkpointed):  # the block within, so that its code is shared too
            region.forward.forward = _Region(region.forward.forward, compilation)
        elif isinstance(region.forward, Exchanging):
            region.forward.compile(compilation)
        else:
            region.forward = _Region(region.forward, compilation)
    return compilation


def compiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of tensors, compiled at its first call; as it is, where it cannot be."""
    return _Region(function, Compilation(()))


def compiled_part(
    function: Callable[..., Any], compilation: Compilation, *, has_any_rows: bool = False
) -> Callable[..., Any]:
    """`function` of tensors, compiled at its first call as a part of `compilation`; `.uncompiled` is as it was.

    `has_any_rows`: the first dimension of every tensor has another size at each call, and the code is for all of them.
    """
    return _Region(function, compilation, has_any_rows=has_any_rows)


def parts_around(exchanging: Sequence[nn.Module], block: nn.Module) -> Iterator[nn.Module]:
    """The modules of `exchanging` within a block, or itself, and the outermost ones that hold none of them.

    Left out are single layers of PyTorch, which are a kernel each anyway.
    """
    modules, is_list = list(block.modules()), isinstance(block, nn.ModuleList | nn.ModuleDict)
    if any(block is one for one in exchanging):
        yield block
    elif is_list or any(module is one for module in modules for one in exchanging):  # a list has no pass of its own
        for child in block.children():
            yield from parts_around(exchanging, child)
    elif len(modules) > 1 or not type(block).__module__.startswith("torch.nn"):
        yield block


def compiled_regions(model: nn.Module) -> list[nn.Module]:
    """The modules that are compiled separately: blocks of one kind, or the whole model.

    Blocks are chosen where the code of one serves at least three, and where they hold most of the model's layers: the
    code outside of them stays uncompiled.
    """
    blocks = separately_compiled_blocks(model)
    inside = sum(_num_layers(block) for block in blocks)
    return blocks if 2 * inside > _num_layers(model) else [model]


def is_double_backward(problem: RuntimeError) -> bool:
    """Whether PyTorch refuses to differentiate a compiled pass twice."""
    return "create_graph=" in str(problem) or "double backward" in str(problem)


def compiler_missing(device: torch.device) -> str | None:
    """The compiler that inductor needs and does not find here, as text; None where nothing is missing."""
    if device.type == "cpu":
        return _absent("CXX", _CPP_COMPILERS, "C++")
    if importlib.util.find_spec("triton") is None:
        return "Triton, which writes kernels for a GPU, is not installed"
    return _absent("CC", _C_COMPILERS, "C")


class _Region:
    """A region's forward pass, compiled at its first call; uncompiled from the moment one region cannot be captured.

    A region is captured whole or not at all, forward and backward before anything is computed: a failed call has
    changed nothing, and is repeated uncompiled. `compiled` is what is compiled, if not `forward`. `has_any_rows` as
    `compiled_part` has it.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        compilation: Compilation,
        compiled: Callable[..., Any] | None = None,
        *,
        has_any_rows: bool = False,
    ) -> None:
        self.uncompiled, self._compilation, self._has_any_rows = forward, compilation, has_any_rows
        # The option for every call, where this PyTorch has it; patching its setting takes 70 µs a call.
        has_option = "recompile_limit" in inspect.signature(torch.compile).parameters
        limit: dict[str, Any] = {"recompile_limit": MOST_SHAPES} if has_option else {}
        self._compiled = torch.compile(compiled or forward, dynamic=False, fullgraph=True, **limit)
        self._is_compiled = self._is_given_up = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        has_problem = self._compilation.problem is not None and not self._compilation.is_in_parts
        if self._is_given_up or has_problem or is_uncompiled():
            return self.uncompiled(*args, **kwargs)
        if self._has_any_rows:
            if len(args[0]) < _LEAST_ROWS:
                return self.uncompiled(*args, **kwargs)
            compiler: Any = importlib.import_module("torch._dynamo")
            for tensor in args:
                compiler.mark_dynamic(tensor, 0)
        from torch._dynamo.exc import FailOnRecompileLimitHit  # noqa: PLC0415 - takes seconds, as `_capture_errors` does

        try:
            # Compiled code keeps no casts, and is recompiled where that setting differs, as in checkpointed blocks.
            with without_cached_casts(), contextlib.nullcontext() if self._is_compiled else _first_call():
                output = self._compiled(*args, **kwargs)
        except _capture_errors() as problem:
            lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [type(problem).__name__]
            reason = " ".join(lines[: 2 if lines[0].endswith(":") else 1]).rstrip(".")
            line = users_line(getattr(problem, "real_stack", None) or ())
            where = f", at {Path(line.filename).name}:{line.lineno} (`{line.line}`)" if line is not None else ""
            self._give_up(f"{reason}{where}")
            return self.uncompiled(*args, **kwargs)
        except FailOnRecompileLimitHit:  # not a TorchDynamoException
            self._give_up(
                f"it goes on meeting shapes, or values, that it was not yet compiled for (at most {MOST_SHAPES} are)"
            )
            return self.uncompiled(*args, **kwargs)
        self._is_compiled = True
        return output

    def _give_up(self, reason: str) -> None:
        what = "a part of the model" if self._compilation.is_in_parts else "the model"
        self._is_given_up = True
        self._compilation.problem = f"{what} {_RUNS_AS_IT_IS}: {reason}"


@functools.cache
def _capture_errors() -> tuple[type[Exception], ...]:
    """What the compiler raises about code that it cannot capture; nothing has been computed then."""
    # Sizes that depend on values, as numbers of experts' rows; and code that takes a number of rows for a constant.
    sizes = "torch.fx.experimental.symbolic_shapes", ("GuardOnDataDependentSymNode", "ConstraintViolationError")
    names = [("torch._dynamo.exc", ("TorchDynamoException",)), sizes]
    return tuple(getattr(importlib.import_module(module), name) for module, of_it in names for name in of_it)


@contextlib.contextmanager
def _first_call() -> Iterator[None]:
    """Sets `_SWITCHES`, and hides warnings about PyTorch's own access to gradients, and advice."""
    with doing("compiling", is_long=True), contextlib.ExitStack() as stack, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        # The compiler makes an object of a function's class to capture it, of which PyTorch warns its users.
        warnings.filterwarnings("ignore", r".*autograd\.function\.Function.* should not be instantiated")
        # Advice of inductor about speed, such as to allow tf32: the plan has decided.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._inductor\.")
        # Advice about changes in place under selective checkpointing, which compiled code does not have.
        advice = logging.getLogger("torch._higher_order_ops.wrap")
        stack.callback(advice.setLevel, advice.level)
        advice.setLevel(logging.ERROR)
        for module, switches in _SWITCHES.items():
            config: Any = importlib.import_module(module)
            known = {name: value for name, value in switches.items() if hasattr(config, name)}
            if known:
                stack.enter_context(config.patch(known))
        yield


def users_line(stack: Iterable[FrameSummary]) -> FrameSummary | None:
    """The innermost line that is neither PyTorch's nor ours, or the innermost of all."""
    frames, libraries = list(stack), {Path(torch.__file__).parent, Path(__file__).parents[1]}
    users = [frame for frame in frames if libraries.isdisjoint(Path(frame.filename).parents)] or frames
    return users[-1] if users else None


def _num_layers(module: nn.Module) -> int:
    """Number of modules within that hold no others, an estimate of the amount of computation."""
    return sum(next(inner.children(), None) is None for inner in module.modules())


def _absent(variable: str, names: tuple[str, ...], language: str) -> str | None:
    """None where a compiler is found."""
    candidates = (os.environ[variable],) if os.environ.get(variable) else names
    if any(shutil.which(name) for name in candidates):
        return None
    return f"no {language} compiler is found here (looked for {', '.join(candidates)})"
