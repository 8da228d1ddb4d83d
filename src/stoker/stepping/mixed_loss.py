"""The loss of mixed samples: that of the output with each of the two targets, in the sample's own proportion.

What: sum over samples of share * loss(output, first) + (1 - share) * loss(output, second). Entries that are not
counted, such as labels of -100, count in the same proportion, so that sum and count add up over micro-batches and
processes. Use when: Job(mix=…). Costs: a second loss of the same output. Source: as `jobs/mixing.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from stoker.errors import BadJob
from stoker.jobs import Job, Loss
from stoker.loading.mixing import MixedTarget

_IGNORED = -100

Entries = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""From output and target to the loss of each entry [B, ...], 0 where it is not counted, and whether it is (0 or 1)."""


def mixed_loss(entries: Entries, output: Any, target: MixedTarget) -> Loss:
    """Sum and count of the losses of mixed samples; see the head of this file."""
    (first, counted), (second, also) = entries(output, target.first), entries(output, target.second)
    share = target.share.to(first.dtype).view(-1, *[1] * (first.dim() - 1))
    total = (first * share).sum() + (second * (1 - share)).sum()
    # What counts in both counts once, without the rounding of share + (1 - share).
    return Loss(total, (also + share * (counted - also)).sum())


def entries_of(job: Job, loss: Callable[..., Any], *, takes_model: bool) -> Entries:
    """The job's loss entry by entry; `loss` is its function.

    Raises:
        BadJob: it is of the form (model, batch), which would see two targets.
    """
    if takes_model:
        raise BadJob(
            "Job(mix=…) mixes the losses of samples, and a loss of the form loss(model, batch) gives one for all",
            remedy="Give a loss of the form loss(output, target) with one value per sample, or leave mix out.",
        )
    if job.loss == "cross_entropy":
        return functools.partial(_cross_entropy_entries, label_smoothing=job.label_smoothing)
    if job.loss == "token_cross_entropy":
        return functools.partial(_token_cross_entropy_entries, label_smoothing=job.label_smoothing)
    return functools.partial(_entries_of_function, loss)


def _entries_of_function(function: Callable[..., Any], output: Any, target: Any) -> tuple[torch.Tensor, torch.Tensor]:
    values = function(output, target)
    if isinstance(values, torch.Tensor) and values.is_floating_point() and values.dim() > 0:
        return values, torch.ones_like(values)
    given = f"a tensor of shape {list(values.shape)}" if isinstance(values, torch.Tensor) else type(values).__name__
    raise BadJob(
        f"Job(mix=…) mixes the losses of samples, and the loss gives {given} for a batch",
        remedy='Return one value per sample (in PyTorch: reduction="none"), or leave mix out.',
    )


def _cross_entropy_entries(
    output: torch.Tensor, target: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    values = F.cross_entropy(output, target, reduction="none", label_smoothing=label_smoothing)
    if target.is_floating_point():
        return values, torch.ones_like(values)
    return values, (target != _IGNORED).to(values.dtype)


def _token_cross_entropy_entries(
    output: torch.Tensor, target: torch.Tensor, label_smoothing: float
) -> tuple[torch.Tensor, torch.Tensor]:
    values, counted = _cross_entropy_entries(output.flatten(0, -2), target.flatten(), label_smoothing)
    return values.view(target.shape), counted.view(target.shape)
