"""A rate that falls when evaluations stand still: `stoker.schedules.plateau` over a run."""

from __future__ import annotations

from collections.abc import Mapping

from stoker.jobs.extent import Extent
from stoker.jobs.schedule_shapes import Plateau
from stoker.records import Position
from stoker.records.codec import JSON
from stoker.training.stopping import Improvement, has_passed, measured
from stoker.units import Duration


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
        is_better = self._best.take(measured(metrics, rule.metric), now)
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
