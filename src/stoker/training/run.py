"""A run in this process alone.

A run on several processes, as one of them lives it: meet, train, meet again after a loss, finish together.

An update is atomic: whoever loses another process within one drops it. Where every process holds all of the state,
those that are left go on from what they hold, and the furthest gives its state to the others. Sites that make updates
of their own each go on from their own state and what they share; one that comes takes over a living one's. Else all go
on from the last checkpoint. The batches stay the Job's, cut for as many processes as there are now.

`stoker train --profile`: PyTorch's profiler beside a run, and its files in the run's directory.
"""

from __future__ import annotations

import dataclasses
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch.distributed import DistError

from stoker import records
from stoker.devices import attached_devices, resolve_place
from stoker.devices.malloc import apply_malloc
from stoker.errors import BadJob, DoesNotFit, RunFailed, first_line
from stoker.jobs import Entry, Job
from stoker.planning.resolved_job import ResolvedJob, resolve_job, users_code
from stoker.profiling.ceilings import computing_threads
from stoker.profiling.plan_trial import PeakMemory
from stoker.profiling.torch_profile import ProfiledSource, TorchProfile
from stoker.records import Coupling, Decision, Device, Event, Plan
from stoker.records.codec import JSON
from stoker.stepping.world import World, is_broken, join, leave
from stoker.store import RunDirectory, disk_errors
from stoker.store.files import make_directories
from stoker.training.elastic.rendezvous import Rendezvous, WorkerRetired
from stoker.training.elastic.state_broadcast import SurvivorState
from stoker.training.elastic.supervisor import INTERRUPTED
from stoker.training.elastic.worker import ElasticWorker
from stoker.training.hooks import Update
from stoker.training.loop import RendezvousRequested
from stoker.training.rank_times import rank_clock
from stoker.training.recovery import ReplanAllRanks, Replanned, RollBack, emit_replanned
from stoker.training.run_completion import final_metrics, finish_run, leave_unfinished
from stoker.training.run_handle import Run
from stoker.training.run_setup import (
    decision_in_force,
    emit_event,
    plan_change_recorder,
    plan_for_layout,
    train_with_rollbacks,
    with_plan,
)
from stoker.training.session import TrainingSession, build_session, slowest_s
from stoker.training.signals import StopRequest, stop_on_signals
from stoker.training.telemetry import Sink
from stoker.training.threads import thread_keeper
from stoker.training.watchdog import WatchdogPatience


def train_single_process(
    prepared: ResolvedJob,
    directory: RunDirectory,
    device: Device,
    chosen: tuple[Decision, Coupling],
    sinks: Sequence[Sink],
    *,
    profile: bool = False,
    others_share: float = 0.0,
    on_update: Callable[[Update], None] | None = None,
) -> Run:
    """Train, test and report the run in `directory`, whose lock is held, from where it is.

    Args:
        prepared: the job made ready.
        directory: the run's.
        device: what it runs on.
        chosen: what it begins under, and how samples influence each other.
        sinks: receive every event, the run's own log among them.
        profile: run a few updates under PyTorch's profiler.
        others_share: of the CPU, that other processes used just now, while the plan was chosen [0 to 1].
        on_update: looks on at every update.

    Raises:
        RunFailed: training could not go on; what was saved is intact.
    """
    decision, coupling = chosen
    plan = decision.chosen.plan

    def sink(event: Event) -> None:
        for one in sinks:
            one(event)

    if problem := apply_malloc(plan.malloc):
        emit_event(sinks, "warned", message=f"memory is had as it is by default: {problem}")
    with (
        computing_threads(plan.threads), stop_on_signals() as stop,
        users_code("training", prepared.entry, RunFailed), PeakMemory(plan.device) as peak,
    ):  # fmt: skip
        note, began = plan_change_recorder(prepared, directory, device, decision), time.monotonic()

        def begin(chosen: Decision) -> TrainingSession:
            session = build_session(
                prepared, directory, device, decision=chosen, coupling=coupling, sink=sink, stop=stop, replanned=note,
                age_s=time.monotonic() - began,
            )  # fmt: skip
            if profile:
                profile_updates(session)
            session.loop.on_update = on_update
            session.loop.threads = thread_keeper(
                session.step, session.loop.telemetry.emit,
                usual_samples_per_s=decision.chosen.forecast.samples_per_s.value, others_share=others_share,
            )  # fmt: skip
            return session

        session = train_with_rollbacks(begin, decision, note)
        if not session.is_complete:
            return leave_unfinished(session, stop.reason or "asked")
        return finish_run(session, final_metrics(session), peak.num_bytes)


