"""Chosen hyperparameters: the batch by the gradient's noise scale, the learning rate by a range test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stoker.records.estimate import Estimate


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


@dataclass(frozen=True, kw_only=True)
class BatchChoice:
    """An optimiser batch [samples] chosen by the noise scale, and what became of the learning rate.

    `lr` was stated for `base`, and is multiplied by `lr_factor` for `batch`, a power of two times `base`; `exponent` is
    that of the rule, 1 for SGD and 1/2 for Adam. `noise_scale` [samples] is what both follow: the median of `trained`,
    measured at points of a short warm-up; `initial` is that of the initial weights. `why` says what decided: the noise
    scale or a limit.
    """

    schema: ClassVar[int] = 1
    base: int
    batch: int
    lr: float
    lr_factor: float
    exponent: float
    noise_scale: float
    coupling_group: int | None
    initial: NoiseScale
    trained: tuple[NoiseScale, ...]
    why: str
    took_s: float

    def in_words(self) -> str:
        """The choice and its numbers on one line."""
        first, later = self.initial.scale, sorted((one.scale for one in self.trained), key=lambda scale: scale.value)
        initial = _bound(first)  # `410 (330 to 540)`, or its lower bound
        if first.value != float("inf"):
            initial += f" ({first.low:.3g} to {first.high:.3g})"
        span = f"{_bound(later[0])} to {_bound(later[-1])}"
        after = f"{self.noise_scale:.3g} ({span}) after up to {self.trained[-1].trained_samples:,} samples"
        groups = "" if self.coupling_group is None else f" in coupling groups of {self.coupling_group}"
        return (
            f"batch {self.batch:,}{groups} and lr {self.lr * self.lr_factor:.4g}, from lr {self.lr:g} stated for "
            f"batch {self.base:,}: the gradient's noise scale is {initial} "
            f"on the initial weights, {after}; {self.why} "
            f"(measured in {self.took_s:.1f} s)"
        )


def _bound(scale: Estimate) -> str:
    return f"above {scale.low:.3g}" if scale.value == float("inf") else f"{scale.value:.3g}"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One seed's sweep: `losses[i]` is the mean loss of the batch after the update at `LrRange.rates[i]`.

    There are fewer losses than rates where the sweep ended early, because the loss ran away. `edge` is the largest rate
    at which the smoothed loss was still falling; None where it never ran away.
    """

    seed: int
    losses: tuple[float, ...]
    edge: float | None


@dataclass(frozen=True, kw_only=True)
class LrRange:
    """A suggestion for the learning rate, what it rests on, and how far it can be relied on.

    `lr` is always one to begin with: where `is_clear` is false, `why` says what was not found and what `lr` is instead.
    `low` to `high` are the rates between which training made good progress: from where the loss had fallen by a tenth
    of its whole fall, to the edge. `edge` is the geometric mean of the seeds' edges (None: no edge was found);
    `spread` is the largest edge over the smallest. `batch` is the optimiser batch [samples] it holds for, `stated_lr`
    what the job says.
    """

    schema: ClassVar[int] = 1
    lr: float
    low: float
    high: float
    is_clear: bool
    why: str
    edge: float | None
    spread: float | None
    stated_lr: float
    batch: int
    rates: tuple[float, ...]
    sweeps: tuple[Sweep, ...]
    num_updates: int
    took_s: float

    def mean_losses(self) -> tuple[float, ...]:
        """The loss after each rate, averaged over the seeds that got that far."""
        longest = max((len(sweep.losses) for sweep in self.sweeps), default=0)
        columns = [[sweep.losses[i] for sweep in self.sweeps if i < len(sweep.losses)] for i in range(longest)]
        return tuple(sum(column) / len(column) for column in columns)
