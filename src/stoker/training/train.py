"""Train a job: choose the run's directory, plan, train, finish.

`train` reads from the job to the finished run. `run_to_end` is the life of one process of a run: it trains until the
run is complete, and begins another session whenever one ends early (`stoker.training.run`). A process alone, the
processes of a launcher such as torchrun, and those that `--on 2xhere` starts all go through it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Literal

from torch.distributed import DistError

from stoker import records
from stoker.activity import doing
from stoker.devices import Place, attached_devices, planned_devices, resolve_place, sample_cpu
from stoker.devices.malloc import apply_malloc
from stoker.errors import BadJob, BadRun, NoDevice, StokerError
from stoker.jobs import Entry, Job
from stoker.planning.decision import SAFE, decide, given_plan, memory_limit, most_threads, require_mtbf
from stoker.planning.resolved_job import ResolvedJob, resolve_job
from stoker.profiling.ceilings import computing_threads
from stoker.profiling.plan_trial import PeakMemory
from stoker.records import Decision, Device, Event, Plan
from stoker.reporting.display import choose_display
from stoker.stepping.message_folder import MessageFolder, StoppedWaiting, parse_site
from stoker.stepping.python_state import unchanged
from stoker.store import RunDirectory, default_directory, find_run, runs_root
from stoker.store.mirror import Mirror
from stoker.store.remote_runs import RemoteRuns
from stoker.tracking.base import TrackerTarget, parse_tracker
from stoker.tracking.run_tracking import tracked
from stoker.training.elastic.rendezvous import Rendezvous, WorkerRetired
from stoker.training.elastic.worker import ElasticWorker
from stoker.training.hooks import Hook, Hooks
from stoker.training.logged_values import RunLogger, logging_to
from stoker.training.plan_in_force import PlanInForce, saving_every
from stoker.training.run import RunProcess
from stoker.training.run_completion import record_failure
from stoker.training.run_handle import Run, keep_sources
from stoker.training.run_setup import (
    bring_kept_runs,
    choose_run_directory,
    create_run,
    device_of,
    discard_on_error,
    note_continuation_here,
)
from stoker.training.session import TrainingSession
from stoker.training.signals import stop_on_signals
from stoker.training.slices import Slice
from stoker.training.supervised_run import require_file, train_supervised
from stoker.training.telemetry import Sink, emit_event
from stoker.training.watchdog import patience_s
from stoker.units import Duration

_RUN_DIRECTORY_KEY = "run"
"""Key in the processes' store under which rank 0 names the run's directory."""

_RUN_ENDED_KEY = "run/ended"
"""Key that rank 0 sets once the run is finished, or left to be continued."""


def train(  # noqa: PLR0913 - what the command line offers, from top to bottom
    job: Job,
    *,
    on: str = "here",
    run_dir: str | Path | None = None,
    plan: str | Path | Plan | None = None,
    new: bool = False,
    resume: str | None = None,
    fork: str | None = None,
    checkpoint_every: Duration | None = None,
    device_mtbf_h: float | None = None,
    memory: float | str | None = None,
    threads: int | None = None,
    profile: bool = False,
    entry: Entry | None = None,
    sink: Sink | None = None,
    hooks: Sequence[Hook] = (),
    track: Sequence[str] = (),
    keep: str | None = None,
    slice: Duration | float | str | Slice | None = None,  # noqa: A002 - the field's word, as on the command line
    site: str | None = None,
    exchange: str | Path | None = None,
) -> Run:
    """Plan `job`, train it, test it, and report; an unfinished run of the same job is continued.

    Args:
        job: model, data, loss and optimiser.
        on: the device: `here`, `cpu`, `cuda:1`, …; `2xhere` for two processes. Processes that a launcher such as
            torchrun started find each other by its environment variables, and each has one device of `on`.
        run_dir: the run's directory (default: named after the job, under `$STOKER_RUNS` or `./runs`).
        plan: a plan, or a JSON file that holds one, instead of the planner's choice; "safe" for the one that is legal
            whatever the model, of which nothing is compared or tried.
        new: start another run even where one could be continued.
        resume: continue this run, and no other.
        fork: start from this run's last checkpoint, under a job that may have changed.
        checkpoint_every: `stoker.seconds(…)` between checkpoints, instead of the plan's.
        device_mtbf_h: mean time between failures of one device [h]. With the measured cost of a checkpoint it gives the
            time between checkpoints; None: as stated in `stoker.devices.hardware`.
        memory: most device memory to use [bytes]; a number, or `6GB`. A continued run keeps its own plan.
        threads: most compute threads on a CPU, in all processes together (default: OMP_NUM_THREADS if it is set, else
            one for each core). A continued run keeps its own plan.
        profile: run a few updates under PyTorch's profiler; its trace, tables and timeline go to the run's directory.
        entry: the job file it came from.
        sink: receives every event (default: a display on standard error; `lambda event: None` for silence).
        hooks: functions that are called with a copy of every event; `stoker.on("evaluated", f)` for events of one
            kind, `stoker.on("updated", f)` for every update. A hook that raises is reported once, then disabled. Hooks
            run on rank 0 only.
        track: trackers that follow the run: `tensorboard`, `mlflow=http://host:5000`, `wandb=project`, `trackio`,
            `prometheus`, `csv`; see docs/reports.md.
        keep: a URL that fsspec reaches, such as `s3://bucket/runs`: records and checkpoints are sent there in the
            background, and a run that is further there is fetched first, so that any machine goes on with it.
        slice: for places that end jobs: the time this process may take, from its start on (in a process that had a
            slice before, from this call on); `stoker.seconds(3000)`, or `50min`. The state is saved before it is over,
            the run is left `unfinished` with `stopped_by` `slice over`, and the same call goes on.
        site: which of the sites of `Job(sync=…)` this process is, where no network joins them: `0/2`, and `1/2` in the
            other place.
        exchange: the folder through which sites exchange messages; see docs/slow-links.md.

    Returns:
        The run; its status is `unfinished` if it was asked to stop.

    Raises:
        BadJob, DoesNotFit, NoDevice: before anything was spent; no run is left behind. Of `new`, `resume` and `fork`
            one may be given, and `run_dir` not with `resume`.
        BadRun: the run directory cannot be used, or is in use.
        RunFailed: training could not go on; what was saved is intact.
    """
    _require_here(on)
    _require_valid_options(run_dir, resume, fork, checkpoint_every, new=new)
    require_mtbf(device_mtbf_h)
    slice_ = None if slice is None else Slice.begin(slice)
    targets = [parse_tracker(text) for text in track]
    for target in targets:
        target.require_writable()
    cpu_before = sample_cpu()
    with doing("reading the data, and outlining the model"):
        prepared = resolve_job(job, entry)
    member = ElasticWorker.from_environment()
    prepared, messages = _as_site(prepared, site, exchange, on, member)
    run_dir = run_dir if messages is None or resume is not None else run_dir or _directory_of_site(prepared, messages)
    meeting = None if member is None else member.meet()
    if member is not None and meeting is not None and meeting.rank > 0:
        return _train_other_rank(prepared, _device(on, member), member, meeting, slice_)
    device, place = _device(on, member), _place(on, meeting)

    def warn_of_hook(message: str) -> None:
        emit_event([shown[0], *([directory.append_event] if directory.is_run else [])], "warned", message=message)

    listening = Hooks(hooks, warn_of_hook)
    _require_possible(entry, place, member, listening, profile=profile)
    remote = None if keep is None else RemoteRuns.open(keep)
    brought = [] if remote is None else bring_kept_runs(remote, prepared, run_dir, resume=resume, fork=fork)
    parent = find_run(runs_root(), fork) if fork is not None else None
    directory, because = choose_run_directory(prepared, run_dir, resume, parent, new=new)
    given, others_share = given_plan(plan), 0.0
    with _interruption_after_the_end(directory, [listening if sink is None else sink]), ExitStack() as stack:
        shown: list[Sink] = [stack.enter_context(choose_display()) if sink is None else sink, listening]
        is_new = not directory.is_run
        stack.enter_context(nullcontext() if is_new else directory.locked())  # before it is said to be continued
        for text in (*brought, *([] if because is None else [because])):
            emit_event(shown, "warned", message=text)
        if is_new:
            early: list[Event] = []
            memory_bytes = memory_limit(memory)
            if prepared.data.note:
                emit_event([early.append, *shown], "noted", message=prepared.data.note)
            # A loss that counts its calls begins where it was given.
            with doing("planning"), unchanged(prepared.model, prepared.job.step or prepared.job.objective.loss):
                decision, coupling = decide(
                    prepared,
                    place or device,
                    given,
                    memory_bytes=memory_bytes,
                    threads=threads,
                    device_mtbf_h=device_mtbf_h,
                    begins_at_once=member is None and not profile,
                    cpu_before=cpu_before,
                )
            others_share = decision.others_share
            decision = saving_every(checkpoint_every, device_mtbf_h, decision)
            decision = decision if slice_ is None else slice_.announced(decision)
            emit_event(
                [early.append, *shown],
                "planned",
                run=directory.name,
                plan=records.to_json(decision.chosen.plan),
                took_s=decision.took_s,
                forecast=records.to_json(decision.chosen.forecast),
                explanation=list(decision.explanation),
                device=device.model,
                is_settled=decision.is_settled,
            )
            stack.enter_context(directory.locked())
            create_run(directory, prepared, device, decision, coupling, parent)
            with discard_on_error(directory):
                keep_sources(directory, entry)
                for event in early:
                    directory.append_event(event)
        else:
            _require_its_plan(directory, given, memory=memory, threads=threads, shown=shown)
            device = device_of(directory, device, _device_name(on))
            note_continuation_here(directory)
            keep_sources(directory, entry)  # a kill may have come before they were there
        logged: list[Sink] = [directory.append_event, *shown]
        sinks = [*logged, *stack.enter_context(_followers(directory, targets, remote, logged, slice_))]
        logger = stack.enter_context(logging_to(RunLogger(directory, tuple(sinks))))
        sinks.append(logger)
        plans = PlanInForce.of(directory)
        plans.leave_out_deadly(sinks)
        plans.save_every(checkpoint_every, device_mtbf_h)
        plans.fit_to_ranks(prepared, 1 if place is None else place.count, device, sinks)
        for text in _warnings(prepared, plans.decision):
            emit_event(sinks, "warned", message=text)
        with _failure_recorded(directory, sinks, is_new=is_new), _exit_if_retired():
            if place is not None and member is None:
                return train_supervised(prepared, directory, plans.decision, sinks, slice_)
            if member is not None:
                member.store.set(_RUN_DIRECTORY_KEY, str(directory.path.resolve()))
            process = RunProcess(
                prepared,
                directory,
                device,
                plans,
                sinks,
                member,
                profile=profile,
                others_share=others_share,
                on_update=listening.updated if listening.see_updates else None,
                slice=slice_,
                logger=logger,
                messages=messages,
            )
            run = run_to_end(process, meeting)
            if member is not None:
                member.store.set(_RUN_ENDED_KEY, "")
            return run
    return Run(directory, prepared.job)


def run_to_end(process: RunProcess, meeting: Rendezvous | None = None) -> Run:
    """Train until the run is complete or was asked to stop, and finish it.

    Args:
        process: this process of the run.
        meeting: the first generation, if the processes have met already.

    Raises:
        RunFailed: training could not go on; what was saved is intact.
        WorkerRetired: the run goes on, or ended, without this process.
    """
    plan, member = process.plans.plan, process.member
    if (problem := apply_malloc(plan.malloc)) and member is None:
        emit_event(process.sinks, "warned", message=f"memory is had as it is by default: {problem}")
    with (
        computing_threads(plan.intra_op_threads),
        stop_on_signals() as process.stop,
        PeakMemory(process.device.torch_name) as peak,
    ):
        if member is not None and meeting is None:
            meeting = member.meet()
        while True:
            session: TrainingSession | None = None
            try:
                with doing("building the model, and its optimiser"):
                    session = process.begin(meeting)
                process.check_held_out(session)
                with process.timed(session):
                    session.position = session.loop.run(session.position)
                process.conclude(session)
            except StoppedWaiting as why:
                assert session is not None
                return process.leave_waiting(session, why)
            except Exception as error:  # noqa: BLE001 - raised again where the run cannot go on
                process.recover(error, session)
            else:
                return process.finish(session, peak.num_bytes)
            session = None  # releases the old model
            meeting = process.rejoin()


def take_part_in(directory: Path, job: Job, entry: Entry, slice_: str | None = None) -> int:
    """Train the run in `directory` as a process that `train_supervised` started; the exit code [0, or why it ended].

    `slice_` is the supervisor's slice, as text.

    Raises:
        RunFailed: training could not go on; what was saved is intact.
    """
    member = ElasticWorker.from_environment()
    if member is None:
        raise BadJob(
            "take-part is what `stoker train --on 2xhere` starts its processes with", remedy="Use `stoker train`."
        )
    prepared, where = resolve_job(job, entry), RunDirectory(directory)
    decision = where.read_decision()
    name = "cpu" if decision is None else decision.chosen.plan.device
    if name.startswith("cuda"):
        name = f"cuda:{member.worker}"
    sinks: list[Sink] = [where.append_event, lambda event: member.event(records.dumps(event, indent=None))]
    device = resolve_place(name, attached_devices())
    logger = RunLogger(where, tuple(sinks))
    try:
        slice_of_all = None if slice_ is None else Slice.parse(slice_)
        with logging_to(logger):
            run = run_to_end(
                RunProcess.of_rank(prepared, where, device, member, [*sinks, logger], slice_of_all, logger)
            )
    except WorkerRetired as retired:
        return retired.exit_code
    return run.exit_code


def _train_other_rank(
    prepared: ResolvedJob, device: Device, member: ElasticWorker, meeting: Rendezvous, slice_: Slice | None
) -> Run:
    """Train the run that rank 0 of a launcher's processes has chosen."""
    with _exit_if_retired():
        directory = RunDirectory(Path(member.store.get(_RUN_DIRECTORY_KEY).decode()))
        run = run_to_end(RunProcess.of_rank(prepared, directory, device, member, [], slice_), meeting)
        with suppress(DistError):  # rank 0 is gone, and with it the store: it has ended the run
            member.store.wait([_RUN_ENDED_KEY])
        return Run(directory, prepared.job, stopped_by=run.stopped_by)


