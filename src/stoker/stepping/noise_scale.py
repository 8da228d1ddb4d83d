"""The gradient's noise scale, from the gradients of many small groups of samples at the same weights.

What: with g_i the mean gradient of group i of b samples, k groups, and averages over i and over pairs i != j,
|G|² is estimated by the mean of g_i · g_j and tr(Σ) by b times (mean |g_i|² - mean g_i · g_j): both without bias where
samples are independent draws. It is the two-batch estimator of the source with batches of b and k b, averaged over all
ways to take them from one pass. The scale is the ratio, its inverse near normal.
Use when: a batch is chosen before a run.
Costs: one forward and backward a group, and `BLOCKS` gradients in memory.
Does not combine with: losses that need the whole batch; unequal counts (masked tokens) make it a ratio estimate.
Spread: for normal gradients Var(|G|² estimate) = 2 tr(Σ²) / (k b)² (1 + 1 / (k - 1)) + 4 GᵀΣG / (k b), so that the
noise scale needs about as many samples as it is large; what is reported is a jackknife over `BLOCKS` blocks of groups.
Source: McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, appendix A.1; the jackknife: Tukey 1958.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from stoker.errors import RunFailed
from stoker.loading.batches import Batch
from stoker.records import Estimate
from stoker.stepping.distributed_tensors import as_real
from stoker.stepping.step import Step

BLOCKS = 8
"""Number of separate sums of gradients, for the jackknife."""

_T_OF_8_IN_10 = 1.415
"""Half-width of an 80 % interval in standard errors, with BLOCKS - 1 = 7 degrees of freedom (Student's t)."""

PRECISE_ENOUGH = 0.2
"""Relative standard error of the scale's inverse at which no more samples are taken."""


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """Number of samples at which an update's gradient is as much signal as noise.

    `squared_gradient` estimates |G|², the squared norm of the gradient over all data, without bias: where it is lost in
    noise it may come out negative. `variance` estimates tr(Σ), the summed variance of a single sample's gradient, both
    from `num_samples` samples in groups of `group`, after training on `trained_samples` others. `scale` is their ratio
    tr(Σ) / |G|² [samples]; its value or its high end is infinite where the samples do not bound it.
    """

    schema: ClassVar[int] = 1
    scale: Estimate
    squared_gradient: float
    variance: float
    group: int
    num_samples: int
    trained_samples: int


class NoiseMeter:
    """Takes the gradients of groups of `group` samples at fixed weights, and estimates the noise scale."""

    def __init__(self, group: int) -> None:
        self.group, self.num_groups = group, 0
        self._sums: list[list[torch.Tensor]] = []
        self._squares = [0.0] * BLOCKS

    def add(self, gradient: Sequence[torch.Tensor]) -> None:
        """One group's mean gradient, tensor by tensor; groups take turns among the blocks.

        Raises:
            RunFailed: it is not finite.
        """
        block = self.num_groups % BLOCKS
        square = _dot(gradient, gradient)
        if not math.isfinite(square):
            raise RunFailed(
                f"the gradient of {self.group} samples is not finite",
                remedy="Look at the data, the loss and the learning rate.",
            )
        if block == len(self._sums):
            self._sums.append([tensor.detach().clone() for tensor in gradient])
        else:
            torch._foreach_add_(self._sums[block], list(gradient))
        self._squares[block] += square
        self.num_groups += 1

    def read(self, trained_samples: int) -> tuple[NoiseScale, float]:
        """The estimate after that many samples of training, and the relative standard error of the scale's inverse.

        Every block needs a group, and as many as the others.
        """
        products = [[_dot(a, b) for b in self._sums[: block + 1]] for block, a in enumerate(self._sums)]
        signal, variance = self._moments(products, leaving_out=None)
        inverse = signal / variance if variance > 0 else math.inf
        parts = [self._moments(products, leaving_out=block) for block in range(BLOCKS)]
        inverses = [part_signal / noise if noise > 0 else math.inf for part_signal, noise in parts]
        error = 0.0
        if all(map(math.isfinite, inverses)):  # the jackknife's standard error
            mean = sum(inverses) / BLOCKS
            error = math.sqrt((BLOCKS - 1) / BLOCKS * sum((each - mean) ** 2 for each in inverses))
        bounds = (inverse + sign * _T_OF_8_IN_10 * error for sign in (0.0, 1.0, -1.0))
        value, low, high = (1 / bound if bound > 0 else math.inf for bound in bounds)
        scale = NoiseScale(
            scale=Estimate(value=value, low=low, high=high, unit="samples", basis="measured here"),
            squared_gradient=signal,
            variance=variance,
            group=self.group,
            num_samples=self.group * self.num_groups,
            trained_samples=trained_samples,
        )
        return scale, error / inverse if inverse > 0 else math.inf

    def _moments(self, products: list[list[float]], *, leaving_out: int | None) -> tuple[float, float]:
        """Estimates of |G|² and tr(Σ) from all blocks but one."""
        blocks = [block for block in range(BLOCKS) if block != leaving_out]
        k = len(blocks) * self.num_groups // BLOCKS
        total = sum((1 if i == j else 2) * products[i][j] for i, j in itertools.product(blocks, blocks) if j <= i)
        squares = sum(self._squares[block] for block in blocks)
        signal = (total - squares) / (k * (k - 1))
        return signal, self.group * (squares / k - signal)


def measure_noise(
    step: Step, batches: Iterator[Batch], *, group: int, fewest: int, most: int, trained_samples: int
) -> NoiseScale:
    """The noise scale of `step`'s loss at its weights, which are left as they are; buffers and generators move on.

    Args:
        step: a step whose plan takes `group` samples at once.
        batches: groups of `group` samples; others, such as the last of an epoch, are passed over.
        group: samples in a group: a coupling group, or any number where samples are separable.
        fewest: samples to take at least, and never fewer than BLOCKS groups.
        most: samples to take at most, unless that is fewer; no more than enough are taken.
        trained_samples: what the weights were trained on, for the record.

    Raises:
        RunFailed: a gradient is not finite, or there were too few batches.
    """
    meter, check_at = NoiseMeter(group), BLOCKS * math.ceil(fewest / (BLOCKS * group))
    parameters = [p for part in step.optimizer.param_groups for p in part["params"]]
    for number, batch in enumerate(batches):
        if batch.size != group:
            continue
        step.gradients(batch, number)
        meter.add([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
        step.model.zero_grad(set_to_none=True)
        if meter.num_groups == check_at:
            scale, error = meter.read(trained_samples)
            check_at *= 2
            if error <= PRECISE_ENOUGH or check_at * group > most:
                return scale
    raise RunFailed(f"{meter.num_groups} groups of {group} samples are too few to measure the gradient's noise")


def _dot(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The scalar product over all tensors; in float64, since small differences of large sums are taken."""
    pairs = ((as_real(a.detach()), as_real(b.detach())) for a, b in zip(one, other, strict=True))
    products = [(a.double() * b.double()).sum() for a, b in pairs]
    return float(torch.stack(products).sum())
