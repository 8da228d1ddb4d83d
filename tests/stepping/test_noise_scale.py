"""The noise scale against problems whose gradients have a known mean and covariance."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.errors import RunFailed
from stoker.loading.batches import Batch, BatchSource
from stoker.loading.datasets import datasets_of
from stoker.records import Position
from stoker.stepping.noise_scale import BLOCKS, NoiseMeter, NoiseScale, measure_noise
from stoker.stepping.step import Step
from tests.stepping.driving import SEPARABLE, plan_of

DIM, GROUP = 20, 4


def gaussian_groups(signal: float, noise: float, num_groups: int, seed: int) -> Iterator[list[torch.Tensor]]:
    """Mean gradients of groups of GROUP samples, each N(signal · e_0, noise² I) in DIM dimensions, as two tensors."""
    draws = np.random.default_rng(seed).normal(0.0, noise / math.sqrt(GROUP), (num_groups, DIM))
    draws[:, 0] += signal
    for row in torch.from_numpy(draws):
        yield [row[:5].view(5, 1), row[5:]]


def measured(signal: float, noise: float, *, num_groups: int = 64, seed: int = 0) -> tuple[NoiseScale, float]:
    """What the meter reads after those groups."""
    meter = NoiseMeter(GROUP)
    for gradient in gaussian_groups(signal, noise, num_groups, seed):
        meter.add(gradient)
    return meter.read(0)


@pytest.mark.slow
def test_the_estimates_are_unbiased() -> None:
    """Over 200 measurements the means of both estimates agree with the closed form within three standard errors."""
    signal, noise, repeats = 0.5, 2.0, 200
    found = [measured(signal, noise, num_groups=16, seed=seed)[0] for seed in range(repeats)]
    for values, truth in (
        ([one.squared_gradient for one in found], signal**2),
        ([one.variance for one in found], DIM * noise**2),
    ):
        error = np.std(values) / math.sqrt(repeats)
        assert abs(np.mean(values) - truth) < 3 * error
        assert error < 0.15 * truth


@pytest.mark.slow
def test_the_spread_is_as_stated() -> None:
    """The variance of the |G|² estimate is that of the formula in the method card."""
    signal, noise, k, repeats = 1.0, 1.0, 16, 300
    values = [measured(signal, noise, num_groups=k, seed=seed)[0].squared_gradient for seed in range(repeats)]
    samples = k * GROUP
    stated = 2 * DIM * noise**4 / samples**2 * (1 + 1 / (k - 1)) + 4 * signal**2 * noise**2 / samples
    assert np.var(values) == pytest.approx(stated, rel=0.25)  # of 300 draws, 8 % is one standard error


@pytest.mark.slow
def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    """The closed form is in the 80 % interval in 72 to 88 of 100 measurements."""
    signal, noise = 1.5, 1.0
    found = [measured(signal, noise, seed=seed)[0].scale for seed in range(100)]
    truth = DIM * noise**2 / signal**2
    assert 72 <= sum(one.low <= truth <= one.high for one in found) <= 88


def test_it_is_the_two_batch_estimator_of_the_paper() -> None:
    """The estimates equal those of McCandlish et al., A.1, from batches of one group and of all groups."""
    gradients = [torch.cat([part.flatten() for part in one]) for one in gaussian_groups(1.0, 1.0, 16, seed=3)]
    small, big = GROUP, GROUP * len(gradients)
    small_norm = float(torch.stack([g @ g for g in gradients]).mean())
    mean = torch.stack(gradients).mean(0)
    big_norm = float(mean @ mean)
    found, _ = measured(1.0, 1.0, num_groups=16, seed=3)
    assert found.squared_gradient == pytest.approx((big * big_norm - small * small_norm) / (big - small))
    assert found.variance == pytest.approx((small_norm - big_norm) / (1 / small - 1 / big))


def test_a_gradient_that_is_all_noise_has_no_upper_bound() -> None:
    """Without a signal the high end is infinite, and the low end is above what the samples would have shown."""
    found = [measured(0.0, 1.0, seed=seed)[0].scale for seed in range(20)]
    assert sum(math.isinf(one.high) for one in found) >= 15
    assert min(one.low for one in found) > 64 * GROUP / 8


def test_a_gradient_without_noise_has_the_scale_zero() -> None:
    """Where all groups agree, one sample says all."""
    meter = NoiseMeter(GROUP)
    for _ in range(2 * BLOCKS):
        meter.add([torch.ones(DIM)])
    found, error = meter.read(7)
    assert found.scale.value == pytest.approx(0.0, abs=1e-12)
    assert (found.trained_samples, found.num_samples, error) == (7, 2 * BLOCKS * GROUP, 0.0)


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    """A nan would make every estimate a nan."""
    with pytest.raises(RunFailed, match="gradient of 4 samples is not finite"):
        NoiseMeter(GROUP).add([torch.tensor([math.nan])])


class Mean(nn.Module):
    """A vector that is to be the mean of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(DIM))
        self.unused = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The vector once for each sample [B, DIM]."""
        return self.w.expand(len(x), DIM)


def mean_job(num_samples: int = 4096, **changes: object) -> stoker.Job:
    """Per sample half the squared distance to N(0.5 · e_0, I): a gradient of mean -0.5 · e_0 and covariance I."""
    x = torch.randn(num_samples, DIM, generator=torch.Generator().manual_seed(0))
    x[:, 0] += 0.5

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 0.5 * (output - target).square().sum(1)

    settings = {
        "model": Mean,
        "data": (x, x),
        "loss": loss,
        "optimizer": stoker.SGD(lr=0.1),
        "batch": 16,
        "until": stoker.epochs(1),
    }
    return stoker.Job(**(settings | changes))  # type: ignore[arg-type]


def noise_of(job: stoker.Job, *, most: int = 2048, size: int = 16) -> NoiseScale:
    """The noise measured through a Step, in groups of 16 out of batches of `size`."""
    step, data = Step(job, plan_of(16), SEPARABLE), datasets_of(job)
    source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), 0, step.plan)

    def batches() -> Iterator[Batch]:
        yield from source.batches(Position(), 10_000)

    before = {name: tensor.clone() for name, tensor in step.model.state_dict().items()}
    found = measure_noise(step, batches(), group=size, fewest=512, most=most, trained_samples=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in step.model.state_dict().items())
    assert all(p.grad is None for p in step.model.parameters())
    return found


def test_a_model_is_measured_as_the_closed_form_says() -> None:
    """tr(Σ) / |G|² = 20 / 0.25 = 80 samples, within the interval; weights and gradients are left as they were."""
    found = noise_of(mean_job())
    assert found.scale.low <= DIM / 0.25 <= found.scale.high
    assert found.variance == pytest.approx(DIM, rel=0.1)


def test_the_noise_does_not_depend_on_the_size_of_groups() -> None:
    """Groups of 8 and of 32 samples estimate the same scale."""
    scales: list[float] = []
    for size in (8, 32):
        job = mean_job(batch=size)
        step, data = Step(job, plan_of(size), SEPARABLE), datasets_of(job)
        source = BatchSource(data.train, step.pipeline(data.train, augmented=True), data.extent(job), 0, step.plan)
        batches = source.batches(Position(), 10_000)
        scales.append(measure_noise(step, batches, group=size, fewest=4096, most=4096, trained_samples=0).scale.value)
    assert scales[0] == pytest.approx(scales[1], rel=0.1)


def test_no_more_samples_are_taken_than_are_needed() -> None:
    """A strong signal is measured with the fewest samples, a weak one with as many as are allowed."""
    plain = mean_job()
    objective = stoker.Objective(plain.objective.loss, penalty=lambda model: 100 * model.w.sum())
    strong = noise_of(mean_job(loss=objective))
    assert strong.num_samples == 512
    assert noise_of(mean_job(), most=4096).num_samples > 512


def test_ragged_batches_are_passed_over_and_too_few_are_refused() -> None:
    """Groups of another size would be another measurement; an epoch with too few of the right size fails."""
    with pytest.raises(RunFailed, match="0 groups of 8 samples are too few"):
        noise_of(mean_job(num_samples=64), size=8)
