"""Choose the fastest plan from the times of a run's own updates: candidates in turns, until no turn can pay.

`LiveSearch` decides which plan makes the next updates; the caller makes them and reports their times:

```
search = LiveSearch(safe, candidates)
while turn := search.next_turn(updates_left):
    search.record(turn.plan, times of its updates)      # or search.leave_out(turn.plan, why)
chosen = search.best
```

What: candidates take turns of a few updates in rounds, so that a drift of the machine falls on all of them. The
logarithm of a turn's median time, less that of the best plan in the same round, is taken as normal; with the noise
known from measurements of equal plans as a prior, its mean has an interval. A candidate whose interval is above the
best is out. The search ends when no candidate left is expected to save, over the rest of the run, what its next turn
may cost. Use when: plans are the same mathematics, so that a turn under a slow one costs its slowness and no more.
Costs: two or three turns of each plan that is clearly slower. Does not combine with: updates of very different sizes.
Source: successive elimination, E. Even-Dar, S. Mannor and Y. Mansour, JMLR 7 (2006), with expected improvement to stop;
noise of equal plans in docs/log.md, 2026-11-24.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from stoker.planning.plan_search import expected_gain
from stoker.records import Plan

TURN_S, FEWEST, MOST = 0.15, 2, 64
"""Time of the timed updates of a turn [s], and the least and the most of them."""

UNTIMED = 1
"""Updates at the beginning of a turn that are not timed: the first after a switch takes up to 1.6 times as long."""

MOST_ROUNDS = 12
"""Rounds in which a candidate can take part; about 32 updates a side, after which equal plans differ by 2 %."""

MOST_SHARE = 0.25
"""The most of a run's updates that are made in trials."""

LEAST_GAIN = 0.005
"""Share of the time below which another plan is not worth a turn [0 to 1]."""

_SURE = 1.65
"""Standard deviations between a candidate and the best beyond which it is out: one-sided, 5 %."""

_SLOW_AT_ONCE = 0.4
"""Logarithm of the ratio from which a candidate is out after its first turn: bursts of other work seldom cost more."""

_TRUST = 2.0
"""Weight of the noise known from equal plans, in turns."""


@dataclass(frozen=True)
class Turn:
    """The next updates of the run: `plan` makes `updates` of them, of which the first `UNTIMED` are not timed."""

    plan: Plan
    updates: int


@dataclass
class Timed:
    """Times of a plan's turns [s an update], by round."""

    plan: Plan
    by_round: dict[int, float] = field(default_factory=dict)
    times_s: list[float] = field(default_factory=list)
    """The updates of its last turn."""

    @property
    def update_s(self) -> float:
        """Typical time of an update [s]."""
        return math.exp(statistics.fmean(map(math.log, self.by_round.values())))


