"""The course of a run: what its evaluations make of the learning rate, and of its end.

It is part of the state: kept with every checkpoint, so that a run that goes on decides what one never stopped decides.
Several processes know the same metrics, and each of them decides for itself, alike.

What evaluations decide about the rest of a run: whether a measure still gets better, and whether that is enough.

A rate that falls when evaluations stand still: `stoker.schedules.plateau` over a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from stoker.errors import RunFailed
from stoker.jobs import Job
from stoker.jobs.early_stopping import EarlyStopping, Stop, Target, bare_name
from stoker.jobs.extent import Extent
from stoker.jobs.job import measure_of, plateau_of
from stoker.jobs.metrics import direction_of
from stoker.jobs.schedules import Plateau
from stoker.records import Position
from stoker.records.codec import JSON
from stoker.units import Duration


class RunControl:
    """What a run's evaluations have decided so far.

    `verdict` is why the run ended before its time, None as long as it goes on.
    """

    def __init__(
        self, plateau: PlateauWatch | None = None, stops: tuple[EarlyStoppingState | TargetState, ...] = ()
    ) -> None:
        self._plateau, self._stops = plateau, stops
        self._judged = 0
        self.verdict: str | None = None

    @classmethod
    def of(cls, job: Job) -> Self:
        """At the beginning of a job's run."""
        found = plateau_of(job)
        lower = None if found is None else _is_lower_better(job, found.metric, found.lower_is_better)
        plateau = None if found is None else PlateauWatch(found, lower_is_better=bool(lower))
        return cls(plateau, tuple(_watching(job, rule) for rule in job.stop))

    @property
    def rate_factor(self) -> float:
        """What the schedule's rate is multiplied by."""
        return 1.0 if self._plateau is None else self._plateau.factor

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> str | None:
        """Take in an evaluation of `valid`; what is to be told of it, if anything was decided.

        An evaluation that is made again, since what followed it was cut off, decides nothing a second time.

        Raises:
            RunFailed: a measure that the job waits for is not there.
        """
        if now.updates <= self._judged:
            return None
        self._judged = now.updates
        words = [words for one in self._stops if (words := one.judge(metrics, now, extent)) is not None]
        self.verdict = words[0] if words else None
        if self._plateau is not None and self._plateau.judge(metrics, now, extent):
            factor, at = self._plateau.factor, now.samples
            return f"a plateau at {at:,} samples: the learning rate is {factor:.3g} of its schedule's from here on"
        return None

    def state(self) -> dict[str, JSON]:
        """What is kept with a checkpoint; empty where there is nothing to decide."""
        if self._plateau is None and not self._stops:
            return {}
        return {
            "judged": self._judged, "verdict": self.verdict, "stops": [one.state() for one in self._stops],
            "plateau": None if self._plateau is None else self._plateau.state(),
        }  # fmt: skip

    def load(self, state: Mapping[str, JSON]) -> None:
        """Go on from what was kept; nothing, from where nothing was. A fork waits anew: its `stops` are None."""
        if not state:
            return
        self._judged, self.verdict = int(state["judged"]), state["verdict"]
        if state["stops"] is not None:
            for one, kept in zip(self._stops, state["stops"], strict=True):
                one.load(kept)
        if self._plateau is not None and state["plateau"] is not None:
            self._plateau.load(state["plateau"])


def _watching(job: Job, rule: Stop) -> EarlyStoppingState | TargetState:
    lower = _is_lower_better(job, rule.metric, rule.lower_is_better)
    if isinstance(rule, EarlyStopping):
        return EarlyStoppingState(rule, lower_is_better=lower)
    return TargetState(rule, lower_is_better=lower)


def _is_lower_better(job: Job, metric: str, given: bool | None) -> bool:  # noqa: FBT001 - a job's setting
    """Whether lower is better; the job has seen to it that somebody says."""
    return bool(direction_of(measure_of(job, metric), list(job.metrics), given))


_DECIMALS = 6
"""Lengths in samples are rounded to this, as those of a run are."""


def metric_value(metrics: Mapping[str, float], metric: str) -> float:
    """The value of the measure that a job's setting names.

    Raises:
        RunFailed: the evaluation found no such measure.
    """
    name = bare_name(metric)
    if name not in metrics:
        raise RunFailed(
            f"the job waits for {metric!r}, and an evaluation found {', '.join(metrics)}",
            remedy="Name one of these. A metric with a value for each class is called name[class].",
        )
    return metrics[name]


