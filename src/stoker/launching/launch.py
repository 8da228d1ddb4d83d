"""Start a run elsewhere: `stoker train JOB --on ssh:box`, `stoker.launch("job.py", on="ssh:box")`.

`launch` reads from the job file to the run that is started there; `prepare` makes the submission, which `--dry-run`
prints. The run has a directory here from the beginning, `runs/NAME` with `launch.json`: the same command finds the run
by it. What goes on there comes home by `follow.py`.

The name is the job file's with six digits of what identifies the run: its executed code and its settings. The place
works the plan out, since devices and data are there.
"""

from __future__ import annotations

import ast
import getpass
import json
import platform
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.devices import attached_cpu, catalogue
from stoker.errors import BadJob, BadRun, NoDevice, PlaceFailed, PlaceUnreachable, StokerError
from stoker.jobs import Entry, Job, load_job
from stoker.launching import launcher_of, parse_target
from stoker.launching.at_place import longest_save_s
from stoker.launching.bundle import (
    code_bundle,
    commit_of,
    data_of,
    secret_values,
    stoker_bundle,
    work_folder,
)
from stoker.launching.environment_lock import EnvironmentLock, lock_of
from stoker.launching.follow import EventStream
from stoker.launching.kept_forecasts import keep_forecast, kept_forecast
from stoker.launching.launch_options import LaunchOptions, PlaceQuestion
from stoker.launching.launcher import (
    Launcher,
    LaunchTarget,
    Probe,
    Request,
    Submission,
    require_known,
    seen_now,
    utc_now,
)
from stoker.launching.meter import LEAST_RESERVE_S, Meter, most_seconds, price_there
from stoker.launching.place_history import NO_LESSONS, PlaceLessons, job_key, lessons_of, place_of, setting_key
from stoker.planning.decision import plan
from stoker.planning.resolved_job import resolve_job
from stoker.records import ENDED, Forecast, Launch, LaunchState
from stoker.records.codec import digest
from stoker.store import RunDirectory, cache_root, runs_root, write_atomic
from stoker.store.locks import RunLock
from stoker.store.run_files import LAUNCH
from stoker.training.run_handle import keep_sources
from stoker.units import format_money

CHANGES = "changes.diff"
"""The uncommitted changes of the job's repository, in the run's directory here."""

_PLAN_FILE = ".stoker-plan.json"
_START_UP_S = 120.0
"""Allowed for starting Python, planning and reading data, before the time of the forecast begins [s]."""
_MOST_ITEMS = 1000


@dataclass(frozen=True, kw_only=True)
class LaunchedRun:
    """A run elsewhere, and how this call left it.

    Attributes:
        directory: of the run here.
        launch: its record.
        is_new: False where the run was going on already, and nothing was sent.
        because: what people should know about the choice of the run; "" for nothing.
    """

    directory: RunDirectory
    launch: Launch
    is_new: bool = True
    because: str = ""


