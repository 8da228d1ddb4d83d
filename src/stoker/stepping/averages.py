"""Which average of its weights a job keeps, if any."""

from __future__ import annotations

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import EMA, Job
from stoker.jobs.averages import SWA
from stoker.records import Coupling, Plan
from stoker.stepping.averaging import Average, EqualAverage
from stoker.stepping.schedule_free import HiddenAverage, ScheduleFree

KeptAverage = Average | EqualAverage | HiddenAverage


def average_of(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, coupling: Coupling, plan: Plan
) -> KeptAverage | None:
    """The second set of weights that is evaluated and kept in place of the model's; None where there is none.

    Raises:
        BadJob: running statistics would have to be found for it, and no process holds the model whole.
    """
    if isinstance(job.ema, EMA):
        return Average(job.ema, model)
    average: KeptAverage | None = None
    if isinstance(job.swa, SWA):
        average = EqualAverage(model)
    elif isinstance(optimizer, ScheduleFree):
        average = HiddenAverage(model, optimizer)
    if average is not None and coupling.kind == "batch_norm" and not plan.layout.is_replicated:
        raise BadJob(
            "the averaged weights need running statistics of their own for each batch norm, which takes whole models; "
            f"{plan.layout.in_words()} hold parts of one",
            remedy="Use a layout of replicas, another norm, or ema in place of this average.",
        )
    return average
