"""The fast recipe: settings under which image classifiers are good after few epochs; and whitening, which it fills.

What: Muon over convolutions held at a fixed size, SGD for the rest; a rate with a short rise and a fall to 0; label
smoothing; alternating mirror images and small shifts.
Use when: a convolutional network with batch norm is trained from scratch. Small batches do better: of validation images
of Fashion-MNIST, Airbench had 92.9 % right after two epochs in batches of 256, and 92.4 % in batches of 512.
Costs: Muon's products, once per update; nothing else.
Does not combine with: images whose label a mirror changes, unless `augment` is given.
Source: K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024), https://arxiv.org/abs/2404.00498, and
airbench94_muon.py, https://github.com/KellerJordan/cifar10-airbench. There the rates are 0.24 for Muon and 0.05 to 0.67
for the rest, with batches of 2,000; here they were chosen on 6,000 held-out training images of Fashion-MNIST.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stoker.errors import BadJob
from stoker.jobs import SGD, Job, Muon, schedules
from stoker.jobs.job import OpenAugmentation
from stoker.loading import transforms
from stoker.loading.datasets import datasets_of
from stoker.loading.transforms import for_evaluation
from stoker.stepping.model import meta_model
from stoker.stepping.model_copies import copied
from stoker.zoo.airbench import Whitening, whitening_filters

_LEAST_PIXELS_TO_SHIFT = 16
"""Height or width [pixels] below which images are not shifted: one pixel would be too large a share."""


def fast(job: Job) -> Job:
    """The job with its open settings chosen for few epochs; its model, batch and length stay.

    Set are, each only if the job does not state it: `optimizer` (Muon, normalised, with SGD for gains, biases and the
    output layer), `schedule` (a short linear rise, then a linear fall to 0), label smoothing (0.1, also in place of 0),
    `augment` (alternating mirror images; a shift by one pixel). Whitening layers of the model are filled.

    Args:
        job: what is learned.

    Raises:
        BadJob: the loss is not the cross-entropy, the inputs are not images, or the model has no convolutions with
            batch norm.
    """
    if job.objective.loss != "cross_entropy":
        raise _misfit(f"it is for classifiers trained with loss='cross_entropy', this job's is {job.objective.loss!r}")
    images_BCHW = training_images(job, 1)
    model = meta_model(job)
    parts = list(model.modules())
    if not any(isinstance(part, nn.Conv2d) and part.weight.requires_grad for part in parts):
        raise _misfit(f"it is for convolutional networks, and {type(model).__name__} has no Conv2d to train")
    if not any(isinstance(part, nn.BatchNorm2d) for part in parts):
        raise _misfit(
            "it keeps the scale of weights fixed, which only batch norm makes up for; "
            f"{type(model).__name__} has no BatchNorm2d"
        )
    if any(isinstance(part, Whitening) and not part.is_filled for part in parts):
        job = whitened(job)
    shifts = [transforms.RandomShift(1)] if min(images_BCHW.shape[2:]) >= _LEAST_PIXELS_TO_SHIFT else []
    rest = SGD(lr=0.03, momentum=0.85, nesterov=True)
    left_open: dict[str, Any] = {}
    if job.optimizer is None:
        left_open["optimizer"] = Muon(lr=0.06, momentum=0.6, steps=3, adjust="none", normalize=True, rest=rest)
    if getattr(job.schedule, "is_open", False):
        left_open["schedule"] = schedules.warmup_linear(warmup=0.1)
    if isinstance(job.augment, OpenAugmentation):
        left_open["augment"] = (transforms.AlternatingFlip(), *shifts)
    if not job.objective.label_smoothing:
        left_open["loss"] = dataclasses.replace(job.objective, label_smoothing=0.1)
    return dataclasses.replace(job, recipe="fast", **left_open)


def _misfit(why: str) -> BadJob:
    return BadJob(
        f"recipe 'fast' does not fit this job: {why}",
        remedy="Leave recipe out, or take single recipes from stoker.recipes.",
    )


_NUM_IMAGES = 2000
"""Number of images that the filters are computed from, evenly spread over the training samples.

Of Fashion-MNIST, 500 give filters up to 3.2 % from those of 10,000, and 2,000 up to 0.9 %.
"""


def whitened(job: Job) -> Job:
    """The job with each Whitening layer of its model filled from its training samples, without those held out.

    Equal jobs have equal filters, which are part of the initial weights that identify a job's runs.

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
    _images: npt.NDArray[Any] | None = field(default=None, repr=False)
    """The training images [B, C, H, W], once a layer has needed them."""

    def __call__(self) -> nn.Module:
        model = copied(self.model) if isinstance(self.model, nn.Module) else self.model()
        layers = [part for part in model.modules() if isinstance(part, Whitening)]
        if not layers:
            raise BadJob(
                f"{type(model).__name__} has no Whitening layer to fill",
                remedy="Make its first layer a stoker.recipes.Whitening, or leave the recipe out.",
            )
        if self._images is None:
            with torch.device("cpu"):  # data are real even where the model is on the meta device
                self._images = training_images(self.job, _NUM_IMAGES)
        for layer in layers:
            layer.fill(whitening_filters(self._images, layer))
        return model


def training_images(job: Job, count: int) -> npt.NDArray[Any]:
    """Up to `count` of the job's training inputs [B, C, H, W] as the model gets them, spread evenly, not augmented.

    Raises:
        BadJob: the inputs are not images.
    """
    samples = datasets_of(job).train
    indices = np.unique(np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(np.int64))
    prepared: list[Any] = []
    fields, content = job.fields, samples.fetch(indices, 0)
    for change in for_evaluation(job.augment):
        content = fields.map_inputs(content, change)
    fields.map_inputs(samples.prepare(content), prepared.append)
    inputs = prepared[0]
    if not isinstance(inputs, torch.Tensor) or inputs.dim() != 4:
        sample = list(inputs.shape[1:]) if isinstance(inputs, torch.Tensor) else f"a {type(inputs).__name__}"
        raise BadJob(f"this recipe is for images [channels, height, width]; a sample of this job is {sample}")
    images: npt.NDArray[Any] = inputs.float().numpy()
    return images


RECIPES: dict[str, Callable[[Job], Job]] = {"fast": fast}
"""Recipes by the names that `Job(recipe=…)` takes."""


def resolved(job: Job) -> Job:
    """The job with its recipe's settings applied; a job without a recipe unchanged. Idempotent.

    Raises:
        BadJob: the recipe does not fit the job.
    """
    return job if job.recipe is None else RECIPES[job.recipe](job)
