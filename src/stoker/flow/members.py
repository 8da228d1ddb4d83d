"""A run on several processes, as one of them lives it: meet, train, meet again after a loss, finish together.

An update is atomic: whoever loses another process within one drops it. Where every process holds all of the state,
those that are left go on from what they hold, and the furthest gives its state to the others. Sites that make updates
of their own each go on from their own state and what they share; one that comes takes over a living one's. Else all go
on from the last checkpoint. The batches stay the Job's, cut for as many processes as there are now.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch.distributed import DistError

from stoker import profiling, records, training
from stoker.devices import attached_devices, resolve_place
from stoker.devices.malloc import apply_malloc
from stoker.errors import BadJob, DoesNotFit, RunFailed, first_line
from stoker.flow.finishing import final_metrics, finish, stopped
from stoker.flow.opening import over, tell
from stoker.flow.preparation import Prepared, prepare, users_code
from stoker.flow.recovering import in_force, noting, with_plan
from stoker.flow.runs import Run
from stoker.flow.starting import Session, ready, slowest_s
from stoker.jobs import Entry, Job
from stoker.launching import INTERRUPTED, Dismissed, Meeting, Member
from stoker.records import Coupling, Decision, Device, Event, Plan
from stoker.records.codec import JSON
from stoker.stepping.world import World, is_broken, join, leave
from stoker.store import RunDirectory
from stoker.training import Called, Carried, Patience, Replanned, Sink, StopRequest
from stoker.training.rank_times import rank_clock


@dataclass
class _Life:
    """What a member keeps between two meetings."""

    prepared: Prepared
    directory: RunDirectory
    device: Device
    member: Member
    stop: StopRequest
    sinks: list[Sink]
    decision: Decision
    coupling: Coupling
    carried: Carried | None = None

    @property
    def plan(self) -> Plan:
        """What it trains under now."""
        return self.decision.chosen.plan

    @property
    def patience_s(self) -> float:
        """How long it waits for another one that does not answer [s]."""
        return Patience.of(slowest_s(self.prepared.job, self.decision)).others_s


_WHERE = "run"
"""Under this name the first process tells the others, in their store, where the run is."""

_ENDED = "run/ended"
"""Under this name, that it has finished the run, or left it to be continued."""


def lead(
    prepared: Prepared, directory: RunDirectory, device: Device, member: Member, meeting: Meeting, sinks: list[Sink]
) -> Run:
    """As the first of processes that a launcher started: say where the run is, and take part in it."""
    member.store.set(_WHERE, str(directory.path.resolve()))
    run = _unless_dismissed(lambda: take_part(prepared, directory, device, member, sinks, meeting=meeting))
    member.store.set(_ENDED, "")
    return run


def follow(prepared: Prepared, device: Device, member: Member, meeting: Meeting) -> Run:
    """As another of them: learn where the run is, and take part in it."""

    def run() -> Run:
        directory = RunDirectory(Path(member.store.get(_WHERE).decode()))
        take_part(prepared, directory, device, member, [], meeting=meeting)
        with suppress(DistError):  # the first process is gone, and with it the store: it has ended the run
            member.store.wait([_ENDED])
        return Run(directory, prepared.job)

    return _unless_dismissed(run)


def _unless_dismissed(run: Callable[[], Run]) -> Run:
    """What `run` gives; whoever is dismissed leaves without a word, since another process says why."""
    try:
        return run()
    except Dismissed as dismissed:
        if dismissed.why:
            print(dismissed.why, file=sys.stderr, flush=True)  # noqa: T201 - each process of a launcher has its own log
        raise SystemExit(dismissed.exit_code) from None


def take_part_in(directory: Path, job: Job, entry: Entry) -> int:
    """As a process that `train_supervised` started: train the run in `directory`; the exit code.

    Raises:
        RunFailed: training could not go on; what was saved is intact.
    """
    member = Member.from_environment()
    if member is None:
        raise BadJob("take-part is what `stoker train --on 2xhere` starts its processes with",
                     remedy="Use `stoker train`.")  # fmt: skip
    prepared, where = prepare(job, entry), RunDirectory(directory)
    decision = where.read_decision()
    name = "cpu" if decision is None else decision.chosen.plan.device
    if name.startswith("cuda"):
        name = f"cuda:{member.worker}"
    try:
        run = take_part(
            prepared, where, resolve_place(name, attached_devices()), member,
            [where.append_event, lambda event: member.event(records.dumps(event, indent=None))],
        )  # fmt: skip
    except Dismissed as dismissed:
        return dismissed.exit_code
    return 0 if run.status == "finished" else INTERRUPTED


def take_part(
    prepared: Prepared,
    directory: RunDirectory,
    device: Device,
    member: Member,
    sinks: list[Sink],
    *,
    meeting: Meeting | None = None,
) -> Run:
    """Train the run in `directory` with the other members, to its end or until asked to stop.

    Args:
        prepared: the job made ready.
        directory: the run's, seen by all processes.
        device: this process's.
        member: finds the other processes.
        sinks: receive events, where this process is the one that tells.
        meeting: the first one, if it was held already.

    Raises:
        RunFailed: training could not go on; what was saved is intact.
        Dismissed: the run goes on, or ended, without this process.
    """
    decision, coupling = directory.read_decision(), directory.read_coupling()
    if decision is None or coupling is None:
        raise RunFailed(f"{directory.path} cannot be seen by every process, or has lost its plan",
                        remedy="Put the run's directory where all machines find it under the same path.")  # fmt: skip
    decision = in_force(directory, decision)
    apply_malloc(decision.chosen.plan.malloc)
    with ExitStack() as stack:
        stack.enter_context(profiling.threads(decision.chosen.plan.threads))
        stop = stack.enter_context(training.stop_on_signals())
        life = _Life(prepared, directory, device, member, stop, sinks, decision, coupling)
        with profiling.PeakMemory(device.torch_name) as peak:
            found: Session | Meeting = meeting or member.meet()
            while isinstance(found, Meeting):
                found = _until_lost(life, found)
        return _ended(life, found, peak)


def _until_lost(life: _Life, meeting: Meeting) -> Session | Meeting:
    """Train with those who met: the session, where training came to its end; else the next meeting."""
    session: Session | None = None
    notes: dict[str, JSON] = {}
    try:
        life.member.require_same(_facts(life.prepared), patience_s=life.patience_s)
        _adapt(life, meeting)
        world = _joined(life, meeting)
        clock = rank_clock(
            world, worker=life.member.worker, device=torch.device(life.device.torch_name),
            write=life.directory.write_rank_times,
        )  # fmt: skip
        session = _begin(life, dataclasses.replace(world, mark=clock.mark), meeting.age_s)
        clock.first_update = session.position.updates
        session.loop.telemetry.on_lap = clock.lap
        with clock.running():
            session.position = session.loop.run(session.position)
        if clock.problem:
            session.loop.telemetry.emit("warned", message=clock.problem)
        _evaluate(session)
    except Dismissed:
        raise
    except Called:
        assert session is not None
        why = "called"
        life.carried = Carried.of(session.loop) if session.step.plan.layout.is_replicated else None
    except (training.Together, training.RollBack) as request:
        why = request.change.why
        notes = {"plan": records.to_json(request.change.new), "why": why}
        life.carried = _kept(life, session) if isinstance(request, training.Together) else None
        noting(life.prepared, life.directory, life.device, life.decision)(request.change)
        if not life.member.can_reform:
            raise RunFailed(why, remedy="The same command goes on under a plan that needs less.") from request
    except Exception as error:
        if not (is_broken(error) and life.member.can_reform):
            with users_code("training", life.prepared.entry, RunFailed):
                raise
        why = f"lost touch with another process: {first_line(error)}"
        life.carried = _kept(life, session)
    else:
        return session
    del session
    leave()
    return life.member.lost(why, notes)


def _joined(life: _Life, meeting: Meeting) -> World:
    """The world of those who met."""
    device = torch.device(life.device.torch_name)
    with life.member.joining():
        return join(
            life.plan.layout, meeting.rank, life.member.store, device=device, name=meeting.name,
            patience_s=life.patience_s,
        )  # fmt: skip


def _facts(prepared: Prepared) -> dict[str, str]:
    """What must be equal in all processes."""
    return {
        "the job": prepared.spec.digest()[:12], "Stoker": version("stoker"), "PyTorch": torch.__version__,
        "Python": platform.python_version(),
    }  # fmt: skip


def _adapt(life: _Life, meeting: Meeting) -> None:
    """Take over the first process's plan: its own, or what one of them needs, in the layout for so many."""
    old, store, key = life.plan, life.member.store, f"{meeting.name}/plan"
    if meeting.rank > 0:
        life.decision = with_plan(life.decision, records.loads(store.get(key), Plan))
        return
    agreed = records.from_json(meeting.notes["plan"], Plan) if "plan" in meeting.notes else old
    layout = agreed.layout.resized(meeting.size)
    if layout is None:
        raise DoesNotFit(f"{old.layout.in_words()} cannot be spread over {meeting.size} processes")
    new = over(layout, agreed, life.coupling, life.prepared.job)
    store.set(key, records.dumps(new, indent=None))
    life.decision = with_plan(life.decision, new)
    if new != old:
        life.directory.write_changed_plan(new)
        why = str(meeting.notes.get("why") or _who_is_here(old.layout.world_size, meeting.size))
        change = Replanned(old=old, new=new, why=why)
        samples = 0 if life.carried is None else life.carried.position.samples
        training.tell_replanned(lambda kind, **fields: tell(life.sinks, kind, **fields), change, samples)


