"""Shapes of learning rates over a run; made by the functions of `stoker.schedules`, which say what they are for.

Where something happens is a share of the run, or a duration such as `stoker.epochs(30)`, which becomes a share when a
Job says how long it trains: both in one unit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, Self

from stoker.errors import BadSetting
from stoker.jobs.plain_numbers import is_number
from stoker.units import Duration, require_duration

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