@dataclass
class _RankContext:
    """What a member keeps between two meetings."""

    prepared: ResolvedJob
    directory: RunDirectory
    device: Device
    member: ElasticWorker
    stop: StopRequest
    sinks: list[Sink]
    decision: Decision
    coupling: Coupling
    carried: SurvivorState | None = None

    @property
    def plan(self) -> Plan:
        """What it trains under now."""
        return self.decision.chosen.plan

    @property
    def patience_s(self) -> float:
        """How long it waits for another one that does not answer [s]."""
        return WatchdogPatience.of(slowest_s(self.prepared.job, self.decision)).others_s


_RUN_DIRECTORY_KEY = "run"
"""Under this name the first process tells the others, in their store, where the run is."""

_RUN_ENDED_KEY = "run/ended"
"""Under this name, that it has finished the run, or left it to be continued."""


def run_rank_zero(
    prepared: ResolvedJob,
    directory: RunDirectory,
    device: Device,
    member: ElasticWorker,
    meeting: Rendezvous,
    sinks: list[Sink],
) -> Run:
    """As the first of processes that a launcher started: say where the run is, and take part in it."""
    member.store.set(_RUN_DIRECTORY_KEY, str(directory.path.resolve()))
    run = _exit_if_retired(lambda: train_rank(prepared, directory, device, member, sinks, meeting=meeting))
    member.store.set(_RUN_ENDED_KEY, "")
    return run


def run_rank(prepared: ResolvedJob, device: Device, member: ElasticWorker, meeting: Rendezvous) -> Run:
    """As another of them: learn where the run is, and take part in it."""

    def run() -> Run:
        directory = RunDirectory(Path(member.store.get(_RUN_DIRECTORY_KEY).decode()))
        train_rank(prepared, directory, device, member, [], meeting=meeting)
        with suppress(DistError):  # the first process is gone, and with it the store: it has ended the run
            member.store.wait([_RUN_ENDED_KEY])
        return Run(directory, prepared.job)

    return _exit_if_retired(run)


def _exit_if_retired(run: Callable[[], Run]) -> Run:
    """What `run` gives; whoever is dismissed leaves without a word, since another process says why."""
    try:
        return run()
    except WorkerRetired as dismissed:
        if dismissed.why:
            print(dismissed.why, file=sys.stderr, flush=True)  # noqa: T201 - each process of a launcher has its own log
        raise SystemExit(dismissed.exit_code) from None


def take_part_in(directory: Path, job: Job, entry: Entry) -> int:
    """As a process that `train_supervised` started: train the run in `directory`; the exit code.

    Raises:
        RunFailed: training could not go on; what was saved is intact.
    """
    member = ElasticWorker.from_environment()
    if member is None:
        raise BadJob("take-part is what `stoker train --on 2xhere` starts its processes with",
                     remedy="Use `stoker train`.")  # fmt: skip
    prepared, where = resolve_job(job, entry), RunDirectory(directory)
    decision = where.read_decision()
    name = "cpu" if decision is None else decision.chosen.plan.device
    if name.startswith("cuda"):
        name = f"cuda:{member.worker}"
    try:
        run = train_rank(
            prepared, where, resolve_place(name, attached_devices()), member,
            [where.append_event, lambda event: member.event(records.dumps(event, indent=None))],
        )  # fmt: skip
    except WorkerRetired as dismissed:
        return dismissed.exit_code
    return 0 if run.status == "finished" else INTERRUPTED


