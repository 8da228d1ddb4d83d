"""Learning-rate schedules: pure functions of progress, so that nothing needs saving and nothing counts steps.

Progress is the share of the run's samples already trained on, from 0 up to (not including) 1. A schedule answers with a
factor of the optimiser's learning rate. Any function `progress -> factor` will do; these are the usual ones. Where they
have places in the run, those are shares of it, or durations in the unit of the job's `until`:

>>> thirds = step(every=epochs(30)).over(epochs(90))  # as Job(until=stoker.epochs(90)) does
>>> [round(thirds(epoch / 90), 3) for epoch in (0, 29, 30, 60)]
[1.0, 1.0, 0.1, 0.01]

Shapes of learning rates over a run; made by the functions of `stoker.schedules`, which say what they are for.

Where something happens is a share of the run, or a duration such as `stoker.epochs(30)`, which becomes a share when a
Job says how long it trains: both in one unit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number
from stoker.units import Duration, epochs, require_duration

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


Shape = Callable[[float], float]
Place = float | Duration
"""A share of the run, or how long after its beginning."""

_ROUNDING = 1e-9
"""Intervals are whole to within this share of one: thirty thirtieths are one, though 30 * (1 / 30) may be less."""


@dataclass(frozen=True)
class Timed:
    """A schedule with places in the run; `run` is how long that is, which a Job sets."""

    _: KW_ONLY
    run: Duration | None = None

    def over(self, run: Duration) -> Self:
        """The same schedule over a run of that length, as are the ones within it.

        Raises:
            BadSetting: a place in it is in another unit than the run.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name != "run"]
        inner: dict[str, Any] = {name: bound(getattr(self, name), run) for name in names}
        found = dataclasses.replace(self, run=run, **inner)
        found(0.0)
        return found

    def __call__(self, progress: float) -> float:
        """The factor of the learning rate at `progress`."""
        raise NotImplementedError

    def share(self, place: Place) -> float:
        """A place as a share of the run."""
        if not isinstance(place, Duration):
            return place
        if self.run is None or self.run.unit != place.unit:
            length = "a run whose length is not known" if self.run is None else f"a run of {self.run}"
            raise BadSetting(
                f"{place} is no place in {length}: give it in the unit of Job(until=…), or as a share of the run"
            )
        return place.value / self.run.value


def bound(value: object, run: Duration) -> object:
    """A schedule over a run of that length; anything else as it is."""
    return value.over(run) if isinstance(value, Timed) else value


@dataclass(frozen=True)
class Steps(Timed):
    """1, and `factor` times less or more after each of the places `at`."""

    at: tuple[Place, ...]
    factor: float

    def __post_init__(self) -> None:
        _require_positive("factor", self.factor)
        _require_places(self.at)

    def __call__(self, progress: float) -> float:
        """The factor at `progress`."""
        return float(self.factor ** sum(progress + _ROUNDING >= self.share(place) for place in self.at))


@dataclass(frozen=True)
class Decay(Timed):
    """`factor` times less with each `every`: at its end, or `smooth` all along."""

    every: Place
    factor: float
    smooth: bool = False

    def __post_init__(self) -> None:
        _require_positive("factor", self.factor)
        _require_length("every", self.every)

    def __call__(self, progress: float) -> float:
        """The factor at `progress`."""
        passed = progress / self.share(self.every)
        return float(self.factor ** (passed if self.smooth else math.floor(passed + _ROUNDING)))


@dataclass(frozen=True)
class Polynomial(Timed):
    """From 1 to `final` as a power of what is left of the run."""

    power: float
    final: float

    def __post_init__(self) -> None:
        _require_positive("power", self.power)
        _require_factor("final", self.final)

    def __call__(self, progress: float) -> float:
        """The factor at `progress`."""
        return float(self.final + (1 - self.final) * max(0.0, 1 - progress) ** self.power)


@dataclass(frozen=True)
class Restarts(Timed):
    """Cosines from 1 to `final`, the first one `first` long, each `multiply` times as long as the one before."""

    first: Place
    multiply: float
    final: float

    def __post_init__(self) -> None:
        _require_length("first", self.first)
        _require_factor("final", self.final)
        if not self.multiply >= 1:
            raise BadSetting(f"multiply is how much longer each cycle is, 1 or more, got {self.multiply}")

    def __call__(self, progress: float) -> float:
        """The factor at `progress`."""
        length, begun = self.share(self.first), 0.0
        while progress + _ROUNDING * length >= begun + length:
            begun, length = begun + length, length * self.multiply
        within = max(0.0, (progress - begun) / length)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * within)) / 2


