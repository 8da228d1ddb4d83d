from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob
from stoker.jobs.job_description import describe_settings
from stoker.loading.datasets import datasets_of
from stoker.profiling.tracing.update import trace_update
from stoker.recipes import fast, mirror_averaged, resolved
from stoker.records import Coupling, TraceSettings
from stoker.stepping.model import build_model
from stoker.stepping.torch_optimizers import build_optimizer
from stoker.training.checkpoints import restore
from tests.recipes.test_recipe_whitening import pictures
from tests.training.builders import PLAN, advance, assert_bit_equal, blobs, everything_of, saved, step_of, tiny_job

COUPLED = Coupling(kind="batch_norm", group=16, causes=("BatchNorm2d",), evidence="known")


def net() -> nn.Module:
    """A small Airbench for images of 16 pixels and 2 classes."""
    return stoker.zoo.Airbench((4, 6, 8), classes=2)


def job_of(**changed: object) -> stoker.Job:
    """A classifier of small pictures that leaves to the recipe what it can."""
    given = {"model": net, "data": pictures(80, 16), "optimizer": None, "recipe": "fast", "metrics": []}
    return tiny_job(**{**given, **changed})


def test_what_is_left_open_is_set_and_recorded() -> None:
    """Optimiser, schedule, smoothing and augmentation are there to read in what identifies the run."""
    settings = describe_settings(resolved(job_of()))
    assert settings["recipe"] == "fast"
    assert settings["optimizer"]["type"] == "Muon"  # type: ignore[index,call-overload]
    assert settings["optimizer"]["rest"]["type"] == "SGD"  # type: ignore[index,call-overload]
    assert settings["schedule"]["type"] == "Ramp"  # type: ignore[index,call-overload]
    assert settings["loss"]["label_smoothing"] > 0  # type: ignore[index,call-overload,operator]
    assert [each["type"] for each in settings["augment"]] == ["AlternatingFlip", "RandomShift"]  # type: ignore[index,union-attr,call-overload]


def test_what_the_job_sets_stays() -> None:
    """A setting given by the user is the user's; batch, length and seed are never touched."""
    given = {
        "optimizer": stoker.SGD(lr=0.1),
        "schedule": stoker.schedules.one_cycle(),
        "loss": stoker.Objective("cross_entropy", label_smoothing=0.3),
        "augment": [stoker.transforms.RandomShift(2)],
    }
    found = resolved(job_of(**given))
    assert {name: getattr(found, name) for name in given} == given
    assert (found.batch, found.until, found.seed) == (16, stoker.epochs(3), 0)


@pytest.mark.parametrize("augment", [(), []])
def test_a_default_that_the_job_states_stays(augment: object) -> None:
    """No augmentation, and a constant rate; also in a copy, and in another process."""
    stated = job_of(augment=augment, schedule=stoker.schedules.constant(), data=pictures(80, 16))
    for job in (stated, dataclasses.replace(stated, seed=1), dataclasses.replace(job_of(), augment=augment)):
        assert not resolved(job).augment
    assert resolved(stated).schedule == stoker.schedules.constant()
    still_open = dataclasses.replace(job_of(model=stoker.zoo.Airbench((4, 6, 8), classes=2)), seed=1)
    for job in (still_open, copy.deepcopy(still_open), pickle.loads(pickle.dumps(still_open))):  # noqa: S301 - our own
        assert resolved(job).augment
        assert resolved(job).schedule != stoker.schedules.constant()


def test_twice_is_once() -> None:
    """A resolved job is resolved to the same, and a job without a recipe to itself."""
    once = resolved(job_of())
    assert describe_settings(resolved(once)) == describe_settings(once)
    assert resolved(once).model is once.model
    plain = tiny_job()
    assert resolved(plain) is plain


def test_small_images_are_not_shifted() -> None:
    """A pixel is too much of 9; the mirror image remains."""
    assert list(resolved(job_of(data=pictures(80, 9))).augment) == [stoker.transforms.AlternatingFlip()]


