"""Learning-rate schedules: pure functions of progress, so that they have no state to save.

Progress is the share of the run's samples already trained on, from 0 up to (not including) 1; for a schedule with
places in updates, the share of its updates. A schedule returns a factor of the optimiser's learning rate. Any function
`progress -> factor` is a schedule; these are the usual ones.
Places in the run are shares of it, or durations in the unit of the job's `until`, which a Job turns into shares:

>>> thirds = step(every=epochs(30)).over(epochs(90))  # as Job(until=stoker.epochs(90)) does
>>> [round(thirds(epoch / 90), 3) for epoch in (0, 29, 30, 60)]
[1.0, 1.0, 0.1, 0.01]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, Self

from stoker.errors import BadSetting
from stoker.jobs.numeric_settings import is_number
from stoker.units import Duration, epochs, require_duration

__all__ = [
    "constant",
    "cosine_restarts",
    "cyclic",
    "exponential",
    "inverse_sqrt",
    "multi_step",
    "one_cycle",
    "piecewise",
    "plateau",
    "polynomial",
    "step",
    "warmup",
    "warmup_cosine",
    "warmup_linear",
]

Schedule = Callable[[float], float]
Place = float | Duration
"""A share of the run, or a duration from its beginning."""

_ROUNDING = 1e-9
"""Intervals are whole to within this share of one: thirty thirtieths are one, though 30 * (1 / 30) may be less."""


@dataclass(frozen=True)
class Constant:
    """The learning rate as given, throughout."""

    is_open: ClassVar[bool] = False
    """Whether it is only the default, which a recipe may replace with another schedule."""

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate: 1 at any progress [1]."""
        return 1.0


constant = Constant

OPEN_SCHEDULE = Constant()
"""The schedule of a Job that states none; it is equal to `constant()`, also in descriptions."""
object.__setattr__(OPEN_SCHEDULE, "is_open", True)


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
        _require_factor("initial", self.initial)
        _require_factor("final", self.final)
        if self.shape not in ("cosine", "linear"):
            raise BadSetting(f'the fall has the shape "cosine" or "linear", got {self.shape!r}')

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        if progress < self.warmup:
            return self.initial + (1 - self.initial) * progress / self.warmup
        fallen = (progress - self.warmup) / (1 - self.warmup)
        left = 1 - fallen if self.shape == "linear" else (1 + math.cos(math.pi * fallen)) / 2
        return self.final + (1 - self.final) * left


def one_cycle(*, warmup: float = 0.25, initial: float = 0.04, final: float = 0.0) -> Schedule:
    """Rise linearly over the first quarter of the run, then fall along a cosine to `final`.

    Args:
        warmup: share of the run that rises [0 to 1].
        initial: factor at its beginning [1].
        final: factor at its end [1].

    Raises:
        BadSetting: a value is out of its range.
    """
    return Ramp(warmup, initial, final, "cosine")


def warmup_cosine(*, warmup: float = 0.05, initial: float = 0.0, final: float = 0.0) -> Schedule:
    """Rise linearly over the first `warmup` share of the run, then fall along a cosine to `final`.

    Args:
        warmup: share of the run that rises [0 to 1].
        initial: factor at its beginning [1].
        final: factor at its end [1].

    Raises:
        BadSetting: a value is out of its range.
    """
    return Ramp(warmup, initial, final, "cosine")


def warmup_linear(*, warmup: float = 0.05, initial: float = 0.0, final: float = 0.0) -> Schedule:
    """Rise linearly over the first `warmup` share of the run, then fall linearly to `final`.

    Args:
        warmup: share of the run that rises [0 to 1].
        initial: factor at its beginning [1].
        final: factor at its end [1].

    Raises:
        BadSetting: a value is out of its range.
    """
    return Ramp(warmup, initial, final, "linear")


@dataclass(frozen=True)
class Timed:
    """A schedule with places in the run; `run` is its length, which a Job sets."""

    _: KW_ONLY
    run: Duration | None = None

    def over(self, run: Duration) -> Self:
        """The same schedule, and those within it, for a run of this length.

        Raises:
            BadSetting: a place in it is in another unit than the run.
        """
        names = [field.name for field in dataclasses.fields(self) if field.name != "run"]
        inner: dict[str, Any] = {name: bound(getattr(self, name), run) for name in names}
        schedule = dataclasses.replace(self, run=run, **inner)
        schedule(0.0)  # raises if a place is in another unit
        return schedule

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        raise NotImplementedError

    def share(self, place: Place) -> float:
        """A place as a share of the run [0 to 1]."""
        if not isinstance(place, Duration):
            return place
        if self.run is None or self.run.unit != place.unit:
            length = "a run whose length is not known" if self.run is None else f"a run of {self.run}"
            raise BadSetting(
                f"{place} is no place in {length}: give it in the unit of Job(until=…), or as a share of the run"
            )
        return place.value / self.run.value