def launch(
    job_file: str | Path,
    *,
    on: str,
    settings: Mapping[str, object] | None = None,
    options: LaunchOptions | None = None,
    tell: Callable[[str], None] = lambda _: None,
    question: PlaceQuestion | None = None,
) -> LaunchedRun:
    """Start the run of a job file elsewhere, or find it where it is going on.

    Args:
        job_file: the job file; it runs here too, so that its errors show before anything is sent.
        on: the place, such as `ssh:me@box/2xcpu`.
        settings: values by name, as for `--set`.
        options: what travels, and how.
        tell: receives a line of text about each step that takes time.
        question: what the place was asked before, with these options; None: it is asked now, while the job is
            read.

    Returns:
        The run, started or going on; its end is not waited for.

    Raises:
        BadJob, NoDevice: before anything was sent.
        BadRun: the run's directory here is in use, or of another run; or the run is going on with other limits, or
            at another target.
        PlaceFailed: the place refuses, or lacks what the run needs; nothing is left behind.
        PlaceUnreachable: it does not answer; what it may have started is found by the same command.
    """
    options = options or LaunchOptions()
    path, target = Path(job_file), parse_target(on)
    launcher = launcher_of(target.kind)
    secret_values(options.secrets)
    question = question or PlaceQuestion(target, options)
    job, entry = load_job(path, _texts(settings))
    identity = identity_of(entry)
    directory, before, because = choose_run(path, identity, on, options)
    if before is not None:
        state = _state_there(launcher, before)
        before = _with_state(directory, before, state)
        if state.phase == "finished":
            directory, _, because = choose_run(path, identity, on, options)
        elif state.phase not in ENDED:
            _require_its_word(before, state, on)
            _require_its_limits(before, state, options)
            because = f"{directory.name} is {state.phase} at {before.place}: {state.why}"
            return LaunchedRun(directory=directory, launch=before, is_new=False, because=because)
    with RunLock(directory.path):
        submission = prepare(path, job, entry, directory, on, options)
        earlier: tuple[LaunchState, ...] = ()
        if before is not None and before.run == directory.name:
            earlier = before.states
            submission = replace(submission, earlier=before.handle)
            if options.max_cost is not None:
                _bring_log(directory, launcher, before, tell)
        tell(f"asking {on}")
        probe = _answered(question)
        setting = setting_key(submission)
        submission = launcher.with_forecasts(job, entry, submission, tell)
        price_per_h, currency, price_source = _price(launcher, target, options)
        held = _held_limit(directory, earlier, options, price_per_h)
        device = device_word(target, probe)
        is_limited = launcher.limits_time and options.time_limit_s is None
        forecast, limits = forecast_there(job, entry, target, probe, tell, is_needed=is_limited), [held]
        save_s = submission.save_s  # before a limit there has to be time for a save; the run there forecasts its own
        if is_limited and forecast is not None:
            save_s = forecast.checkpoint_s.high
            key = job_key(submission.code.digest, submission.arguments, target)
            place = probe.place or place_of(on)
            lessons = lessons_of(place, job=key, device=device or "", setting=setting)
            limits.append(time_limit(forecast, lessons))
        if options.plan is not None or options.arguments:  # it is of the plan that is chosen without these
            forecast = None
        submission = replace(submission, save_s=max(save_s, longest_save_s(directory.events_path)))
        limit_s = min((limit for limit in limits if limit is not None), default=None)
        submission = replace(submission, time_limit_s=limit_s, most_held_s=held)
        handle = launcher.start(submission, tell)
        submitted_at = utc_now("milliseconds")
        submit_s = time.monotonic() - question.began_s
        commit = commit_of(path.resolve().parent)
        record = Launch(
            run=directory.name,
            place=on,
            kind=target.kind,
            handle=handle,
            identity=identity,
            code_digest=submission.code.digest,
            environment_digest="" if isinstance(submission.environment, str) else submission.environment.digest,
            arguments=submission.arguments,
            submitted_at=submitted_at,
            commit=commit.name,
            has_changes=bool(commit.diff),
            max_cost=options.max_cost,
            time_limit_s=options.time_limit_s,
            secrets=options.secrets,
            sent_bytes=int(handle.get("sent_bytes", 0)),
            forecast_s=None if forecast is None else forecast.total_s.value,
            forecast_low_s=None if forecast is None else forecast.total_s.low,
            forecast_high_s=None if forecast is None else forecast.total_s.high,
            price_per_h=price_per_h,
            currency=currency,
            price_source=price_source,
            states=(*earlier, replace(seen_now("queued", "submitted"), at=submitted_at)),
            device=device or "",
            submit_s=submit_s,
            setting=setting,
            place_taken=probe.place,
        )
        directory.write(LAUNCH, record)
        keep_sources(directory, entry)
        if commit.diff:
            write_atomic(directory.path / CHANGES, commit.diff, what="the uncommitted changes")
    return LaunchedRun(directory=directory, launch=record, because=because)


def _require_its_word(before: Launch, state: LaunchState, on: str) -> None:
    """Refuse another target of a place for a run that is going on there: it does not move because of a word.

    Raises:
        BadRun: the word names an address or a device, and is not the one that the run was started with.
    """
    target = parse_target(on)
    if (target.address or target.device) and not _is_same_word(before.place, on):
        raise BadRun(
            f"{before.run} is {state.phase} at {before.place}, and does not move to {on} by itself.",
            remedy=f"`stoker stop {before.run}`, then the same command, goes on there; `stoker attach {before.run}` "
            "follows it where it is.",
        )