def _who_is_here(before: int, now: int) -> str:
    """Why a plan is for another number of processes.

    >>> _who_is_here(4, 3), _who_is_here(2, 1), _who_is_here(1, 2)
    ('3 of 4 processes are left', '1 of 2 processes is left', '2 processes are here, not 1 any more')
    """
    if now < before:
        return f"{now} of {before} processes {'is' if now == 1 else 'are'} left"
    return f"{now} processes are here, not {before} any more"


def _begin(life: _Life, world: World, age_s: float) -> Session:
    """The session of this process in `world`, from what was carried over or from the last checkpoint."""

    def sink(event: Event) -> None:
        for one in life.sinks:
            one(event)

    session = ready(
        life.prepared, life.directory, life.device, decision=life.decision, coupling=life.coupling,
        sink=sink if world.is_first else _silent, stop=life.stop, replanned=_unexpected, world=world,
        carried=life.carried, age_s=age_s,
    )  # fmt: skip
    life.carried = None
    session.loop.is_called = life.member.is_called
    return session


def _kept(life: _Life, session: Session | None) -> Carried | None:
    """What a process can go on from after an update that came to nothing; None where only a checkpoint will do."""
    if session is None:
        return life.carried  # it was not yet handed over
    can_go_on = session.step.plan.layout.is_replicated and session.loop.is_between_updates()
    return Carried.of(session.loop) if can_go_on else None


def _evaluate(session: Session) -> None:
    """All that needs every process before one of them finishes the run."""
    if session.is_complete:
        session.metrics = final_metrics(session)
        session.weights = session.step.whole_weights()


def _ended(life: _Life, session: Session, peak: profiling.PeakMemory) -> Run:
    """Leave the others, and finish the run or leave it to be continued, in the first process."""
    is_first = session.step.world.is_first
    leave()
    if is_first and session.metrics is None:
        stopped(session, life.stop.reason or "asked")
    elif is_first and session.metrics is not None:
        finish(session, session.metrics, peak.num_bytes)
    if session.metrics is not None:
        life.member.finished()
    return Run(life.directory, life.prepared.job)


def _silent(_event: Event) -> None:
    """Only the first process tells."""


def _unexpected(change: Replanned) -> None:
    raise RunFailed(f"one process of several changed its plan by itself: {change.why}")