class Unnormed(nn.Module):
    """A convolution without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"loss": "mse"}, "trained with loss='cross_entropy', this job's is 'mse'"),
        ({"data": blobs()}, r"is for images .* of this job is \[6\]"),
        ({"model": lambda: nn.Sequential(nn.Flatten(), nn.Linear(256, 2))}, "Sequential has no Conv2d to train"),
        ({"model": Unnormed}, "Unnormed has no BatchNorm2d"),
    ],
)
def test_a_job_it_does_not_fit_is_refused(changed: dict[str, object], problem: str) -> None:
    """Each says what the recipe is for and what the job has."""
    with pytest.raises(BadJob, match=problem):
        fast(job_of(**changed))


def test_a_recipe_that_was_not_resolved_is_told() -> None:
    """A step made without it has no optimiser, rather than another one."""
    job = job_of()
    with pytest.raises(BadJob, match="recipe 'fast' has not set its optimiser yet"):
        build_optimizer(job, nn.Linear(4, 2), PLAN)


def test_a_recipe_that_there_is_not_is_refused() -> None:
    """With the name that is nearest; and an optimiser may be left out for a recipe alone."""
    with pytest.raises(BadJob, match=r"'fsat' is no recipe.*fast"):
        job_of(recipe="fsat")
    with pytest.raises(BadJob, match=r"Job\(optimizer=…\): wanted"):
        job_of(recipe=None)


def test_a_run_goes_on_bit_equal(tmp_path: Path) -> None:
    """Model, Muon, its rest, alternating mirror images: restored from a checkpoint in the second epoch."""
    job = resolved(job_of())
    whole, fresh = step_of(job, PLAN, COUPLED), step_of(job, PLAN, COUPLED)
    advance(whole, 0, 7)
    restore(fresh, *saved(whole, tmp_path, 7))
    advance(whole, 7, 12)
    advance(fresh, 7, 12)
    assert_bit_equal(everything_of(fresh), everything_of(whole))


def test_whitening_layers_are_filled() -> None:
    """The recipe fills them; a model without them is taken as it is."""
    model = build_model(resolved(job_of()))
    assert model.whitening.is_filled
    plain = resolved(job_of(model=lambda: stoker.zoo.ResNet9(width=2, classes=2)))
    assert isinstance(build_model(plain), stoker.zoo.ResNet9)
    assert torch.isfinite(model(pictures(4, 16)[0])).all()


def test_a_forecast_counts_what_muon_computes() -> None:
    """A traced update holds the Newton-Schulz products: for each matrix R x C and step 4*R*R*C + 2*R^3 operations."""
    job = resolved(job_of())
    trace = trace_update(job, datasets_of(job), COUPLED, TraceSettings(target="cpu", capability="", micro_batch=16))
    found = sum(trace.operations[one.operation].flops for one in trace.occurrences if one.phase == "optimizer")
    channels = (8, 4, 6, 8)
    banks = [(o, 9 * i) for i, o in pairwise(channels)] + [(o, 9 * o) for o in channels[1:]]
    assert found == 3 * sum(4 * r * r * c + 2 * r**3 for r, c in banks)


def test_a_whole_run_trains_tests_and_comes_back(tmp_path: Path) -> None:
    """Whitened, mirrored both ways in evaluation: the run's own model gives the accuracy that was reported."""
    inputs, labels = pictures(80, 16)
    labels = (inputs[:, 0, :8].mean((1, 2)) > inputs[:, 0, 8:].mean((1, 2))).long()
    job = mirror_averaged(resolved(job_of(data=(inputs, labels), test=(inputs, labels), metrics=["accuracy"])))
    run = stoker.train(job, run_dir=tmp_path / "run", plan=PLAN, sink=lambda _event: None)
    model = run.model(job).eval()
    with torch.no_grad():
        accuracy = (model(inputs).argmax(1) == labels).double().mean()
    assert run.metrics["test/accuracy"] == pytest.approx(float(accuracy), abs=0.02)
    assert json.loads((run.path / "spec.json").read_text())["settings"]["recipe"] == "fast"