def train_rank(
    prepared: ResolvedJob,
    directory: RunDirectory,
    device: Device,
    member: ElasticWorker,
    sinks: list[Sink],
    *,
    meeting: Rendezvous | None = None,
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
    decision = decision_in_force(directory, decision)
    apply_malloc(decision.chosen.plan.malloc)
    with ExitStack() as stack:
        stack.enter_context(computing_threads(decision.chosen.plan.threads))
        stop = stack.enter_context(stop_on_signals())
        life = _RankContext(prepared, directory, device, member, stop, sinks, decision, coupling)
        with PeakMemory(device.torch_name) as peak:
            found: TrainingSession | Rendezvous = meeting or member.meet()
            while isinstance(found, Rendezvous):
                found = _train_generation(life, found)
        return _finish_rank(life, found, peak)


def _train_generation(life: _RankContext, meeting: Rendezvous) -> TrainingSession | Rendezvous:
    """Train with those who met: the session, where training came to its end; else the next meeting."""
    session: TrainingSession | None = None
    notes: dict[str, JSON] = {}
    try:
        life.member.require_same(_facts_to_compare(life.prepared), patience_s=life.patience_s)
        _adopt_plan(life, meeting)
        world = _join_world(life, meeting)
        clock = rank_clock(
            world, worker=life.member.worker, device=torch.device(life.device.torch_name),
            write=life.directory.write_rank_times,
        )  # fmt: skip
        session = _build_rank_session(life, dataclasses.replace(world, mark=clock.mark), meeting.age_s)
        clock.first_update = session.position.updates
        session.loop.telemetry.on_lap = clock.lap
        with clock.running():
            session.position = session.loop.run(session.position)
        if clock.problem:
            session.loop.telemetry.emit("warned", message=clock.problem)
        _evaluate(session)
    except WorkerRetired:
        raise
    except RendezvousRequested:
        assert session is not None
        why = "called"
        life.carried = SurvivorState.of(session.loop) if session.step.plan.layout.is_replicated else None
    except (ReplanAllRanks, RollBack) as request:
        why = request.change.why
        notes = {"plan": records.to_json(request.change.new), "why": why}
        life.carried = _survivor_state(life, session) if isinstance(request, ReplanAllRanks) else None
        plan_change_recorder(life.prepared, life.directory, life.device, life.decision)(request.change)
        if not life.member.can_reform:
            raise RunFailed(why, remedy="The same command goes on under a plan that needs less.") from request
    except Exception as error:
        if not (is_broken(error) and life.member.can_reform):
            with users_code("training", life.prepared.entry, RunFailed):
                raise
        why = f"lost touch with another process: {first_line(error)}"
        life.carried = _survivor_state(life, session)
    else:
        return session
    del session
    leave()
    return life.member.lost(why, notes)


def _join_world(life: _RankContext, meeting: Rendezvous) -> World:
    """The world of those who met."""
    device = torch.device(life.device.torch_name)
    with life.member.joining():
        return join(
            life.plan.layout, meeting.rank, life.member.store, device=device, name=meeting.name,
            patience_s=life.patience_s,
        )  # fmt: skip


def _facts_to_compare(prepared: ResolvedJob) -> dict[str, str]:
    """What must be equal in all processes."""
    return {
        "the job": prepared.spec.digest()[:12], "Stoker": version("stoker"), "PyTorch": torch.__version__,
        "Python": platform.python_version(),
    }  # fmt: skip


def _adopt_plan(life: _RankContext, meeting: Rendezvous) -> None:
    """Take over the first process's plan: its own, or what one of them needs, in the layout for so many."""
    old, store, key = life.plan, life.member.store, f"{meeting.name}/plan"
    if meeting.rank > 0:
        life.decision = with_plan(life.decision, records.loads(store.get(key), Plan))
        return
    agreed = records.from_json(meeting.notes["plan"], Plan) if "plan" in meeting.notes else old
    layout = agreed.layout.resized(meeting.size)
    if layout is None:
        raise DoesNotFit(f"{old.layout.in_words()} cannot be spread over {meeting.size} processes")
    new = plan_for_layout(layout, agreed, life.coupling, life.prepared.job)
    store.set(key, records.dumps(new, indent=None))
    life.decision = with_plan(life.decision, new)
    if new != old:
        life.directory.write_changed_plan(new)
        why = str(meeting.notes.get("why") or _who_is_here(old.layout.world_size, meeting.size))
        change = Replanned(old=old, new=new, why=why)
        samples = 0 if life.carried is None else life.carried.position.samples
        emit_replanned(lambda kind, **fields: emit_event(life.sinks, kind, **fields), change, samples)


def _who_is_here(before: int, now: int) -> str:
    """Why a plan is for another number of processes.

    >>> _who_is_here(4, 3), _who_is_here(2, 1), _who_is_here(1, 2)
    ('3 of 4 processes are left', '1 of 2 processes is left', '2 processes are here, not 1 any more')
    """
    if now < before:
        return f"{now} of {before} processes {'is' if now == 1 else 'are'} left"
    return f"{now} processes are here, not {before} any more"


def _build_rank_session(life: _RankContext, world: World, age_s: float) -> TrainingSession:
    """The session of this process in `world`, from what was carried over or from the last checkpoint."""

    def sink(event: Event) -> None:
        for one in life.sinks:
            one(event)

    session = build_session(
        life.prepared, life.directory, life.device, decision=life.decision, coupling=life.coupling,
        sink=sink if world.is_first else _ignore_event, stop=life.stop, replanned=_reject_plan_change, world=world,
        carried=life.carried, age_s=age_s,
    )  # fmt: skip
    life.carried = None
    session.loop.is_called = life.member.is_called
    return session


def _survivor_state(life: _RankContext, session: TrainingSession | None) -> SurvivorState | None:
    """What a process can go on from after an update that came to nothing; None where only a checkpoint will do."""
    if session is None:
        return life.carried  # it was not yet handed over
    can_go_on = session.step.plan.layout.is_replicated and session.loop.is_between_updates()
    return SurvivorState.of(session.loop) if can_go_on else None


def _evaluate(session: TrainingSession) -> None:
    """All that needs every process before one of them finishes the run."""
    if session.is_complete:
        session.metrics = final_metrics(session)
        session.weights = session.step.whole_weights()


def _finish_rank(life: _RankContext, session: TrainingSession, peak: PeakMemory) -> Run:
    """Leave the others, and finish the run or leave it to be continued, in the first process."""
    is_first = session.step.world.is_first
    leave()
    if is_first and session.metrics is None:
        leave_unfinished(session, life.stop.reason or "asked")
    elif is_first and session.metrics is not None:
        finish_run(session, session.metrics, peak.num_bytes)
    if session.metrics is not None:
        life.member.finished()
    return Run(life.directory, life.prepared.job)


def _ignore_event(_event: Event) -> None:
    """Only the first process tells."""


def _reject_plan_change(change: Replanned) -> None:
    raise RunFailed(f"one process of several changed its plan by itself: {change.why}")


def profile_updates(session: TrainingSession) -> None:
    """Profile some of the updates that `session.loop` is about to make; what is learned does not change.

    Raises:
        RunFailed: the directory for the files cannot be made.
    """
    directory, loop, telemetry = session.directory, session.loop, session.loop.telemetry
    with disk_errors(directory.profile_path, "the profile's directory"):
        make_directories(directory.profile_path)
    profile = TorchProfile(loop.step, directory.profile_path, directory.name)

    def written() -> None:
        if profile.table is not None:
            directory.write_kernels(profile.table)
        else:
            telemetry.emit("warned", message=f"there is no profile: {profile.problem}")
        telemetry.lap("profiling")

    loop.source = ProfiledSource.of(loop.source, profile, written)
    session.is_profiled = True
