"""The fast recipe: image classifiers that shall be good after few epochs.

What: Muon over convolutions held at a fixed size, SGD beside it; a rate that rises shortly and falls to 0; label
smoothing; alternating mirror images and small shifts.
Use when: a convolutional network with batch norm is trained from scratch. Small batches do better: of validation images
of Fashion-MNIST, Airbench had 92.9 % right after two epochs in batches of 256, and 92.4 % in batches of 512.
Costs: Muon's products, once per update; nothing else.
Does not combine with: images whose label a mirror changes, unless `augment` is given.
Source: K. Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU" (2024), https://arxiv.org/abs/2404.00498, and
airbench94_muon.py, https://github.com/KellerJordan/cifar10-airbench. There the rates are 0.24 for Muon and 0.05 to 0.67
for the rest, with batches of 2,000; here they were chosen on 6,000 held-out training images of Fashion-MNIST.

Filling a model's Whitening layers from a job's training data.

From a Job that names a recipe to the Job it stands for.
"""

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
from stoker.jobs import SGD, Job, Muon, schedules
from stoker.loading import transforms
from stoker.loading.datasets import datasets_of
from stoker.loading.fields import Fields
from stoker.loading.transforms import for_evaluation
from stoker.stepping.model import meta_model
from stoker.zoo.airbench import Whitening, whitening_filters

_LEAST_PIXELS_TO_SHIFT = 16
"""Height or width below which images are not shifted: a pixel would be too much of them."""


def fast(job: Job) -> Job:
    """The job with what it leaves open set for few epochs: its model, batch and length stay.

    Set are, each only if the job leaves it at its default: `optimizer` (Muon, normalised, with SGD for gains, biases
    and the output layer), `schedule` (a short linear rise, then a linear fall to 0), `label_smoothing` (0.1), `augment`
    (alternating mirror images; a shift by one pixel). Whitening layers of the model are filled.

    Raises:
        BadJob: the loss is not the cross-entropy, the inputs are no images, or the model has no convolutions with batch
            norm; it says which.
    """
    if job.loss != "cross_entropy":
        raise _misfit(f"it is for classifiers trained with loss='cross_entropy', this job's is {job.loss!r}")
    images_BCHW = training_images(job, 1)
    model = meta_model(job)
    _require_convolutions(model)
    if any(isinstance(part, Whitening) and not part.is_filled for part in model.modules()):
        job = whitened(job)
    return dataclasses.replace(job, recipe="fast", **_left_open(job, min(images_BCHW.shape[2:])))


def _left_open(job: Job, num_pixels: int) -> dict[str, Any]:
    """What the job leaves at its defaults, as the recipe sets it."""
    shifts = [transforms.RandomShift(1)] if num_pixels >= _LEAST_PIXELS_TO_SHIFT else []
    recipe: dict[str, Any] = {
        "optimizer": Muon(
            lr=0.06, momentum=0.6, steps=3, adjust="none", normalize=True,
            rest=SGD(lr=0.03, momentum=0.85, nesterov=True),
        ),
        "schedule": schedules.warmup_linear(warmup=0.1),
        "label_smoothing": 0.1,
        "augment": (transforms.AlternatingFlip(), *shifts),
    }  # fmt: skip
    defaults = {field.name: field.default for field in dataclasses.fields(Job)}
    return {name: value for name, value in recipe.items() if getattr(job, name) == defaults[name]}


def _require_convolutions(model: nn.Module) -> None:
    parts = list(model.modules())
    if not any(isinstance(part, nn.Conv2d) and part.weight.requires_grad for part in parts):
        raise _misfit(f"it is for convolutional networks, and {type(model).__name__} has no Conv2d to train")
    if not any(isinstance(part, nn.BatchNorm2d) for part in parts):
        raise _misfit(f"it keeps the scale of weights fixed, which only batch norm makes up for; "
                      f"{type(model).__name__} has no BatchNorm2d")  # fmt: skip


def _misfit(why: str) -> BadJob:
    return BadJob(f"recipe 'fast' does not fit this job: {why}",
                  remedy="Leave recipe out, or take single recipes from stoker.recipes.")  # fmt: skip


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


RECIPES: dict[str, Callable[[Job], Job]] = {"fast": fast}
"""Recipes by the names that `Job(recipe=…)` takes."""


def resolved(job: Job) -> Job:
    """The job with everything set that its recipe sets; a job without a recipe as it is. Twice is the same as once.

    Raises:
        BadJob: the recipe does not fit the job.
    """
    return job if job.recipe is None else RECIPES[job.recipe](job)
