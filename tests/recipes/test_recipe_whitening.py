from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.loading.datasets import datasets_of
from stoker.recipes import Whitening, whitened
from stoker.recipes.fast_recipe import training_images
from stoker.stepping.model import build_model, meta_model, weights_digest
from stoker.zoo.airbench import whitening_filters
from tests.training.builders import blobs, tiny_job


def pictures(count: int = 60, size: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 1, size, size] and labels [N]."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 1, size, size, generator=random), torch.randint(2, (count,), generator=random)


def net() -> nn.Module:
    """A whitening layer and an output layer."""
    return nn.Sequential(Whitening(1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))


def test_filters_come_from_the_training_part() -> None:
    """Changing what is held out changes nothing; changing what is trained on does."""
    inputs, labels = pictures()
    job = tiny_job(model=net, data=(inputs, labels), valid=stoker.holdout(0.5))
    filled = weights_digest(build_model(whitened(job)))
    train = datasets_of(job).train
    kept = torch.from_numpy(train.indices)
    aside = torch.ones(len(inputs), dtype=torch.bool)
    aside[kept] = False
    other = inputs.clone()
    other[aside] = 0.0
    assert weights_digest(build_model(whitened(tiny_job(model=net, data=(other, labels), valid=job.valid)))) == filled
    other[kept] = other[kept] ** 2
    assert weights_digest(build_model(whitened(tiny_job(model=net, data=(other, labels), valid=job.valid)))) != filled


def test_the_filters_are_those_of_the_images() -> None:
    """The layer of the model holds what the images give, and every model made is the same."""
    data = pictures()
    job = whitened(tiny_job(model=net, data=data))
    layer = build_model(job)[0]
    expected = whitening_filters(data[0].numpy(), Whitening(1)).astype(np.float32)
    assert np.array_equal(layer.weight.detach().numpy(), np.concatenate([expected, -expected]))
    assert weights_digest(build_model(job)) == weights_digest(build_model(whitened(tiny_job(model=net, data=data))))
    assert whitened(job) is job


def test_a_module_given_is_left_as_it_is() -> None:
    """A model handed over as a module is copied before its layer is filled."""
    model = net()
    before = model[0].weight.clone()
    filled = build_model(whitened(tiny_job(model=model, data=pictures())))
    assert torch.equal(model[0].weight, before)
    assert not torch.equal(filled[0].weight, before)


def test_the_outline_needs_no_weights() -> None:
    """On PyTorch's meta device the model is filled with nothing."""
    assert next(meta_model(whitened(tiny_job(model=net, data=pictures()))).parameters()).is_meta


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (lambda: tiny_job(model=net, data=blobs()), r"is for images .* of this job is \[6\]"),
        (lambda: tiny_job(model=lambda: nn.Conv2d(1, 2, 3), data=pictures()), "Conv2d has no Whitening layer"),
    ],
)
def test_a_job_it_does_not_fit_is_refused(job, problem: str) -> None:
    """Reported when the model is made: no images, or no layer to fill."""
    with pytest.raises(BadJob, match=problem):
        build_model(whitened(job()))


def test_images_are_spread_over_the_samples() -> None:
    """First and last are among them, as the model gets them; a small set is taken whole."""
    inputs, labels = pictures(50)
    found = training_images(tiny_job(model=net, data=(inputs, labels)), 5)
    assert found.shape == (5, 1, 6, 6)
    assert np.array_equal(found[[0, -1]], inputs[[0, -1]].numpy())
    assert len(training_images(tiny_job(model=net, data=(inputs, labels)), 1000)) == 50
