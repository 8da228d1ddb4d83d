"""Training a job: choose the directory, plan, train, finish.

A run whose processes this one starts, watches and brings together again after a loss.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from stoker import records
from stoker.devices import Place, attached_devices, planned_devices, resolve_place
from stoker.errors import BadJob, BadRun, DoesNotFit, NoDevice, RunFailed, StokerError
from stoker.jobs import Entry, Job
from stoker.planning.decision import decide, decide_many, given_plan, memory_limit, most_threads, require_mtbf
from stoker.planning.resolved_job import ResolvedJob, resolve_job
from stoker.records import Coupling, Decision, Device, Event, Plan
from stoker.reporting.display import choose_display
from stoker.stepping.python_state import unchanged
from stoker.store import RunDirectory, find_run, runs_root
from stoker.tracking.base import TrackerTarget, parse_tracker
from stoker.tracking.run_tracking import tracked
from stoker.training.elastic.membership import RENDEZVOUS_REQUESTED
from stoker.training.elastic.rendezvous import Rendezvous
from stoker.training.elastic.supervisor import INTERRUPTED, Supervisor
from stoker.training.elastic.worker import ElasticWorker
from stoker.training.hooks import Hook, Hooks
from stoker.training.run import run_rank, run_rank_zero, train_single_process
from stoker.training.run_completion import record_failure
from stoker.training.run_handle import Run, keep_sources
from stoker.training.run_setup import (
    choose_run_directory,
    chosen_plan,
    create_run,
    device_of,
    discard_on_error,
    emit_event,
    fit_plan_to_ranks,
    require_same_plan,
    saving_every,
)
from stoker.training.session import slowest_s
from stoker.training.telemetry import Sink
from stoker.training.watchdog import PATIENCE_VARIABLE, WatchdogPatience, patience_s
from stoker.units import Duration, format_seconds


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
) -> Run:
    """Plan `job`, train it, test it, and report; an unfinished run of the same job is continued.

    Args:
        job: what to learn.
        on: the device: `here`, `cpu`, `cuda:1`, …; `2xhere` for two processes. Processes that a launcher such as
            torchrun started find each other by its environment variables, and each has one device of `on`.
        run_dir: the run's directory (default: named after the job, under `$STOKER_RUNS` or `./runs`).
        plan: a plan, or a JSON file that holds one, instead of the planner's choice.
        new: start another run even where one could be continued.
        resume: continue this run, and no other.
        fork: start from this run's last checkpoint, under a job that may have changed.
        checkpoint_every: `stoker.seconds(…)` between checkpoints, instead of the plan's.
        device_mtbf_h: mean time of one device between two failures [h], from which, with what saving takes, the time
            between checkpoints follows; None: as stated in `stoker.devices.failure_rates`.
        memory: the most of the device's memory that may be used [bytes]; a number, or `6GB`. For the plan of a new run:
            one that is continued keeps its own.
        threads: the most that compute on a CPU, in all processes together (default: OMP_NUM_THREADS if it is set, else
            one for each core). For the plan of a new run, likewise.
        profile: run a few updates under PyTorch's profiler; its trace, tables and timeline go to the run's directory.
        entry: the job file it came from.
        sink: receives every event (default: a display on standard error; `lambda event: None` for silence).
        hooks: functions that are called with a copy of every event, beside the sink; `stoker.on("evaluated", f)` for
            events of one kind, `stoker.on("updated", f)` for every update. One that raises is told of once and called
            no more. Of several processes those of the first one are called.
        track: trackers that follow the run: `tensorboard`, `mlflow=http://host:5000`, `wandb=project`, `trackio`,
            `csv`; see
            docs/experiment-tracking.md.

    Returns:
        The run; its status is `unfinished` if it was asked to stop.

    Raises:
        BadJob, DoesNotFit, NoDevice: before anything was spent; no run is left behind.
        BadRun: the run directory cannot be used, or is in use.
        RunFailed: training could not go on; what was saved is intact.
    """
    if checkpoint_every is not None and checkpoint_every.unit != "seconds":
        raise BadJob(f"checkpoints are counted in seconds, not {checkpoint_every.unit}")
    require_mtbf(device_mtbf_h)
    targets = _trackers(track)
    prepared = resolve_job(job, entry)
    member = ElasticWorker.from_environment()
    meeting = None if member is None else member.meet()
    if member is not None and meeting is not None and meeting.rank > 0:
        return run_rank(prepared, _device(on, member), member, meeting)
    device, place = _device(on, member), _place(on, meeting)
    looking = Hooks(hooks, lambda words: _emit_hook_warning(directory, shown[0], words))
    _require_possible(entry, place, member, looking, profile=profile)
    parent = find_run(runs_root(), fork) if fork is not None else None
    directory, because = choose_run_directory(prepared, run_dir, resume, parent, new=new)
    given, early, others_share = given_plan(plan), list[Event](), 0.0
    with ExitStack() as stack:
        shown: list[Sink] = [stack.enter_context(choose_display()) if sink is None else sink]
        if hooks:
            shown.append(looking)
        if because is not None:
            emit_event(shown, "warned", message=because)
        if not directory.is_run:
            decision, coupling = _decided(
                prepared, device, place, given, memory_limit(memory), threads, device_mtbf_h, [early.append, *shown]
            )
            others_share = decision.others_share
            decision = saving_every(checkpoint_every, device_mtbf_h, decision)
            _emit_plan(decision, device, directory.name, [early.append, *shown])
            stack.enter_context(directory.locked())
            create_run(directory, prepared, device, decision, coupling, parent)
            _keep_sources_and_events(directory, prepared.entry, early)
        else:
            stack.enter_context(directory.locked())
            _require_its_plan(directory, given, memory=memory, threads=threads, shown=shown)
            device = device_of(directory, device, _device_name(on))
            keep_sources(directory, prepared.entry)  # a kill may have come before they were there
        told: list[Sink] = [directory.append_event, *shown]
        followers = tracked(directory, targets, lambda words: emit_event(told, "warned", message=words))
        sinks = [*told, *stack.enter_context(followers)]
        count = 1 if place is None else place.count
        began = chosen_plan(directory, checkpoint_every, device_mtbf_h)
        chosen = fit_plan_to_ranks(directory, prepared.job, began, count, device, sinks)
        for words in _warnings(prepared, chosen[0]):
            emit_event(sinks, "warned", message=words)
        with _failure_recorded(directory, sinks):
            if member is not None and meeting is not None:
                return run_rank_zero(prepared, directory, device, member, meeting, sinks)
            if place is not None:
                return train_supervised(prepared, directory, chosen[0], sinks)
            return train_single_process(
                prepared, directory, device, chosen, sinks, profile=profile, others_share=others_share,
                on_update=looking.updated if looking.see_updates else None,
            )  # fmt: skip


def _warnings(prepared: ResolvedJob, decision: Decision) -> tuple[str, ...]:
    """What of the job is likely to learn badly; of a run that is seconds long it is known only now."""
    job = prepared.job
    if job.sync is None or job.until.unit != "seconds":
        return prepared.warnings
    words = job.sync.for_run(job.batch, decision.chosen.forecast.total_updates)[1]
    return () if words is None else (words,)


@contextmanager
def _failure_recorded(directory: RunDirectory, sinks: Sequence[Sink]) -> Iterator[None]:
    """Write down an error that ends the run."""
    try:
        yield
    except StokerError as error:
        record_failure(directory, error, sinks)
        raise


def _keep_sources_and_events(directory: RunDirectory, entry: Entry | None, early: Sequence[Event]) -> None:
    """Copy the job file, and what happened before there was a run; without them there is none."""
    with discard_on_error(directory):
        keep_sources(directory, entry)
        for event in early:
            directory.append_event(event)


def _require_possible(
    entry: Entry | None, place: Place | None, member: ElasticWorker | None, hooks: Hooks, *, profile: bool
) -> None:
    """Refuse what several processes cannot do: be looked into closely, or make a job that is in no file.

    Also a patience in the environment that is no number, before anything is spent.
    """
    patience_s()
    if hooks.see_updates and (place is not None or member is not None):
        raise BadJob("a hook at every update looks into one process, and this run has several",
                     remedy='Listen to stoker.on("progress", …), or train on one device.')  # fmt: skip
    if profile and place is not None:
        raise BadJob(
            f"profile looks into one process, and {place.count} are asked for",
            remedy="Use it with `--on here`; the report of a run on many shows where the time of each goes.",
        )
    if place is not None and member is None:
        require_file(entry, place.count)


def _require_its_plan(
    directory: RunDirectory,
    given: Plan | None,
    *,
    memory: float | str | None,
    threads: int | None,
    shown: Sequence[Sink],
) -> None:
    """A run that exists goes on under its own plan: refuse another one, and say that limits do not change it."""
    require_same_plan(directory, given)
    for option, value, limit in (("memory", memory, memory_limit(memory)), ("threads", threads, most_threads(threads))):
        if value is not None and limit is not None:
            message = f"{directory.name} goes on under its own plan, which --{option} does not change; use --new"
            emit_event(shown, "warned", message=message)


def _trackers(words: Sequence[str]) -> list[TrackerTarget]:
    """What a run is to be followed by; places that cannot be written to are refused before anything is spent."""
    targets = [parse_tracker(word) for word in words]
    for target in targets:
        target.require_writable()
    return targets


def _emit_hook_warning(directory: RunDirectory, shown: Sink, words: str) -> None:
    """Say what became of a hook, also in the run's log if there is a run."""
    emit_event([shown, *([directory.append_event] if directory.is_run else [])], "warned", message=words)