@contextmanager
def _exit_if_retired() -> Iterator[None]:
    """Exit quietly if this process is retired: another one reports the cause."""
    try:
        yield
    except WorkerRetired as retired:
        if retired.why:
            print(retired.why, file=sys.stderr, flush=True)  # noqa: T201 - each process of a launcher has its own log
        raise SystemExit(retired.exit_code) from None


@contextmanager
def _followers(
    directory: RunDirectory,
    targets: Sequence[TrackerTarget],
    remote: RemoteRuns | None,
    logged: Sequence[Sink],
    slice_: Slice | None,
) -> Iterator[list[Sink]]:
    """Trackers and the mirror, which follow the run in threads; at the end of the block they have all of it."""

    def tell(kind: records.EventKind) -> Callable[[str], None]:
        return lambda text: emit_event(logged, kind, message=text)

    with ExitStack() as stack:
        sinks: list[Sink] = [*stack.enter_context(tracked(directory, targets, tell("warned")))]
        if remote is not None:
            mirror = Mirror(directory, remote, tell("warned"), tell("noted"))
            if slice_ is not None:
                mirror.most_s, slice_.upload_s, slice_.sends = (lambda: slice_.left_s), (lambda: mirror.longest_s), True
            sinks.append(stack.enter_context(mirror))
        yield sinks


