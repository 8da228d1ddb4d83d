"""From optimiser settings to PyTorch's optimisers."""

from __future__ import annotations

import fnmatch
import inspect
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob, nearest
from stoker.jobs import SGD, Adam, AdamW, Job, Optimizer
from stoker.records import Plan

_CLASSES: dict[type[Optimizer], type[torch.optim.Optimizer]] = {
    SGD: torch.optim.SGD,
    Adam: torch.optim.Adam,
    AdamW: torch.optim.AdamW,
}


def build_optimizer(job: Job, model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """The job's optimiser over the model's trainable parameters, in the plan's implementation.

    Raises:
        BadJob: a group's pattern matches no parameter, or a user's function returns no optimiser.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if isinstance(job.optimizer, Optimizer):
        implementation = plan.optimizer_implementation
        chosen: dict[str, Any] = {} if implementation == "default" else {implementation: True}
        groups = parameter_groups(job.optimizer, trainable)
        return _CLASSES[type(job.optimizer)](groups, **job.optimizer.settings(), **chosen)
    optimizer = job.optimizer(list(trainable.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadJob(f"Job(optimizer=…) made a {type(optimizer).__name__}, wanted a torch.optim.Optimizer")
    return optimizer


def parameter_groups(settings: Optimizer, named: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters by the first pattern of `settings.groups` that matches their name; the rest first."""
    matched: dict[str, list[nn.Parameter]] = {pattern: [] for pattern in settings.groups}
    rest: list[nn.Parameter] = []
    for name, parameter in named.items():
        pattern = next((p for p in settings.groups if fnmatch.fnmatchcase(name, p)), None)
        (rest if pattern is None else matched[pattern]).append(parameter)
    for pattern, found in matched.items():
        if not found:
            raise BadJob(f"optimiser group {pattern!r} matches no parameter that is left. {nearest(pattern, named)}")
    groups = [{"params": rest}] if rest else []
    return groups + [{"params": found, **settings.groups[pattern]} for pattern, found in matched.items()]


def implementations(job: Job, device_kind: str) -> tuple[str, ...]:
    """Implementations of the job's optimiser that a plan may choose among on this kind of device."""
    if not isinstance(job.optimizer, Optimizer):
        return ("default",)
    return ("fused", "default") if device_kind in ("cpu", "cuda") else ("default",)


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step` must be given a function that recomputes the loss, as in L-BFGS."""
    parameter = inspect.signature(type(optimizer).step).parameters.get("closure")
    return parameter is not None and parameter.default is inspect.Parameter.empty
