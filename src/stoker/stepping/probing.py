"""The probe: losses of chosen batches on throw-away copies of a job's model, compared with each other.

Everything is computed on the CPU in float64, where rounding lies nine orders below any coupling that matters; in fp32
where the model insists. Weights are the initial ones and, because layers that begin as zero hide what lies behind them,
the initial ones with noise added.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from stoker.jobs import Job
from stoker.loading import Batch, Samples, Stream, key_of, seed_generators
from stoker.loading.order import Indices
from stoker.stepping.losses import LossForm, Objective, require_scalar
from stoker.stepping.model import build_model, default_dtype
from stoker.stepping.pool import Pool, Quad, pool_of
from stoker.stepping.randomness import RandomDraws

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5}
"""Differences up to this [relative to the losses compared] are taken for rounding, by the coarsest type in use."""
_HALF, _ROUNDS = 4, 8
_HALF_IF_SLOW, _ROUNDS_IF_SLOW = 1, 2
_SLOW_S, _VERY_SLOW_S = 0.1, 2.0
_NOISE = 0.05


Where = tuple[nn.Module, Quad]
"""The weights and the samples of a comparison."""


@dataclass(frozen=True)
class Value:
    """A loss's sum and count, as plain numbers."""

    sum: float
    count: float

    def __add__(self, other: Value) -> Value:
        """Both together."""
        return Value(self.sum + other.sum, self.count + other.count)

    @property
    def mean(self) -> float:
        """Sum over count; NaN where nothing was counted."""
        return self.sum / self.count if self.count else math.nan


def gap(one: Value, other: Value, *scale: Value) -> float:
    """The larger of the differences of sums and of counts, relative to the largest of `scale`; NaN if not finite."""
    sums = abs(one.sum - other.sum) / max(1e-12, *(abs(value.sum) for value in scale))
    counts = abs(one.count - other.count) / max(1e-12, *(abs(value.count) for value in scale))
    return float(np.maximum(sums, counts))


