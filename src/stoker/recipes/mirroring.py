"""Evaluating images both ways: the average over an image and its mirror image."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job


class MirrorAveraged(nn.Module):
    """In evaluation, the mean of `model`'s outputs for an image and its mirror image; in training, `model` as it is.

    What: averaging over a transform that leaves the label. Use when: training mirrors its images. Costs: evaluation and
    use take twice as long. Does not combine with: data whose label a mirror changes, such as digits or text.
    Source: Krizhevsky et al. 2012 (crops and reflections at test time); K. Jordan 2024,
    https://arxiv.org/abs/2404.00498, section 3.5, "multi-crop evaluation".
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x_BCHW: torch.Tensor) -> Any:
        """What `model` gives, averaged over both ways in evaluation."""
        if self.training:
            return self.model(x_BCHW)
        if x_BCHW.dim() != 4:
            raise BadJob(f"MirrorAveraged takes images [B, C, H, W], got a tensor of shape {list(x_BCHW.shape)}")
        return (self.model(x_BCHW) + self.model(x_BCHW.flip(-1))) / 2


def mirror_averaged(job: Job) -> Job:
    """The job with its model evaluated both ways; the model that comes out is that average too."""
    return dataclasses.replace(job, model=_Mirrored(job.model))


@dataclass(frozen=True)
class _Mirrored:
    """Makes a job's model and wraps it."""

    model: nn.Module | Callable[[], nn.Module]

    def __call__(self) -> nn.Module:
        return MirrorAveraged(copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model())