def has_passed(length: Duration, since: int, now: Position, extent: Extent) -> bool:
    """Whether `length` has gone by since update number `since`."""
    if length.unit == "updates":
        return now.updates - since >= length.value
    samples = round(length.value * (extent.num_train if length.unit == "epochs" else 1), _DECIMALS)
    return now.samples - extent.position(since).samples >= samples


@dataclass
class Improvement:
    """The best value of a measure so far, and the number of updates when it was found."""

    lower_is_better: bool
    min_delta: float
    value: float | None = None
    since: int = 0

    def take(self, value: float, now: Position) -> bool:
        """Note a value; whether it is better than all before, by more than `min_delta`. NaN is not."""
        if math.isnan(value):
            return False
        better = self.value is None or (
            value < self.value - self.min_delta if self.lower_is_better else value > self.value + self.min_delta
        )
        if better:
            self.value, self.since = value, now.updates
        return better

    def state(self) -> JSON:
        """What has to be known to go on."""
        return {"value": self.value, "since": self.since}

    def load(self, state: JSON) -> None:
        """Go on from such a state."""
        self.value, self.since = state["value"], int(state["since"])


class EarlyStoppingState:
    """`stoker.EarlyStopping` over a run."""

    def __init__(self, rule: EarlyStopping, *, lower_is_better: bool) -> None:
        self._rule = rule
        self._best = Improvement(lower_is_better, rule.min_delta)

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> str | None:
        """Why the run ends now; None if it goes on."""
        rule, best = self._rule, self._best
        if best.take(metric_value(metrics, rule.metric), now) or not has_passed(rule.patience, best.since, now, extent):
            return None
        if best.value is None:
            return f"{bare_name(rule.metric)} on valid was no number for {rule.patience}"
        at = extent.position(best.since).samples
        more = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        return (
            f"{bare_name(rule.metric)} on valid has not got better than {best.value:.6g}{more} for {rule.patience}, "
            f"since {at:,} samples"
        )

    def state(self) -> JSON:
        """What has to be known to go on."""
        return self._best.state()

    def load(self, state: JSON) -> None:
        """Go on from such a state."""
        self._best.load(state)


class TargetState:
    """`stoker.Target` over a run."""

    def __init__(self, rule: Target, *, lower_is_better: bool) -> None:
        self._rule, self._lower = rule, lower_is_better

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> str | None:
        """Why the run ends now; None if it goes on."""
        del now, extent
        value, wanted = metric_value(metrics, self._rule.metric), self._rule.value
        if value <= wanted if self._lower else value >= wanted:
            return f"{bare_name(self._rule.metric)} on valid is {value:.6g}: the target of {wanted:g} is reached"
        return None

    def state(self) -> JSON:
        """Nothing has to be known to go on."""
        return {}

    def load(self, state: JSON) -> None:
        """Nothing is needed."""


class PlateauWatch:
    """What a plateau has made of the rate so far: `factor`, beside the schedule's own.

    A measure has to stand still for `patience`, which after a fall is counted from the end of `cooldown`.
    """

    def __init__(self, rule: Plateau, *, lower_is_better: bool) -> None:
        self._rule = rule
        self._best = Improvement(lower_is_better, rule.min_delta)
        self._fell: int | None = None
        cooldown = 0.0 if rule.cooldown is None else rule.cooldown.value
        self._between = Duration(rule.patience.value + cooldown, rule.patience.unit)
        self.factor = 1.0

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> bool:
        """Take in an evaluation; whether the rate falls."""
        rule = self._rule
        is_better = self._best.take(metric_value(metrics, rule.metric), now)
        if is_better or not has_passed(rule.patience, self._best.since, now, extent):
            return False
        if self._fell is not None and not has_passed(self._between, self._fell, now, extent):
            return False
        lower = max(rule.least, self.factor * rule.factor)
        self._fell = now.updates
        falls, self.factor = lower < self.factor, lower
        return falls

    def state(self) -> JSON:
        """What has to be known to go on."""
        return {"best": self._best.state(), "fell": self._fell, "factor": self.factor}

    def load(self, state: JSON) -> None:
        """Go on from such a state."""
        self._best.load(state["best"])
        self._fell, self.factor = state["fell"], float(state["factor"])
