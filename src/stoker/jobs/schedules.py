"""Learning-rate schedules: pure functions of progress, so that nothing needs saving and nothing counts steps.

Progress is the share of the run's samples already trained on, from 0 up to (not including) 1. A schedule answers with a
factor of the optimiser's learning rate. Any function `progress -> factor` will do; these are the usual ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup is the share of the run spent rising, in [0, 1), got {self.warmup}")
        for name in ("initial", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a factor of the learning rate, in [0, 1], got {getattr(self, name)}")
        if self.shape not in ("cosine", "linear"):
            raise ValueError(f'the fall has the shape "cosine" or "linear", got {self.shape!r}')

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