def _require_its_limits(before: Launch, state: LaunchState, options: LaunchOptions) -> None:
    """Refuse limits that a run which is going on does not have: the place keeps those that it was started with.

    Raises:
        BadRun: one was given that is another one.
    """
    limits = (
        ("--max-cost", options.max_cost, before.max_cost),
        ("--time-limit", options.time_limit_s, before.time_limit_s),
    )
    if other := [name for name, given, own in limits if given not in (None, own)]:
        raise BadRun(
            f"{before.run} is {state.phase} at {before.place}, and was not started with that "
            f"{' and '.join(other)}: its limits stay as they were",
            remedy=f"`stoker stop {before.run}`, then the same command, goes on under the new limit; `stoker attach "
            f"{before.run}` follows it as it is.",
        )


def _answered(question: PlaceQuestion) -> Probe:
    """The resources of the place, which are all that the run needs.

    Raises:
        PlaceFailed: something is missing, or (PlaceUnreachable) the place does not answer.
    """
    try:
        probe = question.answer()
    except PlaceUnreachable as problem:
        remedy = "Nothing was started; the same command tries again."
        raise PlaceUnreachable(problem.message, remedy=remedy) from problem
    if probe.missing:
        raise PlaceFailed("; ".join(probe.missing), remedy="Nothing was sent.")
    return probe


def _bring_log(directory: RunDirectory, launcher: Launcher, before: Launch, tell: Callable[[str], None]) -> None:
    """Bring the run's log here, to its end: of starts that were not followed it alone says what they cost.

    Where it is gone for good, or does not have the last start, a warning says so.

    Raises:
        PlaceUnreachable: the place does not answer.
    """
    stream = EventStream(directory.events_path, lambda offset: launcher.events(before.handle, offset))
    try:
        while stream.pull():
            pass
    except PlaceUnreachable as problem:
        message = f"what {directory.name} has cost is not known, since its log cannot be read: {problem.message}"
        raise PlaceUnreachable(message, remedy="Nothing was started; the same command asks again.") from problem
    except PlaceFailed as problem:
        why = f"cannot be read: {problem.message}"
    else:
        newest = directory.read_events()[-1:] if directory.events_path.exists() else ()
        if newest and newest[0].at >= (before.submitted_s or 0.0):
            return
        why = "holds nothing of it"
    tell(f"what the start of {before.submitted_at} has cost is not known, and does not count: its log {why}")


def _held_limit(
    directory: RunDirectory, earlier: Sequence[LaunchState], options: LaunchOptions, price_per_h: float | None
) -> float | None:
    """How long the run may hold devices from now on [s], by `--time-limit`, and by what `--max-cost` leaves of money.

    Raises:
        PlaceFailed: earlier starts have spent the money.
    """
    limits = [] if options.time_limit_s is None else [options.time_limit_s]
    if options.max_cost is not None and (longest_s := most_seconds(options.max_cost, price_per_h)) is not None:
        meter = Meter(price_per_h=price_per_h)
        for state in earlier:
            meter.on_state(state)
        for event in directory.read_events() if earlier and directory.events_path.exists() else ():
            meter.on_event(event)
        if earlier and meter.held_s + LEAST_RESERVE_S >= longest_s:
            raise PlaceFailed(
                f"{directory.name} has cost {format_money(meter.spent or 0)} of {format_money(options.max_cost)}, so "
                "that nothing is left to go on with",
                remedy="Give a higher --max-cost, which counts all that the run costs.",
            )
        limits.append(longest_s - meter.held_s)
    return min(limits, default=None)