@dataclass(frozen=True)
class Cycles(Timed):
    """Straight lines from `low` to 1 and back, each pair `period` long; `halving` makes each peak half as high."""

    period: Place
    low: float
    halving: bool

    def __post_init__(self) -> None:
        _require_length("period", self.period)
        _require_factor("low", self.low)

    def __call__(self, progress: float) -> float:
        """The factor at `progress`."""
        passed = progress / self.share(self.period)
        number = math.floor(passed + _ROUNDING)
        height = 1 - abs(2 * max(0.0, passed - number) - 1)
        return self.low + (1 - self.low) * height / (2**number if self.halving else 1)


@dataclass(frozen=True)
class Piecewise(Timed):
    """Factors at places, and between two of them on a line or as at the one before."""

    points: tuple[tuple[Place, float], ...]
    between: Literal["line", "step"]

    def __post_init__(self) -> None:
        if not self.points or any(factor < 0 for _, factor in self.points):
            raise BadSetting(f"points are factors of the rate by their place, none of them negative, got {self.points}")
        _require_places(place for place, _ in self.points)
        if self.between not in ("line", "step"):
            raise BadSetting(f'between two points goes a "line" or a "step", got {self.between!r}')

    def __call__(self, progress: float) -> float:
        """The factor at `progress`."""
        known = sorted((self.share(place), factor) for place, factor in self.points)
        behind = [point for point in known if point[0] <= progress + _ROUNDING]
        ahead = known[len(behind) :]
        if not behind:
            return float(ahead[0][1])
        (start, factor), following = behind[-1], ahead[0] if ahead else None
        if following is None or self.between == "step":
            return float(factor)
        return float(factor + (following[1] - factor) * (progress - start) / (following[0] - start))


@dataclass(frozen=True)
class Warmup(Timed):
    """A line from `initial` to 1 over the first `length` of the run, times the schedule `then`."""

    length: Place
    initial: float
    then: Shape

    def __post_init__(self) -> None:
        _require_length("length", self.length)
        _require_factor("initial", self.initial)

    def __call__(self, progress: float) -> float:
        """The factor at `progress`."""
        risen = min(1.0, progress / self.share(self.length))
        return (self.initial + (1 - self.initial) * risen) * self.then(progress)


@dataclass(frozen=True)
class InverseRoot(Timed):
    """A line from 0 to 1 over `warmup`, then the root of `warmup` over how far the run is."""

    warmup: Place

    def __post_init__(self) -> None:
        _require_length("warmup", self.warmup)

    def __call__(self, progress: float) -> float:
        """The factor at `progress`."""
        warmup = self.share(self.warmup)
        return progress / warmup if progress < warmup else math.sqrt(warmup / progress)


@dataclass(frozen=True)
class Plateau(Timed):
    """The schedule `then`, times `factor` each time that evaluations have not got better for `patience`.

    What evaluations said is no function of progress: it is kept with each checkpoint; see `training/plateau.py`.
    """

    metric: str
    factor: float
    patience: Duration
    min_delta: float
    cooldown: Duration | None
    least: float
    lower_is_better: bool | None
    then: Shape

    def __post_init__(self) -> None:
        if not 0 < self.factor < 1:
            raise BadSetting(f"a plateau makes the rate smaller, by a factor in (0, 1), got {self.factor}")
        _require_factor("least", self.least)
        if not self.min_delta >= 0:
            raise BadSetting(f"min_delta is how much better is better, not negative, got {self.min_delta}")
        for name, length in (("patience", self.patience), ("cooldown", self.cooldown)):
            if length is None:
                continue
            require_duration(name, length)
            if length.unit == "seconds":
                raise BadSetting(f"{name} is counted in epochs, samples or updates, not seconds")
        if self.cooldown is not None and self.cooldown.unit != self.patience.unit:
            raise BadSetting(f"cooldown is counted as patience is, in {self.patience.unit}, got {self.cooldown}")

    def __call__(self, progress: float) -> float:
        """The factor at `progress` before any plateau."""
        return self.then(progress)


def _require_positive(name: str, value: float) -> None:
    if not (is_number(value) and 0 < value < math.inf):
        raise BadSetting(f"{name} must be positive and finite, got {value!r}")


def _require_factor(name: str, value: float) -> None:
    if not (is_number(value) and 0 <= value <= 1):
        raise BadSetting(f"{name} is a factor of the learning rate, in [0, 1], got {value!r}")


def _require_places(places: Iterable[Place]) -> None:
    # PyTorch's milestones are epochs: taken as shares, 30 and 60 would never come, and nobody would be told.
    for place in places:
        if not isinstance(place, Duration) and not (is_number(place) and 0 <= place <= 1):
            raise BadSetting(f"places are shares of the run, in [0, 1], or stoker.epochs({place}), got {place!r}")


def _require_length(name: str, place: Place) -> None:
    if not isinstance(place, Duration) and not (is_number(place) and 0 < place <= 1):
        raise BadSetting(f"{name} is a share of the run, in (0, 1], or as long as stoker.epochs(5), got {place!r}")