def _device(on: str, member: ElasticWorker | None) -> Device:
    """The device of this process: of several GPUs, the one its launcher means it to have."""
    attached = attached_devices()
    if member is None:
        return resolve_place(_device_name(on), attached)
    device = resolve_place(on, attached)
    if device.kind != "cuda" or on.startswith("cuda:"):
        return device
    return resolve_place(f"cuda:{member.worker}", attached)


def _device_name(on: str) -> str:
    """`here` of `2xhere`."""
    count, times, name = on.strip().lower().partition("x")
    return name if times and count.isdigit() else on


def _place(on: str, meeting: Rendezvous | None) -> Place | None:
    """Where several processes train together; None for one.

    Raises:
        NoDevice: fewer such devices are attached than are asked for.
    """
    wanted = on if meeting is None else f"{meeting.size}x{on}"
    place, *_ = planned_devices(wanted, attached_devices())
    if not place.is_here:
        raise NoDevice(f"{wanted!r} asks for {place.count} devices, and fewer of them are attached.",
                       remedy="`stoker doctor` shows what is; `stoker plan` forecasts what is not.")  # fmt: skip
    return place if place.count > 1 else None


def _decided(
    prepared: ResolvedJob,
    device: Device,
    place: Place | None,
    given: Plan | None,
    memory_bytes: float | None,
    threads: int | None,
    device_mtbf_h: float | None,
    sinks: list[Sink],
) -> tuple[Decision, Coupling]:
    if prepared.data.note:
        emit_event(sinks, "noted", message=prepared.data.note)
    with unchanged(prepared.model, prepared.job.loss):  # a loss that counts its calls begins where it was given
        if place is not None:
            place = place.limited_to(memory_bytes, most_threads(threads))
            return decide_many(prepared, place, given, device_mtbf_h=device_mtbf_h)
        return decide(prepared, device, given, memory_bytes=memory_bytes, threads=threads, device_mtbf_h=device_mtbf_h)


