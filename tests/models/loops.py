"""The same training by Stoker's step and by a loop of one's own, batch for batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import stoker
from stoker.records import Coupling
from stoker.stepping.model import build_model
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, plan_of, train, whole_stream

UPDATES = 50


def ours(job: stoker.Job, coupling: Coupling = SEPARABLE, updates: int = UPDATES, **plan: Any) -> list[float]:
    """The loss of each update by Stoker."""
    return train(job, Step(job, plan_of(plan.pop("micro_batch", job.batch), **plan), coupling), updates)


def theirs(
    job: stoker.Job, loss_of: Callable[[Any, Any], torch.Tensor], optimizer: Callable[[Any], torch.optim.Optimizer]
) -> list[float]:
    """The same by a plain loop, from the same initial weights, over the same batches."""
    model = build_model(job)
    moved = optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for batch in whole_stream(job, Step(job, plan_of(job.batch), SEPARABLE), UPDATES):
        moved.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        moved.step()
        losses.append(float(loss.detach()))
    return losses


def largest_gap(one: list[float], other: list[float]) -> float:
    """The largest difference of two curves at any update."""
    assert len(one) == len(other)
    return max(abs(a - b) for a, b in zip(one, other, strict=True))
