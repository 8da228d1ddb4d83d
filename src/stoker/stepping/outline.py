"""A job's model without its weights: what it is made of, in no memory."""

from __future__ import annotations

import contextlib
import copy

import torch
from torch import nn

from stoker.jobs import Job
from stoker.jobs.freezing import Freeze
from stoker.stepping.adopting import adopted
from stoker.stepping.freezing import freeze_for_good


def outline(job: Job) -> nn.Module:
    """The job's model with its parameters on PyTorch's meta device, or the module given; frozen as the job says.

    A function that cannot make its model there, because it looks at values, makes the real one.

    Raises:
        BadJob: what the job freezes is not there.
        Exception: what the function raises when it makes the real one.
    """
    if not isinstance(job.freeze, Freeze):
        return _unfrozen(job)
    model = _unfrozen(job)
    return freeze_for_good(_without_values(model) if model is job.model else model, job.freeze)


def _unfrozen(job: Job) -> nn.Module:
    if isinstance(job.model, nn.Module):
        return job.model
    with torch.random.fork_rng(devices=[]):
        # Looking at values fails in many ways, `.numpy()` by a TypeError; whether the job is wrong, the real one tells.
        with contextlib.suppress(Exception), torch.device("meta"):
            return adopted(job.model())
        return adopted(job.model())


def _without_values(model: nn.Module) -> nn.Module:
    """A copy of a user's module on the meta device, made in no memory."""
    memo: dict[int, torch.Tensor] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    return copy.deepcopy(model, memo)
