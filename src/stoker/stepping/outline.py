"""A job's model without its weights: what it is made of, in no memory."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from stoker.jobs import Job


def outline(job: Job) -> nn.Module:
    """The job's model with its parameters on PyTorch's meta device, or the module given.

    A function that cannot make its model there, because it looks at values, makes the real one.

    Raises:
        Exception: what the function raises when it makes the real one.
    """
    if isinstance(job.model, nn.Module):
        return job.model
    with torch.random.fork_rng(devices=[]):
        # Looking at values fails in many ways, `.numpy()` by a TypeError; whether the job is wrong, the real one tells.
        with contextlib.suppress(Exception), torch.device("meta"):
            return job.model()
        return job.model()
