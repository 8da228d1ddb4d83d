"""Rules that end a run early by its evaluations; part of the Job, since they change what is learned."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number
from stoker.units import Duration, require_duration

LOWER_IS_BETTER = frozenset({"loss", "mse", "l1"})
"""Named measures for which lower is better; for all others higher is."""


@dataclass(frozen=True)
class EarlyStopping:
    """End the run when a measure on `valid` has not improved for `patience`.

    Args:
        metric: its name in results: "loss", "accuracy", "f1[3]"; "valid/loss" and "valid loss" mean the same. Of
            several validation sets it is the first one's, or that of the named one: "unseen/accuracy".
        patience: time without improvement, counted from the best evaluation: `stoker.epochs(5)`.
        min_delta: least improvement that counts.
        lower_is_better: of the measure; by default known of losses, errors and the named metrics, and of objects with
            the attribute `lower_is_better`, or torchmetrics' `higher_is_better`.

    Raises:
        BadSetting: a setting is out of range.
    """

    metric: str = "loss"
    _: KW_ONLY
    patience: Duration
    min_delta: float = 0.0
    lower_is_better: bool | None = None

    def __post_init__(self) -> None:
        require_duration("patience", self.patience)
        if self.patience.unit == "seconds":
            raise BadSetting("patience is counted in epochs, samples or updates, not seconds")
        if not (is_number(self.min_delta) and 0 <= self.min_delta < math.inf):
            raise BadSetting(f"min_delta is how much better is better, finite and not negative, got {self.min_delta!r}")


@dataclass(frozen=True)
class Target:
    """End the run when a measure on `valid` has reached `value`; for its name and direction see `EarlyStopping`.

    Args:
        metric: the measure of an evaluation on `valid`, such as "accuracy" or "loss".
        value: what it is to reach, in the metric's own unit.
        lower_is_better: its direction; None: that of the metric, where it is known.

    Raises:
        BadSetting: `value` is not a finite number.
    """

    metric: str
    value: float
    _: KW_ONLY
    lower_is_better: bool | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.value) and math.isfinite(self.value)):
            raise BadSetting(f"a target is a finite number, got {self.value!r}")


Stop = EarlyStopping | Target


def stop_rules(given: object) -> list[Stop] | tuple[Stop, ...]:
    """The rules of `Job(stop=…)`, which are given as a list.

    Raises:
        BadSetting: they are not.
    """
    if isinstance(given, list | tuple):
        return given
    is_rule = isinstance(given, EarlyStopping | Target)
    raise BadSetting(
        f"wanted a list of stoker.EarlyStopping(…) and stoker.Target(…), got {given!r}",
        remedy=f"Put it into a list: stop=[stoker.{type(given).__name__}(…)]." if is_rule else None,
    )


def bare_name(metric: str) -> str:
    """A measure's name without the split before it.

    >>> bare_name("valid/f1[3]"), bare_name("valid loss"), bare_name("accuracy")
    ('f1[3]', 'loss', 'accuracy')
    """
    return metric.removeprefix("valid").lstrip("/ ") if metric.startswith(("valid/", "valid ")) else metric