def _price(launcher: Launcher, target: LaunchTarget, options: LaunchOptions) -> tuple[float | None, str, str]:
    """Price an hour of the job at the place, its currency, and who says so.

    Raises:
        PlaceFailed: it is unknown, and a limit was set.
    """
    try:
        price = price_there(target, Request(target=target, options=options.place), launcher)
    except PlaceFailed:
        price = (None, "USD", "")
    if options.max_cost is not None and price[0] is None:
        raise PlaceFailed(
            f"no price is known at {target.text}, so --max-cost cannot be kept",
            remedy="Give the price an hour of the whole job: --place-option price=2.50; or leave --max-cost out.",
        )
    return price


def describe_launch(
    job_file: str | Path,
    *,
    on: str,
    settings: Mapping[str, object] | None = None,
    options: LaunchOptions | None = None,
) -> str:
    """The submission of `launch` as text: a batch script, a manifest, commands; nothing is sent or asked.

    Raises:
        BadJob, NoDevice: as for `launch`.
    """
    options = options or LaunchOptions()
    path, target = Path(job_file), parse_target(on)
    job, entry = load_job(path, _texts(settings))
    directory, _, _ = choose_run(path, identity_of(entry), on, options)
    return launcher_of(target.kind).script(prepare(path, job, entry, directory, on, options))


def prepare(
    job_file: Path, job: Job, entry: Entry, directory: RunDirectory, on: str, options: LaunchOptions
) -> Submission:
    """The submission for a launcher; the files that would travel are read, and nothing is sent.

    Raises:
        BadJob: a file cannot travel.
        PlaceFailed: the environment cannot be had elsewhere.
    """
    target = parse_target(on)
    place = {name: value for name, value in options.place.items() if name != "price"}  # for the meter alone
    launcher = launcher_of(target.kind)
    require_known(f"--place-option: {target.kind}", place, launcher.options)
    if options.image and not launcher.runs_images:
        raise BadJob(
            f"--image {options.image}: {target.kind} runs no container images",
            remedy="Leave it out, or name a place that does: k8s:….",
        )
    root = work_folder(job_file)
    paths = data_paths(job)
    inside = [path for path in paths if is_below(path, root)]
    data = [data_of(path, root) for path in dict.fromkeys((*inside, *options.data))]
    arguments = (*entry.setting_words, *options.arguments)
    extra: dict[str, bytes] = {}
    if options.plan is not None:
        extra[_PLAN_FILE] = _content_of(options.plan)
        arguments = (*arguments, "--plan", _PLAN_FILE)
    code = code_bundle(job_file, entry.sources, data, options.send, extra)
    return Submission(
        run=directory.name,
        target=target,
        code=code,
        stoker=stoker_bundle(),
        data=tuple(shipped.bundle for shipped in data),
        expected=tuple(str(path) for path in paths if path not in inside),
        job_file=job_file.resolve().relative_to(root).as_posix(),
        arguments=arguments,
        environment=_environment(entry, options),
        image=options.image,
        variables=options.variables,
        secrets=options.secrets,
        max_cost=options.max_cost,
        owner=f"{getpass.getuser()}@{platform.node()}:{directory.path.resolve()}",
        send_limit=options.send_limit,
        time_limit_s=options.time_limit_s,
        most_held_s=options.time_limit_s,
        options=place,
    )


def forecast_there(
    job: Job, entry: Entry, target: LaunchTarget, probe: Probe, tell: Callable[[str], None], *, is_needed: bool
) -> Forecast | None:
    """The forecast of the run on the place's devices; None where they are not known here, or it is not needed.

    One that was made a short time ago, as by `stoker plan --on`, is taken as it is.

    Args:
        job: the job.
        entry: its file.
        target: the place and its devices.
        probe: the answer of the place.
        tell: hears why there is none, if it is needed.
        is_needed: make it if none is kept.
    """
    word = device_word(target, probe)
    if word is None:
        if is_needed:
            tell(f"no forecast: {why_unknown(target, probe)}; the run there makes its own")
        return None
    kept = kept_forecast(job, entry, word)
    if kept is not None or not is_needed:
        return kept
    tell(f"forecasting for {word}")
    try:
        forecast = plan(job, on=word, entry=entry).chosen.forecast
    except NoDevice as problem:
        tell(f"no forecast: {problem.message}")
        return None
    keep_forecast(resolve_job(job, entry), word, forecast)
    return forecast


