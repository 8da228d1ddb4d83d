"""Training a job: choose the directory, plan, train, finish."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stoker import profiling, records, reporting, training
from stoker.devices import attached_devices, resolve_place
from stoker.devices.malloc import apply_malloc
from stoker.errors import BadJob, BadRun, RunFailed, StokerError
from stoker.flow.decision import decide, given_plan, memory_limit
from stoker.flow.finishing import final_metrics, finish
from stoker.flow.preparation import Prepared, prepare, users_code
from stoker.flow.recovering import in_force, noting, train_through
from stoker.flow.runs import JOB_COPY, Run
from stoker.flow.starting import Session, ready
from stoker.flow.watching import watch
from stoker.jobs import Entry, Job
from stoker.records import Coupling, Decision, Device, Event, Plan
from stoker.store import (
    CheckpointStore,
    RunDirectory,
    choose_directory,
    disk_errors,
    find_run,
    require_same_spec,
    runs_root,
    write_atomic,
)
from stoker.store.files import make_directories
from stoker.training import Sink
from stoker.units import Duration


def train(  # noqa: PLR0913 - what the command line offers
    job: Job,
    *,
    on: str = "here",
    run_dir: str | Path | None = None,
    plan: str | Path | Plan | None = None,
    new: bool = False,
    resume: str | None = None,
    fork: str | None = None,
    checkpoint_every: Duration | None = None,
    memory: float | str | None = None,
    profile: bool = False,
    entry: Entry | None = None,
    sink: Sink | None = None,
) -> Run:
    """Plan `job`, train it, test it, and report; an unfinished run of the same job is continued.

    Args:
        job: what to learn.
        on: the device: `here`, `cpu`, `cuda:1`, …
        run_dir: the run's directory (default: named after the job, under `$STOKER_RUNS` or `./runs`).
        plan: a plan, or a JSON file that holds one, instead of the planner's choice.
        new: start another run even where one could be continued.
        resume: continue this run, and no other.
        fork: start from this run's last checkpoint, under a job that may have changed.
        checkpoint_every: `stoker.seconds(…)` between checkpoints, instead of the plan's.
        memory: the most of the device's memory that may be used [bytes]; a number, or `6GB`.
        profile: run a few updates under PyTorch's profiler; its trace, tables and timeline go to the run's directory.
        entry: the job file it came from.
        sink: receives every event (default: a display on standard error; `lambda event: None` for silence).

    Returns:
        The run; its status is `unfinished` if it was asked to stop.

    Raises:
        BadJob, DoesNotFit, NoDevice: before anything was spent; no run is left behind.
        BadRun: the run directory cannot be used, or is in use.
        RunFailed: training could not go on; what was saved is intact.
    """
    if checkpoint_every is not None and checkpoint_every.unit != "seconds":
        raise BadJob(f"checkpoints are counted in seconds, not {checkpoint_every.unit}")
    prepared = prepare(job, entry)
    device = resolve_place(on, attached_devices())
    parent = find_run(runs_root(), fork) if fork is not None else None
    directory, because = _choose(prepared, run_dir, resume, parent, new=new)
    given = given_plan(plan)
    with ExitStack() as stack:
        sinks: list[Sink] = [stack.enter_context(reporting.choose_display()) if sink is None else sink]
        if not directory.is_run:
            early: list[Event] = []
            if because is not None:
                _tell(sinks, "warned", message=because)
            decision, coupling = _decide_and_tell(
                prepared,
                device,
                given,
                checkpoint_every,
                [early.append, *sinks],
                directory,
                memory_bytes=memory_limit(memory),
            )
            stack.enter_context(directory.locked())
            _create(directory, prepared, device, decision, coupling, parent)
            with _or_no_run(directory):
                _keep_sources(directory, prepared.entry)
                for event in early:
                    directory.append_event(event)
        else:
            stack.enter_context(directory.locked())
            _require_same_plan(directory, given)
            device = _device_of(directory, device, on)
            _keep_sources(directory, prepared.entry)  # a kill may have come before they were there
            _tell(sinks, "warned", message=because)
        return _run(prepared, directory, device, _chosen_plan(directory, checkpoint_every), sinks, profile=profile)


def _choose(
    prepared: Prepared, run_dir: str | Path | None, resume: str | None, parent: RunDirectory | None, *, new: bool
) -> tuple[RunDirectory, str | None]:
    """The directory to train in, and what the user should know about the choice."""
    if resume is None:
        choice = choose_directory(
            runs_root(),
            prepared.spec,
            run_dir=None if run_dir is None else Path(run_dir),
            new=new,
            job_name=prepared.spec.name,
            forked_from=None if parent is None else parent.name,
        )
        return choice.directory, choice.because
    directory = find_run(runs_root(), resume)
    run = directory.read_run()
    require_same_spec(directory, prepared.spec)
    if run.status == "finished":
        raise BadRun(f"{run.name} is finished: there is nothing to resume",
                     remedy=f"Train on from it under a longer job with --fork {run.name}.")  # fmt: skip
    return directory, f"{run.name} is continued, as asked."


def _require_same_plan(directory: RunDirectory, given: Plan | None) -> None:
    """Nothing if no plan was asked for, or the one the run began with."""
    decision = directory.read_decision()
    if given is None or decision is None:
        return
    began = decision.chosen.plan
    if dataclasses.replace(given, checkpoint_every_s=began.checkpoint_every_s) != began:
        raise BadRun(
            f"{directory.name} began under another plan and goes on under it: {began.in_words()}",
            remedy="Drop --plan to continue it, or start another run with --new.",
        )


def _decide_and_tell(
    prepared: Prepared,
    device: Device,
    given: Plan | None,
    checkpoint_every: Duration | None,
    sinks: Sequence[Sink],
    directory: RunDirectory,
    *,
    memory_bytes: float | None,
) -> tuple[Decision, Coupling]:
    if prepared.data.note:
        _tell(sinks, "warned", message=prepared.data.note)
    decision, coupling = decide(prepared, device, given, memory_bytes=memory_bytes)
    decision = _saving_every(checkpoint_every, decision)
    chosen = decision.chosen
    _tell(
        sinks, "planned", run=directory.name, plan=records.to_json(chosen.plan), took_s=decision.took_s,
        forecast=records.to_json(chosen.forecast), explanation=list(decision.explanation), device=device.model,
    )  # fmt: skip
    return decision, coupling


def _saving_every(interval: Duration | None, decision: Decision) -> Decision:
    """The decision with this time between checkpoints in its plan."""
    if interval is None:
        return decision
    plan = dataclasses.replace(decision.chosen.plan, checkpoint_every_s=interval.value)
    candidates = (dataclasses.replace(decision.chosen, plan=plan), *decision.candidates[1:])
    return dataclasses.replace(decision, candidates=candidates)


def _create(
    directory: RunDirectory,
    prepared: Prepared,
    device: Device,
    decision: Decision,
    coupling: Coupling,
    parent: RunDirectory | None,
) -> None:
    """Make the run on disk."""
    run = records.Run(
        name=directory.name,
        status="unfinished",
        created_at=datetime.now(UTC).isoformat(timespec="microseconds"),
        spec_digest=prepared.spec.digest(),
        total_samples=decision.chosen.forecast.total_samples,
        forked_from=None if parent is None else parent.name,
    )
    RunDirectory.create(
        directory.path, run, prepared.spec, decision=decision, device=device, coupling=coupling,
        environment=profiling.environment(device, decision.chosen.plan),
    )  # fmt: skip


@contextmanager
def _or_no_run(directory: RunDirectory) -> Iterator[None]:
    """Take the run away again if what belongs to it cannot be written."""
    try:
        yield
    except StokerError:
        with suppress(StokerError):  # the first error is the one to tell
            directory.discard()
        raise


def _keep_sources(directory: RunDirectory, entry: Entry | None) -> None:
    """Copy the job file and its local imports into the run, as far as they are not there."""
    for name, text in (entry.sources if entry is not None else {}).items():
        copy = directory.path / JOB_COPY / name
        if not copy.exists():
            with disk_errors(copy, "the copy of the job file"):
                make_directories(copy.parent)
                write_atomic(copy, text)


def _device_of(directory: RunDirectory, asked: Device, on: str) -> Device:
    """The attached device that the run began on.

    Raises:
        BadRun: it is not attached, or another one was asked for by name.
    """
    decision = directory.read_decision()
    began = asked.torch_name if decision is None else decision.chosen.plan.device
    found = next((device for device in attached_devices() if device.torch_name == began), None)
    if found is None or (on != "here" and asked.torch_name != began):
        why = "is not attached to this machine" if found is None else f"is not {on}"
        raise BadRun(
            f"{directory.name} began on {began}, which {why}, and goes on where it began",
            remedy=f"Start another run with --new, or from this one's state with --fork {directory.name}.",
        )
    return found


def _chosen_plan(directory: RunDirectory, checkpoint_every: Duration | None) -> tuple[Decision, Coupling]:
    """What the run was begun under, with checkpoints as often as asked for now."""
    decision, coupling = directory.read_decision(), directory.read_coupling()
    if decision is None or coupling is None:
        raise BadRun(f"{directory.path} has lost its plan", remedy="Start another run with --new.")
    return _saving_every(checkpoint_every, in_force(directory, decision)), coupling


def _run(
    prepared: Prepared,
    directory: RunDirectory,
    device: Device,
    chosen: tuple[Decision, Coupling],
    sinks: Sequence[Sink],
    *,
    profile: bool = False,
) -> Run:
    """Train, test and report the run in `directory`, whose lock is held, from where it is."""
    decision, coupling = chosen
    plan = decision.chosen.plan
    every_sink = [directory.append_event, *sinks]

    def sink(event: Event) -> None:
        for one in every_sink:
            one(event)

    if problem := apply_malloc(plan.malloc):
        _tell(every_sink, "warned", message=f"memory is had as it is by default: {problem}")
    with profiling.threads(plan.threads), training.stop_on_signals() as stop:
        try:
            with users_code("training", prepared.entry, RunFailed), profiling.PeakMemory(plan.device) as peak:
                note = noting(prepared, directory, device, decision)

                def begin(chosen: Decision) -> Session:
                    session = ready(
                        prepared, directory, device, decision=chosen, coupling=coupling, sink=sink, stop=stop,
                        replanned=note,
                    )  # fmt: skip
                    if profile:
                        watch(session)
                    session.loop.threads = training.thread_keeper(
                        session.step, session.loop.telemetry.emit,
                        usual_samples_per_s=decision.chosen.forecast.samples_per_s.value,
                    )  # fmt: skip
                    return session

                session = train_through(begin, decision, note)
                if session.position.updates < session.loop.total_updates:
                    return _stopped(session, stop.reason or "asked")
                metrics = final_metrics(session)
            return finish(session, metrics, peak.num_bytes)
        except StokerError as error:
            _failed(directory, error, every_sink)
            raise


def _stopped(session: Session, reason: str) -> Run:
    """Leave the run to be continued."""
    directory, position, telemetry = session.directory, session.position, session.loop.telemetry
    telemetry.emit("stopped", reason=reason, samples=position.samples)
    run = directory.read_run()
    directory.write_run(
        dataclasses.replace(run, samples=position.samples, updates=position.updates, wall_s=telemetry.wall_s)
    )
    return Run(directory, session.prepared.job)


def _failed(directory: RunDirectory, error: StokerError, sinks: Sequence[Sink]) -> None:
    """Record the failure as far as the disk allows; a run that kept nothing leaves nothing."""
    names: tuple[str, ...] = ()
    samples, has_dumps = 0, False
    with suppress(StokerError):  # the first error is the one to tell
        names = CheckpointStore(directory.checkpoints).names()
        has_dumps = directory.dumps.exists()
        if not (names or has_dumps):
            directory.discard()
            return
        if isinstance(error, BadRun):
            return  # what is in the directory cannot be used, and is left as it was found
        samples = int(names[-1].split(".")[0]) if names else 0
        failed = dataclasses.replace(directory.read_run(), status="failed", failure=error.message, samples=samples)
        directory.write_run(failed)
    for sink in sinks if names or has_dumps else ():
        with suppress(StokerError):
            _tell([sink], "stopped", reason=error.message, samples=samples)


def _tell(sinks: Sequence[Sink], kind: records.EventKind, **fields: Any) -> None:
    event = Event(kind=kind, at=time.time(), fields=fields)
    for sink in sinks:
        sink(event)
