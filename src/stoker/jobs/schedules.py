"""Learning-rate schedules: pure functions of progress, so that nothing needs saving and nothing counts steps.

Progress is the share of the run's samples already trained on, from 0 up to (not including) 1. A schedule answers with a
factor of the optimiser's learning rate. Any function `progress -> factor` will do; these are the usual ones. Where they
have places in the run, those are shares of it, or durations in the unit of the job's `until`:

>>> thirds = step(every=epochs(30)).over(epochs(90))  # as Job(until=stoker.epochs(90)) does
>>> [round(thirds(epoch / 90), 3) for epoch in (0, 29, 30, 60)]
[1.0, 1.0, 0.1, 0.01]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.errors import BadSetting
from stoker.jobs.plain_numbers import is_number
from stoker.jobs.schedule_shapes import (
    Cycles,
    Decay,
    InverseRoot,
    Piecewise,
    Place,
    Plateau,
    Polynomial,
    Restarts,
    Steps,
    Warmup,
)
from stoker.units import Duration, epochs

Schedule = Callable[[float], float]


@dataclass(frozen=True)
class Constant:
    """The learning rate as given, throughout."""

    def __call__(self, progress: float) -> float:
        """1 at any progress."""
        return 1.0


@dataclass(frozen=True)
class Ramp:
    """A rise over the first `warmup` share of the run, then a fall to `final`.

    The rise is linear from `initial` to 1. The fall has the stated shape. `shape="cosine"` with a short rise is the
    warm-up + cosine schedule (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, without restarts);
    a long rise makes it the one-cycle policy (Smith and Topin 2018, https://arxiv.org/abs/1708.07120; momentum is
    not cycled here).
    """

    warmup: float
    initial: float
    final: float
    shape: Literal["cosine", "linear"]

    def __post_init__(self) -> None:
        if not (is_number(self.warmup) and 0 <= self.warmup < 1):
            raise BadSetting(f"warmup is the share of the run spent rising, in [0, 1), got {self.warmup!r}")
        for name in ("initial", "final"):
            factor = getattr(self, name)
            if not (is_number(factor) and 0 <= factor <= 1):
                raise BadSetting(f"{name} is a factor of the learning rate, in [0, 1], got {factor!r}")
        if self.shape not in ("cosine", "linear"):
            raise BadSetting(f'the fall has the shape "cosine" or "linear", got {self.shape!r}')

    def __call__(self, progress: float) -> float:
        """The factor of the learning rate at `progress`."""
        if progress < self.warmup:
            return self.initial + (1 - self.initial) * progress / self.warmup
        fallen = (progress - self.warmup) / (1 - self.warmup)
        left = 1 - fallen if self.shape == "linear" else (1 + math.cos(math.pi * fallen)) / 2
        return self.final + (1 - self.final) * left


def constant() -> Schedule:
    """The learning rate as given, throughout."""
    return Constant()


def one_cycle(*, warmup: float = 0.25, initial: float = 0.04, final: float = 0.0) -> Schedule:
    """Rise linearly over the first quarter of the run, then fall along a cosine to `final`."""
    return Ramp(warmup, initial, final, "cosine")


def warmup_cosine(*, warmup: float = 0.05, initial: float = 0.0, final: float = 0.0) -> Schedule:
    """Rise linearly over the first `warmup` share of the run, then fall along a cosine to `final`."""
    return Ramp(warmup, initial, final, "cosine")


def warmup_linear(*, warmup: float = 0.05, initial: float = 0.0, final: float = 0.0) -> Schedule:
    """Rise linearly over the first `warmup` share of the run, then fall linearly to `final`."""
    return Ramp(warmup, initial, final, "linear")


def step(*, every: Place, factor: float = 0.1) -> Schedule:
    """`factor` times the rate after each `every`: `step(every=stoker.epochs(30))`; `torch`'s StepLR."""
    return Decay(every, factor)


def multi_step(*, at: Sequence[Place], factor: float = 0.1) -> Schedule:
    """`factor` times the rate after each of the places: `multi_step(at=[0.5, 0.75])`; `torch`'s MultiStepLR."""
    return Steps(tuple(at), factor)


def exponential(factor: float, *, every: Place = epochs(1), smooth: bool = False) -> Schedule:
    """`factor` times the rate after each `every`, or `smooth` all along; `torch`'s ExponentialLR."""
    return Decay(every, factor, smooth)


def polynomial(*, power: float = 1.0, final: float = 0.0) -> Schedule:
    """From the rate to `final` times it as the `power`-th power of what is left of the run."""
    return Polynomial(power, final)


def cosine_restarts(*, first: Place, multiply: float = 1.0, final: float = 0.0) -> Schedule:
    """Cosines that begin anew, each `multiply` times as long as the one before.

    Source: Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983 (SGDR).
    """
    return Restarts(first, multiply, final)


def cyclic(*, period: Place, low: float = 0.1, halving: bool = False) -> Schedule:
    """Up from `low` to the rate and down again in every `period`; `halving` halves each cycle's height.

    Source: Smith 2017, https://arxiv.org/abs/1506.01186 ("triangular", and "triangular2" with `halving`).
    """
    return Cycles(period, low, halving)


def piecewise(
    points: Mapping[Place, float] | Sequence[tuple[Place, float]], *, between: Literal["line", "step"] = "line"
) -> Schedule:
    """Factors of the rate at places of the run, with lines or steps between: `piecewise({0: 1, 0.7: 1, 1: 0})`."""
    pairs = points.items() if isinstance(points, Mapping) else points
    return Piecewise(tuple((place, factor) for place, factor in pairs), between)


def warmup(length: Place, *, initial: float = 0.0, then: Schedule = Constant()) -> Schedule:
    """A rise from `initial` over the first `length` of the run, times another schedule (a constant rate if none)."""
    return Warmup(length, initial, then)


def inverse_sqrt(*, warmup: Place) -> Schedule:
    """A rise over `warmup`, then a fall with the root of how far the run is.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 5.3.
    """
    return InverseRoot(warmup)


def plateau(
    metric: str = "loss",
    *,
    factor: float = 0.1,
    patience: Duration = epochs(10),
    min_delta: float = 0.0,
    cooldown: Duration | None = None,
    least: float = 0.0,
    lower_is_better: bool | None = None,
    then: Schedule = Constant(),
) -> Schedule:
    """`factor` times the rate each time that a measure on `valid` has not got better for `patience`.

    Args:
        metric: the measure's name in results.
        factor: what the rate is multiplied by.
        patience: how long it may stand still (epochs, samples or updates), counted from the best evaluation, or from
            the last time the rate fell.
        min_delta: better is what is better by more than this.
        cooldown: how long after a fall nothing is counted, in the unit of `patience`.
        least: the factor never falls below this share of the rate as given.
        lower_is_better: of the measure; left out, it is known of losses, errors and the named metrics.
        then: another schedule that the factor is multiplied with.
    """
    return Plateau(metric, factor, patience, min_delta, cooldown, least, lower_is_better, then)
