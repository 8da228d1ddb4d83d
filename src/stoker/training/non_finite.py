"""Where a number that is not finite came from: one redo of the update that looks at everything on its way."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stoker.errors import StokerError
from stoker.loading.batches import Batch
from stoker.loading.fields import map_tensors
from stoker.loading.order import Indices
from stoker.loading.workers import named
from stoker.records import Position
from stoker.records.codec import JSON
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite
from stoker.stepping.torch_compile import uncompiled
from stoker.store import write_atomic


@dataclasses.dataclass
class NonFiniteReport:
    """What is known of a number that was not finite.

    `first` is where the first one was met, in the order of the computation: a weight, an input, a module's output, the
    loss, a gradient; None where the redo met none. `gradient_norms` are by parameter, of the redo.
    """

    what: str
    update: int
    samples: int
    precision: str
    micro_batch: int
    learning_rates: list[float]
    epoch: int | None = None
    indices: list[int] = dataclasses.field(default_factory=list)
    loss: float | None = None
    first: str | None = None
    gradient_norms: dict[str, float] = dataclasses.field(default_factory=dict)
    problem: str | None = None


InData = Callable[[Indices, int], Indices]
"""Gives where samples of an epoch lie in the data that the user gave."""


def examine(
    step: Step, problem: NotFinite, batch: Batch | None, position: Position, in_data: InData
) -> NonFiniteReport:
    """Redo the update's forward and backward pass and look; without a batch only the weights are looked at.

    Buffers and gradients are left as that pass leaves them. Buffers must be as they were before the update.
    """
    found = NonFiniteReport(
        what=problem.message,
        update=position.updates + 1,
        samples=position.samples,
        precision=step.plan.precision,
        micro_batch=step.plan.micro_batch,
        learning_rates=[float(group["lr"]) for group in step.optimizer.param_groups],
    )
    found.first = _first_weight(step.model)
    if batch is None:
        return found
    found.epoch, found.indices = batch.epoch, in_data(batch.indices, batch.epoch).tolist()
    try:
        _redo(step, batch, position.updates, found, in_data)
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises now, the first error is the one to tell
        found.problem = f"the redo raised {type(error).__name__}: {error}"
    return found


def write_dump(folder: Path | None, found: NonFiniteReport, position: Position) -> Path | None:
    """Write what was found as JSON; None where it cannot be, which is not worth an error of its own."""
    if folder is None:
        return None
    path = folder / f"not-finite-{position.samples:012}.json"
    with suppress(OSError, StokerError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(_plain(dataclasses.asdict(found)), indent=2) + "\n", what="what was found")
        return path
    return None


def _redo(step: Step, batch: Batch, update: int, found: NonFiniteReport, in_data: InData) -> None:
    first: list[str] = [found.first] if found.first is not None else []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        if not first and not _is_finite(tensor):
            first.append(f"in the input{_of_samples(tensor, batch, in_data)}")
        return tensor

    map_tensors(batch.cut(0, batch.size), look)
    step.forget_gradients()
    # Only a pass of the modules themselves calls their hooks.
    with _watched(step.model, first), uncompiled(), step.ordinary():
        loss = step.gradients(batch, update)
    found.loss = float(loss)
    if not first and not math.isfinite(found.loss):
        first.append("the loss itself: every module's output was finite")
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            found.gradient_norms[name] = float(parameter.grad.norm())
            if not first and not _is_finite(parameter.grad):
                first.append(f"the gradient of {name}")
    found.first = first[0] if first else None


@contextmanager
def _watched(model: nn.Module, first: list[str]) -> Iterator[None]:
    """Within the block, the first module whose output is not finite is noted."""

    def hook(name: str) -> Any:
        def look(module: nn.Module, _inputs: Any, output: Any) -> None:
            if first:
                return
            tensors = output if isinstance(output, list | tuple) else [output]
            if any(isinstance(one, torch.Tensor) and not _is_finite(one) for one in tensors):
                first.append(f"in the output of {name or 'the model'} ({type(module).__name__})")

        return look

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_weight(model: nn.Module) -> str | None:
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            return f"in the weights before the update: {name}"
    return None


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _of_samples(tensor: torch.Tensor, batch: Batch, in_data: InData) -> str:
    """Whose rows of a batch's tensor are not finite; nothing where it has no row for each sample."""
    if tensor.dim() == 0 or len(tensor) != batch.size:
        return ""
    rows = (~torch.isfinite(tensor)).reshape(batch.size, -1).any(1).nonzero().flatten().tolist()
    return f" (samples {named(in_data(batch.indices[rows], batch.epoch))})"


def _plain(value: Any) -> JSON:
    """As JSON, which has no word for what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
