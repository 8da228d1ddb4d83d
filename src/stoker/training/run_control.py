"""Control of a run by its evaluations: early stopping, targets, and a learning rate that falls on a plateau.

The decisions are kept with every checkpoint, so that a resumed run decides as one never stopped. Every process knows
the same metrics and decides the same by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from stoker.errors import RunFailed
from stoker.jobs import Job
from stoker.jobs.early_stopping import EarlyStopping, Stop, Target, bare_name
from stoker.jobs.job import measure_of, plateau_of
from stoker.jobs.metrics import direction_of
from stoker.jobs.run_length import Extent
from stoker.jobs.schedules import Plateau
from stoker.records import Position
from stoker.records.codec import JSON
from stoker.units import Duration


class RunControl:
    """Decisions of a run's evaluations so far; `verdict` is why the run ends early, or None."""

    def __init__(
        self, plateau: PlateauWatch | None = None, stops: tuple[EarlyStoppingState | TargetState, ...] = ()
    ) -> None:
        self._plateau, self._stops = plateau, stops
        self._judged = 0
        self.verdict: str | None = None

    @classmethod
    def of(cls, job: Job) -> Self:
        """The state at the beginning of a job's run."""

        def lower(rule: Plateau | Stop) -> bool:
            return bool(direction_of(measure_of(job, rule.metric), list(job.metrics), rule.lower_is_better))

        plateau = plateau_of(job)
        stops = tuple(
            EarlyStoppingState(rule, lower_is_better=lower(rule))
            if isinstance(rule, EarlyStopping)
            else TargetState(rule, lower_is_better=lower(rule))
            for rule in job.stop
        )
        return cls(None if plateau is None else PlateauWatch(plateau, lower_is_better=lower(plateau)), stops)

    @property
    def rate_factor(self) -> float:
        """Factor on the schedule's learning rate [1]."""
        return 1.0 if self._plateau is None else self._plateau.factor

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> str | None:
        """Take in an evaluation of `valid`; returns the text of a decision, if one was made.

        An evaluation that is repeated after a resume decides nothing a second time.

        Raises:
            RunFailed: a measure that the job waits for is missing.
        """
        if now.updates <= self._judged:
            return None
        self._judged = now.updates
        verdicts = [stop.judge(metrics, now, extent) for stop in self._stops]
        self.verdict = next((verdict for verdict in verdicts if verdict is not None), None)
        if self._plateau is not None and self._plateau.judge(metrics, now, extent):
            factor = self._plateau.factor
            rate = f"the learning rate is {factor:.3g} of its schedule's from here on"
            return f"a plateau at {now.samples:,} samples: {rate}"
        return None

    def state(self) -> dict[str, JSON]:
        """State for a checkpoint; empty where there is nothing to decide."""
        if self._plateau is None and not self._stops:
            return {}
        return {
            "judged": self._judged,
            "verdict": self.verdict,
            "stops": [stop.state() for stop in self._stops],
            "plateau": None if self._plateau is None else self._plateau.state(),
        }

    def load(self, state: Mapping[str, JSON]) -> None:
        """Restore the state; for a fork `stops` are None, and its rules begin again."""
        if not state:
            return
        self._judged, self.verdict = int(state["judged"]), state["verdict"]
        if state["stops"] is not None:
            for stop, kept in zip(self._stops, state["stops"], strict=True):
                stop.load(kept)
        if self._plateau is not None and state["plateau"] is not None:
            self._plateau.load(state["plateau"])


def metric_value(metrics: Mapping[str, float], metric: str) -> float:
    """Value of the measure that a job's setting names [the measure's own unit].

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
    """Whether `length` has passed since update number `since`."""
    if length.unit == "updates":
        return now.updates - since >= length.value
    samples = round(length.value * (extent.num_train if length.unit == "epochs" else 1), 6)  # as the run's own length
    return now.samples - extent.position(since).samples >= samples


@dataclass
class Improvement:
    """The best value of a measure so far, and the number of updates at that evaluation."""

    lower_is_better: bool
    min_delta: float
    value: float | None = None
    since: int = 0

    def take(self, value: float, now: Position) -> bool:
        """Take in a value; returns whether it is better than all before by more than `min_delta`. NaN is not."""
        if math.isnan(value):
            return False
        better = self.value is None or (
            value < self.value - self.min_delta if self.lower_is_better else value > self.value + self.min_delta
        )
        if better:
            self.value, self.since = value, now.updates
        return better

    def state(self) -> JSON:
        """State for a checkpoint."""
        return {"value": self.value, "since": self.since}

    def load(self, state: JSON) -> None:
        """Restore the state."""
        self.value, self.since = state["value"], int(state["since"])


class EarlyStoppingState:
    """`stoker.EarlyStopping` over a run."""

    def __init__(self, rule: EarlyStopping, *, lower_is_better: bool) -> None:
        self._rule = rule
        self._best = Improvement(lower_is_better, rule.min_delta)

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> str | None:
        """Why the run ends now, or None."""
        rule, best = self._rule, self._best
        if best.take(metric_value(metrics, rule.metric), now) or not has_passed(rule.patience, best.since, now, extent):
            return None
        if best.value is None:
            return f"{bare_name(rule.metric)} on valid was no number for {rule.patience}"
        since = extent.position(best.since).samples
        more = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        return (
            f"{bare_name(rule.metric)} on valid has not got better than {best.value:.6g}{more} for {rule.patience}, "
            f"since {since:,} samples"
        )

    def state(self) -> JSON:
        """State for a checkpoint."""
        return self._best.state()

    def load(self, state: JSON) -> None:
        """Restore the state."""
        self._best.load(state)


class TargetState:
    """`stoker.Target` over a run."""

    def __init__(self, rule: Target, *, lower_is_better: bool) -> None:
        self._rule, self._lower = rule, lower_is_better

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> str | None:
        """Why the run ends now, or None."""
        del now, extent
        value, target = metric_value(metrics, self._rule.metric), self._rule.value
        if value <= target if self._lower else value >= target:
            return f"{bare_name(self._rule.metric)} on valid is {value:.6g}: the target of {target:g} is reached"
        return None

    def state(self) -> JSON:
        """A target has no state."""
        return {}

    def load(self, state: JSON) -> None:
        """A target has no state."""


class PlateauWatch:
    """`stoker.schedules.plateau` over a run: `factor` on the schedule's learning rate.

    The rate falls when the measure has not improved for `patience`; after a fall, counted from the end of `cooldown`.
    """

    def __init__(self, rule: Plateau, *, lower_is_better: bool) -> None:
        self._rule = rule
        self._best = Improvement(lower_is_better, rule.min_delta)
        self._fell: int | None = None
        cooldown = 0.0 if rule.cooldown is None else rule.cooldown.value
        self._between = Duration(rule.patience.value + cooldown, rule.patience.unit)
        self.factor = 1.0

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> bool:
        """Take in an evaluation; returns whether the learning rate falls."""
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
        """State for a checkpoint."""
        return {"best": self._best.state(), "fell": self._fell, "factor": self.factor}

    def load(self, state: JSON) -> None:
        """Restore the state."""
        self._best.load(state["best"])
        self._fell, self.factor = state["fell"], float(state["factor"])
