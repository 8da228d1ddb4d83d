"""Averages of the weights as settings: exponential moving average and stochastic weight averaging."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number, is_whole
from stoker.units import Duration, epochs, require_duration


@dataclass(frozen=True)
class EMA:
    """An exponential moving average of the weights after every update, which is evaluated and kept.

    Early averages are shorter: the decay of update `t` is min(decay, (1 + t) / (10 + t)). Buffers are copied.

    Args:
        decay: the decay of late updates, between 0 and 1.

    Raises:
        BadSetting: `decay` is out of its range.
    """

    decay: float = 0.999

    def __post_init__(self) -> None:
        if not (is_number(self.decay) and 0 < self.decay < 1):
            raise BadSetting(f"the decay of an average must be between 0 and 1, got {self.decay!r}")


@dataclass(frozen=True, kw_only=True)
class SWA:
    """Stochastic weight averaging: the plain mean of the weights at points of the last part of a run.

    From the first point on, the mean is evaluated and kept. Running statistics of batch norms at the mean are computed
    before each evaluation, and at the end, from `statistics` batches of training data in training order (epoch 0,
    augmented, dropout off), as plain means over these batches.
    The rate is the schedule's: for the paper's constant one, use a schedule that falls and then stays, such as
    `schedules.piecewise({0: 1, 0.7: 0.1})`.
    Source: Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization",
    https://arxiv.org/abs/1803.05407, algorithm 1.

    Args:
        start: share of the run after which the first point may come, in [0, 1).
        every: weights are taken at the end of each interval of this length (epochs, samples or updates), and of the
            run.
        statistics: training batches for the running statistics.

    Raises:
        BadSetting: a setting is out of range.
    """

    start: float = 0.75
    every: Duration = epochs(1)
    statistics: int = 50

    def __post_init__(self) -> None:
        if not (is_number(self.start) and 0 <= self.start < 1):
            raise BadSetting(
                f"start is the share of the run before the first weights are taken, in [0, 1), got {self.start}"
            )
        require_duration("every", self.every)
        if self.every.unit == "seconds":
            raise BadSetting("weights are taken every so many epochs, samples or updates, not seconds")
        if not (is_whole(self.statistics) and self.statistics >= 1):
            raise BadSetting(f"statistics is a number of training batches, 1 or more, got {self.statistics!r}")