def bound(value: object, run: Duration) -> object:
    """A schedule for a run of this length; anything else unchanged."""
    return value.over(run) if isinstance(value, Timed) else value


@dataclass(frozen=True)
class Steps(Timed):
    """A factor of 1, multiplied by `factor` after each of the places `at`."""

    at: tuple[Place, ...]
    factor: float

    def __post_init__(self) -> None:
        _require_positive("factor", self.factor)
        _require_places(self.at)

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        return float(self.factor ** sum(progress + _ROUNDING >= self.share(place) for place in self.at))


def multi_step(*, at: Sequence[Place], factor: float = 0.1) -> Schedule:
    """`factor` times the rate after each of the places: `multi_step(at=[0.5, 0.75])`; `torch`'s MultiStepLR.

    Args:
        at: places in the run, ascending: shares [0 to 1], or `stoker.epochs(30)` and other lengths.
        factor: of the rate at each of them [1].

    Raises:
        BadSetting: a value is out of its range.
    """
    return Steps(tuple(at), factor)


@dataclass(frozen=True)
class Decay(Timed):
    """Multiplied by `factor` after each `every`, or continuously if `smooth`."""

    every: Place
    factor: float
    smooth: bool = False

    def __post_init__(self) -> None:
        _require_positive("factor", self.factor)
        _require_length("every", self.every)

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        intervals = progress / self.share(self.every)
        return float(self.factor ** (intervals if self.smooth else math.floor(intervals + _ROUNDING)))


def step(*, every: Place, factor: float = 0.1) -> Schedule:
    """`factor` times the rate after each `every`: `step(every=stoker.epochs(30))`; `torch`'s StepLR.

    Args:
        every: length between two changes: a share of the run [0 to 1], or `stoker.epochs(30)` and other lengths.
        factor: of the rate at each of them [1].

    Raises:
        BadSetting: a value is out of its range.
    """
    return Decay(every, factor)


def exponential(factor: float, *, every: Place = epochs(1), smooth: bool = False) -> Schedule:
    """`factor` times the rate after each `every`, or `smooth` all along; `torch`'s ExponentialLR.

    Args:
        factor: of the rate in each `every` [1].
        every: a share of the run [0 to 1], or `stoker.epochs(1)` and other lengths.
        smooth: fall continuously, not in steps.

    Raises:
        BadSetting: a value is out of its range.
    """
    return Decay(every, factor, smooth)


@dataclass(frozen=True, kw_only=True)
class Polynomial(Timed):
    """From 1 to `final` as the `power`-th power of the rest of the run."""

    power: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _require_positive("power", self.power)
        _require_factor("final", self.final)

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        return float(self.final + (1 - self.final) * max(0.0, 1 - progress) ** self.power)


polynomial = Polynomial


@dataclass(frozen=True, kw_only=True)
class Restarts(Timed):
    """Cosines from 1 to `final`, the first one `first` long, each `multiply` times as long as the one before.

    Source: Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983 (SGDR).
    """

    first: Place
    multiply: float = 1.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _require_length("first", self.first)
        _require_factor("final", self.final)
        if not self.multiply >= 1:
            raise BadSetting(f"multiply is how much longer each cycle is, 1 or more, got {self.multiply}")

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        length, start = self.share(self.first), 0.0
        while progress + _ROUNDING * length >= start + length:
            start, length = start + length, length * self.multiply
        within = max(0.0, (progress - start) / length)
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * within)) / 2


cosine_restarts = Restarts


@dataclass(frozen=True, kw_only=True)
class Cycles(Timed):
    """Lines from `low` to 1 and back in every `period`; with `halving` each peak is half as high as the one before.

    Source: Smith 2017, https://arxiv.org/abs/1506.01186 ("triangular", and "triangular2" with `halving`).
    """

    period: Place
    low: float = 0.1
    halving: bool = False

    def __post_init__(self) -> None:
        _require_length("period", self.period)
        _require_factor("low", self.low)

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        cycles = progress / self.share(self.period)
        number = math.floor(cycles + _ROUNDING)
        height = 1 - abs(2 * max(0.0, cycles - number) - 1)
        return self.low + (1 - self.low) * height / (2**number if self.halving else 1)


cyclic = Cycles


@dataclass(frozen=True)
class Piecewise(Timed):
    """Factors at places; between two of them on a line, or as at the one before. Two at one place are a jump."""

    points: tuple[tuple[Place, float], ...]
    between: Literal["line", "step"]

    def __post_init__(self) -> None:
        if not self.points or any(factor < 0 for _, factor in self.points):
            raise BadSetting(f"points are factors of the rate by their place, none of them negative, got {self.points}")
        _require_places(place for place, _ in self.points)
        if self.between not in ("line", "step"):
            raise BadSetting(f'between two points goes a "line" or a "step", got {self.between!r}')

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        known = sorted(((self.share(place), factor) for place, factor in self.points), key=lambda point: point[0])
        behind = [point for point in known if point[0] <= progress + _ROUNDING]
        ahead = known[len(behind) :]
        if not behind:
            return float(ahead[0][1])
        (start, factor), following = behind[-1], ahead[0] if ahead else None
        if following is None or self.between == "step":
            return float(factor)
        return float(factor + (following[1] - factor) * (progress - start) / (following[0] - start))