@dataclass(frozen=True)
class Probe:
    """A job's model and samples, ready to be asked for losses; halves of its batches have `sizes` samples."""

    job: Job
    samples: Samples
    objective: Objective
    pool: Pool
    models: tuple[nn.Module, nn.Module]
    dtype: torch.dtype
    sizes: tuple[int, int]
    rounds: int
    tolerance: float = 0.0
    drawn: frozenset[str] = frozenset()

    @property
    def model(self) -> nn.Module:
        """The model with noise in its weights."""
        return self.models[0]

    def describe(self) -> str:
        """How much was looked at: `8 rounds of 8 samples, float64`."""
        return f"{self.rounds} rounds of {sum(self.sizes)} samples, {str(self.dtype).removeprefix('torch.')}"

    def quads(self) -> Iterator[Where]:
        """The weights and samples of every round: at first the noisy weights, then both in turns of three."""
        quads = self.pool.quads(self.sizes, self.job.seed)
        for turn, quad in enumerate(itertools.islice(quads, self.rounds)):
            yield self.models[turn // 3 % 2], quad

    def value(self, model: nn.Module, *rows: Indices, seed: int = 0) -> Value:
        """The loss of the batch of these rows, on a fresh copy of `model`."""
        return self.value_of(fresh(model), self.pool.batch(*rows), 0, sum(map(len, rows)), seed=seed)

    def value_of(self, model: nn.Module, batch: Batch, start: int, stop: int, *, seed: int = 0) -> Value:
        """The loss of samples start..stop of `batch` on `model` itself, which keeps what the pass leaves in it."""
        with torch.no_grad():
            loss = self._loss(model, batch, start, stop, seed)
        return Value(float(loss[0]), loss[1])

    def gradient_of(self, model: nn.Module, batch: Batch, start: int, stop: int) -> tuple[Value, list[torch.Tensor]]:
        """The loss of samples start..stop of `batch` and the gradient of its sum, by trainable parameter."""
        total, count = self._loss(model, batch, start, stop, seed=0)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        found = torch.autograd.grad(total, trainable, materialize_grads=True, allow_unused=True)
        return Value(float(total.detach()), count), [gradient.detach() for gradient in found]

    def mixed_difference(self, model: nn.Module, quad: Quad) -> float:
        """f(A, B) + f(A', B') - f(A', B) - f(A, B') relative to the largest of the four; NaN where one is not finite.

        With f the sum, and likewise the count, of a batch of two halves. It vanishes for all halves only where each
        adds its own share. All four have one shape and one seed, so that dropout draws the same masks in each.
        """
        ab = self.value(model, quad.first, quad.second)
        other_ab = self.value(model, quad.other_first, quad.other_second)
        other_a = self.value(model, quad.other_first, quad.second)
        other_b = self.value(model, quad.first, quad.other_second)
        return gap(ab + other_ab, other_a + other_b, ab, other_ab, other_a, other_b)

    def largest_mixed_difference(self) -> tuple[float, Where | None]:
        """The first one over the tolerance, else the largest one, and where it was; (0, None) if none was finite."""
        largest, where = 0.0, None
        for model, quad in self.quads():
            difference = self.mixed_difference(model, quad)
            if difference >= largest:  # never so for NaN
                largest, where = difference, (model, quad)
            if largest > self.tolerance:
                break
        return largest, where

    def is_repeatable(self) -> bool:
        """Whether the same batch, seed and state give the same loss again."""
        return self.is_same_with(seed=0)

    def is_same_with(self, *, seed: int) -> bool:
        """Whether a batch's loss under seed 0 is the same under `seed`."""
        model, quad = next(self.quads())
        one, two = (self.value(model, quad.first, quad.second, seed=each) for each in (0, seed))
        return not gap(one, two, one) > self.tolerance

    def form(self) -> LossForm:
        """What the loss function returns."""
        quad = next(self.quads())[1]
        batch = self.pool.batch(quad.first, quad.second)
        with torch.no_grad(), default_dtype(self.dtype):
            return self.objective.form(fresh(self.model), batch.cut(0, batch.size))

    def require_by_sample(self) -> None:
        """Refuse a loss of one's own that compares every sample with every target, and does not say so.

        Raises:
            BadJob: it does.
        """
        if isinstance(self.job.loss, str):
            return  # named losses look at shapes themselves
        model, quad = next(self.quads())
        batch = self.pool.batch(quad.first, quad.second)
        seed_generators(key_of(Stream.PROBE, 0))
        with torch.no_grad(), default_dtype(self.dtype):
            self.objective.require_by_sample(fresh(model), batch.cut(0, batch.size))

    def with_frozen(self, modules: list[nn.Module]) -> Probe:
        """The same probe with these modules of `model` in evaluation mode."""
        names = {name for name, module in self.model.named_modules() if any(module is one for one in modules)}
        return replace(self, models=(_frozen(self.models[0], names), _frozen(self.models[1], names)))

    def _loss(self, model: nn.Module, batch: Batch, start: int, stop: int, seed: int) -> tuple[torch.Tensor, float]:
        seed_generators(key_of(Stream.PROBE, seed))
        content = batch.cut(start, stop)
        with default_dtype(self.dtype):
            loss = require_scalar(self.objective.loss(model, content, stop - start), "loss")
        return loss.sum, float(loss.count)


def working_probe(job: Job, samples: Samples) -> Probe:
    """A probe of as many samples as are quick; in fp32, or of the real batch, where the model insists.

    Raises:
        BadJob: the samples or the loss cannot be used. Whatever the model raises at every attempt is passed on.
    """
    few = (min(_HALF_IF_SLOW, job.batch // 2),) * 2
    real = (job.batch // 2, job.batch - job.batch // 2)
    for dtype, sizes in ((torch.float64, few), (torch.float32, few), (torch.float64, real)):
        with contextlib.suppress(Exception):  # the last attempt, below, shows what is wrong
            return _calibrated(_quick(_probe(job, samples, dtype, sizes)))
    return _calibrated(_probe(job, samples, torch.float32, real))


def _quick(probe: Probe) -> Probe:
    """The probe with more samples and rounds where one loss is quick, in fp32 where it takes very long."""
    seconds = _seconds(probe)
    half = min(_HALF, probe.job.batch // 2)
    if seconds > _VERY_SLOW_S and probe.dtype is torch.float64:
        probe = _probe(probe.job, probe.samples, torch.float32, probe.sizes)
    if seconds > _SLOW_S:
        return replace(probe, rounds=_ROUNDS_IF_SLOW)
    return probe if sum(probe.sizes) == probe.job.batch else replace(probe, sizes=(half, half))


def fresh(model: nn.Module) -> nn.Module:
    """A copy that shares the parameters of `model` and nothing else; the model itself where it cannot be copied."""
    shared = {id(parameter): parameter for parameter in model.parameters()}
    with contextlib.suppress(Exception):  # a generator, a lock or a result of a pass among the model's attributes
        return copy.deepcopy(model, shared)
    return model


def _probe(job: Job, samples: Samples, dtype: torch.dtype, sizes: tuple[int, int]) -> Probe:
    initial = build_model(job).to(dtype)
    noisy = build_model(job).to(dtype)
    _add_noise(noisy, key_of(Stream.PROBE, job.seed))
    pool = pool_of(job, samples, dtype)
    return Probe(job, samples, Objective(job, dtype=dtype), pool, (noisy, initial), dtype, sizes, _ROUNDS)


def _calibrated(probe: Probe) -> Probe:
    """The probe with its tolerance and what draws at random; with the initial weights alone if noise breaks it."""
    _, quad = next(probe.quads())
    with RandomDraws() as draws:
        value = probe.value(probe.model, quad.first, quad.second)
    if not np.isfinite(value.sum):
        probe = replace(probe, models=(probe.models[1], probe.models[1]))
    coarse = probe.dtype is torch.float32 or draws.coarsest > torch.finfo(torch.float64).eps
    tolerance = ROUNDING[torch.float32 if coarse else torch.float64]
    return replace(probe, tolerance=tolerance, drawn=frozenset(draws.drawn))


def _seconds(probe: Probe) -> float:
    """How long one loss takes, not counting the first call [s]."""
    model, quad = next(probe.quads())
    probe.value(model, quad.first, quad.second)
    started = time.perf_counter()
    probe.value(model, quad.first, quad.second)
    return time.perf_counter() - started


def _add_noise(model: nn.Module, seed: int) -> None:
    """Add noise to the trainable weights: 5 % of each tensor's own spread, or of 1 / sqrt(fan) where that is more."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad and p.is_floating_point() and p.numel()):
            fan = max(1, parameter[0].numel()) if parameter.dim() > 1 else 1
            spread = max(float(parameter.std(correction=0)), fan**-0.5)
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(_NOISE * spread * noise.to(parameter.dtype))


def _frozen(model: nn.Module, names: set[str]) -> nn.Module:
    frozen = fresh(model)
    for name, module in frozen.named_modules():
        if name in names:
            module.eval()
    return frozen
