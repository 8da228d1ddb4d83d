"""Models of Keras 3 on PyTorch: channels last, their own random state, their training flag."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.stepping.coupling import find_coupling
from stoker.stepping.model import build_model, weights_digest
from stoker.stepping.step import Step
from tests.models.loops import UPDATES, largest_gap, ours
from tests.optional import optional
from tests.stepping.driving import SEPARABLE, plan_of, train, whole_stream
from tests.stepping.models import samples_of

keras = optional("keras")
if os.environ["KERAS_BACKEND"] != "torch":
    pytest.skip("Keras computes by another library here", allow_module_level=True)

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
"""Keras 3.15 makes arrays of its variables, to save them, as before NumPy 2."""

SIDE, CLASSES = 8, 3
RATE, MOMENTUM = 0.05, 0.9


def network(*, dropout: float = 0.0, norm: bool = False, seed: int | None = None) -> Any:
    """A small convolutional network for images [B, H, W, 1]."""
    layers = [keras.Input((SIDE, SIDE, 1)), keras.layers.Conv2D(4, 3, activation="relu")]
    layers += [keras.layers.BatchNormalization()] if norm else []
    layers += [keras.layers.Flatten()]
    layers += [keras.layers.Dropout(dropout, seed=seed)] if dropout else []
    return keras.Sequential([*layers, keras.layers.Dense(CLASSES)])


def job_of(model: Any = network, **changed: Any) -> stoker.Job:
    """A classifier of small images, channels last."""
    draw = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (48,), generator=draw)
    images = torch.randn(48, SIDE, SIDE, 1, generator=draw) + labels[:, None, None, None]
    given: dict[str, Any] = {
        "model": model,
        "data": (images, labels),
        "loss": "cross_entropy",
        "batch": 12,
        "optimizer": stoker.SGD(lr=RATE, momentum=MOMENTUM),
        "until": stoker.updates(UPDATES),
    }
    return stoker.Job(**{**given, **changed})


@pytest.mark.parametrize("norm", [False, True])
def test_a_keras_model_learns_as_by_keras_itself(*, norm: bool) -> None:
    """By `train_on_batch` over the same batches from the same weights, to 1e-5 over 50 updates."""
    job = job_of(lambda: network(norm=norm))
    start: Any = build_model(job)
    theirs = start.keras
    theirs.compile(
        optimizer=keras.optimizers.SGD(RATE, momentum=MOMENTUM),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    expected = [
        float(theirs.train_on_batch(images, labels))
        for images, labels in whole_stream(job, Step(job, plan_of(job.batch), SEPARABLE), UPDATES)
    ]
    assert largest_gap(ours(job), expected) < 1e-5
    assert expected[-1] < expected[0]


def test_names_and_weights_are_the_same_however_often_it_is_made() -> None:
    """Keras counts layers through a process: here each making starts from nothing, and the seed draws the weights."""
    models = [build_model(job_of()) for _ in range(2)]
    assert list(models[0].state_dict()) == ["conv2d/kernel", "conv2d/bias", "dense/kernel", "dense/bias"] or all(
        name.endswith(("kernel", "bias")) for name in models[0].state_dict()
    )
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    assert weights_digest(models[0]) == weights_digest(models[1])
    assert weights_digest(build_model(job_of(seed=1))) != weights_digest(models[0])


def test_what_is_trained_is_a_parameter_and_what_is_kept_a_buffer() -> None:
    """Moving statistics and seeds are state of the model, saved with it, and no parameters."""
    model = build_model(job_of(lambda: network(norm=True, dropout=0.5, seed=3)))
    assert all(p.requires_grad for p in model.parameters())
    kinds = sorted(name.rpartition("/")[2] for name, _ in model.named_buffers())
    assert kinds == ["moving_mean", "moving_variance", "seed_generator_state"]


def test_dropout_is_on_in_training_and_off_in_evaluation() -> None:
    """Keras needs the mode at every call."""
    model = build_model(job_of(lambda: network(dropout=0.5)))
    images = job_of().data[0]
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_dropout_draws_by_the_key_of_the_update() -> None:
    """From PyTorch's generator, which is seeded for each micro-batch: a run repeats bit for bit, a resumed one too."""
    job = job_of(lambda: network(dropout=0.5))
    whole, resumed = Step(job, plan_of(12), SEPARABLE), Step(job, plan_of(12), SEPARABLE)
    losses = train(job, whole, 6)
    assert train(job, resumed, 3) + train(job, resumed, 3, begin=3) == losses
    assert find_coupling(job, samples_of(job)).kind == "separable"


def test_copies_share_layers_and_nothing_else() -> None:
    """Training a copy leaves the original's weights and answers as they were."""
    model = build_model(job_of()).eval()
    images = job_of().data[0]
    before, other = model(images).detach(), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    assert not torch.equal(other(images), before)
    assert torch.equal(model(images), before)


def test_the_users_own_model_is_copied() -> None:
    """A model given as it is starts from its weights, and is not trained itself."""
    given = network()
    before = [value.copy() for value in given.get_weights()]
    job = job_of(given)
    step = Step(job, plan_of(12), SEPARABLE)
    assert all(
        torch.equal(torch.as_tensor(a), b) for a, b in zip(before, step.model.state_dict().values(), strict=True)
    )
    train(job, step, 2)
    assert all((a == b).all() for a, b in zip(before, given.get_weights(), strict=True))


def test_a_whole_run_gives_a_keras_model_back(tmp_path: Path) -> None:
    """Planned by trials, trained, evaluated; `run.model().keras` saves as Keras's own models do."""
    job = job_of(until=stoker.epochs(2), valid=stoker.holdout(0.25), metrics=("accuracy",))
    run = stoker.train(job, run_dir=tmp_path / "run", plan=plan_of(12), sink=lambda event: None)
    trained: Any = run.model()
    trained.keras.save(tmp_path / "model.keras")
    images = job.data[0]
    with torch.no_grad():
        expected = trained(images)
        assert torch.allclose(keras.saving.load_model(tmp_path / "model.keras")(images), expected, atol=1e-6)
    assert run.metrics.keys() == {"valid/loss", "valid/accuracy"}


def test_batch_norms_of_keras_are_not_frozen_without_its_knowledge() -> None:
    """The sentence says how; frozen with moving statistics, it is accepted."""
    job = job_of(lambda: network(norm=True), freeze=("*conv2d*",))
    with pytest.raises(BadJob, match="is a batch norm of Keras"):
        build_model(job)
    model = build_model(job_of(freeze=("*conv2d*",)))
    assert [p.requires_grad for p in model.parameters()] == [False, False, True, True]


def test_a_model_without_weights_is_refused() -> None:
    """Not built yet: its sizes are unknown."""
    with pytest.raises(BadJob, match="no weights before it is built"):
        build_model(job_of(lambda: keras.Sequential([keras.layers.Dense(3)])))


def test_plain_modules_are_left_alone() -> None:
    """Keras being there changes nothing for them."""
    assert isinstance(build_model(job_of(lambda: nn.Linear(3, 3))), nn.Linear)