def piecewise(
    points: Mapping[Place, float] | Sequence[tuple[Place, float]], *, between: Literal["line", "step"] = "line"
) -> Schedule:
    """Factors of the rate at places of the run, with lines or steps between: `piecewise({0: 1, 0.7: 1, 1: 0})`.

    Args:
        points: factors [1] by their places: shares of the run [0 to 1], or `stoker.epochs(5)` and other lengths.
        between: "line": linear from one to the next; "step": as at the one before.

    Raises:
        BadSetting: a value is out of its range.
    """
    pairs = points.items() if isinstance(points, Mapping) else points
    return Piecewise(tuple((place, factor) for place, factor in pairs), between)


@dataclass(frozen=True)
class Warmup(Timed):
    """A line from `initial` to 1 over the first `length` of the run, times the schedule `then`."""

    length: Place
    _: KW_ONLY
    initial: float = 0.0
    then: Schedule = Constant()

    def __post_init__(self) -> None:
        _require_length("length", self.length)
        _require_factor("initial", self.initial)

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        risen = min(1.0, progress / self.share(self.length))
        return (self.initial + (1 - self.initial) * risen) * self.then(progress)


warmup = Warmup


@dataclass(frozen=True, kw_only=True)
class InverseRoot(Timed):
    """A line from 0 to 1 over `warmup`, then the root of `warmup` / progress.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, section 5.3.
    """

    warmup: Place

    def __post_init__(self) -> None:
        _require_length("warmup", self.warmup)

    def __call__(self, progress: float) -> float:
        """Factor of the learning rate at `progress` [1]."""
        warmup = self.share(self.warmup)
        return progress / warmup if progress < warmup else math.sqrt(warmup / progress)


inverse_sqrt = InverseRoot


@dataclass(frozen=True)
class Plateau(Timed):
    """The schedule `then`, times `factor` each time that a measure on `valid` has not improved for `patience`.

    The result of evaluations is not a function of progress: it is saved in checkpoints; see `training/run_control.py`.

    Args:
        metric: the measure's name in results.
        factor: multiplies the rate.
        patience: time without improvement (epochs, samples or updates), counted from the best evaluation, or from the
            last time the rate fell.
        min_delta: least improvement that counts.
        cooldown: time after a fall in which nothing is counted, in the unit of `patience`.
        least: the factor never falls below this share of the given rate.
        lower_is_better: of the measure; by default known of losses, errors and the named metrics.
        then: another schedule, which is multiplied by the factor.
    """

    metric: str = "loss"
    _: KW_ONLY
    factor: float = 0.1
    patience: Duration = epochs(10)
    min_delta: float = 0.0
    cooldown: Duration | None = None
    least: float = 0.0
    lower_is_better: bool | None = None
    then: Schedule = Constant()

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
        """Factor of the learning rate at `progress` before any plateau [1]."""
        return self.then(progress)


plateau = Plateau


def length_in_updates(schedule: object) -> float | None:
    """Length of the run [updates] for a schedule with places in updates, which goes by the share of these; else None.

    Updates differ in samples where an epoch ends in a smaller batch, so that shares of samples are none of updates.
    """
    return schedule.run.value if isinstance(schedule, Timed) and schedule.run and _is_in_updates(schedule) else None


def _is_in_updates(value: object) -> bool:
    if isinstance(value, Plateau):
        return _is_in_updates(value.then)  # patience is no place
    if isinstance(value, Timed):
        return any(_is_in_updates(item) for name, item in vars(value).items() if name != "run")
    if isinstance(value, tuple):
        return any(map(_is_in_updates, value))
    return isinstance(value, Duration) and value.unit == "updates"


def _require_positive(name: str, value: float) -> None:
    if not (is_number(value) and 0 < value < math.inf):
        raise BadSetting(f"{name} must be positive and finite, got {value!r}")


def _require_factor(name: str, value: float) -> None:
    if not (is_number(value) and 0 <= value <= 1):
        raise BadSetting(f"{name} is a factor of the learning rate, in [0, 1], got {value!r}")


def _require_places(places: Iterable[Place]) -> None:
    # PyTorch's milestones are epochs: taken as shares, 30 and 60 would silently never come.
    for place in places:
        if not isinstance(place, Duration) and not (is_number(place) and 0 <= place <= 1):
            raise BadSetting(f"places are shares of the run, in [0, 1], or stoker.epochs({place}), got {place!r}")


def _require_length(name: str, place: Place) -> None:
    if not isinstance(place, Duration) and not (is_number(place) and 0 < place <= 1):
        raise BadSetting(f"{name} is a share of the run, in (0, 1], or as long as stoker.epochs(5), got {place!r}")
