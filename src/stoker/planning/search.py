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
from collections.abc import Callable

from stoker.errors import DoesNotFit
from stoker.planning.explanation import explain
from stoker.planning.forecast import Extents, forecast
from stoker.planning.space import first_plan, neighbours
from stoker.records import Candidate, Decision, Device, Measurement, Plan, Profile, Rejection
from stoker.units import format_seconds

PLANNING_SHARE = 0.05
"""The most of a run's forecast time that is spent on trials."""

LEAST_PLANNING_S = 2.0
LARGEST_GRADIENT_ERROR = 0.1
"""A reduced precision whose gradient is further from fp32 than this, relatively, is not used."""

LEAST_GAIN = 0.02
"""A plan is preferred to an earlier one only if it is faster by more than this: less is within the noise of a trial."""


class Search:
    """Coordinate descent over legal plans, measured one by one."""

    def __init__(self, profile: Profile, device: Device, extents: Callable[[Measurement], Extents]) -> None:
        self.profile, self.device, self._extents = profile, device, extents
        self.measured: list[Measurement] = []
        self.rejected: list[Rejection] = []
        self._best: Measurement | None = None
        self._tried: set[Plan] = set()

    @property
    def spent_s(self) -> float:
        """Seconds spent on trials so far."""
        return sum(measurement.took_s for measurement in self.measured)

    def next_plan(self) -> Plan | None:
        """The next plan to try; None when it is time to decide."""
        if not self.measured and not self.rejected:
            return first_plan(self.profile, self.device)
        if self._best is None:
            return self._smaller_than_rejected()
        if self.spent_s > max(LEAST_PLANNING_S, PLANNING_SHARE * self._total_s(self._best)):
            return None
        candidates = neighbours(self._best.plan, self.profile, self.device)
        return next((plan for plan in candidates if plan not in self._tried), None)

    def record(self, measurement: Measurement) -> None:
        """Take a trial's result into account."""
        self._tried.add(measurement.plan)
        error = measurement.gradient_error
        if error is not None and not error <= LARGEST_GRADIENT_ERROR:
            self.reject(measurement.plan, f"its gradient is {error:.1%} from fp32's, more than "
                        f"{LARGEST_GRADIENT_ERROR:.0%}")  # fmt: skip
            return
        self.measured.append(measurement)
        if self._best is None or _pace(measurement) < _pace(self._best) * (1 - LEAST_GAIN):
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
        slower = [Rejection(plan=m.plan, reason=self._lost_by(m, best)) for m in sorted(losers, key=_pace)]
        return Decision(
            device=self.device.name,
            candidates=(chosen,),
            rejected=(*slower, *self.rejected),
            explanation=explain(chosen, self.profile, self.device, self.measured, self.rejected),
            took_s=self.spent_s,
        )

    def _smaller_than_rejected(self) -> Plan | None:
        """After a plan that did not work: the same in fp32, then with smaller micro-batches."""
        last = self.rejected[-1].plan
        return next((p for p in neighbours(last, self.profile, self.device) if p not in self._tried), None)

    def _total_s(self, measurement: Measurement) -> float:
        return forecast(measurement, self.profile, self._extents(measurement)).total_s.value

    def _lost_by(self, loser: Measurement, best: Measurement) -> str:
        ratio = _pace(loser) / _pace(best)
        shown = format_seconds(statistics.median(loser.update_s))
        if ratio < 1:
            return f"{shown} an update, faster by {1 - ratio:.1%}: within the noise of a trial"
        return f"{shown} an update, {ratio:.2f}x the time"


def _pace(measurement: Measurement) -> float:
    """Seconds a sample, from the faster half of the trial: noise only ever adds time."""
    times = sorted(measurement.update_s)
    return statistics.mean(times[: max(1, len(times) // 2)]) / measurement.samples_per_update