def device_word(target: LaunchTarget, probe: Probe) -> str | None:
    """The word of `stoker plan --on` for a place's devices; None: they are not known.

    A GPU has to be in the catalogue, by the word or by what the probe found. A CPU has to be the one of this machine,
    on which its operations are measured.
    """
    shape = f"{target.num_devices}x" if target.num_devices > 1 else ""
    if target.device not in {"", "cpu"}:
        return f"{shape}{target.device}"
    entries = catalogue().find(probe.device) if probe.device else ()
    if target.device == "" and len(entries) == 1 and entries[0].kind != "cpu":
        return f"{shape}{entries[0].name}"
    here = attached_cpu()
    is_here = probe.device == here.model and probe.cores == here.cores and target.num_nodes == 1
    return f"{shape}cpu" if is_here else None


def why_unknown(target: LaunchTarget, probe: Probe) -> str:
    """Why there is no word for a place's devices, and so no forecast here."""
    here = attached_cpu()
    if probe.device != here.model:
        return f"{probe.device or 'the device'} is not known here"
    there = f"{f'{target.num_nodes} nodes of ' if target.num_nodes > 1 else ''}{probe.cores} × {probe.device}"
    return f"on CPUs it is for those of this machine, {here.cores} × {here.model}, and there are {there}"


def time_limit(forecast: Forecast, lessons: PlaceLessons = NO_LESSONS) -> float:
    """The time to ask a scheduler for [s]: the upper bound of the forecast, planning and start-up, and a save.

    Where earlier runs of the place took longer to start, or longer than their forecasts, so much is allowed for.
    """
    start_s = max(_START_UP_S, lessons.longest_start_s or 0.0)
    run_s = max(lessons.run_time(forecast).high, forecast.total_s.high)  # a run that is ended costs more than a limit
    return run_s + forecast.checkpoint_s.high + start_s


def identity_of(entry: Entry) -> str:
    """SHA-256 (hex) of what the same command finds its run by: executed code and settings."""
    return digest({"file": entry.path.name, "functions": entry.functions, "parameters": entry.parameters})


def choose_run(
    job_file: Path, identity: str, on: str, options: LaunchOptions
) -> tuple[RunDirectory, Launch | None, str]:
    """The run's directory here; the launch that may be continued, if there is one; and what to say about the choice.

    The newest unfinished launch of this identity is continued. Otherwise the next free name is taken.

    Raises:
        BadRun: the unfinished run is at another place; or a record cannot be read.
    """
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", job_file.stem).strip("-.")[:50] or "job"
    base = options.run_dir or runs_root() / f"{slug}-{identity[:6]}"
    number, finished = 1, ""
    while True:
        directory = RunDirectory(base if number == 1 else base.with_name(f"{base.name}-{number}"))
        number += 1
        before = directory.read_launch()
        if before is None:
            if not directory.path.exists() or directory.is_vacant:
                return directory, None, f"{finished} is finished; {directory.name} is a new run" if finished else ""
            if number == 2 and options.run_dir is not None:
                raise BadRun(
                    f"{directory.path} is no run elsewhere: {directory.in_the_way()}.",
                    remedy="Choose an empty or a new --run-dir.",
                )
            continue
        if before.identity != identity:
            if options.run_dir is not None:
                raise BadRun(
                    f"{directory.path} holds a run of another job or other settings.",
                    remedy="Choose another --run-dir, or --new.",
                )
            continue
        if _is_finished(directory, before):
            finished = directory.name
            continue
        if options.new:
            continue
        if before.continued_here_at:
            raise BadRun(
                f"{directory.name} was started at {before.place}, and went on on this machine since: what is there is "
                "older.",
                remedy=f"`stoker train {job_file} --resume {directory.name}` continues it here; or start another run "
                "with --new.",
            )
        kind = parse_target(on).kind
        if not _is_same_word(before.place, on) and not (before.kind == kind and launcher_of(kind).is_one_place):
            raise BadRun(
                f"{directory.name} is unfinished at {before.place}, and {on} is another place.",
                remedy=f"Go on there with --on {before.place}; or start another run here with --new.",
            )
        return directory, before, f"{directory.name} is continued"