class LiveSearch:
    """The turns of a run.

    Args:
        safe: the plan that the run begins under; it has been timed by the first updates.
        candidates: legal plans to try against it, the likeliest first.
        is_quiet: whether other processes leave the machine alone; else one slow turn decides nothing.

    Attributes:
        timed: the plans in turns, by plan.
        left_out: plans that cannot be used, with the reasons.
        num_updates: updates made in turns so far.
    """

    def __init__(
        self, safe: Plan, candidates: Iterable[Plan] = (), is_quiet: Callable[[], bool] = lambda: True
    ) -> None:
        self.best, self._is_quiet = safe, is_quiet
        self.timed: dict[Plan, Timed] = {safe: Timed(safe)}
        self.left_out: dict[Plan, str] = {}
        self.num_updates = 0
        self._racing: list[Plan] = []
        self._round, self._waiting = 0, list[Plan]()
        self.add(candidates)

    def add(self, candidates: Iterable[Plan]) -> None:
        """Let more plans take part, from the next round on."""
        new = [plan for plan in candidates if plan not in self.timed and plan not in self.left_out]
        self.timed |= {plan: Timed(plan) for plan in new}
        self._racing += new

    @property
    def has_rivals(self) -> bool:
        """Whether candidates are left besides the best plan."""
        return bool(self._racing)

    def next_turn(self, updates_left: int) -> Turn | None:
        """The next turn; None if none can pay.

        Args:
            updates_left: updates of the run still to be made.
        """
        if not self._waiting:
            if self._round:
                self._judge(updates_left)
            if self._round and not self._racing:
                return None
            self._round += 1
            # Every second round the other way round: the best is not always the first after a switch.
            order = [self.best, *self._racing]
            self._waiting = order if self._round % 2 else order[::-1]
        plan = self._waiting[0]
        allowed = int(min(MOST_SHARE * (self.num_updates + updates_left) - self.num_updates, updates_left))
        # What is left is kept for two turns of each plan of this round.
        updates = max(UNTIMED + FEWEST, min(UNTIMED + self._num_timed(plan), allowed // (2 * len(self._waiting))))
        if updates > allowed:
            self._racing, self._waiting = [], []
            self._take_fastest()
            return None
        return Turn(plan, updates)

    def record(self, plan: Plan, times_s: Sequence[float]) -> None:
        """Take in a turn: the times of its updates [s], without the first ones that do not count."""
        timed = self.timed[plan]
        timed.by_round[self._round], timed.times_s = statistics.median(times_s), list(times_s)
        self.num_updates += UNTIMED + len(times_s)
        self._waiting = [other for other in self._waiting if other != plan]

    def leave_out(self, plan: Plan, why: str) -> None:
        """Try a plan no more."""
        self.left_out[plan] = why
        self.timed.pop(plan, None)
        self._racing = [other for other in self._racing if other != plan]
        self._waiting = [other for other in self._waiting if other != plan]

    def against_best(self, plan: Plan) -> tuple[float, float]:
        """Mean and standard error of log(time / time of the best plan), over the rounds that both took part in."""
        mine, theirs = self.timed[plan].by_round, self.timed[self.best].by_round
        both = [math.log(mine[number] / theirs[number]) for number in mine.keys() & theirs.keys()]
        if not both:
            return 0.0, _noise(self.timed[self.best], 1)
        mean, prior = statistics.fmean(both), _noise(self.timed[self.best], self._num_timed(self.best)) ** 2
        squares = sum((one - mean) ** 2 for one in both)
        variance = (_TRUST * prior + squares) / (_TRUST + len(both) - 1)
        return mean, math.sqrt(variance / len(both))

    def _judge(self, updates_left: int) -> None:
        """After a round: a surely faster plan is the best from now on; those that cannot pay take no further part."""
        self._take_fastest(is_sure=True)
        left_s = updates_left * self.timed[self.best].update_s
        staying: list[Plan] = []
        slow_at_once = _SLOW_AT_ONCE if self._is_quiet() else math.inf
        for plan in self._racing:
            if plan == self.best:
                continue
            mean, error = self.against_best(plan)
            gain, rounds = expected_gain(mean, error), len(self.timed[plan].by_round)
            turn_s = self._num_timed(plan) * self.timed[plan].update_s if rounds else 0.0
            cost_s = turn_s * max(0.05, math.exp(mean) - 1)
            is_undecided = rounds < 2 and mean < slow_at_once
            can_pay = mean < _SURE * error and gain > LEAST_GAIN and gain * left_s > cost_s
            if is_undecided or (can_pay and rounds < MOST_ROUNDS):
                staying.append(plan)
        self._racing = staying
        if not staying:
            self._take_fastest()

    def _take_fastest(self, *, is_sure: bool = False) -> None:
        """Make the plan with the least mean time the best one, if it is faster (`is_sure`: by its interval)."""
        for plan in [p for p, timed in self.timed.items() if timed.by_round and p != self.best]:
            mean, error = self.against_best(plan)
            if mean + (_SURE * error if is_sure else LEAST_GAIN) < 0:
                if self.best not in self._racing:
                    self._racing.append(self.best)
                self.best = plan
        self._racing = [plan for plan in self._racing if plan != self.best]

    def _num_timed(self, plan: Plan) -> int:
        """Number of timed updates in a turn."""
        known = self.timed[plan].by_round or self.timed[self.best].by_round
        update_s = statistics.median(known.values()) if known else TURN_S / FEWEST
        return max(FEWEST, min(MOST, round(TURN_S / max(update_s, 1e-6))))


def _noise(timed: Timed, updates: int) -> float:
    """Deviation of log(time) between turns of equal plans, each of `updates` updates, on a shared machine.

    Measured at 95 %: 8 updates a side 7 % at 150 ms an update, 20 % at 5 ms; it falls with their number's root.
    """
    update_s = timed.update_s if timed.by_round else TURN_S
    at_eight = 0.035 if update_s >= 0.05 else 0.1
    return at_eight * math.sqrt(8 / max(1, updates))
