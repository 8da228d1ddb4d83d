"""The schedule of plans of a run: which update ran under which plan, as it is written before each switch.

Another legal plan is the same mathematics, so that a run may begin under a safe plan and try others on its own updates.
A run is bit-equal to an uninterrupted one under the same schedule: a resume replays it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from stoker.records.plan import Plan
from stoker.records.progress import Position

SwitchKind = Literal["trial", "settled", "left out", "changed"]
"""Why a plan comes into force: to be timed; as the fastest, for the rest of the run; in place of a candidate that
failed; or for another reason, such as memory, threads or the number of processes."""


@dataclass(frozen=True, kw_only=True)
class PlanSwitch:
    """From update number `update` (from 0) on, which comes after `samples` samples, a run is made under `plan`.

    `left_out` is the plan that failed at that update and is not tried again, where `kind` is "left out". `is_again`: a
    process that resumed in a trial makes this update first, since the one before it did not end in order.
    """

    schema: ClassVar[int] = 1
    update: int
    samples: int
    plan: Plan
    kind: SwitchKind
    why: str
    left_out: Plan | None = None
    is_again: bool = False

    @classmethod
    def at(
        cls, position: Position, plan: Plan, kind: SwitchKind, why: str, *, left_out: Plan | None = None
    ) -> PlanSwitch:
        """The switch to `plan` from the update at `position` on."""
        return cls(update=position.updates, samples=position.samples, plan=plan, kind=kind, why=why, left_out=left_out)


@dataclass(frozen=True)
class PlanSchedule:
    """The plans of a run in order. `began` is the first one; `switches` ascend by update, at most one for each."""

    began: Plan
    switches: tuple[PlanSwitch, ...] = ()

    @classmethod
    def of(cls, began: Plan, written: Iterable[PlanSwitch]) -> PlanSchedule:
        """The schedule that holds after all switches in the order of writing: each replaces those from its update on.

        >>> plan = Plan(device="cpu", micro_batch=8)
        >>> switch = lambda update, why: PlanSwitch(update=update, samples=0, plan=plan, kind="changed", why=why)
        >>> [s.why for s in PlanSchedule.of(plan, [switch(3, "a"), switch(9, "b"), switch(5, "c")]).switches]
        ['a', 'c']
        """
        schedule = cls(began)
        for switch in written:
            schedule = schedule.then(switch)
        return schedule

    def then(self, switch: PlanSwitch) -> PlanSchedule:
        """The schedule with another switch, which replaces those from its update on."""
        return PlanSchedule(self.began, (*(s for s in self.switches if s.update < switch.update), switch))

    def at(self, update: int) -> Plan:
        """The plan of update number `update` (from 0)."""
        return next((s.plan for s in reversed(self.switches) if s.update <= update), self.began)

    def next_after(self, update: int) -> int | None:
        """The first update after `update` that begins under a switch; None if no switch follows."""
        return next((s.update for s in self.switches if s.update > update), None)

    @property
    def last(self) -> Plan:
        """The plan of all updates after the last switch."""
        return self.switches[-1].plan if self.switches else self.began

    @property
    def safe(self) -> Plan:
        """The plan that needs no trial: the first, or that of the last change; it saves as often as the last one."""
        plan = next((s.plan for s in reversed(self.switches) if s.kind == "changed"), self.at(0))
        return saving_as_often(plan, self.last)

    @property
    def candidate(self) -> PlanSwitch | None:
        """The last switch, if it is to a plan that is being tried and may fail; None where it is to the safe one."""
        last = self.switches[-1] if self.switches else None
        return last if last is not None and last.kind == "trial" and last.plan != self.safe else None

    @property
    def settled(self) -> PlanSwitch | None:
        """The switch to the plan that trials came to; None where they go on, or there were none."""
        return next((s for s in reversed(self.switches) if s.kind == "settled"), None)

    @property
    def is_settled(self) -> bool:
        """Whether no more plans are tried: the fastest is chosen, or none was ever to be tried."""
        return self.settled is not None or not any(s.kind == "trial" for s in self.switches)


def saving_as_often(plan: Plan, other: Plan) -> Plan:
    """`plan` with the checkpoint interval of `other`, and the failure rate that it may follow from."""
    return replace(plan, checkpoint_every_s=other.checkpoint_every_s, device_mtbf_h=other.device_mtbf_h)
