"""Where a number that is not finite came from: the update is repeated once with every tensor checked on its way."""

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
from stoker.loading.fields import tensors_of
from stoker.loading.order import Indices
from stoker.loading.workers import named
from stoker.records import Position
from stoker.records.codec import to_json
from stoker.stepping.step import Step
from stoker.stepping.step_failures import NotFinite
from stoker.stepping.uncompiled import uncompiled
from stoker.store import write_atomic


@dataclasses.dataclass
class NonFiniteReport:
    """Findings about a number that was not finite.

    `first` is the place of the first one in the order of the computation: a weight, an input, a module's output, the
    loss, a gradient; None where the repetition met none. `gradient_norms` are those of the repetition, by parameter.
    `counts_nothing`: no target of the batch counts in the loss, which is divided by their number.
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
    counts_nothing: bool = False
    problem: str | None = None


InData = Callable[[Indices, int], Indices]
"""Indices of an epoch's samples in the data that the user gave."""


def examine(
    step: Step, problem: NotFinite, batch: Batch | None, position: Position, in_data: InData
) -> NonFiniteReport:
    """Repeat the update's forward and backward pass, checking every tensor; without a batch check the weights alone.

    Buffers must be as they were before the update. Buffers and gradients stay as the pass leaves them.
    """
    report = NonFiniteReport(
        what=problem.message,
        update=position.updates + 1,
        samples=position.samples,
        precision=step.plan.precision,
        micro_batch=step.plan.micro_batch,
        learning_rates=[float(group["lr"]) for group in step.optimizer.param_groups],
    )
    weights = (name for name, parameter in step.model.named_parameters() if not _is_finite(parameter))
    if (weight := next(weights, None)) is not None:
        report.first = f"in the weights before the update: {weight}"
    if batch is None:
        return report
    report.epoch, report.indices = batch.epoch, in_data(batch.indices, batch.epoch).tolist()
    try:
        _redo(step, batch, position.updates, report, in_data)
    except Exception as error:  # noqa: BLE001 - whatever the user's code raises, the first error is the one to report
        report.problem = f"the redo raised {type(error).__name__}: {error}"
    return report


def write_dump(folder: Path | None, report: NonFiniteReport, position: Position) -> Path | None:
    """Write the report as JSON; None where it cannot be written, which is no error of its own."""
    if folder is None:
        return None
    path = folder / f"not-finite-{position.samples:012}.json"
    with suppress(OSError, StokerError):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(to_json(report), indent=2) + "\n", what="what was found")
        return path
    return None


def _redo(step: Step, batch: Batch, update: int, report: NonFiniteReport, in_data: InData) -> None:
    first: list[str] = [report.first] if report.first is not None else []
    for tensor in tensors_of(batch.cut(0, batch.size)):
        if not first and not _is_finite(tensor):
            samples = ""
            if tensor.dim() > 0 and len(tensor) == batch.size:  # a row for each sample
                rows = (~torch.isfinite(tensor)).reshape(batch.size, -1).any(1).nonzero().flatten().tolist()
                samples = f" (samples {named(in_data(batch.indices[rows], batch.epoch))})"
            first.append(f"in the input{samples}")
    step.forget_gradients()
    # Only a pass of the modules themselves calls their hooks; a search for a loss scale would raise again.
    with _watched(step.model, first), uncompiled(), step.ordinary():
        loss = step.gradients(batch, update)
    report.loss = float(loss)
    if is_of_loss := not first and not math.isfinite(report.loss):
        first.append("the loss itself: every module's output was finite")
    for name, parameter in step.model.named_parameters():
        if parameter.grad is not None:
            report.gradient_norms[name] = float(parameter.grad.norm())
            if not first and not _is_finite(parameter.grad):
                first.append(f"the gradient of {name}")
    report.first = first[0] if first else None
    if is_of_loss and _counts_nothing(step, batch, update):
        report.counts_nothing = True
        report.first = f"the loss itself: no target of its {batch.size} samples counts"


def _counts_nothing(step: Step, batch: Batch, update: int) -> bool:
    """Whether the loss counts no target of the batch: by its count, or because all are the label that is left out."""
    content, objective = batch.cut(0, batch.size), step.objective
    target = objective.fields.target_of(content)
    if isinstance(target, torch.Tensor) and target.numel() and bool((target == objective.ignored).all()):
        return True
    return step.job.objective.loss is not None and float(step.loss_of(content, batch.size, update, 0).count) == 0


@contextmanager
def _watched(model: nn.Module, first: list[str]) -> Iterator[None]:
    """Within the block, add the first module whose output is not finite to `first`."""

    def hook(name: str) -> Any:
        def look(module: nn.Module, _inputs: Any, output: Any) -> None:
            if first:
                return
            tensors = output if isinstance(output, list | tuple) else [output]
            if any(isinstance(tensor, torch.Tensor) and not _is_finite(tensor) for tensor in tensors):
                first.append(f"in the output of {name or 'the model'} ({type(module).__name__})")

        return look

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
