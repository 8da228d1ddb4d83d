"""Filling a model's Whitening layers from a job's training data."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import Job
from stoker.loading import datasets_of
from stoker.loading.fields import Fields
from stoker.loading.transforms import for_evaluation
from stoker.zoo.whitening import Whitening, whitening_filters

_NUM_IMAGES = 2000
"""Images the filters are computed from, spread evenly over the training samples: patches number hundreds of times more.

Of Fashion-MNIST, 500 give filters up to 3.2 % from those of 10,000, and 2,000 up to 0.9 %.
"""


def whitened(job: Job) -> Job:
    """The job with each Whitening layer of its model filled from its own training samples, those held out left aside.

    The same job has the same filters; they are part of the initial weights that identify its runs.

    Raises:
        BadJob: when the model is made: it has no Whitening layer, or the samples are not images that fit it.
    """
    if isinstance(job.model, _WhitenedModel):
        return job
    return dataclasses.replace(job, model=_WhitenedModel(job.model, job))


@dataclass
class _WhitenedModel:
    """Makes a job's model and fills its Whitening layers."""

    model: nn.Module | Callable[[], nn.Module]
    job: Job
    _looked_at: npt.NDArray[Any] | None = field(default=None, repr=False)
    """The training images [B, C, H, W], once they were needed."""

    def __call__(self) -> nn.Module:
        model = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        layers = [part for part in model.modules() if isinstance(part, Whitening)]
        if not layers:
            raise BadJob(
                f"{type(model).__name__} has no Whitening layer to fill",
                remedy="Make its first layer a stoker.recipes.Whitening, or leave the recipe out.",
            )
        for layer in layers:
            layer.fill(whitening_filters(self._images(), layer))
        return model

    def _images(self) -> npt.NDArray[Any]:
        if self._looked_at is None:
            with torch.device("cpu"):  # data are real even where the model is an outline
                self._looked_at = training_images(self.job, _NUM_IMAGES)
        return self._looked_at


def training_images(job: Job, count: int) -> npt.NDArray[Any]:
    """Up to `count` of the job's training inputs [B, C, H, W] as the model gets them, spread evenly, not augmented.

    Raises:
        BadJob: they are no images.
    """
    samples = datasets_of(job).train
    indices = np.unique(np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(np.int64))
    found: list[Any] = []
    fields, content = Fields(job.inputs, job.target), samples.fetch(indices, 0)
    for change in for_evaluation(job.augment):
        content = fields.map_inputs(content, change)
    fields.map_inputs(samples.prepare(content), found.append)
    inputs = found[0]
    if not isinstance(inputs, torch.Tensor) or inputs.dim() != 4:
        found_one = list(inputs.shape[1:]) if isinstance(inputs, torch.Tensor) else f"a {type(inputs).__name__}"
        raise BadJob(f"this recipe is for images [channels, height, width]; a sample of this job is {found_one}")
    images: npt.NDArray[Any] = inputs.float().numpy()
    return images