def _warnings(prepared: ResolvedJob, decision: Decision) -> tuple[str, ...]:
    """Settings of the job that are likely to learn badly; for a run given in seconds they are known only now."""
    job = prepared.job
    if job.sync is None or job.until.unit != "seconds":
        return prepared.warnings
    warning = job.sync.for_run(job.batch_size, decision.chosen.forecast.total_updates)[1]
    return () if warning is None else (warning,)


@contextmanager
def _interruption_after_the_end(directory: RunDirectory, shown: Sequence[Sink]) -> Iterator[None]:
    """End the block, with a warning, if it is interrupted once its run is finished, as during the last upload.

    A finished run has to be returned as one: after an exit code of 130 the same command would begin another run.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not (directory.is_run and directory.read_run().status == "finished"):
            raise
        text = f"interrupted after {directory.name} was finished; trackers and the copy of --keep may lack its end"
        emit_event(shown, "warned", message=text)


@contextmanager
def _failure_recorded(directory: RunDirectory, sinks: Sequence[Sink], *, is_new: bool) -> Iterator[None]:
    """Record an error that ends the run."""
    try:
        yield
    except StokerError as error:
        record_failure(directory, error, sinks, is_new=is_new)
        raise


def _require_valid_options(
    run_dir: str | Path | None, resume: str | None, fork: str | None, checkpoint_every: Duration | None, *, new: bool
) -> None:
    """Refuse an interval that is none, and options of which one would be ignored: another one says which run."""
    if sum(map(bool, (new, resume, fork))) > 1:
        raise BadJob("--new, --resume and --fork exclude each other", remedy="Give one of them, or none.")
    if resume and run_dir is not None:
        raise BadJob("--resume and --run-dir exclude each other", remedy="A run that is named has its directory.")
    if checkpoint_every is not None and checkpoint_every.unit != "seconds":
        raise BadJob(f"checkpoints are counted in seconds, not {checkpoint_every.unit}")


def _require_possible(
    entry: Entry | None, place: Place | None, member: ElasticWorker | None, hooks: Hooks, *, profile: bool
) -> None:
    """Refuse before anything is spent what several processes cannot do, and a bad patience in the environment."""
    patience_s()
    if hooks.see_updates and (place is not None or member is not None):
        raise BadJob(
            "a hook at every update looks into one process, and this run has several",
            remedy='Listen to stoker.on("progress", …), or train on one device.',
        )
    if profile and place is not None:
        raise BadJob(
            f"profile looks into one process, and {place.count} are asked for",
            remedy="Use it with `--on here`; the report of a run on many shows where the time of each goes.",
        )
    if place is not None and member is None:
        require_file(entry, place.count)


def _as_site(
    prepared: ResolvedJob, site: str | None, exchange: str | Path | None, on: str, member: ElasticWorker | None
) -> tuple[ResolvedJob, MessageFolder | None]:
    """The job as one site has it, and its exchanges with the others; None where this is no site.

    Raises:
        BadJob: it cannot be trained so.
    """
    job = prepared.job
    if site is None and exchange is None:
        return prepared, None
    if site is None or exchange is None:
        raise BadJob(
            "a site has a number and a folder of messages, and one of them is missing",
            remedy="--site 0/2 --exchange DIR here, --site 1/2 --exchange DIR in the other place.",
        )
    number, sites = parse_site(site)
    if job.sync is None:
        raise BadJob(
            f"--site {site}: the job's processes sum gradients in every update, which no folder is fast enough for",
            remedy="Sites make updates of their own: Job(sync=stoker.DiLoCo(every=stoker.updates(50))), which changes "
            "what is learned.",
        )
    if member is not None or _place(on, None) is not None:
        raise BadJob(f"--site {site}: a site is one process", remedy="Use it with one device: --on here, cuda:0, ….")
    if job.until.unit == "seconds":
        raise BadJob(
            f"--site {site}: a length in seconds is another number of updates at each site",
            remedy="Give until=… in epochs, samples or updates.",
        )
    folder = MessageFolder(Path(exchange), number, sites, job=prepared.spec.digest())
    return dataclasses.replace(prepared, sites=sites), folder


def _directory_of_site(prepared: ResolvedJob, messages: MessageFolder) -> Path:
    """Where a site is trained that names no directory: sites may share the folder of runs."""
    usual = default_directory(runs_root(), prepared.spec.name, prepared.spec)
    return usual.with_name(f"{usual.name}-site{messages.site}of{messages.num_sites}")


def _require_its_plan(
    directory: RunDirectory,
    given: Plan | Literal["safe"] | None,
    *,
    memory: float | str | None,
    threads: int | None,
    shown: Sequence[Sink],
) -> None:
    """Refuse another plan for a run that exists; warn that limits do not change its own."""
    decision = directory.read_decision()
    schedule = directory.read_schedule()
    if given == SAFE and schedule is not None and any(switch.kind == "trial" for switch in schedule.switches):
        raise BadRun(
            f"{directory.name} began by trying plans, and goes on under those that it tried",
            remedy="Drop --plan to continue it, or start another run with --new.",
        )
    if given is not None and given != SAFE and decision is not None:
        began = decision.chosen.plan
        asked = dataclasses.replace(
            given, checkpoint_every_s=began.checkpoint_every_s, device_mtbf_h=began.device_mtbf_h
        )
        if began != asked:
            raise BadRun(
                f"{directory.name} began under another plan and goes on under it: {began.in_words()}",
                remedy="Drop --plan to continue it, or start another run with --new.",
            )
    for option, value, limit in (("memory", memory, memory_limit(memory)), ("threads", threads, most_threads(threads))):
        if value is not None and limit is not None:
            message = f"{directory.name} goes on under its own plan, which --{option} does not change; use --new"
            emit_event(shown, "warned", message=message)


def _device(on: str, member: ElasticWorker | None) -> Device:
    """The device of this process: of several GPUs, the one of its local rank."""
    attached = attached_devices()
    if member is None:
        return resolve_place(_device_name(on), attached)
    device = resolve_place(on, attached)
    if device.kind != "cuda" or on.startswith("cuda:"):
        return device
    return resolve_place(f"cuda:{member.worker}", attached)


def _require_here(on: str) -> None:
    """Refuse a place elsewhere: `ssh:box`.

    Raises:
        NoDevice: `on` names one.
    """
    kind, colon, _ = on.partition(":")
    if colon and re.fullmatch(r"(\d+x)*(cpu|cuda|mps|xpu)", kind.strip().lower()) is None:
        raise NoDevice(
            f"{on!r} is a place elsewhere, and stoker.train trains in this program.",
            remedy=f'From a job file: stoker.launch("job.py", on={on!r}), or `stoker train job.py --on {on}`.',
        )


def _device_name(on: str) -> str:
    """`here` of `2xhere`."""
    count, times, name = on.strip().lower().partition("x")
    return name if times and count.isdigit() else on


def _place(on: str, meeting: Rendezvous | None, environ: Mapping[str, str] = os.environ) -> Place | None:
    """Where several processes train together; None for one.

    Of processes on several machines those of this one have to find their devices here (LOCAL_WORLD_SIZE, which torchrun
    and Stoker's launchers set); the other machines are taken to be like it.

    Raises:
        NoDevice: fewer such devices are attached than are asked for.
    """
    place_name, size = on, 1
    if meeting is not None:
        size, local = meeting.size, environ.get("LOCAL_WORLD_SIZE", "")
        here = int(local) if local.isdigit() and 0 < int(local) < size else size
        place_name = f"{here}x{on}"
    place, *_ = planned_devices(place_name, attached_devices())
    if place.is_here and place.count < size and place.device.kind != "cpu":
        place = dataclasses.replace(place, name=f"{size}x{place.name.rpartition('x')[2]}", count=size)
    elif place.count < size:  # on a CPU places share one machine's cores
        place, *_ = planned_devices(f"{size}x{on}", attached_devices())
    if not place.is_here:
        raise NoDevice(
            f"{place_name!r} asks for {place.count} devices, and fewer of them are attached.",
            remedy="`stoker doctor` shows what is; `stoker plan` forecasts what is not.",
        )
    return place if place.count > 1 else None
