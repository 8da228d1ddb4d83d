"""`batch="auto"`: resolved once, into plain numbers that are recorded, or refused with the reason."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.errors import BadJob, DoesNotFit
from stoker.loading.datasets import datasets_of
from stoker.planning import automatic_batch
from stoker.planning.automatic_batch import BatchChoice
from stoker.planning.resolved_job import resolve_job
from stoker.records import Estimate, dumps, loads
from stoker.stepping.noise_scale import NoiseScale
from tests.flow.builders import blobs_job, stopped_run

pytestmark = pytest.mark.usefixtures("place")

DIM = 10


class Line(nn.Module):
    """One output, linear in the inputs."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*between, nn.Linear(DIM, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One value a sample [B]."""
        return self.layers(x).squeeze(1)  # type: ignore[no-any-return]


def noisy_job(**changes: Any) -> stoker.Job:
    """A linear regression whose targets are mostly noise, so that large batches pay."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, DIM, generator=generator)
    y = x @ torch.ones(DIM) + 6 * torch.randn(4000, generator=generator)
    settings: dict[str, Any] = {
        "model": Line,
        "data": (x, y),
        "loss": "mse",
        "optimizer": stoker.SGD(lr=0.01),
        "batch": stoker.auto(base=8),
        "until": stoker.epochs(10),
    }
    return stoker.Job(**(settings | changes))


def scale_of(value: float, low: float | None = None, high: float | None = None) -> NoiseScale:
    """A measured noise scale."""
    ends = (value if low is None else low, value if high is None else high)
    estimate = Estimate(value=value, low=ends[0], high=ends[1], unit="samples", basis="measured here")
    return NoiseScale(
        scale=estimate, squared_gradient=1.0, variance=value, group=16, num_samples=512, trained_samples=100
    )


def choice_for(*scales: NoiseScale, num_train: int = 10_000, most: int | None = None, base: int = 8) -> BatchChoice:
    """What is chosen for these measurements of a run of ten epochs."""
    job = noisy_job(batch=base)
    return automatic_batch.choose_batch(
        job, num_train, scale_of(1.0), scales, most=most, coupling_group=None, took_s=0.0
    )


@pytest.mark.slow
def test_the_batch_and_the_rate_become_numbers_of_the_spec() -> None:
    """The spec is that of the job written with the chosen numbers: a power of two times the base, the rate scaled."""
    prepared = resolve_job(noisy_job())
    choice = prepared.batch_choice
    assert choice is not None
    assert type(prepared.job.batch) is int
    assert prepared.job.batch == choice.batch
    assert choice.batch in {16, 32, 64, 128, 256}
    by_hand = noisy_job(batch=choice.batch, optimizer=stoker.SGD(lr=0.01 * choice.lr_factor))
    assert prepared.spec.digest() == resolve_job(by_hand).spec.digest()
    assert 1 < choice.lr_factor < choice.batch / choice.base
    assert f"batch {choice.batch} and lr {0.01 * choice.lr_factor:.4g}" in prepared.notes[0]


def test_the_noise_is_that_of_the_problem() -> None:
    """On the initial weights the scale agrees with the one computed from all single-sample gradients."""
    job = noisy_job()
    choice = resolve_job(job).batch_choice
    assert choice is not None
    x, y = job.data
    line = resolve_job(noisy_job(batch=8)).job
    weights = automatic_batch.build_model(line).layers[0]
    residual = 2 * (x @ weights.weight[0] + weights.bias - y).detach()
    gradients = torch.cat([residual[:, None] * x, residual[:, None]], 1)
    mean = gradients.mean(0)
    truth = float(gradients.var(0).sum() / mean.square().sum())
    low, high = choice.initial.scale.low, choice.initial.scale.high
    assert low / 1.3 <= truth <= high * 1.3  # the interval is one of 80 %


def test_a_second_start_measures_nothing_and_is_the_same_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept answer is taken, though the seed of nothing and no measurement could repeat it to the bit."""
    first = resolve_job(noisy_job())

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(automatic_batch, "measure_noise", fail)
    second = resolve_job(noisy_job())
    assert second.spec == first.spec
    assert second.batch_choice == first.batch_choice


