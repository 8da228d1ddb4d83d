"""The plan in force: under which plan a run makes its next update, and the changes of it.

A run begins under the plan of its decision. Another one takes its place where plans are tried on the run's own updates
(`plan_trials`), memory runs out, threads are given up, other processes share the run, or another time between
checkpoints is asked for. Each switch is on the disk before its first update: a process alone replays the schedule when
it resumes, and is then bit-equal to one that was never interrupted. Several processes go on under the last plan.
`PlanInForce` is the only place that reads and changes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from torch.distributed import Store  # type: ignore[attr-defined]  # missing from the stubs

from stoker import records
from stoker.errors import BadRun, DoesNotFit
from stoker.jobs import Job
from stoker.planning.resolved_job import ResolvedJob
from stoker.records import NOT_COMPARED, ONE_PROCESS, Coupling, Decision, Device, Layout, Plan, PlanSwitch, Position
from stoker.records.plan_schedule import PlanSchedule, SwitchKind, saving_as_often
from stoker.stepping.coupling import find_coupling
from stoker.stepping.layouts.compatibility import micro_batch_problem
from stoker.store import CheckpointStore, RunDirectory
from stoker.store.run_files import COUPLING, PLAN
from stoker.training.elastic.rendezvous import Rendezvous
from stoker.training.telemetry import Emit, Sink, emit_event
from stoker.units import Duration


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replanned:
    """A change of plan during a run, from the update at `position` on; None: from the last checkpoint on.

    `free_bytes` is the device's free memory when memory ran out, `reachable_bytes` what this process held or could
    have got [bytes]; None where memory was not the reason, or where they are unknown. `left_out` is a
    candidate that failed there, and is tried no more. `is_shortage`: memory ran out.
    """

    old: Plan
    new: Plan
    why: str
    position: Position | None = None
    left_out: Plan | None = None
    is_shortage: bool = False
    free_bytes: int | None = None
    reachable_bytes: int | None = None

    def emit(self, tell: Emit, samples: int) -> None:
        """Send the event of the change, which came after `samples` samples."""
        tell(
            "replanned",
            samples=samples,
            old=records.to_json(self.old),
            new=records.to_json(self.new),
            why=self.why,
            free_bytes=self.free_bytes,
        )


@dataclasses.dataclass
class PlanInForce:
    """The plan that a run's next update is made under.

    Attributes:
        directory: the run's.
        decision: the planner's, with the plan in force in the place of the chosen one, whose forecast stays.
        coupling: how samples influence each other.
        schedule: which update runs under which plan.
    """

    directory: RunDirectory
    decision: Decision
    coupling: Coupling
    schedule: PlanSchedule
    due: float = 0
    """The next update before which the plan is to be looked up; `math.inf` while none follows."""
    was_ended: bool = False
    """The process before this one ended in order: it was stopped, or wrote why it failed."""

    @classmethod
    def of(cls, directory: RunDirectory) -> PlanInForce:
        """The plan in force of the run in `directory`.

        Raises:
            BadRun: the directory holds none.
        """
        decision, coupling, schedule = directory.read_decision(), directory.read(COUPLING), directory.read_schedule()
        if decision is None or coupling is None or schedule is None:
            raise BadRun(f"{directory.path} has lost its plan", remedy="Start another run with --new.")
        return cls(directory, _with_plan(decision, schedule.last), coupling, schedule)

    @property
    def plan(self) -> Plan:
        """The plan itself."""
        return self.decision.chosen.plan

    def take_over(self, plan: Plan) -> None:
        """Go on under `plan`, which is stored."""
        self.decision = _with_plan(self.decision, plan)

    def at(self, update: int) -> Plan:
        """The plan of update number `update` (from 0) of a process alone, which is in force from now on.

        Checkpoints come as often as was asked for last.
        """
        last, plan, following = self.schedule.last, self.schedule.at(update), self.schedule.next_after(update)
        self.due = math.inf if following is None else following
        is_alone = plan.layout == last.layout == ONE_PROCESS
        self.take_over(saving_as_often(plan if is_alone else last, last))
        return self.plan

    @property
    def most_threads(self) -> int:
        """The threads of the plan in force before any were given up to other processes [1].

        A trial of as many threads as were left chooses none: the run takes back what it gave up before.
        """
        plans = [self.schedule.began]
        for switch in self.schedule.switches:
            is_chosen = switch.kind != "changed" and switch.plan.threads != plans[-1].threads
            plans = [*([] if is_chosen else plans), switch.plan]
        return max(plan.threads for plan in plans)

    def switch(self, switch: PlanSwitch) -> None:
        """Go on under another plan from `switch.update` on, which must be the next update; stored first.

        Raises:
            RunFailed: it cannot be stored.
        """
        self.directory.append_switch(switch)
        self.schedule = self.schedule.then(switch)
        self.due = switch.update
        self.take_over(switch.plan)

    def try_again(self, position: Position) -> None:
        """Note that a process that resumed in a trial makes its first update at `position`; stored before it is made.

        Raises:
            RunFailed: it cannot be stored.
        """
        if (trial := self.schedule.candidate) is not None:
            again = dataclasses.replace(
                trial, update=position.updates, samples=position.samples, is_again=not self.was_ended
            )
            self.directory.append_switch(again)
            self.schedule = self.schedule.then(again)

    def leave_out_deadly(self, sinks: Sequence[Sink]) -> None:
        """Leave a candidate out under which two processes in succession ended without an error or a checkpoint.

        The system kills a process that takes too much memory; once may have been a power cut.

        Raises:
            RunFailed: it cannot be stored.
        """
        trial, saved = self.schedule.candidate, CheckpointStore(self.directory.checkpoints).newest_position()
        if trial is None:
            return
        events = self.directory.read_events() if self.directory.events_path.exists() else ()
        said = [event.kind for event in events if event.kind not in ("noted", "warned")]
        self.was_ended = said[-1:] == ["stopped"]
        if self.was_ended or not trial.is_again or saved.updates > trial.update:
            return
        why = f"{trial.plan.in_words()} is left out: two processes ended in its updates, as if killed for memory"
        change = Replanned(
            old=trial.plan,
            new=self.schedule.safe,
            why=why,
            left_out=trial.plan,
            position=Position(updates=trial.update, samples=trial.samples),
        )
        self.change(change)
        change.emit(functools.partial(emit_event, sinks), trial.samples)

    def settle(self, decision: Decision) -> None:
        """Keep the decision that trials in the run came to, under whose plan it goes on.

        Raises:
            RunFailed: it cannot be stored.
        """
        self.directory.write(PLAN, decision)
        self.decision = decision

    def learn(self, coupling: Coupling) -> None:
        """Keep how samples influence each other, which was not known when the run began.

        Raises:
            RunFailed: it cannot be stored.
        """
        self.directory.write(COUPLING, coupling)
        self.coupling = coupling

    def change(self, change: Replanned) -> None:
        """Go on under the new plan, and store it first.

        Raises:
            RunFailed: it cannot be stored.
        """
        position = change.position or CheckpointStore(self.directory.checkpoints).newest_position()
        kind: SwitchKind = "changed" if change.left_out is None else "left out"
        self.switch(PlanSwitch.at(position, change.new, kind, change.why, left_out=change.left_out))

    def propose(self, change: Replanned) -> None:
        """Store the new plan, which the processes take over when they meet again.

        Raises:
            RunFailed: it cannot be stored.
        """
        now = self.plan
        self.change(change)
        self.take_over(now)

    def save_every(self, interval: Duration | None, device_mtbf_h: float | None) -> None:
        """Take over the checkpoint interval that is asked for now.

        Which update runs under which plan stays, also beyond the newest checkpoint: the last switch is repeated.
        """
        asked = saving_every(interval, device_mtbf_h, self.decision)
        if asked == self.decision:
            return
        position = CheckpointStore(self.directory.checkpoints).newest_position()
        last = next(reversed(self.schedule.switches), None)
        if last is not None and last.update > position.updates:
            position = dataclasses.replace(position, updates=last.update, samples=last.samples)
        why = "another time between checkpoints is asked for"
        began = PlanSwitch(update=0, samples=0, plan=self.plan, kind="changed", why=why)
        self.switch(
            dataclasses.replace(
                last or began, update=position.updates, samples=position.samples, plan=asked.chosen.plan, why=why
            )
        )

    def fit_to_ranks(self, prepared: ResolvedJob, count: int, device: Device, sinks: Sequence[Sink]) -> None:
        """Lay the plan out for `count` processes, which may divide a batch only where its samples were compared.

        Raises:
            BadJob: the model or the loss cannot be evaluated on samples.
            BadRun: the layout that the run began with cannot be spread over so many processes.
        """
        old = self.plan
        if old.layout.world_size == count:
            return
        began = self.directory.read_decision()
        first = old.layout if began is None else began.chosen.plan.layout  # `old` may have lost processes, or been one
        layout = ONE_PROCESS if count == 1 else first.resized(count)
        if layout is None:
            raise BadRun(
                f"{self.directory.name} was spread over {first.in_words()}, which {count} processes cannot take over",
                remedy=f"Use a multiple of {first.world_size // first.sample_parts} processes, one (`--on here`), or "
                "start another run with --new.",
            )
        if count > 1 and self.coupling.evidence == NOT_COMPARED:  # it began alone, and ended before they were
            self.learn(find_coupling(prepared.job, prepared.data.train))
        threads = max(1, device.cores // count) if device.kind == "cpu" else old.threads
        divided = dataclasses.replace(old, threads=threads, captured=False)
        new = plan_for_layout(layout, divided, self.coupling, prepared.job)
        change = Replanned(old=old, new=new, why=f"{count} processes go on where {old.layout.world_size} stopped")
        self.change(change)
        change.emit(functools.partial(emit_event, sinks), self.directory.read_run().samples)

    def agree(self, job: Job, meeting: Rendezvous, store: Store) -> Replanned | None:
        """Go on under the plan of rank 0 (its own, or the one that a rank needs), laid out for all that met.

        Returns:
            On rank 0, the change where there is one.

        Raises:
            DoesNotFit: the layout cannot be spread over the processes that met.
        """
        old, key = self.plan, f"{meeting.name}/plan"
        if meeting.rank > 0:
            self.take_over(records.loads(store.get(key), Plan))
            return None
        agreed = records.from_json(meeting.notes["plan"], Plan) if "plan" in meeting.notes else old
        layout = agreed.layout.resized(meeting.size)
        if layout is None:
            raise DoesNotFit(f"{old.layout.in_words()} cannot be spread over {meeting.size} processes")
        new = plan_for_layout(layout, agreed, self.coupling, job)
        store.set(key, records.dumps(new, indent=None))
        if new == old:
            return None
        why = str(meeting.notes.get("why") or _who_is_here(old.layout.world_size, meeting.size))
        change = Replanned(old=old, new=new, why=why)
        self.change(change)
        return change


def saving_every(interval: Duration | None, device_mtbf_h: float | None, decision: Decision) -> Decision:
    """The decision with another time between checkpoints in its plan, or another failure rate to compute it from."""
    if interval is None and device_mtbf_h is None:
        return decision
    plan = dataclasses.replace(decision.chosen.plan, device_mtbf_h=device_mtbf_h)
    if interval is not None:
        plan = dataclasses.replace(plan, checkpoint_every_s=interval.value, device_mtbf_h=None)
    return _with_plan(decision, plan)


def plan_for_layout(layout: Layout, plan: Plan, coupling: Coupling, job: Job) -> Plan:
    """The plan in another layout, with its micro-batch, or the least that is legal there.

    Each process takes its part of a group of coupled samples in one pass: fewer processes take larger parts.
    """
    sharing = layout if job.sync is None else ONE_PROCESS
    size = plan.micro_batch
    if coupling.group is not None and micro_batch_problem(coupling, size, job.batch_size, sharing) is not None:
        size = math.ceil(min(coupling.group, job.batch_size) / sharing.sample_parts)
    return dataclasses.replace(plan, layout=layout, micro_batch=size)


def _with_plan(decision: Decision, plan: Plan) -> Decision:
    """The decision with another plan in the place of the chosen one, whose forecast stays."""
    candidates = (dataclasses.replace(decision.chosen, plan=plan), *decision.candidates[1:])
    return dataclasses.replace(decision, candidates=candidates)


def _who_is_here(before: int, now: int) -> str:
    """Why a plan is for another number of processes.

    >>> _who_is_here(4, 3), _who_is_here(2, 1), _who_is_here(1, 2)
    ('3 of 4 processes are left', '1 of 2 processes is left', '2 processes are here, not 1 any more')
    """
    if now < before:
        return f"{now} of {before} processes {'is' if now == 1 else 'are'} left"
    return f"{now} processes are here, not {before} any more"