def _is_same_word(before: str, on: str) -> bool:
    """Whether two words of `--on` are one, as `slurm` and `slurm:` are."""
    return before == on or parse_target(before).text == parse_target(on).text


def _is_finished(directory: RunDirectory, launch: Launch) -> bool:
    if launch.states and launch.states[-1].phase == "finished":
        return True
    with suppress(StokerError):
        return directory.is_run and directory.read_run().status == "finished"
    return False


def _state_there(launcher: Launcher, before: Launch) -> LaunchState:
    """The state of a run that was started before.

    Raises:
        PlaceUnreachable: it is unknown: what may be going on is not started a second time.
    """
    state = launcher.state(before.handle)
    if state.phase == "unknown":
        raise PlaceUnreachable(
            f"{before.run} is at {before.place}, which does not answer: {state.evidence or state.why}",
            remedy="It may be going on; nothing was started. The same command asks again.",
        )
    return state


def _with_state(directory: RunDirectory, launch: Launch, state: LaunchState) -> Launch:
    """The record with the state added if its phase is another one."""
    if launch.states and launch.states[-1].phase == state.phase:
        return launch
    launch = replace(launch, states=(*launch.states, state))
    directory.write(LAUNCH, launch)
    return launch


_PATH_FIELDS = ("paths", "root", "_labels_file", "_given", "_clean")
"""Fields of the sources of `stoker.data` that name files or folders they read."""
_INNER_FIELDS = ("whole", "dataset", "source", "_like", "datasets")
"""Fields that hold another source."""


def data_paths(job: Job) -> tuple[Path, ...]:
    """Files and folders that the job's data sources and initial weights name, absolute, those that are here.

    Found are the files of `stoker.data`'s sources, also within parts and packed forms, and paths (not texts) in the
    fields of that name of the job's own data sets. What a job reads by other means has to be named with `--data`.
    """
    paths: dict[Path, None] = {}
    waiting: list[object] = [job.data, job.valid, job.test, job.init]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen or item is None or isinstance(item, str | bytes | int | float):
            continue
        seen.add(id(item))
        if isinstance(item, Path):
            paths[item.expanduser().absolute()] = None
        elif isinstance(item, Mapping):
            waiting += item.values()
        elif isinstance(item, list | tuple) and len(item) <= _MOST_ITEMS:
            waiting += item
        elif hasattr(item, "__dict__"):
            fields = vars(item)
            named = [fields.get(name) for name in _PATH_FIELDS]
            waiting += [value for value in named if isinstance(value, Path | list | tuple)]
            waiting += [fields.get(name) for name in (*_INNER_FIELDS, "weights")]
    return tuple(sorted(path for path in paths if path.exists() and not path.is_relative_to(cache_root().absolute())))


def is_below(path: Path, root: Path) -> bool:
    """Whether an absolute path is in the folder that is rebuilt at the place."""
    return path.is_relative_to(root) or path.resolve().is_relative_to(root)


def _content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadJob(f"{path} cannot be read: {error.strerror}") from error


def _texts(settings: Mapping[str, object] | None) -> dict[str, str]:
    """Settings as they are typed on the command line."""
    return {
        name: value if isinstance(value, str) else "none" if value is None else json.dumps(value)
        for name, value in (settings or {}).items()
    }


def _environment(entry: Entry, options: LaunchOptions) -> EnvironmentLock | str:
    if options.env == "lock":
        return lock_of(imported_modules(entry.sources.values()))
    return "python3" if options.env == "theirs" else options.env


def imported_modules(texts: Iterable[str]) -> set[str]:
    """Top-level names of the modules that Python texts import, and of Stoker's optional ones that are loaded now."""
    names = {name for name in _OPTIONAL_MODULES if name in sys.modules}
    for text in texts:
        with suppress(SyntaxError, ValueError):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names


_OPTIONAL_MODULES = (
    *("pyarrow", "PIL", "google_crc32c", "datasets"),
    *("torchmetrics", "transformers", "peft", "keras", "timm"),
)
"""What Stoker or the job loads on demand where a job's data or model need it: a job that was made has loaded them."""
