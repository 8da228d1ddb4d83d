"""One process of a run, alone or as a rank of several: it begins, recovers and finishes training sessions.

`stoker.training.train.run_to_end` is the loop over these steps. A process alone is a world of one. Several processes
form a generation: they meet, agree on a plan, train, and meet again after a loss or a change of plan.

An update is atomic: a process that loses another one within an update drops it. Where every process holds all of the
state, the survivors go on from what they hold, and the furthest gives its state to the others. Replicas with updates of
their own (`Job.sync`) go on each from its own state. All other layouts go on from the last checkpoint. The batches stay
the Job's, cut for the present number of processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import torch

from stoker import records
from stoker.errors import RunFailed, first_line
from stoker.planning.plan_history import memory_identity
from stoker.planning.planner import may_give_up_threads
from stoker.planning.resolved_job import ResolvedJob, users_code
from stoker.profiling.torch_profile import ProfiledSource, TorchProfile
from stoker.records import Device, Event
from stoker.records.codec import JSON
from stoker.records.plan import OutOfMemory
from stoker.stepping.message_folder import MessageFolder, StoppedWaiting
from stoker.stepping.world import ALONE, World, is_broken, join, leave
from stoker.store import CheckpointStore, RunDirectory, cache_root, disk_errors
from stoker.store.files import make_directories
from stoker.store.record_caches import out_of_memory_log
from stoker.store.run_files import COUPLING, KERNELS
from stoker.training.elastic.membership import RENDEZVOUS_REQUESTED
from stoker.training.elastic.rendezvous import Rendezvous, WorkerRetired, require_same
from stoker.training.elastic.state_broadcast import SurvivorState
from stoker.training.elastic.worker import ElasticWorker
from stoker.training.evaluation import check_held_out
from stoker.training.hooks import Update
from stoker.training.logged_values import RunLogger
from stoker.training.loop import RendezvousRequested
from stoker.training.plan_in_force import PlanInForce, Replanned
from stoker.training.rank_messages import gather_from_ranks
from stoker.training.rank_times import RankClock, rank_clock
from stoker.training.recovery import ReplanAllRanks, ReplanningRequested
from stoker.training.run_completion import final_metrics, finish_run, leave_unfinished
from stoker.training.run_handle import Run
from stoker.training.session import TrainingSession, build_session, slowest_s
from stoker.training.signals import StopRequest
from stoker.training.slices import SLICE_OVER, Slice
from stoker.training.telemetry import Sink, emit_event
from stoker.training.threads import ThreadKeeper
from stoker.training.watchdog import WatchdogPatience


@dataclass
class RunProcess:
    """This process of a run, and what it keeps from one session to the next.

    Args:
        prepared: the resolved job.
        directory: the run's directory, visible to all processes and locked by the first.
        device: the device of this process.
        plans: the plan in force.
        sinks: receive every event of rank 0; the run's own log is among them.
        member: finds the other processes; None for a process alone.
        profile: run a few updates under PyTorch's profiler.
        others_share: share of the CPU that other processes used while the plan was chosen [0 to 1].
        on_update: sees every update.
        slice: the time that this process may take; None: as long as it likes.
        logger: receives what the job logs with `stoker.log`.
        messages: exchanges with the other sites of the run, each of which is a process alone.
    """

    prepared: ResolvedJob
    directory: RunDirectory
    device: Device
    plans: PlanInForce
    sinks: Sequence[Sink]
    member: ElasticWorker | None = None
    profile: bool = False
    others_share: float = 0.0
    on_update: Callable[[Update], None] | None = None
    slice: Slice | None = None
    logger: RunLogger | None = None
    messages: MessageFolder | None = None
    stop: StopRequest = field(default_factory=StopRequest, init=False)
    _carried: SurvivorState | None = field(default=None, init=False)
    """State that goes into the next session; None: the session starts from the last checkpoint."""
    _why: str = field(default="", init=False)
    """Why the last session ended before the run."""
    _notes: dict[str, JSON] = field(default_factory=dict, init=False)
    """Notes for the next generation."""
    _clock: RankClock | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._forecast_plan, self._began_at = self.plans.plan, time.monotonic()
        self._memory_identity = memory_identity(self.prepared)  # fetches a sample: later that sends a stream back

    @classmethod
    def of_rank(
        cls,
        prepared: ResolvedJob,
        directory: RunDirectory,
        device: Device,
        member: ElasticWorker,
        sinks: list[Sink],
        slice_: Slice | None = None,
        logger: RunLogger | None = None,
    ) -> RunProcess:
        """One of several processes, with what rank 0 has written into the run's directory.

        Raises:
            RunFailed: this process does not see the plan there.
        """
        if directory.read_decision() is None or directory.read(COUPLING) is None:
            raise RunFailed(
                f"{directory.path} cannot be seen by every process, or has lost its plan",
                remedy="Put the run's directory where all machines find it under the same path.",
            )
        return cls(prepared, directory, device, PlanInForce.of(directory), sinks, member, slice=slice_, logger=logger)

    def emit(self, kind: records.EventKind, **fields: Any) -> None:
        """Send an event."""
        emit_event(self.sinks, kind, **fields)

    def begin(self, meeting: Rendezvous | None) -> TrainingSession:
        """A session that goes on where the run is: from the state carried over, or from the last checkpoint.

        Raises:
            BadJob: the processes do not run the same job, code or versions.
            DoesNotFit: the layout cannot be spread over the processes that met.
        """
        alone = ALONE if self.messages is None else World(messages=self.messages)
        world, age_s = alone, time.monotonic() - self._began_at
        if self.member is not None and meeting is not None:
            world, age_s = self._join(self.member, meeting), meeting.age_s

        def send(event: Event) -> None:
            for sink in self.sinks if world.is_first else ():
                sink(event)

        session = build_session(
            self.prepared,
            self.directory,
            self.device,
            plans=self.plans,
            sink=send,
            stop=self.stop,
            replanned=self._change,
            world=world,
            carried=self._carried,
            age_s=age_s,
            slice_=self.slice,
        )
        self._carried = None
        if self.messages is not None:
            self.messages.is_alive = session.loop.telemetry.beat
            self.messages.is_stopping = lambda: self.stop.reason is not None
        if self.profile:
            profile_updates(session)
        session.loop.on_update = self.on_update
        if self.logger is not None:
            self.logger.follow(session.loop, is_first=world.is_first)
        if self.member is not None:
            session.loop.is_called = self.member.is_called
        elif self.plans.plan.device == "cpu":
            session.loop.threads = ThreadKeeper(
                lambda: self.plans.plan,
                session.loop.telemetry.emit,
                usual_samples_per_s=self.plans.decision.chosen.forecast.samples_per_s.value,
                most=lambda: self.plans.most_threads,
                changed=self.plans.change,
                is_free=may_give_up_threads(self.plans.plan),
                others_share=self.others_share,
            )
        return session

    def check_held_out(self, session: TrainingSession) -> None:
        """Evaluate a few samples of each held-out set before the first update.

        Trials of plans have evaluated the first batches only, without metrics that keep a state; a kept plan may be of
        other metrics.

        Raises:
            BadJob: a set cannot be evaluated.
        """
        if session.position.updates:
            return
        data = self.prepared.data
        sets = data.held_out if data.test is None else {**data.held_out, "test": data.test}
        with users_code("the model, the loss or a metric", self.prepared.entry):
            size = session.loop.extent.evaluated_at_once(session.step.plan.micro_batch)
            for doubt in check_held_out(session.step, sets, size):
                self.emit("warned", message=doubt)

    @contextmanager
    def timed(self, session: TrainingSession) -> Iterator[None]:
        """Within the block, the time of each update of several processes is noted, for the report."""
        if (clock := self._clock) is None:
            yield
            return
        clock.first_update = session.position.updates
        session.loop.telemetry.on_lap = clock.lap
        with clock.running():
            yield
        if clock.problem:
            session.loop.telemetry.emit("warned", message=clock.problem)

    def conclude(self, session: TrainingSession) -> None:
        """Compute what needs every process before rank 0 finishes the run, if this slice has room for it."""
        if session.is_complete and not self._leaves_the_end(session):
            session.metrics = final_metrics(session)
            if self.member is not None:
                session.weights = session.step.whole_weights()

    def _leaves_the_end(self, session: TrainingSession) -> bool:
        """Whether the last evaluation is left to the next slice; all processes decide the same.

        A slice that made no update does it in any case: another one would have no more room.
        """
        data, telemetry, mine = session.prepared.data, session.loop.telemetry, False
        if self.slice is not None and self.slice.has_trained:
            held_out = sum(map(len, data.held_out.values()))
            whole = held_out + (0 if data.test is None else len(data.test))
            of_update_s = telemetry.next_update_s / session.prepared.job.batch_size  # backward too, so rather too long
            each_s = telemetry.evaluate_s / held_out if held_out else of_update_s
            mine = self.slice.is_over(updates_s=0.0, evaluate_s=whole * each_s)
        leaves = any(gather_from_ranks(session.step.world, mine)) if self.member is not None else mine
        if leaves and self.stop.reason is None:
            self.stop.ask(SLICE_OVER)
        return leaves

    def recover(self, error: Exception, session: TrainingSession | None) -> None:
        """Keep what the next session goes on from, after `error` ended this one.

        Raises:
            RunFailed: the run cannot go on; what was saved is intact.
            WorkerRetired: the run goes on, or ended, without this process.
        """
        self._notes = {}
        if isinstance(error, WorkerRetired):
            raise error
        if isinstance(error, RendezvousRequested):
            assert session is not None
            self._why = RENDEZVOUS_REQUESTED
            self._carried = SurvivorState.of(session.loop) if session.step.plan.layout.is_replicated else None
        elif isinstance(error, ReplanningRequested):
            change, self._why = self._shared(error.change), error.change.why
            self._carried = self._survivor_state(session) if isinstance(error, ReplanAllRanks) else None
            if self.member is None:
                self._change(change)
                # Each rollback makes micro-batches smaller, or takes fp32: there are few, and then training goes on.
                assert session is not None
                samples = session.loop.reached.samples
                change.emit(self.emit, samples)
                self.emit("recovered", samples=samples, what="rolled back", why=change.why)
                return
            if not self.member.can_reform:  # all start again from the last checkpoint
                change = dataclasses.replace(change, position=None)
            self.plans.propose(change)
            self._note_shortage(change)
            if self.member.can_reform:
                self._notes = {"plan": records.to_json(change.new), "why": change.why}
            else:
                raise RunFailed(change.why, remedy="The same command goes on under a plan that needs less.") from error
        elif self.member is not None and self.member.can_reform and is_broken(error):
            self._why = f"lost touch with another process: {first_line(error)}"
            self._carried = self._survivor_state(session)
        else:
            with users_code("training", self.prepared.entry, RunFailed):
                raise error

    def leave_waiting(self, session: TrainingSession, why: StoppedWaiting) -> Run:
        """Leave the run at its last checkpoint: this site was asked to stop in the middle of an update."""
        session.position = CheckpointStore(self.directory.checkpoints).newest_position()
        then = f"the same command goes on from {session.position.samples:,} samples, the last checkpoint"
        self.emit("warned", message=f"{why}: {then}, and comes to the same weights")
        reason = self.stop.reason or "asked"
        leave_unfinished(session, reason)
        return Run(self.directory, self.prepared.job, stopped_by=reason)

    def rejoin(self) -> Rendezvous | None:
        """The next generation, or None for a process alone; the last session has to be released before."""
        if self.member is not None:
            leave()
            return self.member.lost(self._why, self._notes)
        gc.collect()  # the old model is freed before another one is built
        if self.plans.plan.device.startswith("cuda"):
            torch.cuda.empty_cache()
        return None

    def finish(self, session: TrainingSession, peak_bytes: int) -> Run:
        """Leave the other processes; rank 0 finishes the run, or leaves it to be continued."""
        if self.member is not None:
            leave()
        with users_code("training", self.prepared.entry, RunFailed):
            if session.step.world.is_first and session.metrics is None:
                leave_unfinished(session, self.stop.reason or "asked")
            elif session.step.world.is_first and session.metrics is not None:
                finish_run(session, session.metrics, peak_bytes)
        if self.member is not None and session.metrics is not None:
            self.member.finished()
        stopped_by = (self.stop.reason or "asked") if session.metrics is None else None
        return Run(self.directory, self.prepared.job, stopped_by=stopped_by)

    def _join(self, member: ElasticWorker, meeting: Rendezvous) -> World:
        """The world of the processes that met, under a plan that all of them share."""
        patience_s = WatchdogPatience.of(slowest_s(self.prepared.job, self.plans.decision)).others_s
        facts = {
            "the job": self.prepared.spec.digest()[:12],
            "Stoker": version("stoker"),
            "PyTorch": torch.__version__,
            "Python": platform.python_version(),
        }
        stated_s = member.patience_s
        require_same(member.store, meeting, facts, patience_s=patience_s if stated_s is None else stated_s)
        if (change := self.plans.agree(self.prepared.job, meeting, member.store)) is not None:
            change.emit(self.emit, 0 if self._carried is None else self._carried.position.samples)
        device = torch.device(self.device.torch_name)
        with member.joining():
            layout = self.plans.plan.layout
            world = join(layout, meeting.rank, member.store, device=device, name=meeting.name, patience_s=patience_s)
        self._clock = rank_clock(world, worker=member.worker, device=device, write=self.directory.write_rank_times)
        return dataclasses.replace(world, mark=self._clock.mark)

    def _survivor_state(self, session: TrainingSession | None) -> SurvivorState | None:
        """The state after an update that failed; None where only a checkpoint will do."""
        if session is None:
            return self._carried  # no session took it over yet
        can_go_on = session.step.plan.layout.is_replicated and session.loop.is_between_updates()
        return SurvivorState.of(session.loop) if can_go_on else None

    def _change(self, change: Replanned) -> None:
        """Go on under the new plan, which is stored first; a shortage of memory is noted for planning."""
        self.plans.change(self._shared(change))
        self._note_shortage(self._shared(change))

    def _shared(self, change: Replanned) -> Replanned:
        """A change as all processes have it: on the GPU that their plan names, not on this process's."""
        device = self.plans.plan.device
        old, new = (dataclasses.replace(plan, device=device) for plan in (change.old, change.new))
        return dataclasses.replace(change, old=old, new=new)

    def _note_shortage(self, change: Replanned) -> None:
        """Write that memory ran out into the cache, if it did, for planning."""
        if not change.is_shortage or change.old.micro_batch == change.new.micro_batch:
            return
        is_forecast = change.old == self._forecast_plan
        failure = OutOfMemory(
            device_model=self.device.model,
            torch_version=torch.__version__,
            job=self._memory_identity,
            plan=change.old,
            run=self.directory.name,
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            forecast_bytes=self.plans.decision.chosen.forecast.peak_bytes.value if is_forecast else None,
            reachable_bytes=change.reachable_bytes,
        )
        with contextlib.suppress(RunFailed):  # without the cache the next run repeats one update
            out_of_memory_log(cache_root()).append(failure)


def profile_updates(session: TrainingSession) -> None:
    """Run some updates of the session under PyTorch's profiler (`stoker train --profile`); what is learned is the same.

    Raises:
        RunFailed: the directory for the files cannot be made.
    """
    directory, loop, telemetry = session.directory, session.loop, session.loop.telemetry
    with disk_errors(directory.profile_path, "the profile's directory"):
        make_directories(directory.profile_path)
    profile = TorchProfile(loop.step, directory.profile_path, directory.name)

    def written() -> None:
        if profile.table is not None:
            directory.write(KERNELS, profile.table)
        else:
            telemetry.emit("warned", message=f"there is no profile: {profile.problem}")
        telemetry.lap("profiling")

    loop.source = ProfiledSource.of(loop.source, profile, written)
    session.is_profiled = True