def _emit_plan(decision: Decision, device: Device, run: str, sinks: list[Sink]) -> None:
    chosen = decision.chosen
    emit_event(
        sinks, "planned", run=run, plan=records.to_json(chosen.plan), took_s=decision.took_s,
        forecast=records.to_json(chosen.forecast), explanation=list(decision.explanation), device=device.model,
    )  # fmt: skip


def train_supervised(prepared: ResolvedJob, directory: RunDirectory, decision: Decision, sinks: Sequence[Sink]) -> Run:
    """Train the run in `directory`, whose lock is held, in processes of their own, one for each device of its plan.

    The job's file is what they start from. Their events are in the run's log already when they come here.

    Args:
        prepared: the job made ready.
        directory: the run's.
        decision: what it begins under.
        sinks: receive every event, the run's own log first.

    Raises:
        BadJob: the job has no file.
        RunFailed: training could not go on; what was saved is intact.
    """
    plan = decision.chosen.plan
    entry = require_file(prepared.entry, plan.layout.world_size)
    settings = [word for name, text in entry.settings.items() for word in ("--set", f"{name}={text}")]
    command = [sys.executable, "-m", "stoker", "take-part", str(directory.path), str(entry.path), *settings]

    listener, words = WorkerListener(sinks), _HeldOutput()
    patience = WatchdogPatience.of(slowest_s(prepared.job, decision))
    code = Supervisor(
        command, workers=plan.layout.world_size, usable=plan.layout.usable,
        environment={"OMP_NUM_THREADS": str(plan.threads)}, on_line=listener.on_line, tell=listener.on_loss,
        show=words.show, silence_s=patience.others_s, answer_s=patience.answer_s,
    ).run()  # fmt: skip
    if code not in (0, INTERRUPTED):
        raise words.as_error(code)
    words.release()
    return Run(directory, prepared.job)