@pytest.mark.slow
def test_without_the_cache_the_answer_is_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measured again from the same seeds, everything but the time it took is equal."""
    first = resolve_job(noisy_job()).batch_choice
    monkeypatch.setenv("STOKER_CACHE", str(tmp_path / "another"))
    second = resolve_job(noisy_job()).batch_choice
    assert first is not None
    assert second is not None
    assert dataclasses.replace(second, took_s=first.took_s) == first


@pytest.mark.slow
def test_a_damaged_answer_is_measured_again(place: Path) -> None:
    """What cannot be read counts as absent."""
    first = resolve_job(noisy_job())
    (kept,) = (place / "cache" / "batches").glob("*.json")
    kept.write_text("{")
    assert resolve_job(noisy_job()).spec == first.spec


@pytest.mark.slow
def test_another_seed_or_base_is_asked_anew(place: Path) -> None:
    """An answer belongs to one job and one question."""
    for job in (
        noisy_job(),
        noisy_job(seed=1),
        noisy_job(batch=stoker.auto(base=16)),
        noisy_job(batch=stoker.auto(base=8, most=16)),
    ):
        resolve_job(job)
    assert len(list((place / "cache" / "batches").glob("*.json"))) == 4


@pytest.mark.slow
def test_a_stopped_run_is_continued() -> None:
    """The same command finds its run again, under the batch and the rate it began with."""
    job = blobs_job(batch=stoker.auto(base=16))
    first = stopped_run(job)
    second = stoker.train(job, sink=lambda event: None)
    assert (second.name, second.status) == (first.name, "finished")
    assert second.directory.read_spec().settings["batch"] == 16


@pytest.mark.slow
def test_measuring_leaves_the_generators_and_the_users_model_alone() -> None:
    """What a program draws afterwards, and the module it handed over, are as if nothing had been measured."""
    model = Line(nn.Dropout(0.1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    job = noisy_job(model=model, batch=8)
    data = datasets_of(job)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global generator is what is at stake
    torch.manual_seed(1)
    expected = (random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state())  # noqa: NPY002
    automatic_batch.with_batch(job, None, data, "a job")
    assert (random.getstate()[1], np.random.get_state()[1].tolist()) == expected[:2]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), expected[2])
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.slow
def test_batch_norm_goes_on_normalising_over_the_base() -> None:
    """The noise is measured in groups of the base, and they become the job's coupling group."""
    prepared = resolve_job(noisy_job(model=lambda: Line(nn.BatchNorm1d(DIM))))
    assert prepared.job.coupling_group == 8
    assert prepared.batch_choice is not None
    assert prepared.batch_choice.initial.group == 8
    assert "in coupling groups of 8" in prepared.notes[0]


def _contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - output.mean() - target).square().mean()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"until": stoker.updates(100)}, "a number of updates is another amount of data under each batch"),
        ({"loss": stoker.Objective("mse", scope="batch")}, "another batch is another loss"),
        ({"loss": _contrastive}, "another batch is another loss"),
        ({"step": lambda model, optimizers, batch: None}, "does not say what its gradient is"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "scales the learning rate of stoker.SGD"),
        ({"batch": stoker.auto(base=5000)}, "the training data have only 4000 samples"),
        ({"optimizer": stoker.SGD(lr=1e30)}, "a copy trained for"),
    ],
    ids=["updates", "declared", "contrastive", "step", "function", "base", "diverges"],
)
def test_what_has_no_answer_is_refused(changes: dict[str, Any], words: str) -> None:
    """A job whose batch cannot be chosen is a BadJob that says why and what to do."""
    with pytest.raises(BadJob, match=words) as problem:
        resolve_job(noisy_job(**changes))
    assert problem.value.remedy


def test_a_model_too_large_to_be_measured_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that measuring takes are counted before anything is run."""
    monkeypatch.setattr(automatic_batch, "_COPIES", 10**12)
    with pytest.raises(DoesNotFit, match="copies of the weights"):
        resolve_job(noisy_job())


def test_the_median_of_the_points_decides() -> None:
    """One point at which gradients happened to swing changes nothing."""
    choice = choice_for(scale_of(3.0), scale_of(130.0), scale_of(90_000.0))
    assert (choice.batch, choice.noise_scale) == (128, 130.0)
    assert "twice the batch would be above the noise scale" in choice.why


def test_a_scale_below_the_base_leaves_the_job_as_stated() -> None:
    """The base is the least; its learning rate stays to the bit."""
    choice = choice_for(scale_of(5.0))
    assert (choice.batch, choice.lr_factor) == (8, 1.0)
    assert "not taken below the one stated" in choice.why


@pytest.mark.parametrize(("most", "batch", "word"), [(None, 512, "at least 100 updates"), (100, 64, "100 as asked")])
def test_limits_are_named(most: int | None, batch: int, word: str) -> None:
    """Ten epochs of 10,000 samples leave 100 updates of 1,000; a stated limit comes before."""
    choice = choice_for(scale_of(50_000.0), most=most)
    assert choice.batch == batch
    assert word in choice.why


def test_the_rate_has_three_digits() -> None:
    """A measurement repeated elsewhere, a little off, comes to the same numbers: it is the same job."""
    one, other = choice_for(scale_of(130.0)), choice_for(scale_of(130.001))
    assert one.noise_scale != other.noise_scale
    assert one.lr_factor == other.lr_factor == float(f"{one.lr_factor:.3g}")
    assert one.lr_factor == pytest.approx((1 + 130 / 8) / (1 + 130 / 128), rel=5e-3)


def test_an_unbounded_scale_counts_by_its_low_end() -> None:
    """Where the samples do not bound the scale, only what is certain is used, and said."""
    choice = choice_for(scale_of(math.inf, low=70.0, high=math.inf))
    assert (choice.batch, choice.noise_scale) == (64, 70.0)
    assert "512 samples do not bound it" in choice.why
    assert "(above 70 to" in choice.in_words()


def test_the_record_survives_the_codec() -> None:
    """Kept choices are read back equal, infinite ends among them."""
    choice = choice_for(scale_of(math.inf, low=70.0, high=math.inf))
    assert loads(dumps(choice), BatchChoice) == choice
