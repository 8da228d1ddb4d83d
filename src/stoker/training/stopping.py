"""What evaluations decide about the rest of a run: whether a measure still gets better, and whether that is enough."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stoker.errors import RunFailed
from stoker.jobs.extent import Extent
from stoker.jobs.stopping import EarlyStopping, Target, bare_name
from stoker.records import Position
from stoker.records.codec import JSON
from stoker.units import Duration

_DECIMALS = 6
"""Lengths in samples are rounded to this, as those of a run are."""


def measured(metrics: Mapping[str, float], metric: str) -> float:
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


class Waiting:
    """`stoker.EarlyStopping` over a run."""

    def __init__(self, rule: EarlyStopping, *, lower_is_better: bool) -> None:
        self._rule = rule
        self._best = Improvement(lower_is_better, rule.min_delta)

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> str | None:
        """Why the run ends now; None if it goes on."""
        rule, best = self._rule, self._best
        if best.take(measured(metrics, rule.metric), now) or not has_passed(rule.patience, best.since, now, extent):
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


class Reaching:
    """`stoker.Target` over a run."""

    def __init__(self, rule: Target, *, lower_is_better: bool) -> None:
        self._rule, self._lower = rule, lower_is_better

    def judge(self, metrics: Mapping[str, float], now: Position, extent: Extent) -> str | None:
        """Why the run ends now; None if it goes on."""
        del now, extent
        value, wanted = measured(metrics, self._rule.metric), self._rule.value
        if value <= wanted if self._lower else value >= wanted:
            return f"{bare_name(self._rule.metric)} on valid is {value:.6g}: the target of {wanted:g} is reached"
        return None

    def state(self) -> JSON:
        """Nothing has to be known to go on."""
        return {}

    def load(self, state: JSON) -> None:
        """Nothing is needed."""