def require_file(entry: Entry | None, count: int) -> Entry:
    """The file that `count` processes make their job from.

    Raises:
        BadJob: there is none.
    """
    if entry is None:
        raise BadJob(
            f"{count} processes need the job in a file, from which each of them makes its own",
            remedy="Put it into a file with a function `job` and use `stoker train FILE --on 2xhere`; or start this "
            "program with torchrun.",
        )
    return entry


class WorkerListener:
    """Hands on what the processes tell, and what becomes of them."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._log, self._shown = sinks[:1], sinks[1:]
        self._samples = 0

    def on_line(self, line: str) -> None:
        """An event that a process has written into the log already."""
        event = records.loads(line, Event)
        self._samples = event.fields.get("samples", self._samples)
        for sink in self._shown:
            sink(event)

    def on_loss(self, what: str, fields: dict[str, Any]) -> None:
        """What became of the processes, as the supervisor tells it."""
        sinks = [*self._log, *self._shown]
        match what:
            case "lost":
                emit_event(sinks, "warned", message=f"{_affected_ranks(fields)} is lost: {fields['why']}")
            case "silent":
                who, what = _affected_ranks(fields), "is stopped" if fields["is_stopped"] else "shows no sign of life"
                emit_event(
                    sinks, "warned", message=f"{who} {what} since {format_seconds(fields['seconds'])}; the others wait "
                    f"for it, {format_seconds(fields['patience_s'])} at most ({PATIENCE_VARIABLE}=SECONDS sets that)",
                )  # fmt: skip
            case "awake":
                message = (
                    f"{_affected_ranks(fields)} is back after {format_seconds(fields['seconds'])}, and nothing is lost"
                )
                emit_event(sinks, "warned", message=message)
            case "restarted":
                emit_event(sinks, "warned", message=f"process {fields['worker']} is started again")
            case "left_out":
                times = fields["returns"]
                emit_event(
                    sinks, "warned", message=f"process {fields['worker']} failed {times + 1} times and is left out"
                )
            case "met" if fields["generation"] > 1:
                count = len(fields["workers"])
                emit_event(
                    sinks, "recovered", samples=self._samples,
                    what="one process goes on" if count == 1 else f"{count} processes go on",
                    why="another one is back" if fields["why"] == RENDEZVOUS_REQUESTED else fields["why"],
                    took_s=fields["seconds"],
                )  # fmt: skip


def _affected_ranks(fields: dict[str, Any]) -> str:
    """A process, with its rank if it has one."""
    return f"process {fields['worker']}" + (f" (rank {fields['rank']})" if fields["rank"] >= 0 else "")


class _HeldOutput:
    """What the processes print: shown as it comes, but for the error that the run ends with."""

    def __init__(self) -> None:
        self._error: list[str] = []

    def show(self, line: str) -> None:
        """A line of one of them."""
        if line.startswith("error: ") or self._error:
            self._error.append(line)
        else:
            _print(line)

    def release(self) -> None:
        """Show what looked like the beginning of an error, and was the job's own."""
        for line in self._error:
            _print(line)

    def as_error(self, code: int) -> StokerError:
        """The error that they ended with, in its own words."""
        words = [line.removeprefix("error: ") for line in self._error if not line.startswith("try: ")]
        remedy = next((line.removeprefix("try: ").strip() for line in self._error if line.startswith("try: ")), None)
        kind = next((one for one in (BadJob, DoesNotFit, NoDevice, BadRun) if one.exit_code == code), RunFailed)
        return kind("\n".join(words) or f"a process ended with exit code {code}", remedy=remedy)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - what a job prints is the user's own
