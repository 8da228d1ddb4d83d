"""Choosing a plan: try the likeliest, then change one setting at a time, as long as trying pays back.

`Search` decides what to try and what won; somebody else runs the trials:

```
search = Search(profile, device, extents)
while plan := search.next_plan():
    search.record(try_plan(plan))        # or search.reject(plan, why)
decision = search.decision()
```
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable

from stoker.errors import DoesNotFit
from stoker.planning.explanation import explain
from stoker.planning.forecast import Extents, forecast, pace
from stoker.planning.space import first_plan, neighbours
from stoker.records import (
    LARGEST_GRADIENT_ERROR,
    Candidate,
    Decision,
    Device,
    Measurement,
    Plan,
    Precision,
    Profile,
    Rejection,
)
from stoker.units import format_seconds

PLANNING_SHARE = 0.05
"""The most of a run's forecast time that is spent on trials."""

LEAST_PLANNING_S = 2.0
LEAST_GAIN = 0.02
"""A plan is preferred to an earlier one only if it is faster by more than this: less is within the noise of a trial."""


class Search:
    """Coordinate descent over legal plans, measured one by one.

    Args:
        profile: the job's facts.
        device: where it is to run.
        extents: how much there is to do, under a plan of that measurement.

    Attributes:
        measured: trials of plans that can be used, in order.
        rejected: plans that cannot, with the reasons.
        spent_s: seconds spent on trials so far, as far as they were measured.
    """

    def __init__(self, profile: Profile, device: Device, extents: Callable[[Measurement], Extents]) -> None:
        self.profile, self.device, self._extents = profile, device, extents
        self.measured: list[Measurement] = []
        self.rejected: list[Rejection] = []
        self.spent_s = 0.0
        self._best: Measurement | None = None
        self._tried: set[Plan] = set()
        self._inexact: set[Precision] = set()

    def next_plan(self) -> Plan | None:
        """The next plan to try; None when it is time to decide."""
        if not self.measured and not self.rejected:
            return first_plan(self.profile, self.device)
        if self._best is None:
            return self._smaller_than_rejected()
        if self.spent_s > max(LEAST_PLANNING_S, PLANNING_SHARE * self._total_s(self._best)):
            return None
        return self._first_untried(neighbours(self._best.plan, self.profile, self.device))

    def record(self, measurement: Measurement) -> None:
        """Take a trial's result into account."""
        self._tried.add(measurement.plan)
        self.spent_s += measurement.took_s
        error = measurement.gradient_error
        if error is not None and not error <= LARGEST_GRADIENT_ERROR:
            self._inexact.add(measurement.plan.precision)
            self.reject(measurement.plan, f"its gradient is {error:.1%} from fp32's, more than "
                        f"{LARGEST_GRADIENT_ERROR:.0%}")  # fmt: skip
            return
        self.measured.append(measurement)
        if self._best is None or pace(measurement) < pace(self._best) * (1 - LEAST_GAIN):
            self._best = measurement

    def reject(self, plan: Plan, reason: str) -> None:
        """Rule a plan out."""
        self._tried.add(plan)
        self.rejected.append(Rejection(plan=plan, reason=reason))

    def decision(self) -> Decision:
        """The fastest plan, its forecast and the reasons.

        Raises:
            DoesNotFit: every plan was rejected.
        """
        if self._best is None:
            reasons = "; ".join(f"{r.plan.in_words()}: {r.reason}" for r in self.rejected)
            raise DoesNotFit(f"no plan works on {self.device.model}: {reasons}")
        best = self._best
        losers = [m for m in self.measured if m is not best]
        chosen = Candidate(plan=best.plan, forecast=forecast(best, self.profile, self._extents(best)))
        slower = [Rejection(plan=m.plan, reason=self._lost_by(m, best)) for m in sorted(losers, key=pace)]
        return Decision(
            device=self.device.name,
            candidates=(chosen,),
            rejected=(*slower, *self.rejected),
            explanation=explain(chosen, self.profile, self.device, self.measured, self.rejected),
            took_s=self.spent_s,
        )

    def _smaller_than_rejected(self) -> Plan | None:
        """After a plan that did not work: the same in fp32, then with smaller micro-batches, then anything else."""
        last = self.rejected[-1].plan
        found = list(neighbours(last, self.profile, self.device))
        smaller = [p for p in found if p.precision != last.precision or p.micro_batch != last.micro_batch]
        return self._first_untried([*smaller, *found])

    def _first_untried(self, plans: Iterable[Plan]) -> Plan | None:
        left = (plan for plan in plans if plan not in self._tried and plan.precision not in self._inexact)
        return next(left, None)

    def _total_s(self, measurement: Measurement) -> float:
        return forecast(measurement, self.profile, self._extents(measurement)).total_s.value

    def _lost_by(self, loser: Measurement, best: Measurement) -> str:
        ratio = pace(loser) / pace(best)
        shown = format_seconds(statistics.median(loser.update_s))
        if ratio < 1:
            return f"{shown} an update, faster by {1 - ratio:.1%}: within the noise of a trial"
        return f"{shown} an update, {ratio:.2f}x the time"
