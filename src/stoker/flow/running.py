"""Training a job: choose the directory, plan, train, finish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from stoker import launching, records, reporting
from stoker.devices import Place, attached_devices, planned_devices, resolve_place
from stoker.errors import BadJob, NoDevice, StokerError
from stoker.flow.alone import train_alone
from stoker.flow.decision import decide, decide_many, given_plan, memory_limit, most_threads, require_mtbf
from stoker.flow.finishing import failed
from stoker.flow.job_again import keep_sources
from stoker.flow.members import follow, lead
from stoker.flow.opening import (
    choose,
    chosen_plan,
    create,
    device_of,
    or_no_run,
    require_same_plan,
    saving_every,
    spread_over,
    tell,
)
from stoker.flow.preparation import Prepared, prepare
from stoker.flow.runs import Run
from stoker.flow.supervising import require_file, train_supervised
from stoker.flow.tracking import tracked
from stoker.jobs import Entry, Job
from stoker.records import Coupling, Decision, Device, Event, Plan
from stoker.stepping.python_state import unchanged
from stoker.store import RunDirectory, find_run, runs_root
from stoker.tracking import Target, target_of
from stoker.training import Hook, Hooks, Sink
from stoker.training.watchdog import patience_s
from stoker.units import Duration


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
            between checkpoints follows; None: as stated in `stoker.devices.failures`.
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
            docs/tracking.md.

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
    prepared = prepare(job, entry)
    member = launching.Member.from_environment()
    meeting = None if member is None else member.meet()
    if member is not None and meeting is not None and meeting.rank > 0:
        return follow(prepared, _device(on, member), member, meeting)
    device, place = _device(on, member), _place(on, meeting)
    looking = Hooks(hooks, lambda words: _tell_of_hook(directory, shown[0], words))
    _require_possible(entry, place, member, looking, profile=profile)
    parent = find_run(runs_root(), fork) if fork is not None else None
    directory, because = choose(prepared, run_dir, resume, parent, new=new)
    given, early, others_share = given_plan(plan), list[Event](), 0.0
    with ExitStack() as stack:
        shown: list[Sink] = [stack.enter_context(reporting.choose_display()) if sink is None else sink]
        if hooks:
            shown.append(looking)
        if because is not None:
            tell(shown, "warned", message=because)
        if not directory.is_run:
            decision, coupling = _decided(
                prepared, device, place, given, memory_limit(memory), threads, device_mtbf_h, [early.append, *shown]
            )
            others_share = decision.others_share
            decision = saving_every(checkpoint_every, device_mtbf_h, decision)
            _tell_plan(decision, device, directory.name, [early.append, *shown])
            stack.enter_context(directory.locked())
            create(directory, prepared, device, decision, coupling, parent)
            _keep_what_it_came_of(directory, prepared.entry, early)
        else:
            stack.enter_context(directory.locked())
            _require_its_plan(directory, given, memory=memory, threads=threads, shown=shown)
            device = device_of(directory, device, _one_of(on))
            keep_sources(directory, prepared.entry)  # a kill may have come before they were there
        told: list[Sink] = [directory.append_event, *shown]
        followers = tracked(directory, targets, lambda words: tell(told, "warned", message=words))
        sinks = [*told, *stack.enter_context(followers)]
        count = 1 if place is None else place.count
        began = chosen_plan(directory, checkpoint_every, device_mtbf_h)
        chosen = spread_over(directory, prepared.job, began, count, device, sinks)
        for words in _warnings(prepared, chosen[0]):
            tell(sinks, "warned", message=words)
        with _told_of_failure(directory, sinks):
            if member is not None and meeting is not None:
                return lead(prepared, directory, device, member, meeting, sinks)
            if place is not None:
                return train_supervised(prepared, directory, chosen[0], sinks)
            return train_alone(
                prepared, directory, device, chosen, sinks, profile=profile, others_share=others_share,
                on_update=looking.updated if looking.see_updates else None,
            )  # fmt: skip


def _warnings(prepared: Prepared, decision: Decision) -> tuple[str, ...]:
    """What of the job is likely to learn badly; of a run that is seconds long it is known only now."""
    job = prepared.job
    if job.sync is None or job.until.unit != "seconds":
        return prepared.warnings
    words = job.sync.for_run(job.batch, decision.chosen.forecast.total_updates)[1]
    return () if words is None else (words,)


@contextmanager
def _told_of_failure(directory: RunDirectory, sinks: Sequence[Sink]) -> Iterator[None]:
    """Write down an error that ends the run."""
    try:
        yield
    except StokerError as error:
        failed(directory, error, sinks)
        raise


def _keep_what_it_came_of(directory: RunDirectory, entry: Entry | None, early: Sequence[Event]) -> None:
    """Copy the job file, and what happened before there was a run; without them there is none."""
    with or_no_run(directory):
        keep_sources(directory, entry)
        for event in early:
            directory.append_event(event)


def _require_possible(
    entry: Entry | None, place: Place | None, member: launching.Member | None, hooks: Hooks, *, profile: bool
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
            tell(shown, "warned", message=message)


def _trackers(words: Sequence[str]) -> list[Target]:
    """What a run is to be followed by; places that cannot be written to are refused before anything is spent."""
    targets = [target_of(word) for word in words]
    for target in targets:
        target.require_writable()
    return targets


def _tell_of_hook(directory: RunDirectory, shown: Sink, words: str) -> None:
    """Say what became of a hook, also in the run's log if there is a run."""
    tell([shown, *([directory.append_event] if directory.is_run else [])], "warned", message=words)


def _device(on: str, member: launching.Member | None) -> Device:
    """The device of this process: of several GPUs, the one its launcher means it to have."""
    attached = attached_devices()
    if member is None:
        return resolve_place(_one_of(on), attached)
    device = resolve_place(on, attached)
    if device.kind != "cuda" or on.startswith("cuda:"):
        return device
    return resolve_place(f"cuda:{member.worker}", attached)


def _one_of(on: str) -> str:
    """`here` of `2xhere`."""
    count, times, name = on.strip().lower().partition("x")
    return name if times and count.isdigit() else on


def _place(on: str, meeting: launching.Meeting | None) -> Place | None:
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
    prepared: Prepared,
    device: Device,
    place: Place | None,
    given: Plan | None,
    memory_bytes: float | None,
    threads: int | None,
    device_mtbf_h: float | None,
    sinks: list[Sink],
) -> tuple[Decision, Coupling]:
    if prepared.data.note:
        tell(sinks, "noted", message=prepared.data.note)
    with unchanged(prepared.model, prepared.job.loss):  # a loss that counts its calls begins where it was given
        if place is not None:
            place = place.limited_to(memory_bytes, most_threads(threads))
            return decide_many(prepared, place, given, device_mtbf_h=device_mtbf_h)
        return decide(prepared, device, given, memory_bytes=memory_bytes, threads=threads, device_mtbf_h=device_mtbf_h)


def _tell_plan(decision: Decision, device: Device, run: str, sinks: list[Sink]) -> None:
    chosen = decision.chosen
    tell(
        sinks, "planned", run=run, plan=records.to_json(chosen.plan), took_s=decision.took_s,
        forecast=records.to_json(chosen.forecast), explanation=list(decision.explanation), device=device.model,
    )  # fmt: skip
